"""The records of one step in two runs, tensor by tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .entries import COUNT, SETTING, Entry
from .reading import Layout, Step
from .values import Element, first_difference

BITS = "bits"
# Phases in which a tensor that only one run has is a difference. Which generators exist depends on what was imported, and
# how much of the optimizer was recorded depends on the step.
COMPLETE = ("batch", "forward", "loss", "backward", "recompute", "gradient", "weight")
Bools = NDArray[np.bool_]


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
        return BITS if _kind(self.a) == _kind(self.b) else f"{_kind(self.a)} in A, {_kind(self.b)} in B"


class Alignment:
    """Of two layouts: which tensors are compared, in execution order, that of the run with more of them.

    Phases that only one of them recorded are left out.
    alone: (run, what) that only one of them has, though runs that did the same have it both.
    """

    def __init__(self, a: Layout, b: Layout, complete: bool, weights_only: bool) -> None:
        """complete: whether a tensor that only one has is a difference. It is not where a rank has other micro-batches in the two runs.
        weights_only: ranks that share no work have the weights in common."""
        at_a, at_b = dict(_keyed(a)), dict(_keyed(b))
        phases = [{"weight"}] * 2 if weights_only else [{key[0] for key in places} for places in (at_a, at_b)]
        more, less = (at_a, at_b) if len(at_a) >= len(at_b) else (at_b, at_a)
        keys = [key for key in {**more, **less} if key[0] in phases[0] & phases[1] and not (weights_only and key[2] == "buffer")]
        in_one = [key for key in keys if (key in at_a) != (key in at_b)]
        left_out = {key for key in in_one if not complete or key[0] not in COMPLETE}
        keys = _settings_before_weights([key for key in keys if key not in left_out])
        self.alone = {("A", phase) for phase in phases[0] - phases[1]} | {("B", phase) for phase in phases[1] - phases[0]}
        self.alone |= {("A" if key in at_a else "B", "some weights") for key in left_out if key[0] == "weight"}
        self._a, self._b = ([at.get(key) for key in keys] for at in (at_a, at_b))
        self.pairs = [Pair(_entry(a, one), _entry(b, other), same=False) for one, other in zip(self._a, self._b, strict=True)]
        self._comparable = np.array([pair.how == BITS for pair in self.pairs], dtype=bool)
        self.is_generator = np.array([key[0] == "rng" for key in keys], dtype=bool)
        self._is_setting = np.array([key[2] == SETTING for key in keys], dtype=bool)
        self._places = tuple(np.array([place or 0 for place in places], dtype=np.intp) for places in (self._a, self._b))

    def same(self, a: Step, b: Step) -> Bools:
        """Of every pair. What a run starts with is the state after a step, but for settings: a schedule may have changed them."""
        found: Bools = self._comparable & (a.sums[self._places[0]] == b.sums[self._places[1]])
        return found if a.is_start == b.is_start else found | self._is_setting

    def pairs_of(self, a: Step, b: Step, place: int) -> list[Pair]:
        """As they are in a step. The pair at `place` gets its first element that differs."""
        found = [replace(pair, same=bool(same)) for pair, same in zip(self.pairs, self.same(a, b), strict=True)]
        if self._comparable[place]:
            kept = a.kept_of(self._places[0][place]), b.kept_of(self._places[1][place])
            found[place] = replace(found[place], element=first_difference(found[place].entry, *kept))
        return found


class Alignments:
    """Of the steps of two ranks. Most steps share a layout, so that little is to be made."""

    MOST = 64

    def __init__(self, weights_only: bool = False) -> None:
        self._weights_only = weights_only
        self._known: dict[tuple[int, int, bool], Alignment] = {}

    def of(self, a: Step, b: Step) -> Alignment:
        key = id(a.layout), id(b.layout), share_alike(a, b) and not self._weights_only
        if key not in self._known:
            if len(self._known) == self.MOST:
                self._known.clear()
            self._known[key] = Alignment(a.layout, b.layout, key[2], self._weights_only)
        return self._known[key]


def share_alike(a: Step, b: Step) -> bool:
    """Whether a rank has the same part of the work in both runs. On another number of ranks it has other micro-batches."""
    return a.world_size == b.world_size or None in (a.world_size, b.world_size)


Key = tuple[Any, ...]


def _keyed(layout: Layout) -> Iterator[tuple[Key, int]]:
    """Places of entries by what identifies them; a gradient that arrives twice has two."""
    seen: Counter[Key] = Counter()
    for place, entry in enumerate(layout.entries):
        yield (*entry.key, seen[entry.key]), place
        seen[entry.key] += 1


def _settings_before_weights(keys: list[Key]) -> list[Key]:
    """They are recorded behind the weights, whose update follows them."""
    settings = [key for key in keys if key[2] in (SETTING, COUNT)]
    others = [key for key in keys if key[2] not in (SETTING, COUNT)]
    first = next((place for place, key in enumerate(others) if key[0] == "weight"), len(others))
    return [*others[:first], *settings, *others[first:]]


def _entry(layout: Layout, place: int | None) -> Entry | None:
    return None if place is None else layout.entries[place]


def _kind(entry: Entry) -> str:
    return f"{entry.dtype} {entry.shape}"
