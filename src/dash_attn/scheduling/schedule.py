"""Schedule = problem + order (decides the bits) + placement (decides the time). An invalid one cannot be built."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ScheduleError
from ..formats import SCHEDULES
from .json_fields import as_lists, as_whole, as_wholes, load_json, read_fields
from .order import RUN_TO_RUN, HeadOrder, Ints, Order, frozen_ints, reported
from .problem import Problem, whole_number
from .validate import check_starts, validate

MOST_TILES = 2**26  # of a schedule that is read from JSON: half a million tokens square


@dataclass(frozen=True, eq=False)
class Placement:
    """The order in which chains take tickets; a free worker starts the chain with the next ticket.

    A head is here what has chains of its own: a part of a group (the whole group, where it is not split).
    `starts[kind]` is the order in which the KV tiles of a head of that kind start, cut into `segments` (sizes). Heads go
    in rounds of at most `heads_in_round` of each kind (0: all of them): those of a round start their first segment before
    any starts its second. Inside a segment heads of one kind, at most `lanes`, go side by side, then heads of the next
    kind, and so on in turns. Heads are dealt evenly to as few rounds, and those to as few turns, as that allows.

    Parts of one group add dK and dV to the same sums, one after the other. So the first parts of all groups come before all second
    ones: heads side by side are of different groups, where there are several, and do not wait for each other when they end. Where
    parts differ in size, that would set short ones beside long ones, and group comes after group.
    """

    workers: int
    lanes: int
    starts: tuple[Ints, ...]
    segments: tuple[int, ...]
    heads_in_round: int = 0

    def __post_init__(self) -> None:
        for name, least in (("workers", 1), ("lanes", 1), ("heads_in_round", 0)):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), least))
        object.__setattr__(self, "starts", tuple(frozen_ints(start) for start in self.starts))
        object.__setattr__(self, "segments", tuple(frozen_ints(self.segments).tolist()))

    def tickets(self, problem: Problem) -> NDArray[np.int64]:
        """(sequence, part, kv_tile) of every chain, in the order they start. Of two parts of one kind, the chain of the first one
        comes first for every KV tile."""
        instances = self._instances(problem)
        tickets = []
        for in_round in _deal(instances, self.rounds([len(i) for i in instances])):
            side_by_side = self._side_by_side(in_round)
            for first, end in pairwise([0, *accumulate(self.segments)]):
                for kind, heads in side_by_side:
                    kv_tiles = self.starts[kind][first:end]  # KV tile by KV tile, head by head
                    tickets.append(np.column_stack([np.tile(heads, (len(kv_tiles), 1)), np.repeat(kv_tiles, len(heads))]))
        return np.concatenate(tickets)

    def rounds(self, instances: list[int]) -> int:
        """How many there are, given the heads of each kind in the whole batch."""
        return -(-max(instances) // self.heads_in_round) if self.heads_in_round else 1

    def heads_of_kinds(self, problem: Problem) -> list[NDArray[np.int64]]:
        """The heads of each kind in one sequence: numbers of parts."""
        kinds = np.array([problem.kind_of(part, len(self.starts)) for part in range(problem.all_parts)])
        return [np.flatnonzero(kinds == kind) for kind in range(len(self.starts))]

    def _instances(self, problem: Problem) -> list[NDArray[np.int64]]:
        """(sequence, head) of all heads of each kind: the first part of every group, then the second one, and so on, if all are equal."""
        sequences, kinds = np.arange(problem.batch), len(self.starts)
        instances = []
        for heads in self.heads_of_kinds(problem):
            by_sequence = np.stack([np.repeat(sequences, len(heads)), np.tile(heads, problem.batch)], axis=1)
            place = by_sequence[:, 1] % problem.parts // kinds  # among the parts of this kind in its group
            instances.append(by_sequence[np.argsort(place, kind="stable")] if problem.has_equal_parts else by_sequence)
        return instances

    def _side_by_side(self, instances: list[NDArray[np.int64]]) -> list[tuple[int, NDArray[np.int64]]]:
        """(kind, [(sequence, head), ...]) of the heads that start side by side, in order."""
        turns = -(-max(map(len, instances)) // self.lanes)
        return [(kind, heads) for turn in _deal(instances, turns) for kind, heads in enumerate(turn)]


def _deal(instances: list[NDArray[np.int64]], shares: int) -> Iterator[list[NDArray[np.int64]]]:
    """Heads of each kind in each share: as many as in any other, or one more."""
    dealt = [np.array_split(heads, shares) for heads in instances]
    return (list(share) for share in zip(*dealt, strict=True))


FILLED = 9, 10  # a turn fills nine of ten workers
MANY_KV_TILES = 64  # from which chains make up for reading their tiles once more
HAND_OVER = 2  # steps it takes on an H200 until the next turn of a dQ tile may reduce
CACHED = 2  # Q tiles of a filling of heads that stay in the cache of an H200, per row of a KV tile (the wider a head, the fewer rows)
SIXTEENTHS = 16  # of a step: in which lags are counted
LATE = 56  # sixteenths that a chain lags behind the one before it, in both kinds of head: nearly all start at the same Q tile
TOO_LONG = 4  # times as many Q tiles as CACHED says: the cache of an H200 (60 MB) does not hold such a head


def _in_turns(problem: Problem, workers: int, kinds: int, segments: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Heads of one kind that go side by side before the next kind takes its turn, and the segments in which they do.

    As few heads as fill nine of ten workers, because then the chains of one kind start where those of the other end, one by one; no
    more, because the cache holds the tiles of few heads (docs/log.md). Long chains of one query head and one segment afford
    two fillings, which hand over more smoothly. Where the chains of a head wait to start one after the other, it takes more
    heads to keep the workers busy: as many as the cache holds. If one kind has less than half of them, the other one takes its turn
    as soon as it helps: segments are cut into as many chains as can run at the same time.

    A head of one segment that the cache does not hold is cut into fillings, if they fill the workers. Its chains end one by one. If its own
    took their place, neighbours would drift apart by a hand-over per filling, and each would read from memory what the one before it
    had in the cache. Chains of the other kind start one by one and end together.
    """
    segment, lag = max(segments), _lag(problem, len(segments))
    fillings = 2 if problem.most_members == 1 and segment == problem.kv_tiles >= MANY_KV_TILES else 1
    heads = problem.batch * -(-problem.all_parts // kinds)  # of the kind that has more
    enough = -(-FILLED[0] * fillings * workers // (FILLED[1] * segment))
    busy = -(-FILLED[0] * workers // (FILLED[1] * _chains_under_way(problem, lag)))
    enough = max(enough, min(busy, CACHED * problem.tile_kv // problem.q_tiles))
    piece = segment
    if 2 * heads <= busy and lag >= LATE:
        piece = -(-problem.q_tiles * problem.most_members // HAND_OVER)
    elif lag >= SIXTEENTHS and segment == problem.kv_tiles and problem.q_tiles >= TOO_LONG * CACHED * problem.tile_kv:
        even = -(-segment // -(-segment // workers))
        piece = even if FILLED[1] * even >= FILLED[0] * workers else segment
    segments = tuple(min(piece, size - first) for size in segments for first in range(0, size, piece))
    return -(-heads // max(1, heads // enough)), segments


def _lag(problem: Problem, classes: int) -> int:
    """Sixteenths of a step by which a chain starts later than the one before it, in a head that walks up and one that walks down
    together: a hand-over each, less the Q tiles by which its walk begins farther ahead. The first and the last chain stand for all.
    """
    ends = problem.kept[:, [0, -1]]
    first, behind_last = ends.argmax(0), ends.argmax(0) + ends.sum(0)
    gaps = max(1, problem.kv_tiles - 1)
    ahead = (classes * int(tiles[1] - tiles[0]) for tiles in (first, behind_last))
    return SIXTEENTHS * sum(max(0, HAND_OVER * gaps - tiles) for tiles in ahead) // gaps


def _chains_under_way(problem: Problem, lag: int) -> int:
    """Chains of a head that run at the same time if each lags behind the one before it.

    Half of the lengths of the first and the last chain stands for all lengths. Where most chains are as long as the first (queries
    shorter than keys), that is half of the truth, for which the first chains of all make up: they start one by one on idle workers.
    """
    lengths = int(problem.chain_lengths[0] + problem.chain_lengths[-1])
    return max(1, min(problem.kv_tiles, SIXTEENTHS * lengths * problem.most_members // max(1, lag)))


GENERATED_BY: dict[str, Callable[[Problem, int], Schedule]] = {}  # by name; generators/ fills it, which this file cannot import


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
        cls,
        problem: Problem,
        order: Order,
        starts: tuple[Any, ...],
        workers: int,
        segments: tuple[int, ...] | None = None,
        in_rounds: bool = False,
        fillings: int = 1,
        only_cached: bool = False,
    ) -> Schedule:
        """Place an order on `workers`, gangs never torn.

        in_rounds: a turn of each kind is a round, so that the next segment of its heads finds their tiles in the cache.
        fillings: of the workers by heads of one kind that go side by side, as far as the cache holds their tiles.
        only_cached: no more heads than that, though they fill fewer workers: the next ones follow.
        """
        workers = whole_number("workers", workers)
        starts = tuple(map(frozen_ints, starts))
        check_starts(problem, order, starts)
        segments = (problem.kv_tiles,) if segments is None else segments
        gang = max(kind.gang(start) for kind, start in zip(order.kinds, starts, strict=True))
        if gang > 1:
            lanes = 1  # the chains of a gang start together, so that few of them hold a worker and wait for the rest
        elif len(starts) == 1:
            cached = fillings * CACHED * problem.tile_kv // (problem.q_tiles * problem.most_members)
            least = 1 if only_cached else workers // max(segments)
            lanes = max(1, least, min(cached, fillings * workers // max(segments)))
        else:
            lanes, segments = _in_turns(problem, workers, len(starts), segments)
        in_round = lanes if in_rounds and len(segments) > 1 else 0
        return cls(problem, order, Placement(workers, lanes, starts, segments, in_round))

    @property
    def name(self) -> str:
        return self.order.name

    @property
    def workers(self) -> int:
        return self.placement.workers

    @property
    def slack(self) -> int | None:
        """Of the kind of head that has least."""
        return min((kind.slack for kind in self.order.kinds if kind.slack is not None), default=None)

    @cached_property
    def gang(self) -> int:
        """Chains of a head that must be resident together; 1 means none must."""
        return max(k.gang(s) for k, s in zip(self.order.kinds, self.placement.starts, strict=True))

    @cached_property
    def guarantees(self) -> tuple[str, ...]:
        """Those of the order; with a gang, the number of workers says from how many on."""
        return reported(self.order.guarantees, self.gang)

    @cached_property
    def tickets(self) -> NDArray[np.int64]:
        """(sequence, part, kv_tile) of every chain, in the order they start."""
        return self.placement.tickets(self.problem)

    def order_of(self, part: int) -> HeadOrder:
        return self.order.kinds[self.problem.kind_of(part, len(self.order.kinds))]

    def tasks(self, part: int, kv_tile: int) -> tuple[Ints, Ints, Ints]:
        """(q_tile, turn, member) of the tasks of a chain, in order."""
        return self.order_of(part).tasks(kv_tile, len(self.problem.members(part)))

    def to_json(self) -> str:
        return self._json

    @cached_property
    def _json(self) -> str:
        """Kept: a call that is given a schedule looks itself up by this text."""
        placement = vars(self.placement) | {"starts": [start.tolist() for start in self.placement.starts]}
        value = {**SCHEDULES.mark, "problem": self.problem.to_json(), "order": self.order.to_json(), "placement": placement}
        return json.dumps(value, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        """Raises ValueError for whatever is wrong with it.

        Claims are not believed: the guarantees are those of the generator that it names, if that gives this very order, else
        that every run has the same bits.
        """
        value, what = load_json(text, "a schedule"), "the JSON of a schedule"
        SCHEDULES.check(value, what)
        read_fields(value, what, ("problem", "order", "placement"), (SCHEDULES.field,))
        problem, order = Problem.from_json(value["problem"]), Order.from_json(value["order"])
        placement = _read_placement(value["placement"])
        _check_size(problem, order)
        return cls(problem, replace(order, guarantees=proven_guarantees(problem, order, placement.workers)), placement)


def _read_placement(value: Any) -> Placement:
    read = read_fields(value, "placement", ("workers", "lanes", "starts", "segments"), ("heads_in_round",))
    starts = tuple(map(frozen_ints, as_lists(read["starts"], "placement.starts", as_wholes)))
    workers, lanes = (as_whole(read[name], f"placement.{name}", least=1) for name in ("workers", "lanes"))
    in_round = as_whole(read.get("heads_in_round", 0), "placement.heads_in_round")
    return Placement(workers, lanes, starts, tuple(as_wholes(read["segments"], "placement.segments")), in_round)


def _check_size(problem: Problem, order: Order) -> None:
    """Before anything is allocated: a few digits of JSON can describe more tiles than fit in memory."""
    for kind in order.kinds:
        if kind.kv_tiles != problem.kv_tiles:
            raise ScheduleError(f"the problem has {problem.kv_tiles} KV tiles and needs as many walks; got {kind.kv_tiles}")
    if problem.q_tiles * problem.kv_tiles > MOST_TILES:
        raise ScheduleError(f"a schedule is read for at most {MOST_TILES} tiles; got {problem.q_tiles} x {problem.kv_tiles}")


def proven_guarantees(problem: Problem, order: Order, workers: int) -> tuple[str, ...]:
    """Generators prove theirs: an order that is a function of the problem can depend on nothing else."""
    try:
        generated = GENERATED_BY[order.name](problem, workers).order if order.name in GENERATED_BY else None
    except ScheduleError:
        generated = None
    return (RUN_TO_RUN,) if generated is None or not generated.same_bits(order) else generated.guarantees


DECIDE_TILES = ("mask", "q_len", "kv_len", "tile_q", "tile_kv")  # fields of a Problem: which tiles there are, and which are kept


def fit(schedule: Schedule, problem: Problem, workers: int) -> Schedule:
    """A schedule made earlier, for a problem of now: its order and its start orders on `workers` workers, proven anew.

    Mask, lengths and tile sizes must be those it was made for. Batch, heads, group and head_offset may be others: walks and
    turns are those of a kind of head. Parts of a group are as many as the schedule says, or else as the rule says. It promises what
    the generator it is named after promises, if that gives this very order for this problem, else that every run has the same bits.
    """
    _check_tiles(schedule.problem, problem)
    if parts := schedule.problem.group_parts:  # that were asked for are kept
        if parts > problem.group:
            raise ScheduleError(
                f"the schedule that was given does not fit this call: it deals a group to {parts} parts; the call has groups of"
                f" {problem.group} query heads, so at most as many parts (group_parts 0 leaves them to the rule)"
            )
        problem = replace(problem, group_parts=parts)
    proven = proven_guarantees(problem, schedule.order, workers)
    order = replace(schedule.order, name=f"{schedule.name} (given)", guarantees=proven)
    lanes = schedule.placement.lanes
    if schedule.gang > 1:  # no more heads side by side than leave room for whole gangs
        lanes = max(1, min(lanes, workers // schedule.gang))
    return Schedule(problem, order, replace(schedule.placement, workers=workers, lanes=lanes))


def _check_tiles(made_for: Problem, problem: Problem) -> None:
    """Raise ScheduleError where the two do not have the same tiles, with everything that differs."""
    if differing := [name for name in DECIDE_TILES if getattr(made_for, name) != getattr(problem, name)]:
        theirs, ours = (", ".join(f"{name} {getattr(which, name)}" for name in differing) for which in (made_for, problem))
        raise ScheduleError(
            f"the schedule that was given does not fit this call: it is for {theirs}; the call has {ours}. Mask, lengths and tile"
            " sizes must be equal (explain(...).backward_tiles tells the tile sizes of a call); batch, heads and workers may differ"
        )
