"""The records of one step in two runs, tensor by tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from .entries import Entry
from .reading import Step
from .values import Element, first_difference

BITS = "bits"
# Phases in which a tensor that only one run has is a difference. Which generators exist depends on what was imported, and
# how much of the optimizer was recorded depends on the step.
COMPLETE = ("batch", "forward", "loss", "backward", "recompute", "gradient", "weight")


@dataclass(frozen=True)
class Pair:
    """A tensor in both runs; None where one of them has not recorded it."""

    a: Entry | None
    b: Entry | None
    same: bool
    element: Element | None = None

    @property
    def entry(self) -> Entry:
        found = self.a or self.b
        assert found is not None
        return found

    @property
    def how(self) -> str:
        """In what the two differ."""
        if self.a is None or self.b is None:
            return f"recorded in {'A' if self.b is None else 'B'} alone"
        if (self.a.dtype, self.a.shape) != (self.b.dtype, self.b.shape):
            return f"{_kind(self.a)} in A, {_kind(self.b)} in B"
        return BITS


def pairs(a: Step, b: Step, complete: bool = True) -> list[Pair]:
    """In execution order, that of the run with more tensors. Phases that only one of them recorded are left out.

    complete: whether a tensor that only one has is a difference. It is not where a rank has other micro-batches in the two runs.
    """
    places_a, places_b = dict(_keyed(a)), dict(_keyed(b))
    more, less = (places_a, places_b) if len(places_a) >= len(places_b) else (places_b, places_a)
    both = {key[0] for key in places_a} & {key[0] for key in places_b}
    keys = [key for key in more if key[0] in both] + [key for key in less if key[0] in both and key not in more]
    found = [_pair(a, places_a.get(key), b, places_b.get(key)) for key in keys]
    return [pair for pair in found if None not in (pair.a, pair.b) or (complete and pair.entry.phase in COMPLETE)]


def _keyed(step: Step) -> Iterator[tuple[tuple[object, ...], int]]:
    """Places of entries by what identifies them; a gradient that arrives twice has two."""
    seen: Counter[tuple[object, ...]] = Counter()
    for place, entry in enumerate(step.layout.entries):
        yield (*entry.key, seen[entry.key]), place
        seen[entry.key] += 1


def _pair(a: Step, place_a: int | None, b: Step, place_b: int | None) -> Pair:
    one = None if place_a is None else a.layout.entries[place_a]
    other = None if place_b is None else b.layout.entries[place_b]
    if one is None or other is None or place_a is None or place_b is None:
        return Pair(one, other, same=False)
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return Pair(one, other, same=False)
    if a.sums[place_a] == b.sums[place_b]:
        return Pair(one, other, same=True)
    return Pair(one, other, same=False, element=first_difference(one, a.kept_of(place_a), b.kept_of(place_b)))


def _kind(entry: Entry) -> str:
    return f"{entry.dtype} {entry.shape}"
