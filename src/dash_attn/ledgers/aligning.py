"""The records of one step in two runs, tensor by tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
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
Row = tuple[int | None, int | None]  # places in the two layouts


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
        return BITS if _alike(self.a, self.b) else f"{_kind(self.a)} in A, {_kind(self.b)} in B"


class Alignment:
    """Of two layouts: which tensors are compared, in execution order, that of the run with more of them.

    Phases that only one of them recorded are left out.
    alone: (run, what) that only one of them has, though runs that did the same have it both. settings_alone: (run, setting) likewise;
    many of those change nothing.
    """

    def __init__(self, a: Layout, b: Layout, complete: bool = True, weights_only: bool = False) -> None:
        """complete: whether a tensor that only one has is a difference. It is not where a rank has other micro-batches in the two runs.
        weights_only: ranks that share no work have the weights in common."""
        self._layouts, self.alone, self.settings_alone = (a, b), set[tuple[str, str]](), list[tuple[str, str]]()
        if weights_only or not complete or a.entries != b.entries:
            rows = self._matched(complete, weights_only)
        else:
            rows = [(place, place) for place in range(len(a.entries))]
        self._rows = rows = _settings_before_weights(rows, a, b)
        entries = [_entry(a, b, row) for row in rows]
        self._comparable = np.array(
            [None not in row and _alike(a.entries[row[0] or 0], b.entries[row[1] or 0]) for row in rows], dtype=bool
        )
        self._is_setting = np.array([entry.role == SETTING for entry in entries], dtype=bool)
        self.is_generator = np.array([entry.phase == "rng" for entry in entries], dtype=bool)
        self._places = tuple(np.array([row[run] or 0 for row in rows], dtype=np.intp) for run in (0, 1))

    def _matched(self, complete: bool, weights_only: bool) -> list[Row]:
        """Rows of what has one name in both, and of what only one has where that is a difference."""
        at_a, at_b = (dict(_keyed(layout)) for layout in self._layouts)
        phases = [{"weight"}] * 2 if weights_only else [{key[0] for key in places} for places in (at_a, at_b)]
        more, less = (at_a, at_b) if len(at_a) >= len(at_b) else (at_b, at_a)
        keys = [key for key in {**more, **less} if key[0] in phases[0] & phases[1] and not (weights_only and key[2] == "buffer")]
        in_one = [key for key in keys if (key in at_a) != (key in at_b)]
        left_out = {key for key in in_one if not complete or key[0] not in COMPLETE}
        if not complete:  # other ranks may share the states of an optimizer
            left_out |= {key for key in keys if key[2] == COUNT}
        self.settings_alone = [("A" if key in at_a else "B", key[3]) for key in in_one if key[2] == SETTING]
        self.alone = {("A", phase) for phase in phases[0] - phases[1]} | {("B", phase) for phase in phases[1] - phases[0]}
        self.alone |= {("A" if key in at_a else "B", "some weights") for key in left_out if key[0] == "weight"}
        return [(at_a.get(key), at_b.get(key)) for key in keys if key not in left_out]

    @cached_property
    def pairs(self) -> list[Pair]:
        a, b = (layout.entries for layout in self._layouts)
        return [Pair(None if i is None else a[i], None if j is None else b[j], same=False) for i, j in self._rows]

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


def _settings_before_weights(rows: list[Row], a: Layout, b: Layout) -> list[Row]:
    """They are recorded behind the weights, whose update follows them."""
    settings = [row for row in rows if _entry(a, b, row).role in (SETTING, COUNT)]
    others = [row for row in rows if _entry(a, b, row).role not in (SETTING, COUNT)]
    first = next((place for place, row in enumerate(others) if _entry(a, b, row).phase == "weight"), len(others))
    return [*others[:first], *settings, *others[first:]]


def _entry(a: Layout, b: Layout, row: Row) -> Entry:
    return b.entries[row[1] or 0] if row[0] is None else a.entries[row[0]]


def _alike(one: Entry, other: Entry) -> bool:
    return one is other or (one.dtype, one.shape) == (other.dtype, other.shape)


def _kind(entry: Entry) -> str:
    return f"{entry.dtype} {entry.shape}"
