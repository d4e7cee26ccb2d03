"""Compresses a walk and its turns into runs: constant Q stride, turns on a digital line (docs/how-a-call-runs.md, plan tables)."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from math import gcd

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.int64]
Run = tuple[int, int, int, int, int, int, int, int]

NO_ENTRIES = -1
LARGEST_DIVISOR = 32  # of a slope guessed from the turns; tile ratios may be larger


def compress(q_tile: Array, turn: Array, partial: Array, tile_slope: tuple[int, int], most: int) -> list[Run] | None:
    """The runs of one chain, or None when it needs more than `most`."""
    stretches = list(_straight(q_tile, partial, most))
    if len(stretches) > most:
        return None
    runs: list[Run] = []
    for first, stop in stretches:
        stride = int(q_tile[first + 1] - q_tile[first]) if stop - first > 1 else 1
        while first < stop:
            length, line = _longest_line(turn[first:stop], tile_slope)
            runs.append((int(q_tile[first]), stride, length, *line, int(partial[first]), NO_ENTRIES))
            first += length
            if len(runs) > most:
                return None
    return runs


def _straight(q_tile: Array, partial: Array, most: int) -> Iterator[tuple[int, int]]:
    """Maximal slices with one Q stride and one partial flag. Gives up (yields more than `most`) on irregular walks."""
    stride = np.diff(q_tile)
    same_flag = partial[1:] == partial[:-1]
    bends = np.flatnonzero((stride[1:] != stride[:-1]) | ~same_flag[1:] | ~same_flag[:-1]) + 1
    if len(bends) > 3 * most:
        yield from ((0, 0) for _ in range(most + 1))
        return
    first = 0
    while first < len(q_tile):
        stop = first + 1
        if stop < len(q_tile) and same_flag[first]:
            later = bends[np.searchsorted(bends, first + 1) :]
            stop = int(later[0]) + 1 if len(later) else len(q_tile)
        yield first, stop
        first = stop


def _longest_line(turn: Array, tile_slope: tuple[int, int]) -> tuple[int, tuple[int, int, int]]:
    """Length of the longest prefix with turn[i] == (mul * i + add) // div, and that (mul, add, div)."""
    if (turn == turn[0]).all():
        return len(turn), (0, int(turn[0]), 1)
    slopes = _candidate_slopes(turn, tile_slope)
    mul, div = slopes[:, :1], slopes[:, 1:]
    i = np.arange(len(turn))
    # turn * div <= mul * i + add < (turn + 1) * div bounds `add` from both sides
    least = np.maximum.accumulate(turn * div - mul * i, axis=1)
    most = np.minimum.accumulate((turn + 1) * div - 1 - mul * i, axis=1)
    fits = least <= most
    lengths = np.where(fits.all(axis=1), len(turn), np.argmin(fits, axis=1))
    best = int(np.argmax(lengths))
    length = int(lengths[best])
    return length, (int(mul[best, 0]), int(least[best, length - 1]), int(div[best, 0]))


def _candidate_slopes(turn: Array, tile_slope: tuple[int, int]) -> Array:
    """Slopes (mul, div) worth trying: flat, the tile ratio, the first pace at which this walk's turns change, and the mean pace."""
    changes = np.flatnonzero(np.diff(turn))
    rise = int(turn[changes[0] + 1] - turn[changes[0]])
    pace = int(changes[1] - changes[0]) if len(changes) > 1 else len(turn)
    common = gcd(*tile_slope)
    a, b = tile_slope[0] // common, tile_slope[1] // common
    mean = _simple_fraction(int(turn[changes[-1]] - turn[changes[0]]), int(changes[-1] - changes[0]))
    return np.array([(0, 1), (rise, 1), (rise, pace), (a, b), (-a, b), mean])


def _simple_fraction(rise: int, run: int) -> tuple[int, int]:
    """The ratio with a small denominator: a long digital line shows its slope only up to rounding."""
    ratio = Fraction(rise, max(1, run)).limit_denominator(LARGEST_DIVISOR)
    return ratio.numerator, ratio.denominator
