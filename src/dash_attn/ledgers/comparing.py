"""Do two runs agree; if not, where they part first, and what else is different about them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .aligning import Pair, pairs
from .culprit import Culprit, culprit
from .environment import ALWAYS_DIFFERENT
from .framing import LedgerError
from .reading import RankLedger, Step, read_run


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
    """environment and attention: (what, in A, in B)."""

    first: FirstDifference | None
    steps: tuple[int, ...]  # compared on any rank
    steps_that_differ: tuple[int, ...]
    tensors: int  # compared in all
    ranks: tuple[int, ...]
    environment: list[tuple[str, str, str]]
    attention: list[tuple[str, str, str]]
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
        spans = " and ".join(f"{name} has {_span(list(run[ranks[0]].steps))}" for name, run in (("A", a), ("B", b)))
        raise LedgerError(f"nothing was recorded in both runs: {spans}")
    firsts = [of_rank.first for of_rank in found.values() if of_rank.first is not None]
    return Comparison(
        first=min(firsts, key=lambda one: (one.step, not one.before_it), default=None),
        steps=tuple(sorted({step for of_rank in found.values() for step in of_rank.steps})),
        steps_that_differ=tuple(sorted({step for of_rank in found.values() for step in of_rank.differing})),
        tensors=tensors,
        ranks=tuple(ranks),
        environment=_environment(a[ranks[0]], b[ranks[0]]),
        attention=_attention(a[ranks[0]], b[ranks[0]]),
        notes=[*_notes(a, b, ranks), *_notes_of_difference(firsts), *_notes_of_idle(found)],
    )


def _compare_rank(rank: int, a: RankLedger, b: RankLedger) -> _OfRank:
    found = _OfRank()
    idle = a.idle_generators & b.idle_generators
    for moment in _moments(a, b):
        aligned = pairs(moment.a, moment.b)
        found.idle |= {name for pair in aligned if not pair.same and (name := _generator(pair)) in idle}
        aligned = [pair for pair in aligned if _generator(pair) not in idle]
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


def _generator(pair: Pair) -> str:
    return pair.entry.tensor if pair.entry.phase == "rng" else ""


def _by_phase(aligned: list[Pair]) -> dict[str, tuple[int, int]]:
    compared = Counter(pair.entry.phase for pair in aligned)
    differing = Counter(pair.entry.phase for pair in aligned if not pair.same)
    return {phase: (differing[phase], count) for phase, count in compared.items()}


def _environment(a: RankLedger, b: RankLedger) -> list[tuple[str, str, str]]:
    changes = _changes(dict(_flat(a.environment)), dict(_flat(b.environment)))
    return [change for change in changes if change[0] not in ALWAYS_DIFFERENT]


def _flat(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, inner in value.items():
        if isinstance(inner, dict):
            yield from _flat(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", inner


def _attention(a: RankLedger, b: RankLedger) -> list[tuple[str, str, str]]:
    """The calls of the first step in which they differ."""
    for number in sorted(set(a.steps) & set(b.steps)):
        calls_a, calls_b = a.steps[number].layout.attention, b.steps[number].layout.attention
        if [plan for _, plan in calls_a] == [plan for _, plan in calls_b]:
            continue
        if len(calls_a) != len(calls_b):
            return [(f"step {number}: calls", str(len(calls_a)), str(len(calls_b)))]
        found: dict[tuple[str, str, str], list[str]] = {}
        for place, ((module_a, plan_a), (module_b, plan_b)) in enumerate(zip(calls_a, calls_b, strict=True)):
            for what in _changes(a.plans.get(plan_a, {}), b.plans.get(plan_b, {})):
                found.setdefault(what, []).append(module_a or module_b or f"call {place}")
        return [(f"step {number}, {_some(modules)}: {name}", one, other) for (name, one, other), modules in found.items()]
    return []


def _changes(one: dict[str, Any], other: dict[str, Any]) -> list[tuple[str, str, str]]:
    names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    return [(name, str(one.get(name, "-")), str(other.get(name, "-"))) for name in names]


def _some(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} and {len(names) - 1} others"


def _notes(a: dict[int, RankLedger], b: dict[int, RankLedger], ranks: list[int]) -> list[str]:
    found: list[str] = []
    for name, run, other in (("A", a, b), ("B", b, a)):
        if alone := sorted(set(run) - set(other) - set(ranks)):
            found.append(f"ranks {', '.join(map(str, alone))} are in {name} alone")
        for rank in ranks:
            mine, theirs = run[rank], other[rank]
            if alone := sorted(set(mine.steps) - set(theirs.steps)):
                found.append(f"rank {rank}: {_span(alone)} of {name} alone")
            if ending := mine.ending():
                found.append(f"rank {rank}: {name} {ending}")
            found += [f"rank {rank}: {name} {fault}" for fault in _resume_faults(mine)]
    return found


def _resume_faults(run: RankLedger) -> Iterator[str]:
    """A run that resumed starts with what it had when the checkpoint was written; that shows without another run."""
    for number, start in run.starts.items():
        if number not in run.steps:
            continue
        lost = [pair.entry for pair in pairs(run.steps[number], start) if not pair.same and _generator(pair) not in run.idle_generators]
        if lost:
            names = ", ".join(" ".join(filter(None, (entry.phase, entry.module, entry.tensor))) for entry in lost[:3])
            yield f"resumed at step {number + 1} from another state than it had after step {number}: {names}{', ...' * (len(lost) > 3)}"


def _notes_of_difference(firsts: list[FirstDifference]) -> list[str]:
    if len(firsts) < 2:
        return []
    return [f"ranks that differ: {', '.join(str(one.rank) for one in firsts)}"]


def _notes_of_idle(found: dict[int, _OfRank]) -> list[str]:
    names = sorted({name for of_rank in found.values() for name in of_rank.idle})
    return [f"the generator {name} has another state, but neither run drew from it" for name in names]


def _span(steps: list[int]) -> str:
    if not steps:
        return "no step"
    return f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps from {min(steps)} to {max(steps)}"
