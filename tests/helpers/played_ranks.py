"""One process plays all ranks that share a sequence, on backend 'hopper': on a GPU, or on kernels that are emulated."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from random import Random
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from dash_attn import Mask
from dash_attn.call.call import Call
from dash_attn.call.options import AttentionOptions, Choices, options_for
from dash_attn.call.planning import plan_for, schedule_for
from dash_attn.scheduling import Problem
from dash_attn.scheduling.plan import Plan
from dash_attn.scheduling.ranks.sharding import Sharding
from dash_attn.scheduling.ranks.share import share
from dash_attn.scheduling.ranks.units import SharedSchedule, Unit


def calls() -> ModuleType:
    return import_module("dash_attn.backends.hopper.calls.rank_backward")


@dataclass(frozen=True)
class Case:
    mask: Mask
    sharding: Sharding
    heads: tuple[int, int] = (2, 1)
    dims: tuple[int, int] = (64, 64)
    batch: int = 1
    together: int = 1
    dtype: torch.dtype = torch.bfloat16
    head_offset: int = 0
    schedule: str = "auto"
    softcap: float = 0.0

    @property
    def options(self) -> AttentionOptions:
        chosen = Choices(mask=self.mask, head_offset=self.head_offset, schedule=self.schedule, softcap=self.softcap)
        return options_for(chosen, self.dims[0])

    @property
    def problem(self) -> Problem:
        rows, (q_heads, kv_heads) = self.sharding.rows, self.heads
        tiles = import_module("dash_attn.backends.hopper.ranks").backward_tiles(*self.dims)
        return Problem(self.mask, rows, rows, *tiles, kv_heads, q_heads // kv_heads, self.batch, self.head_offset)

    def rows_of(self, rank: int) -> Tensor:
        return torch.from_numpy(self.sharding.rows_of(rank).copy()).long()

    @property
    def plan(self) -> Plan:
        return plan_for(self.problem, self.schedule, 132)

    @property
    def shared(self) -> SharedSchedule:
        return shared_of(self)


@lru_cache
def shared_of(case: Case) -> SharedSchedule:
    return share(schedule_for(case.problem, case.schedule, 132), case.sharding, case.together)


@dataclass
class Played:
    """The whole sequence's dQ, dK and dV, and what the ranks did."""

    gradients: list[Tensor]
    backwards: list[Any]
    shared: SharedSchedule


def play_forward(case: Case, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Output and LSE of the whole sequence, each rank with its own rows."""
    out, lse = (
        q.new_full((*q.shape[:3], v.shape[-1]), torch.nan),
        q.new_full((len(q), q.shape[2], q.shape[1]), torch.nan, dtype=torch.float32),
    )
    for rank in range(case.sharding.ranks):
        mine = case.rows_of(rank).to(q.device)
        forward = import_module("dash_attn.backends.hopper.ranks").forward
        own = Call(q[:, mine], k, v, case.options, sinks=sinks)
        out[:, mine], lse[:, :, mine] = forward(own, case.problem, case.sharding, rank)
    return out, lse


def in_random_order(shared: SharedSchedule, seed: int) -> list[Unit]:
    """All units, each behind those that it waits for, in some other sequence than the usual one."""
    random = Random(seed)
    left = {unit.number: set(waits) for unit, waits in zip(shared.units, shared.waits, strict=True)}
    found: list[Unit] = []
    while left:
        number = random.choice([number for number, waits in left.items() if not waits])
        del left[number]
        found.append(shared.units[number])
        for waits in left.values():
            waits.discard(number)
    return found


def as_it_is(name: str, tensor: Tensor) -> Tensor:
    return tensor


def play_ranks(
    case: Case,
    inputs: tuple[Tensor, ...],
    gathers: int = 1,
    dlse: Tensor | None = None,
    change: Callable[[Unit, Tensor], None] | None = None,
    made: Callable[[str, Tensor], Tensor] = as_it_is,
    units: Iterable[Unit] | None = None,
    overlap: bool = False,
) -> Played:
    """One process plays all ranks. inputs: dout, q, k, v, out and LSE of the whole sequence.

    gathers: tensors in which keys come. change: of the states before each unit. made: told of memory. units: in another order.
    """
    dout, q, k, v, out, lse = inputs
    shared, plan, sharding = case.shared, case.plan, case.sharding
    rows = [case.rows_of(rank).to(q.device) for rank in range(sharding.ranks)]
    backwards = []
    for rank, mine in enumerate(rows):
        of_rows = [None if x is None else made("rows", x[:, :, mine].contiguous()) for x in (lse, dlse)]
        own = dout[:, mine], q[:, mine], out[:, mine]
        backward = calls().RankBackward(plan, shared, rank, case.options, own, of_rows, overlap)
        for some in torch.arange(case.heads[1]).chunk(gathers):
            first, end = int(some[0]), int(some[-1]) + 1
            backward.take_keys(k[:, :, first:end], v[:, :, first:end], first)
        backwards.append(backward)
    states: dict[int, Tensor] = {}
    for unit in shared.units if units is None else units:
        backward = backwards[unit.rank]
        if unit.before is None:
            state = made("states", backward.new_state(unit))
            if unit.leg is not None:
                state.fill_(torch.nan)  # what begins reads nothing
        else:
            state = states.pop(unit.before)
        if change is not None:
            change(unit, state)
        backward.run(unit, state)
        if unit.after is not None:
            states[unit.number] = state
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    for backward, mine in zip(backwards, rows, strict=True):
        for whole, part in zip(gradients, backward.finish(), strict=True):
            whole[:, mine] = part
    return Played(gradients, backwards, shared)
