"""The records of one step in two runs, tensor by tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .format import COUNT, SETTING, Entry
from .reading import Layout, Step

BITS = "bits"
# Phases in which a tensor that only one run has is a difference. Which generators exist depends on what was imported, and
# how much of the optimizer was recorded depends on the step.
COMPLETE = ("batch", "forward", "loss", "backward", "recompute", "gradient", "weight")
Bools = NDArray[np.bool_]
Key = tuple[Any, ...]


@dataclass(frozen=True)
class Element:
    """The first element that differs: its index, and value and bits in both runs."""

    index: tuple[int, ...]
    a: str
    b: str


def first_difference(entry: Entry, a: bytes, b: bytes) -> Element | None:
    """None where all elements that both runs kept are equal."""
    size = entry.itemsize
    for place in range(min(len(a), len(b)) // size):
        one, other = a[place * size : (place + 1) * size], b[place * size : (place + 1) * size]
        if one != other:
            return Element(tuple(map(int, np.unravel_index(place, entry.shape))), _shown(one, entry.dtype), _shown(other, entry.dtype))
    return None


def _shown(data: bytes, dtype: str) -> str:
    """The value, and its bits: two numbers may look alike, and NaNs do."""
    return f"{_values(data, dtype)[0].item()!r} (0x{data[::-1].hex()})"


def _values(data: bytes, dtype: str) -> NDArray[Any]:
    if dtype == "bfloat16":  # the upper half of a float32
        return (np.frombuffer(data, dtype="<u2").astype(np.uint32) << 16).view(np.float32)
    if dtype in np.sctypeDict:
        return np.frombuffer(data, dtype=dtype)
    import torch

    if not hasattr(torch, dtype):
        raise ValueError(f"this version of PyTorch has no dtype {dtype!r}")
    return torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).float().numpy()


def how_far_apart(pair: Pair, a: Step, b: Step) -> tuple[float, float] | None:
    """The largest difference of elements that both runs kept, and that as a share of the largest of them. None: there is no such number."""
    if not (pair.is_comparable and pair.entry.kept):
        return None
    kept = [step.kept_of(place) for step, place in zip((a, b), pair.places, strict=True)]
    size = min(map(len, kept))
    one, other = (_values(data[:size], pair.entry.dtype).astype(np.complex128) for data in kept)  # of every dtype
    with np.errstate(invalid="ignore"):  # infinite in both
        apart, largest = np.abs(one - other).max(initial=0.0), np.abs([one, other]).max(initial=0.0)
    return (float(apart), float(apart / largest)) if apart > 0 and np.isfinite(apart) else None


@dataclass(frozen=True)
class Pair:
    """A tensor in both runs; None where one of them has not recorded it. places: in the two layouts."""

    a: Entry | None
    b: Entry | None
    places: tuple[int, int]
    same: bool = False
    element: Element | None = None

    @property
    def entry(self) -> Entry:
        found = self.a or self.b
        assert found is not None
        return found

    @property
    def is_comparable(self) -> bool:
        if self.a is None or self.b is None:
            return False
        return self.a is self.b or (self.a.dtype, self.a.shape) == (self.b.dtype, self.b.shape)

    @property
    def how(self) -> str:
        """In what the two differ."""
        if self.a is None or self.b is None:
            return f"recorded in {'A' if self.b is None else 'B'} alone"
        return BITS if self.is_comparable else f"{self.a.dtype} {self.a.shape} in A, {self.b.dtype} {self.b.shape} in B"


class Alignment:
    """Of two layouts: which tensors are compared, in execution order, that of the run with more of them.

    Phases that only one of them recorded are left out.
    alone: (run, what) that only one of them has, though runs that did the same have it both. settings_alone: (run, setting) likewise;
    many of those change nothing.
    """

    def __init__(self, a: Layout, b: Layout, complete: bool, weights_only: bool) -> None:
        """complete: whether a tensor that only one has is a difference. It is not where a rank has other micro-batches in the two runs.
        weights_only: ranks that share no work have the weights in common."""
        self.alone, self.settings_alone = set[tuple[str, str]](), list[tuple[str, str]]()
        if weights_only or not complete or a.entries != b.entries:
            pairs = self._matched(a, b, complete, weights_only)
        else:
            pairs = [Pair(one, other, (place, place)) for place, (one, other) in enumerate(zip(a.entries, b.entries, strict=True))]
        self.pairs = pairs = _settings_before_weights(pairs)
        self._comparable = np.array([pair.is_comparable for pair in pairs], dtype=bool)
        self._is_setting = np.array([pair.entry.role == SETTING for pair in pairs], dtype=bool)
        self.is_generator = np.array([pair.entry.phase == "rng" for pair in pairs], dtype=bool)
        self._places = np.array([pair.places for pair in pairs], dtype=np.intp).reshape(-1, 2).T

    def _matched(self, a: Layout, b: Layout, complete: bool, weights_only: bool) -> list[Pair]:
        """Of what has one name in both, and of what only one has where that is a difference."""
        at_a, at_b = dict(_keyed(a)), dict(_keyed(b))
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
        places = [(at_a.get(key), at_b.get(key)) for key in keys if key not in left_out]
        return [Pair(None if i is None else a.entries[i], None if j is None else b.entries[j], (i or 0, j or 0)) for i, j in places]

    def same(self, a: Step, b: Step) -> Bools:
        """Of every pair. What a run starts with is the state after a step, but for settings: a schedule may have changed them."""
        found: Bools = self._comparable & (a.sums[self._places[0]] == b.sums[self._places[1]])
        return found if a.is_start == b.is_start else found | self._is_setting

    def pairs_of(self, a: Step, b: Step, place: int) -> list[Pair]:
        """As they are in a step. The pair at `place` gets its first element that differs."""
        found = [replace(pair, same=bool(same)) for pair, same in zip(self.pairs, self.same(a, b), strict=True)]
        pair = found[place]
        if pair.is_comparable:
            element = first_difference(pair.entry, a.kept_of(pair.places[0]), b.kept_of(pair.places[1]))
            found[place] = replace(pair, element=element)
        return found


def aligner(weights_only: bool = False) -> Callable[[Step, Step], Alignment]:
    """For the steps of two ranks. Most of them share a layout, so that little is to be made."""
    of_layouts = lru_cache(maxsize=64)(Alignment)

    def align(a: Step, b: Step) -> Alignment:
        return of_layouts(a.layout, b.layout, share_alike(a, b) and not weights_only, weights_only)

    return align


def share_alike(a: Step, b: Step) -> bool:
    """Whether a rank has the same part of the work in both runs. On another number of ranks it has other micro-batches."""
    return a.world_size == b.world_size or None in (a.world_size, b.world_size)


def _keyed(layout: Layout) -> Iterator[tuple[Key, int]]:
    """Places of entries by what identifies them; a gradient that arrives twice has two."""
    seen: Counter[Key] = Counter()
    for place, entry in enumerate(layout.entries):
        yield (*entry.key, seen[entry.key]), place
        seen[entry.key] += 1


def _settings_before_weights(pairs: list[Pair]) -> list[Pair]:
    """They are recorded behind the weights, whose update follows them."""
    settings = [pair for pair in pairs if pair.entry.role in (SETTING, COUNT)]
    others = [pair for pair in pairs if pair.entry.role not in (SETTING, COUNT)]
    first = next((place for place, pair in enumerate(others) if pair.entry.phase == "weight"), len(others))
    return [*others[:first], *settings, *others[first:]]
