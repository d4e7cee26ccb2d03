"""What two runs lack, so that they agree at most as far as both go: an end, files of ranks, steps, phases."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from .entries import DETAIL
from .rank_pairs import RankPair
from .reading import Run, took_part, world_size_of
from .surroundings import by_ranks, numbers, span


class Lack(NamedTuple):
    """is_shorter: a run that is only shorter than it could be, or has less detail."""

    what: str
    is_shorter: bool
    rank: int | None = None


def lacks_of_files(a: Run, b: Run) -> Iterator[Lack]:
    """Every rank of a run must have a file. Where nobody recorded how many there are, those of the other run are asked for, too."""
    for name, run, other in (("A", a, b), ("B", b, a)):
        expected = world_size_of(run) or max(*run, *other) + 1
        if missing := set(range(expected)) - set(run):
            yield Lack(f"{name} has no file of {'rank' if len(missing) == 1 else 'ranks'} {numbers(missing)} of {expected}", False)


def lacks_of_steps(name: str, run: Run) -> Iterator[Lack]:
    """Of one run. Its first rank says which steps there are, the others have those in which they took part."""
    first = min(run)
    steps = set(run[first].steps)
    if gap := set(range(min(steps, default=0), max(steps, default=0))) - steps:
        yield Lack(f"{name} lacks {span(gap)} between others", True, first)
    for rank, ledger in run.items():
        own = {number for number in steps if took_part(run, rank, number)}
        left = steps and max(steps) not in own  # before the end: the run resumed without it
        if not left and (ending := ledger.ending()):
            yield Lack(f"{name} {ending}", True, rank)
        if missing := own - set(ledger.steps):
            yield Lack(f"{name} lacks {span(missing)} of its rank {first}", True, rank)


def lacks_of_pair(pair: RankPair, a: Run, b: Run) -> Iterator[Lack]:
    """Steps that one run alone has."""
    for name, own, others, other in (("A", pair.a, pair.b, b), ("B", pair.b, pair.a, a)):
        if alone := [number for number in own.steps if number not in others.steps and took_part(other, pair.rank, number)]:
            yield Lack(f"{span(alone)} of {name} alone", True, pair.rank)


def lacks_of_phases(rank: int, alone: dict[tuple[str, str], int]) -> Iterator[Lack]:
    """alone: in how many steps one run alone has a phase."""
    for (name, phase), steps in alone.items():
        yield Lack(f"{name} alone has {phase}, in {steps} {'step' if steps == 1 else 'steps'}", phase in DETAIL, rank)


def in_words(lacks: Iterable[Lack]) -> list[str]:
    return by_ranks((lack.rank, lack.what) for lack in lacks)
