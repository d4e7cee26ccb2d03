"""Forward and backward of one rank. What travels goes through `Keys` and `Mail`, so that one process can play all ranks, too."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ...backends import RankBackward
from ...call.modifiers import Modifiers
from ...scheduling.ranks.units import Unit
from .shared_call import SharedCall


class Keys(Protocol):
    """Brings the keys and values of all rows, some KV heads at a time: one gather after the other, in the order of their numbers."""

    def start(self, number: int) -> None:
        """Let this gather, and those before it, begin. All ranks must do so sooner or later."""

    def get(self, number: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a gather that was started."""


class Mail(Protocol):
    """Carries states from rank to rank. A copied float32 number is the same number."""

    def send(self, unit: Unit, state: Tensor) -> None:
        """The states behind this unit, to the rank of the unit after it. The sender does not use their memory again."""

    def receive(self, unit: Unit) -> Tensor:
        """The states before this unit, from the rank of the unit before it."""


def forward_pass(
    call: SharedCall, rank: int, q: Tensor, keys: Keys, sinks: Tensor | None, modifiers: Modifiers | None = None
) -> tuple[Tensor, Tensor]:
    """Output and LSE of a rank's queries. While some KV heads are worked on, the keys of the next are on their way."""
    out = q.new_empty(*q.shape[:3], call.dims[1])
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.promote_types(q.dtype, torch.float32))
    for number, kv_heads in enumerate(call.gathers):
        keys.start(min(number + 1, len(call.gathers) - 1))
        heads = slice(kv_heads.start * call.group, kv_heads.stop * call.group)
        some_sinks = None if sinks is None else sinks[heads]
        more = () if modifiers is None else (modifiers.of_heads(heads),)
        out[:, :, heads], lse[:, heads] = call.of_backend.forward(
            q[:, :, heads], *keys.get(number), call.options, some_sinks, call.problem, call.sharding, rank, *more
        )
    return out, lse


class BackwardPass:
    """The backward of a rank: a `step` for each of its units, then `finish`."""

    def __init__(
        self,
        call: SharedCall,
        rank: int,
        rows: tuple[Tensor, ...],
        of_rows: tuple[Tensor, Tensor | None],
        keys: Keys,
        mail: Mail,
        modifiers: Modifiers | None = None,
    ) -> None:
        """rows: dout, q and out of the rank; of_rows: its LSE and, where it was used, the gradient of that."""
        self.call, self.shared, self.keys, self.mail = call, call.shared, keys, mail
        more = {} if modifiers is None else {"modifiers": modifiers}
        self.backward: RankBackward = call.of_backend.RankBackward(call.plan, call.shared, rank, call.options, rows, of_rows, **more)
        self.units = self.shared.by_rank[rank]
        self._states: dict[int, Tensor] = {}  # of units whose next leg is here, too
        self._there: set[int] = set()  # gathers whose keys have come and are still needed
        self._starts = gather_starts(call)
        self._last_use = {number: unit for unit, number in _uses(call, self.units)}

    def step(self, unit: Unit) -> None:
        """The rank's next unit."""
        self._take_keys(unit)
        state = self._states_before(unit)
        self.backward.run(unit, state)
        if self.shared.hops(unit):
            self.mail.send(unit, state)
        elif unit.after is not None:
            self._states[unit.number] = state
        self._drop_keys(unit)

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """dQ, dK and dV of the rank's rows."""
        self.keys.start(len(self.call.gathers) - 1)  # others may need what this rank did not
        return self.backward.finish()

    def _states_before(self, unit: Unit) -> Tensor:
        if unit.before is None:
            return self.backward.new_state(unit)
        if unit.before in self._states:
            return self._states.pop(unit.before)
        return self.mail.receive(unit)

    def _take_keys(self, unit: Unit) -> None:
        self.keys.start(max(number for number, start in enumerate(self._starts) if start <= unit.number))
        for number in gathers_of(self.call, unit):
            if number not in self._there:
                self.backward.take_keys(*self.keys.get(number), self.call.gathers[number].start)
                self._there.add(number)

    def _drop_keys(self, unit: Unit) -> None:
        for number in [number for number in self._there if self._last_use[number] == unit.number]:
            kv_heads = self.call.gathers[number]
            self.backward.drop_keys(kv_heads.start, len(kv_heads))
            self._there.remove(number)


def gathers_of(call: SharedCall, unit: Unit) -> list[int]:
    """The gathers that a unit needs the keys of. An ending needs none."""
    if unit.leg is None:
        return []
    each = len(call.gathers[0])
    return sorted({part // call.problem.parts // each for _, part in unit.heads})


def gather_starts(call: SharedCall) -> list[int]:
    """Of each gather the unit with which it starts: the first, on whichever rank, that needs the one before it, or itself, or one behind
    it. Gathers start in the order of their numbers, units need them in any. So a rank that waits for a gather waits for ranks that
    are at earlier units, and those never wait for this one."""
    first_use = {number: unit for unit, number in reversed(_uses(call, call.shared.units))}
    needed = [
        [first_use[other] for other in range(number - 1, len(call.gathers)) if other in first_use] for number in range(1, len(call.gathers))
    ]
    return [0, *(min(units, default=0) for units in needed)]


def _uses(call: SharedCall, units: tuple[Unit, ...]) -> list[tuple[int, int]]:
    """(unit, gather that it needs)."""
    return [(unit.number, number) for unit in units for number in gathers_of(call, unit)]
