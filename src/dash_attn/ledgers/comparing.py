"""Do two runs agree; if not, where they part first, and what else is different about them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from .aligning import Alignment, Alignments, Pair
from .completeness import Lack, in_words, lacks_of_files, lacks_of_pair, lacks_of_phases, lacks_of_steps
from .culprit import Culprit, culprit
from .entries import PHASES
from .framing import LedgerError
from .rank_pairs import RankPair, Runs, read_runs
from .reading import RankLedger, Step
from .surroundings import Change, attention_changes, environment_changes, notes_on, numbers, span
from .suspects import Suspects

AGREE, DIFFER, INCOMPLETE = "agree", "differ", "incomplete"


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
    """Of all that both runs recorded.

    lacking: why runs without a difference do not agree as a whole. taken_as_partial: what they lack, and may.
    """

    first: FirstDifference | None
    lacking: list[str]
    taken_as_partial: list[str]
    steps: tuple[int, ...]  # compared on any rank
    steps_of_all: tuple[int, ...]  # on every rank that has its like in the other run
    steps_that_differ: tuple[int, ...]
    tensors: int  # compared in all
    ranks: tuple[int, ...]
    stopped: bool  # at the first difference: later steps were not looked at
    environment: list[Change]
    attention: list[Change]
    notes: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        if self.first is not None:
            return DIFFER
        return INCOMPLETE if self.lacking else AGREE

    @property
    def agree(self) -> bool:
        return self.verdict == AGREE


@dataclass(frozen=True)
class Moment:
    """The end of a step, or the state that a segment started with: as it is in both runs."""

    number: int
    is_start: bool
    a: Step
    b: Step
    aligned: Alignment

    def difference(self, rank: int, place: int) -> FirstDifference:
        pairs = self.aligned.pairs_of(self.a, self.b, place)
        judged = culprit(pairs, place, self.is_start)
        return FirstDifference(rank, self.number + self.is_start, self.is_start, pairs[place], judged, _by_phase(pairs))


@dataclass
class _OfRank:
    first: FirstDifference | None = None
    steps: list[int] = field(default_factory=list)
    differing: list[int] = field(default_factory=list)
    tensors: int = 0
    alone: Counter[tuple[str, str]] = field(default_factory=Counter)  # (run, phase) -> steps
    notes: list[str] = field(default_factory=list)

    def count(self, moment: Moment, differs: bool) -> None:
        self.tensors += len(moment.aligned.is_generator)
        if not moment.is_start:
            self.steps.append(moment.number)
            self.differing += [moment.number] * differs
            self.alone.update(moment.aligned.alone)


def compare_runs(
    path_a: str | Path, path_b: str | Path, *, partial: bool = False, rank: int | None = None, stop: bool = False
) -> Comparison:
    """Raises LedgerError where there is nothing that both recorded.

    partial: a run that is shorter, or has less detail, may agree. rank: this one alone. stop: at the first difference.
    """
    runs = read_runs(path_a, path_b, rank)
    found = {pair.rank: _compare_rank(pair, stop) for pair in runs.pairs}
    _, a, b, _ = runs.pairs[0]
    if not any(of_rank.tensors for of_rank in found.values()):
        raise LedgerError(f"nothing was recorded in both runs: A has {span(a.steps)} and B has {span(b.steps)}")
    firsts = [of_rank.first for of_rank in found.values() if of_rank.first is not None]
    first = min(firsts, key=_time_of, default=None)
    _, a, b, _ = next((pair for pair in runs.pairs if first is not None and pair.rank == first.rank), runs.pairs[0])
    lacks = list(_lacks(runs, found))
    taken = [lack for lack in lacks if partial and lack.is_shorter]
    return Comparison(
        first=first,
        lacking=in_words(lack for lack in lacks if lack not in taken),
        taken_as_partial=in_words(taken),
        steps=tuple(sorted({step for of_rank in found.values() for step in of_rank.steps})),
        steps_of_all=_steps_of_all(runs, found),
        steps_that_differ=tuple(sorted({step for of_rank in found.values() for step in of_rank.differing})),
        tensors=sum(of_rank.tensors for of_rank in found.values()),
        ranks=tuple(found),
        stopped=stop and first is not None,
        environment=environment_changes(a, b),
        attention=attention_changes(a, b),
        notes=[*notes_on(runs), *_notes_of_difference(runs, first, firsts), *_notes_of_ranks(found)],
    )


def _steps_of_all(runs: Runs, found: dict[int, _OfRank]) -> tuple[int, ...]:
    whole = [pair for pair in runs.pairs if not pair.weights_only] or runs.pairs
    return tuple(sorted(set.intersection(*(set(found[pair.rank].steps) for pair in whole))))


def _lacks(runs: Runs, found: dict[int, _OfRank]) -> Iterator[Lack]:
    if not runs.one_rank:
        yield from lacks_of_files(runs.a, runs.b)
    if not found[runs.pairs[0].rank].steps:
        yield Lack("no step is in both", False)
    for name, run in (("A", runs.a), ("B", runs.b)):
        yield from lacks_of_steps(name, run)
    for pair in runs.pairs:
        if not pair.weights_only:
            yield from lacks_of_pair(pair, runs.a, runs.b)
        yield from lacks_of_phases(pair.rank, found[pair.rank].alone)


def _time_of(first: FirstDifference) -> tuple[int, bool, int]:
    """Ranks run side by side: a fault in the forward of one reaches the others with its gradients."""
    return first.step, not first.before_it, PHASES.index(first.pair.entry.phase)


def _compare_rank(ranks: RankPair, stop: bool = False) -> _OfRank:
    found, suspects = _OfRank(), Suspects()
    for moment in _moments(ranks):
        same = moment.aligned.same(moment.a, moment.b)
        places = np.flatnonzero(~same & ~moment.aligned.is_generator)
        found.count(moment, differs=len(places) > 0)
        if found.first is None and len(places):
            blamed = suspects.blamed(moment, int(places[0]))
            at, place = blamed or (moment, int(places[0]))
            found.first = at.difference(ranks.rank, place)
            found.notes = [*suspects.notes(blamed), *_notes_of_settings(found.first, at.aligned)]
        elif found.first is None:
            suspects.look(moment, same)
        if stop and found.first is not None:
            return found
    if found.first is None:
        found.notes = [f"{note}, which changed nothing" for note in suspects.notes()]
    return found


def _moments(ranks: RankPair) -> Iterator[Moment]:
    """In the order of time. The start of a segment compares with the other's, or with what the other had after that step."""
    a, b, alignments = ranks.a, ranks.b, Alignments(ranks.weights_only)
    for number in sorted({*a.steps, *b.steps, *a.starts, *b.starts}):
        if number in a.steps and number in b.steps:
            one, other = a.steps[number], b.steps[number]
            yield Moment(number, False, one, other, alignments.of(one, other))
        starts = _starts(number, a, b)
        if starts is not None:
            yield Moment(number, True, *starts, alignments.of(*starts))


def _starts(number: int, a: RankLedger, b: RankLedger) -> tuple[Step, Step] | None:
    if number not in a.starts and number not in b.starts:
        return None
    one, other = (ledger.starts.get(number) or ledger.steps.get(number) for ledger in (a, b))
    return None if one is None or other is None else (one, other)


def _by_phase(aligned: list[Pair]) -> dict[str, tuple[int, int]]:
    compared = Counter(pair.entry.phase for pair in aligned)
    differing = Counter(pair.entry.phase for pair in aligned if not pair.same)
    return {phase: (differing[phase], count) for phase, count in compared.items()}


def _notes_of_difference(runs: Runs, first: FirstDifference | None, firsts: list[FirstDifference]) -> Iterator[str]:
    if len(firsts) > 1:
        yield f"ranks that differ: {numbers(one.rank for one in firsts)}"
    sizes = {size for run in (runs.a, runs.b) for ledger in run.values() for size in ledger.world_sizes}
    if first is not None and first.pair.entry.phase == "gradient" and sizes != {1}:
        # What modules computed agreed on every rank, or was not recorded: a sum over ranks came between.
        yield "gradients are recorded after they were summed over ranks: that sum may be what differs, not the module"


def _notes_of_settings(first: FirstDifference, aligned: Alignment) -> Iterator[str]:
    """Of what only one optimizer has, where its update may be what differs."""
    if first.pair.entry.phase in ("weight", "optimizer"):
        for run in ("A", "B"):
            names = [name for of_run, name in aligned.settings_alone if of_run == run]
            if names:
                yield f"settings of the optimizer that {run} alone has: {', '.join(names)}"


def _notes_of_ranks(found: dict[int, _OfRank]) -> list[str]:
    return list(dict.fromkeys(note for of_rank in found.values() for note in of_rank.notes))
