"""Do two runs agree; if not, where they part first, and what else is different about them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from .aligning import Pair, pairs
from .culprit import Culprit, culprit
from .entries import PHASES
from .framing import LedgerError
from .reading import Layout, RankLedger, Step, read_run
from .surroundings import Change, attention_changes, environment_changes, generator_of, notes_on, share_alike, span


@dataclass(frozen=True)
class FirstDifference:
    """step: where the runs part. before_it: in the state that a run started this step with, not in the step itself."""

    rank: int
    step: int
    before_it: bool
    pair: Pair
    culprit: Culprit
    differing: dict[str, tuple[int, int]]  # phase -> (tensors that differ, tensors compared), at this moment


@dataclass
class Comparison:
    """Of all that both runs recorded."""

    first: FirstDifference | None
    steps: tuple[int, ...]  # compared on any rank
    steps_that_differ: tuple[int, ...]
    tensors: int  # compared in all
    ranks: tuple[int, ...]
    environment: list[Change]
    attention: list[Change]
    notes: list[str] = field(default_factory=list)

    @property
    def agree(self) -> bool:
        return self.first is None


@dataclass
class _Moment:
    """The end of a step, or the state that a segment started with: as it is in both runs."""

    step: int
    is_start: bool
    a: Step
    b: Step


@dataclass
class _OfRank:
    first: FirstDifference | None = None
    steps: list[int] = field(default_factory=list)
    differing: list[int] = field(default_factory=list)
    tensors: int = 0
    idle: set[str] = field(default_factory=set)  # generators that differ, but nobody drew from


def compare_runs(path_a: str | Path, path_b: str | Path) -> Comparison:
    """Raises LedgerError where there is nothing that both recorded."""
    a, b = read_run(path_a), read_run(path_b)
    ranks = sorted(set(a) & set(b))
    if not ranks and len(a) == len(b) == 1:
        b = {rank: next(iter(b.values())) for rank in a}  # two files that were named one by one
        ranks = list(a)
    if not ranks:
        raise LedgerError(f"no rank is in both runs: A has {sorted(a)}, B has {sorted(b)}")
    found = {rank: _compare_rank(rank, a[rank], b[rank]) for rank in ranks}
    tensors = sum(of_rank.tensors for of_rank in found.values())
    if not tensors:
        spans = " and ".join(f"{name} has {span(list(run[ranks[0]].steps))}" for name, run in (("A", a), ("B", b)))
        raise LedgerError(f"nothing was recorded in both runs: {spans}")
    firsts = [of_rank.first for of_rank in found.values() if of_rank.first is not None]
    first = min(firsts, key=_time_of, default=None)
    reduced = [] if first is None else _notes_of_reduction(first, a[first.rank], b[first.rank])
    return Comparison(
        first=first,
        steps=tuple(sorted({step for of_rank in found.values() for step in of_rank.steps})),
        steps_that_differ=tuple(sorted({step for of_rank in found.values() for step in of_rank.differing})),
        tensors=tensors,
        ranks=tuple(ranks),
        environment=environment_changes(a[ranks[0]], b[ranks[0]]),
        attention=attention_changes(a[ranks[0]], b[ranks[0]]),
        notes=[*notes_on(a, b, ranks), *_notes_of_difference(firsts), *reduced, *_notes_of_idle(found)],
    )


def _time_of(first: FirstDifference) -> tuple[int, bool, int]:
    """Ranks run side by side: a fault in the forward of one reaches the others with its gradients."""
    return first.step, not first.before_it, PHASES.index(first.pair.entry.phase)


def _compare_rank(rank: int, a: RankLedger, b: RankLedger) -> _OfRank:
    found = _OfRank()
    idle = a.idle_generators & b.idle_generators
    complete = share_alike(a, b)
    quick = _QuickLook()
    for moment in _moments(a, b):
        if not moment.is_start and quick.all_same(moment.a, moment.b):
            found.tensors += len(moment.a.sums) - len(idle & set(moment.a.layout.generators))
            found.steps.append(moment.step)
            continue
        aligned = pairs(moment.a, moment.b, complete)
        found.idle |= {name for pair in aligned if not pair.same and (name := generator_of(pair)) in idle}
        aligned = [pair for pair in aligned if generator_of(pair) not in idle]
        if not aligned:
            continue
        step = moment.step + 1 if moment.is_start else moment.step
        found.tensors += len(aligned)
        if not moment.is_start:
            found.steps.append(step)
        place = next((place for place, pair in enumerate(aligned) if not pair.same), None)
        if place is None:
            continue
        if not moment.is_start:
            found.differing.append(step)
        if found.first is None:
            judged = culprit(aligned, place, moment.is_start)
            found.first = FirstDifference(rank, step, moment.is_start, aligned[place], judged, _by_phase(aligned))
    return found


class _QuickLook:
    """Most steps of most runs are the same: they need no look at every tensor. A layout is compared with another once."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], bool] = {}

    def all_same(self, a: Step, b: Step) -> bool:
        return self._same_layout(a.layout, b.layout) and np.array_equal(a.sums, b.sums)

    def _same_layout(self, one: Layout, other: Layout) -> bool:
        key = id(one), id(other)
        if key not in self._known:
            self._known[key] = one.entries == other.entries
        return self._known[key]


def _moments(a: RankLedger, b: RankLedger) -> Iterator[_Moment]:
    """In the order of time. The start of a segment compares with the other's, or with what the other had after that step."""
    for number in sorted({*a.steps, *b.steps, *a.starts, *b.starts}):
        if number in a.steps and number in b.steps:
            yield _Moment(number, False, a.steps[number], b.steps[number])
        starts = a.starts.get(number), b.starts.get(number)
        if starts != (None, None):
            one, other = starts[0] or a.steps.get(number), starts[1] or b.steps.get(number)
            if one is not None and other is not None:
                yield _Moment(number, True, one, other)


def _by_phase(aligned: list[Pair]) -> dict[str, tuple[int, int]]:
    compared = Counter(pair.entry.phase for pair in aligned)
    differing = Counter(pair.entry.phase for pair in aligned if not pair.same)
    return {phase: (differing[phase], count) for phase, count in compared.items()}


def _notes_of_difference(firsts: list[FirstDifference]) -> list[str]:
    if len(firsts) < 2:
        return []
    return [f"ranks that differ: {', '.join(str(one.rank) for one in firsts)}"]


def _notes_of_reduction(first: FirstDifference, a: RankLedger, b: RankLedger) -> list[str]:
    """What modules computed agreed on every rank, or was not recorded: a sum over ranks came between."""
    if first.pair.entry.phase != "gradient" or max(a.world_sizes | b.world_sizes) == 1:
        return []
    return ["gradients are recorded after they were summed over ranks: that sum may be what differs, not the module"]


def _notes_of_idle(found: dict[int, _OfRank]) -> list[str]:
    names = sorted({name for of_rank in found.values() for name in of_rank.idle})
    return [f"the generator {name} has another state, but neither run drew from it" for name in names]
