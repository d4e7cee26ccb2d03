"""Do two runs agree; if not, where they part first, what else is different about them, and how the difference spreads."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import LedgerError
from .aligning import Alignment, Bools, Pair, aligner, how_far_apart
from .format import PHASES
from .reading import RankLedger, RankPair, Runs, Step, read_runs
from .remarks import Change, Culprit, attention_changes, by_ranks, culprit, environment_changes, lacks, notes_on, numbers, span

AGREE, DIFFER, INCOMPLETE = "agree", "differ", "incomplete"
States = dict[str, int]  # of random number generators


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
    """The end of a step, or the state that a stint started with: as it is in both runs."""

    number: int
    is_start: bool
    a: Step
    b: Step
    aligned: Alignment

    @cached_property
    def same(self) -> Bools:
        return self.aligned.same(self.a, self.b)

    def difference(self, rank: int, place: int) -> FirstDifference:
        pairs = self.aligned.pairs_of(self.a, self.b, place)
        judged = culprit(pairs, place, self.is_start)
        compared = Counter(pair.entry.phase for pair in pairs)
        differing = Counter(pair.entry.phase for pair in pairs if not pair.same)
        by_phase = {phase: (differing[phase], count) for phase, count in compared.items()}
        return FirstDifference(rank, self.number + self.is_start, self.is_start, pairs[place], judged, by_phase)


class Suspects:
    """Random number generators whose states differ: which one is to blame for a difference, and which changed nothing.

    A generator that differs is suspected until a step in which numbers are drawn from it. If that step agrees, it changes nothing.
    """

    def __init__(self) -> None:
        self._since: dict[str, tuple[Moment, int]] = {}  # suspected, in the order of time
        self._seen: dict[str, str] = {}  # all that differed, and since when
        self._cleared: set[str] = set()
        self._before: tuple[States, States] = {}, {}  # the states at the moment before

    def look(self, moment: Moment) -> None:
        """At a moment that agrees in all but generators."""
        self._cleared |= {name for name in self._since if self._is_drawn(name, moment)}
        places = np.flatnonzero(~moment.same & moment.aligned.is_generator)
        differing = {moment.aligned.pairs[place].entry.tensor: int(place) for place in places}
        self._since = {name: since for name, since in self._since.items() if name in differing and name not in self._cleared}
        for name, place in differing.items():
            self._seen.setdefault(name, f"{'before' if moment.is_start else 'after'} step {moment.number + moment.is_start}")
            if name not in self._cleared:
                self._since.setdefault(name, (moment, place))
        self._before = moment.a.generators, moment.b.generators

    def blamed(self, moment: Moment, place: int) -> tuple[Moment, int] | None:
        """Where the generator differed first that explains a difference in this moment, if one does."""
        before = {pair.entry.phase for pair in moment.aligned.pairs[:place]}
        kept = moment.aligned.pairs[place].entry.role in ("parameter", "buffer")
        if moment.is_start or kept or before & {"loss", "backward", "gradient"}:  # a forward that agrees drew nothing that matters
            return None
        return next((since for name, since in self._since.items() if self._is_drawn(name, moment)), None)

    def notes(self, blamed: tuple[Moment, int] | None = None) -> list[str]:
        """Of the others."""
        names = [name for name in self._seen if blamed is None or self._since.get(name) != blamed]
        return [f"the generator {name} has another state since {self._seen[name]}" for name in names]

    def _is_drawn(self, name: str, moment: Moment) -> bool:
        """Whether a run drew from it since the moment before."""
        now = (moment.a.generators, moment.b.generators)
        return not moment.is_start and any(one.get(name) != other.get(name) for one, other in zip(self._before, now, strict=True))


@dataclass
class _OfRank:
    first: FirstDifference | None = None
    steps: list[int] = field(default_factory=list)
    differing: list[int] = field(default_factory=list)
    tensors: int = 0
    alone: Counter[tuple[str, str]] = field(default_factory=Counter)  # (run, phase) -> steps
    notes: list[str] = field(default_factory=list)

    def count(self, moment: Moment, differs: bool) -> None:
        self.tensors += len(moment.aligned.pairs)
        if not moment.is_start:
            self.steps.append(moment.number)
            self.differing += [moment.number] * differs
            self.alone.update(sorted(moment.aligned.alone))  # in one order in every process


def compare_runs(
    path_a: str | Path, path_b: str | Path, *, partial: bool = False, rank: int | None = None, stop: bool = False
) -> Comparison:
    """Raises LedgerError where there is nothing that both recorded.

    partial: a run that is shorter, or has less detail, may agree. rank: this one alone. stop: at the first difference.
    """
    runs = read_runs(path_a, path_b, rank)
    found = {pair.rank: _compare_rank(pair, stop) for pair in runs.pairs}
    shown = runs.pairs[0]
    if not any(of_rank.tensors for of_rank in found.values()):
        raise LedgerError(f"nothing was recorded in both runs: A has {span(shown.a.steps)} and B has {span(shown.b.steps)}")
    firsts = [of_rank.first for of_rank in found.values() if of_rank.first is not None]
    # Ranks run side by side: a fault in the forward of one reaches the others with its gradients.
    first = min(firsts, key=lambda one: (one.step, not one.before_it, PHASES.index(one.pair.entry.phase)), default=None)
    if first is not None:
        shown = next(pair for pair in runs.pairs if pair.rank == first.rank)
    lacking = list(lacks(runs, bool(found[runs.pairs[0].rank].steps), {rank: of_rank.alone for rank, of_rank in found.items()}))
    taken = [lack for lack in lacking if partial and lack.is_shorter]
    whole = [pair for pair in runs.pairs if not pair.weights_only] or runs.pairs
    notes_of_ranks = dict.fromkeys(note for of_rank in found.values() for note in of_rank.notes)
    return Comparison(
        first=first,
        lacking=by_ranks((lack.rank, lack.what) for lack in lacking if lack not in taken),
        taken_as_partial=by_ranks((lack.rank, lack.what) for lack in taken),
        steps=tuple(sorted({step for of_rank in found.values() for step in of_rank.steps})),
        steps_of_all=tuple(sorted(set.intersection(*(set(found[pair.rank].steps) for pair in whole)))),
        steps_that_differ=tuple(sorted({step for of_rank in found.values() for step in of_rank.differing})),
        tensors=sum(of_rank.tensors for of_rank in found.values()),
        ranks=tuple(found),
        stopped=stop and first is not None,
        environment=environment_changes(shown.a, shown.b),
        attention=attention_changes(shown.a, shown.b),
        notes=[*notes_on(runs), *_notes_of_difference(runs, first, firsts), *notes_of_ranks],
    )


def _compare_rank(ranks: RankPair, stop: bool = False) -> _OfRank:
    found, suspects = _OfRank(), Suspects()
    for moment in _moments(ranks):
        places = np.flatnonzero(~moment.same & ~moment.aligned.is_generator)
        found.count(moment, differs=len(places) > 0)
        if found.first is None and len(places):
            blamed = suspects.blamed(moment, int(places[0]))
            at, place = blamed or (moment, int(places[0]))
            found.first = at.difference(ranks.rank, place)
            found.notes = [*suspects.notes(blamed), *_notes_of_settings(found.first, at.aligned)]
        elif found.first is None:
            suspects.look(moment)
        if stop and found.first is not None:
            return found
    if found.first is None:
        found.notes = [f"{note}, which changed nothing" for note in suspects.notes()]
    return found


def _moments(ranks: RankPair) -> Iterator[Moment]:
    """In the order of time. The start of a stint compares with the other's, or with what the other had after that step."""
    a, b, align = ranks.a, ranks.b, aligner(ranks.weights_only)
    for number in sorted({*a.steps, *b.steps, *a.starts, *b.starts}):
        if number in a.steps and number in b.steps:
            one, other = a.steps[number], b.steps[number]
            yield Moment(number, False, one, other, align(one, other))
        if number in a.starts or number in b.starts:
            starts = [ledger.starts.get(number) or ledger.steps.get(number) for ledger in (a, b)]
            if starts[0] is not None and starts[1] is not None:
                yield Moment(number, True, starts[0], starts[1], align(starts[0], starts[1]))


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
            if names := [name for of_run, name in aligned.settings_alone if of_run == run]:
                yield f"settings of the optimizer that {run} alone has: {', '.join(names)}"


DIRECTIONS = ("forward", "backward", "update")
DIRECTION_OF = {"batch": 0, "forward": 0, "loss": 0, "recompute": 1, "backward": 1, "gradient": 1, "weight": 2, "optimizer": 2}
Counts = NDArray[np.int64]
Sizes = dict[tuple[int, int, int], tuple[float, float]]


@dataclass(frozen=True)
class Spread:
    """How a difference spreads: per step and module, how many tensors of a rank were compared, and how many differ.

    Modules are in the order in which they ran, each behind those that contain it, and contain what is inside of them.

    compared, differing: [direction, module, step]. 0 compared: nothing was recorded there. Random number generators are left out.
    apart: of some of these, how far elements that were kept are apart at most, and that as a share of the largest beside it.
    """

    rank: int
    modules: tuple[str, ...]  # "" is the model itself
    steps: tuple[int, ...]
    compared: Counts
    differing: Counts
    apart: Sizes


def spread(path_a: str | Path, path_b: str | Path, rank: int | None = None) -> Spread:
    """`rank`: by default the first that both runs have. Raises LedgerError where they have no step in common."""
    ranks = read_runs(path_a, path_b, rank).pairs[0]
    a, b, align = ranks.a, ranks.b, aligner(ranks.weights_only)
    steps = sorted(set(a.steps) & set(b.steps))
    if not steps:
        raise LedgerError("the runs have no step in common")
    modules = _modules_of(a, b)
    shape = len(DIRECTIONS), len(modules), len(steps)
    compared, differing = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    number_of = {module: place for place, module in enumerate(modules)}
    cells_in, apart = lru_cache(maxsize=1)(partial(_cells, number_of)), Sizes()
    for place, step in enumerate(steps):
        one, other = a.steps[step], b.steps[step]
        aligned = align(one, other)
        cells = cells_in(aligned)
        found = cells[~aligned.same(one, other)[cells[:, 0]]]
        np.add.at(compared[:, :, place], (cells[:, 1], cells[:, 2]), 1)
        np.add.at(differing[:, :, place], (found[:, 1], found[:, 2]), 1)
        sizes = {number: how_far_apart(aligned.pairs[number], one, other) for number in set(found[:, 0].tolist())}
        for number, way, module in found.tolist():
            if (size := sizes[number]) is not None:
                apart[way, module, place] = max(apart.get((way, module, place), size), size)
    return Spread(ranks.rank, modules, tuple(steps), compared, differing, apart)


def _cells(number_of: dict[str, int], aligned: Alignment) -> Counts:
    """Rows (tensor, direction, module): a tensor counts in all modules that contain it. Most steps share an alignment, which is looked at
    once."""
    entries = [(number, pair.entry) for number, pair in enumerate(aligned.pairs) if pair.entry.phase in DIRECTION_OF]
    lineages = {module: [number_of[name] for name in dict.fromkeys(["", *_lineage(module)])] for module in number_of}
    found = [(number, DIRECTION_OF[entry.phase], module) for number, entry in entries for module in lineages[entry.module]]
    return np.array(found, dtype=np.int64).reshape(-1, 3)


def _modules_of(a: RankLedger, b: RankLedger) -> tuple[str, ...]:
    """All modules, and all that contain them. Those seen in a forward come as they ran, the others as they were recorded."""
    found: dict[str, None] = {"": None}
    layouts = {id(step.layout): step.layout for run in (a, b) for step in run.steps.values()}.values()
    for layout in sorted(layouts, key=lambda layout: not any(entry.phase == "forward" for entry in layout.entries)):
        for entry in layout.entries:
            found.update(dict.fromkeys(_lineage(entry.module)))
    number = {module: place for place, module in enumerate(found)}
    return tuple(sorted(found, key=lambda module: [number[each] for each in _lineage(module)]))  # children right behind their parents


def _lineage(module: str) -> list[str]:
    """The module, behind all that contain it but the model itself."""
    parts = module.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
