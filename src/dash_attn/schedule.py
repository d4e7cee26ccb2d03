"""Schedule = problem + order (decides the bits) + placement (decides the time). An invalid one cannot be built."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .order import HeadOrder, Ints, Order, frozen_ints
from .problem import Problem, whole_number
from .validate import check_starts, validate


@dataclass(frozen=True, eq=False)
class Placement:
    """The order in which chains take tickets; a free worker starts the chain with the next ticket.

    `starts[kind]` is the order in which the KV tiles of a head of that kind start, cut into `segments` (sizes). All
    heads start their first segment before any starts its second. Inside a segment go `lanes` heads of one kind side
    by side, then `lanes` heads of the next kind, and so on.
    """

    workers: int
    lanes: int
    starts: tuple[Ints, ...]
    segments: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("workers", "lanes"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name)))
        object.__setattr__(self, "starts", tuple(frozen_ints(start) for start in self.starts))
        object.__setattr__(self, "segments", tuple(int(size) for size in self.segments))

    def tickets(self, problem: Problem) -> NDArray[np.int64]:
        """(sequence, head, kv_tile) of every chain, in the order they start."""
        groups = self._head_groups(problem)
        parts, first = [], 0
        for size in self.segments:
            parts += [_side_by_side(heads, self.starts[kind][first : first + size]) for kind, heads in groups]
            first += size
        return np.concatenate(parts)

    def _head_groups(self, problem: Problem) -> list[tuple[int, NDArray[np.int64]]]:
        """(kind, [(sequence, head), ...]) of the heads that start side by side, in order.

        Kinds take turns. A surplus of the first kind goes before all rounds and a surplus of the last kind behind
        them, so that heads whose longest chains start first come last.
        """
        kinds, lanes = len(self.starts), self.lanes
        heads = np.arange(problem.heads)
        instances = []
        for kind in range(kinds):
            of_kind = heads[(heads + problem.head_offset) % kinds == kind]
            sequence = np.repeat(np.arange(problem.batch), len(of_kind))
            instances.append(np.stack([sequence, np.tile(of_kind, problem.batch)], axis=1))
        rounds = min(map(len, instances)) // lanes
        surplus = [len(i) - rounds * lanes for i in instances]
        groups = _chunks(0, instances[0][: surplus[0]], lanes)
        for turn in range(rounds):
            for kind, of_kind in enumerate(instances):
                first = turn * lanes + (surplus[0] if kind == 0 else 0)
                groups.append((kind, of_kind[first : first + lanes]))
        for kind in range(1, kinds):
            groups += _chunks(kind, instances[kind][rounds * lanes :], lanes)
        return groups


def _chunks(kind: int, heads: NDArray[np.int64], lanes: int) -> list[tuple[int, NDArray[np.int64]]]:
    return [(kind, heads[i : i + lanes]) for i in range(0, len(heads), lanes)]


def _side_by_side(heads: NDArray[np.int64], kv_tiles: Ints) -> NDArray[np.int64]:
    """Tickets of some heads: KV tile by KV tile, head by head."""
    return np.concatenate([np.tile(heads, (len(kv_tiles), 1)), np.repeat(kv_tiles, len(heads))[:, None]], axis=1)


@dataclass(frozen=True, eq=False)
class Schedule:
    """A proven schedule. Construction raises ScheduleError with the task and its surroundings if anything is wrong."""

    problem: Problem
    order: Order
    placement: Placement

    def __post_init__(self) -> None:
        validate(self)

    @classmethod
    def build(
        cls, problem: Problem, order: Order, starts: tuple[Any, ...], workers: int, segments: tuple[int, ...] | None = None
    ) -> Schedule:
        """Place an order on `workers`: as many heads side by side as fit, gangs never torn."""
        workers = whole_number("workers", workers)
        starts = tuple(map(frozen_ints, starts))
        check_starts(problem, order, starts)
        gang = max(kind.gang(start) for kind, start in zip(order.kinds, starts, strict=True))
        segments = (problem.kv_tiles,) if segments is None else segments
        side_by_side = gang if gang > 1 else max(segments)
        return cls(problem, order, Placement(workers, max(1, workers // side_by_side), starts, segments))

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
            "workers": self.workers,
            "lanes": self.placement.lanes,
            "starts": [s.tolist() for s in self.placement.starts],
            "segments": list(self.placement.segments),
        }
        value = {"problem": self.problem.to_json(), "order": self.order.to_json(), "placement": placement}
        return json.dumps(value, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        try:
            value = json.loads(text)
            problem, order = Problem.from_json(value["problem"]), Order.from_json(value["order"])
            placed = value["placement"]
            placement = Placement(placed["workers"], placed["lanes"], tuple(placed["starts"]), tuple(placed["segments"]))
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(f"this is not the JSON of a schedule: {type(error).__name__} {error}") from error
        return cls(problem, order, placement)
