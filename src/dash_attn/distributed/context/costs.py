"""What sharing a sequence costs a rank: messages, bytes and memory, counted from the plan that it runs.

Memory is counted along the global sequence of units. A rank that is ahead of the others may hold a few states more for a while.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ...scheduling.ranks.sharding import Sharding
from ...scheduling.ranks.units import Unit, highest, most_states
from .gathering import sharding_of_tiles
from .passes import gather_starts, gathers_of
from .shared_call import SharedCall


class Sent(NamedTuple):
    """Bytes that a rank sends in one pass. A copy for each rank that gets it counts."""

    heads: int = 0  # exchanged for rows, with Ulysses
    keys: int = 0  # gathers of K and V
    states: int = 0  # float32 dK and dV, from leg to leg
    final_states: int = 0  # the same, from the last leg to the rank of the keys
    sinks: int = 0  # what their gradient needs of each row, and that of a rank's heads
    rows: int = 0  # of documents: to the rank that works on them, and their results back

    @property
    def total(self) -> int:
        return sum(self)


class Memory(NamedTuple):
    """Bytes that a rank needs in the backward beyond its own rows of inputs, outputs and gradients."""

    keys: int = 0  # gathered K and V, one copy: of the KV heads that are worked on, and of the next
    states: int = 0  # that wait for their unit or are worked on
    sums: int = 0  # float32 dK and dV of the rank's own keys
    rows: int = 0  # of documents: copies of those that the rank works on, and their gradients

    @property
    def total(self) -> int:
        return sum(self)


@dataclass(frozen=True)
class RankCosts:
    """Of one rank. hops: how many times it sends states on."""

    units: int
    hops: int
    forward: Sent
    backward: Sent
    memory: Memory


class NumberBytes(NamedTuple):
    """Bytes of a number: in q, k, v and out; in states, sums and LSE."""

    tensor: int
    state: int


def costs_of_sharing(call: SharedCall, bytes_of: NumberBytes, sinks: bool) -> list[RankCosts]:
    """Of every rank that shares the sequence. Without Ulysses, that is all."""
    ranks = range(call.sharding.ranks)
    gathered = _gather_bytes(call, bytes_of)
    more = _sink_bytes(call, bytes_of) if sinks else 0
    states = [tiles * tile_bytes(call, bytes_of) for tiles in most_states(call.shared)]
    found = []
    for rank in ranks:
        sent = state_bytes_sent(call, rank, bytes_of)
        backward = Sent(keys=gathered, states=sent.states, final_states=sent.finals, sinks=more)
        memory = Memory(_most_keys(call, rank, bytes_of), states[rank], sum_bytes(call, rank, bytes_of))
        found.append(RankCosts(len(call.shared.by_rank[rank]), sent.hops, Sent(keys=gathered), backward, memory))
    return found


class SentStates(NamedTuple):
    """How many times a rank sends states on, and their bytes: from leg to leg, and from the last leg."""

    hops: int
    states: int
    finals: int


def state_bytes_sent(call: SharedCall, rank: int, bytes_of: NumberBytes) -> SentStates:
    hopping = [unit for unit in call.shared.by_rank[rank] if call.shared.hops(unit)]
    ending = [unit for unit in hopping if unit.after is not None and call.shared.units[unit.after].leg is None]
    finals, all_states = (sum(_state_bytes(call, unit, bytes_of) for unit in units) for units in (ending, hopping))
    return SentStates(len(hopping), all_states - finals, finals)


def _most(sharding: Sharding) -> int:
    """A gather has one shape: every rank sends as many rows as the one with most."""
    return max(len(sharding.rows_of(rank)) for rank in range(sharding.ranks))


def _gather_bytes(call: SharedCall, bytes_of: NumberBytes) -> int:
    heads = call.batch * call.kv_heads * sum(call.dims)
    return (call.sharding.ranks - 1) * _most(call.sharding) * heads * bytes_of.tensor


def _sink_bytes(call: SharedCall, bytes_of: NumberBytes) -> int:
    """Two numbers of each row and query head, in whole tiles."""
    tile = call.problem.tile_q
    rows = _most(sharding_of_tiles(call.sharding, tile)) * tile
    return (call.sharding.ranks - 1) * 2 * call.batch * call.kv_heads * call.group * rows * bytes_of.state


def _state_bytes(call: SharedCall, unit: Unit, bytes_of: NumberBytes) -> int:
    return call.shared.state_tiles(unit) * tile_bytes(call, bytes_of)


def tile_bytes(call: SharedCall, bytes_of: NumberBytes) -> int:
    """The state of a KV tile."""
    return call.of_backend.tile_size(*call.dims) * bytes_of.state


def sum_bytes(call: SharedCall, rank: int, bytes_of: NumberBytes) -> int:
    tiles = sharding_of_tiles(call.sharding, call.problem.tile_kv)
    heads = call.batch * call.kv_heads * len(tiles.rows_of(rank))
    return call.plan.sums * heads * tile_bytes(call, bytes_of)


def _most_keys(call: SharedCall, rank: int, bytes_of: NumberBytes) -> int:
    """A gather is there from its start to its last use by this rank."""
    last_use = {number: unit.number for unit in call.shared.by_rank[rank] for number in gathers_of(call, unit)}
    each = call.batch * call.sharding.rows * sum(call.dims) * bytes_of.tensor
    sizes = {number: each * len(call.gathers[number]) for number in last_use}
    starts = gather_starts(call)
    return highest(event for number, size in sizes.items() for event in ((starts[number], size), (last_use[number] + 1, -size)))
