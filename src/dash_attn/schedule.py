"""Schedule = problem + order (decides the bits) + placement (decides the time). An invalid one cannot be built."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .order import HeadOrder, Ints, Order, frozen_ints
from .problem import Problem
from .validate import validate


@dataclass(frozen=True, eq=False)
class Placement:
    """Chains take tickets: `lanes` heads of one kind side by side, then `lanes` heads of the next kind, and so on.

    `starts[kind]` is the order in which the KV tiles of a head of that kind start.
    """

    workers: int
    lanes: int
    starts: tuple[Ints, ...]

    def __post_init__(self) -> None:
        for name in ("workers", "lanes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
                raise ValueError(f"{name} must be a whole number >= 1; got {value!r}")
        object.__setattr__(self, "starts", tuple(frozen_ints(start) for start in self.starts))

    def tickets(self, problem: Problem) -> NDArray[np.int64]:
        """(sequence, head, kv_tile) of every chain, in the order they start."""
        kinds = len(self.starts)
        heads = np.arange(problem.heads)
        instances = []  # per kind: (sequence, head) of every head of that kind
        for kind in range(kinds):
            of_kind = heads[(heads + problem.head_offset) % kinds == kind]
            sequence, head = np.divmod(np.arange(problem.batch * len(of_kind)), max(1, len(of_kind)))
            instances.append(np.stack([sequence, of_kind[head] if len(of_kind) else head], axis=1))
        rounds = min(len(i) for i in instances) // self.lanes
        groups = [(k, i * self.lanes, (i + 1) * self.lanes) for i in range(rounds) for k in range(kinds)]
        for kind in range(kinds):  # what is left when one kind has run out
            rest = range(rounds * self.lanes, len(instances[kind]), self.lanes)
            groups += [(kind, first, first + self.lanes) for first in rest]
        return np.concatenate([_group_tickets(instances[k][a:b], self.starts[k]) for k, a, b in groups])


def _group_tickets(instances: NDArray[np.int64], start: Ints) -> NDArray[np.int64]:
    """Tickets of the heads of one group: position by position, lane by lane."""
    lanes, positions = len(instances), len(start)
    return np.concatenate([np.tile(instances, (positions, 1)), np.repeat(start, lanes)[:, None]], axis=1)


@dataclass(frozen=True, eq=False)
class Schedule:
    """A proven schedule. Construction raises ScheduleError with the task and its surroundings if anything is wrong."""

    problem: Problem
    order: Order
    placement: Placement

    def __post_init__(self) -> None:
        validate(self)

    @classmethod
    def build(cls, problem: Problem, order: Order, starts: tuple[Any, ...], workers: int) -> Schedule:
        """Place an order on `workers`: as many heads side by side as fit, gangs never torn."""
        gang = max(kind.gang(start) for kind, start in zip(order.kinds, starts, strict=True))
        side_by_side = gang if gang > 1 else problem.kv_tiles
        return cls(problem, order, Placement(workers, max(1, workers // side_by_side), starts))

    @property
    def name(self) -> str:
        return self.order.name

    @property
    def workers(self) -> int:
        return self.placement.workers

    @property
    def slack(self) -> int | None:
        return self.order.slack

    @cached_property
    def gang(self) -> int:
        """Chains of a head that must be resident together; 1 means none must."""
        return max(k.gang(s) for k, s in zip(self.order.kinds, self.placement.starts, strict=True))

    @property
    def guarantees(self) -> tuple[str, ...]:
        return self.order.guarantees

    @cached_property
    def tickets(self) -> NDArray[np.int64]:
        """(sequence, head, kv_tile) of every chain, in the order they start."""
        return self.placement.tickets(self.problem)

    def head_order(self, head: int) -> HeadOrder:
        return self.order.kinds[self.order.kind_of(self.problem, head)]

    def to_json(self) -> str:
        placement = {
            "workers": int(self.workers),
            "lanes": int(self.placement.lanes),
            "starts": [s.tolist() for s in self.placement.starts],
        }
        value = {"problem": self.problem.to_json(), "order": self.order.to_json(), "placement": placement}
        return json.dumps(value, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        value = json.loads(text)
        placement = value["placement"]
        return cls(
            Problem.from_json(value["problem"]),
            Order.from_json(value["order"]),
            Placement(placement["workers"], placement["lanes"], tuple(placement["starts"])),
        )
