"""The part of a schedule that decides the bits: the walk of every chain and the turn of every task."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain as joined
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .json_fields import as_list, as_lists, as_names, as_text, as_wholes, read_fields, shortened
from .problem import Problem, Task

Ints = NDArray[np.int32]

RUN_TO_RUN = "run-to-run"
BATCH_INVARIANT = "batch-invariant"
WORKER_INVARIANT = "worker-count-invariant"
ALL_GUARANTEES = (RUN_TO_RUN, BATCH_INVARIANT, WORKER_INVARIANT)  # of an order; each contains those before it
CONTEXT_PARALLEL_INVARIANT = "context-parallel-invariant"  # the next one: of an order and a sharding, so no order claims it alone
INT32 = np.iinfo(np.int32)
DECIDE_BITS = ("offsets", "q_tile", "turn", "last_member_first")  # of a HeadOrder


def reported(guarantees: Iterable[str], least: int) -> tuple[str, ...]:
    """Guarantees where `least` workers are needed at once, by a gang of as many chains: fewer are refused."""
    invariant = WORKER_INVARIANT if least <= 1 else f"{WORKER_INVARIANT} ({least} workers or more)"
    return tuple(invariant if promises([said], WORKER_INVARIANT) else said for said in guarantees)


def promises(guarantees: Iterable[str], name: str) -> bool:
    """Whether a reported list has this guarantee, on any number of workers or from some number on."""
    return any(said == name or said.startswith(f"{name} (") for said in guarantees)


def frozen_ints(values: Any) -> Ints:
    """A read-only array of 32-bit integers. Nothing is rounded or wrapped: other numbers raise."""
    try:
        array = np.array(values)
    except ValueError:
        raise ValueError("expected whole numbers, or rows of them that are equally long") from None
    if array.size and (array.dtype.kind not in "iu" or array.max() > INT32.max or array.min() < INT32.min):
        raise ValueError(f"expected whole numbers of at most 32 bits; got {shortened(array.tolist())}")
    frozen = array.astype(np.int32)
    frozen.setflags(write=False)
    return frozen


def turn_within(q_tile: NDArray[Any], *keys: NDArray[Any]) -> NDArray[np.int64]:
    """Turn of each task among the tasks of its Q tile, smallest first key first."""
    by_q_tile = np.lexsort((*reversed(keys), q_tile))
    sorted_q = q_tile[by_q_tile]
    first_of_group = np.searchsorted(sorted_q, sorted_q, side="left")
    turns = np.empty(len(q_tile), dtype=np.int64)
    turns[by_q_tile] = np.arange(len(q_tile)) - first_of_group
    return turns


def neighbours(group: NDArray[Any], place: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(earlier, later): indices of all that follow each other directly in a group, by their places in it."""
    order = np.asarray(np.lexsort((place, group)), dtype=np.int64)
    same = group[order[1:]] == group[order[:-1]]
    return order[:-1][same], order[1:][same]


def members(count: int, last_first: bool) -> Ints:
    """The query heads of a part in the order a chain takes them."""
    forward = np.arange(count, dtype=np.int32)
    return forward[::-1] if last_first else forward


class Sum(NamedTuple):
    """Where a part adds its dK and dV: which of the sums of a KV tile, and after how many other parts."""

    number: int
    turn: int

    @classmethod
    def of_part(cls, problem: Problem, part: int, kinds: int) -> Sum:
        """Parts of one kind share a sum, so that a part waits for chains that started before it, whatever the placement."""
        turn, number = divmod(part % problem.parts, kinds)
        return cls(number, turn)

    @staticmethod
    def how_many(problem: Problem, kinds: int) -> int:
        """Sums per KV tile of a KV head."""
        return min(problem.parts, kinds)


@dataclass(frozen=True, eq=False)
class HeadOrder:
    """Walks and turns of one head. Chain `kv` owns the slice offsets[kv]:offsets[kv + 1] of the task arrays.

    `first_step` places each chain in a nominal execution without waits; slack and the grids in errors come from it.
    A chain makes its walk once for every query head of its part, one head after the other (so that chains which
    follow each other share Q tiles in the cache), from the first head or from the last.
    """

    offsets: Ints
    q_tile: Ints
    turn: Ints
    first_step: Ints
    last_member_first: bool = False

    def __post_init__(self) -> None:
        for name in ("offsets", "q_tile", "turn", "first_step"):
            array = frozen_ints(getattr(self, name))
            if array.ndim != 1:
                raise ValueError(f"{name} must be a list of whole numbers; got one of {array.ndim} dimensions")
            object.__setattr__(self, name, array)
        if not isinstance(self.last_member_first, bool):
            raise ValueError(f"last_member_first must be True or False; got {self.last_member_first!r}")

    @classmethod
    def build(cls, chain: Any, q_tile: Any, turn: Any, first_step: Any, last_member_first: bool = False) -> HeadOrder:
        """From task arrays that are sorted by chain."""
        kv_tiles = len(first_step)
        offsets = np.searchsorted(chain, np.arange(kv_tiles + 1))
        return cls(frozen_ints(offsets), q_tile, turn, first_step, last_member_first)

    @property
    def kv_tiles(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def chain(self) -> Ints:
        """KV tile of every task."""
        return frozen_ints(np.repeat(np.arange(self.kv_tiles), np.diff(self.offsets)))

    @cached_property
    def step(self) -> Ints:
        """Nominal step of every task."""
        position = np.arange(len(self.q_tile)) - self.offsets[self.chain]
        return frozen_ints(self.first_step[self.chain] + position)

    def walk(self, kv_tile: int) -> Ints:
        return self.q_tile[self.offsets[kv_tile] : self.offsets[kv_tile + 1]]

    def turns(self, kv_tile: int) -> Ints:
        return self.turn[self.offsets[kv_tile] : self.offsets[kv_tile + 1]]

    def tasks(self, kv_tile: int, count: int) -> tuple[Ints, Ints, Ints]:
        """(q_tile, turn, member) of the tasks of a chain with `count` members, in order."""
        walk = self.walk(kv_tile)
        return np.tile(walk, count), np.tile(self.turns(kv_tile), count), np.repeat(members(count, self.last_member_first), len(walk))

    @cached_property
    def hand_overs(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(earlier task, later task) for every pair of consecutive turns."""
        return neighbours(self.q_tile, self.turn)

    @cached_property
    def slack(self) -> int | None:
        """Least steps between consecutive turns; None when no Q tile has two."""
        earlier, later = self.hand_overs
        return int((self.step[later] - self.step[earlier]).min()) if len(later) else None

    def piece_ends(self, start: Sequence[int] | Ints) -> NDArray[np.int64]:
        """Positions of the start order after which nothing waits for a later start: ends of the shortest closed segments."""
        position = np.empty(self.kv_tiles, dtype=np.int64)
        position[np.asarray(start)] = np.arange(self.kv_tiles)
        latest_needed = np.arange(self.kv_tiles)
        earlier, later = self.hand_overs
        np.maximum.at(latest_needed, position[self.chain[later]], position[self.chain[earlier]])
        return np.flatnonzero(np.maximum.accumulate(latest_needed) <= np.arange(self.kv_tiles))

    def gang(self, start: Sequence[int] | Ints) -> int:
        """Longest segment of the start order whose chains wait for each other (1: chains wait only for earlier starts)."""
        return int(np.diff(self.piece_ends(start), prepend=-1).max())


@dataclass(frozen=True, eq=False)
class Order:
    """Walks and turns of all heads. Part p of a sequence follows `kinds[(p + head_offset * parts) % len(kinds)]`.

    dK and dV of a KV tile are summed over the parts of a group in the order of the parts, those of each kind by itself; then the sums
    of the two kinds are added, that of the first part first.

    Any fixed order gives the same bits in every run. More is claimed by those who can show it: generators, whose orders are
    functions of the problem.
    """

    name: str
    kinds: tuple[HeadOrder, ...]
    guarantees: tuple[str, ...] = (RUN_TO_RUN,)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"an order needs a name; got {shortened(self.name)}")
        allowed = [ALL_GUARANTEES[:count] for count in range(1, len(ALL_GUARANTEES) + 1)]  # each contains those before it
        if not isinstance(self.guarantees, tuple) or self.guarantees not in allowed:
            raise ValueError(f"guarantees must be one of {', '.join(map(str, allowed))}; got {shortened(self.guarantees)}")

    def same_bits(self, other: Order) -> bool:
        """Whether both orders sum everything in the same sequence."""
        pairs = [(getattr(a, field), getattr(b, field)) for a, b in zip(self.kinds, other.kinds, strict=False) for field in DECIDE_BITS]
        return len(self.kinds) == len(other.kinds) and all(np.array_equal(one, another) for one, another in pairs)

    def to_json(self) -> dict[str, Any]:
        kinds = [
            {
                "last_member_first": kind.last_member_first,
                "first_step": kind.first_step.tolist(),
                "walks": [[str(Task(number, q_tile, kv)) for q_tile in kind.walk(kv).tolist()] for kv in range(kind.kv_tiles)],
                "ranks": [kind.turns(kv).tolist() for kv in range(kind.kv_tiles)],
            }
            for number, kind in enumerate(self.kinds)  # tasks are named after the first head of their kind
        ]
        return {"name": self.name, "guarantees": list(self.guarantees), "kinds": kinds}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Order:
        """As it was written, claims included; `Schedule.from_json` believes only what it can prove."""
        read = read_fields(value, "order", ("name", "guarantees", "kinds"))
        kinds = [_kind_from_json(kind, number) for number, kind in enumerate(as_list(read["kinds"], "order.kinds"))]
        return cls(as_text(read["name"], "order.name"), tuple(kinds), as_names(read["guarantees"], "order.guarantees", ALL_GUARANTEES))


def _kind_from_json(value: Any, number: int) -> HeadOrder:
    where = f"order.kinds[{number}]"
    read = read_fields(value, where, ("last_member_first", "first_step", "walks", "ranks"))
    names, turns = as_lists(read["walks"], f"{where}.walks", as_list), as_lists(read["ranks"], f"{where}.ranks", as_wholes)
    if [len(w) for w in names] != [len(r) for r in turns]:
        raise ValueError(f"{where}: every walk needs one turn per task")
    walks = [[_q_tile_of(name, number, kv, where) for name in walk] for kv, walk in enumerate(names)]
    chain = np.repeat(np.arange(len(walks)), [len(w) for w in walks])
    first_step = as_wholes(read["first_step"], f"{where}.first_step")
    if len(first_step) != len(walks):
        raise ValueError(f"{where}: every walk needs one first step; got {len(first_step)} for {len(walks)} walks")
    return HeadOrder.build(chain, list(joined(*walks)), list(joined(*turns)), first_step, read["last_member_first"])


def _q_tile_of(name: Any, head: int, kv_tile: int, where: str) -> int:
    task = Task.parse(as_text(name, f"{where}.walks"))
    if (task.head, task.kv_tile, task.sequence) != (head, kv_tile, 0):
        raise ValueError(f"{where}.walks: walk i holds the tasks of KV tile i, head {head}; got {task} in walk {kv_tile}")
    return task.q_tile
