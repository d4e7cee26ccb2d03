"""Which pairs dropout keeps: a function of a seed, the query head and two positions, computed anew wherever a pair is visited.

No state and no stream of random numbers: so forward and backward agree whatever their tiles are, and neither the batch, nor packing,
nor the schedule, nor the number of ranks can move a number from one pair to another.

    key  = mix(mix(seed) + (head + 1) * GAMMA)                          64 bits, once per sequence and query head
    word = philox(counter = (unit(row) ^ high(key), unit(column)), low(key))     two words of 32 bits, once per unit
    pair is kept  <=>  its 16 bits of the words < threshold

`head` is the query head in the unsharded model, `row` and `column` count from the first query and the first key of the sequence.
`mix` is the finalizer of SplitMix64, `philox` is Philox2x32 of 7 rounds (Salmon et al., 2011). Only integers are compared, so every
machine finds the same pairs.

A unit is four pairs: two rows 8 apart and two columns 8 apart, in an aligned square of 16 x 16. A thread of a tensor core's
fragment has all four of them, whether it holds the scores or their transpose: one Philox serves four pairs in both.

    unit(x) = x // 16 * 8 + x % 8,   half(x) = x // 8 % 2
    the pair's bits: word half(column), its low 16 bits where half(row) is 0, else its high 16
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

LEVELS = 2**16  # of a pair's number
SQUARE = 16  # rows and columns that units are made of
ROUNDS = 7
MULTIPLIER, KEY_STEP = 0xD256D193, 0x9E3779B9  # Philox2x32
GAMMA, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # SplitMix64
_WORD, _LONG = 2**32 - 1, 2**64 - 1

UInts = NDArray[np.uint64]


def threshold_of(dropout_p: float) -> int:
    """How many of the 65,536 numbers keep a pair."""
    return LEVELS - round(dropout_p * LEVELS)


def key_of(seed: int, head: int) -> int:
    """Of a sequence and a query head of the unsharded model. Seeds are 64 bits, signed or not."""
    return _mix(_mix(seed & _LONG) + (head + 1) * GAMMA)


def _mix(x: int) -> int:
    x &= _LONG
    x = (x ^ x >> 30) * MIX_1 & _LONG
    x = (x ^ x >> 27) * MIX_2 & _LONG
    return x ^ x >> 31


def philox(first: UInts, second: UInts, key: int, rounds: int = ROUNDS) -> tuple[UInts, UInts]:
    """Two words for each counter. Words are below 2^32, in numbers of 64 bits."""
    for _ in range(rounds):
        product = first * np.uint64(MULTIPLIER)
        first, second = product >> np.uint64(32) ^ np.uint64(key) ^ second, product & np.uint64(_WORD)
        key = key + KEY_STEP & _WORD
    return first, second


@dataclass(frozen=True)
class Dropout:
    """Of the sequences of a batch. first_head: the query head, in the unsharded model, of head 0."""

    threshold: int
    seeds: tuple[int, ...]
    first_head: int = 0

    @property
    def rescale(self) -> float:
        """What makes up for the dropped weights, for the rate that the threshold really has."""
        return LEVELS / self.threshold

    def kept(self, sequence: int, head: int, rows: range, columns: range) -> NDArray[np.bool_]:
        """Of a rectangle whose rows and columns are whole multiples of 16."""
        key = key_of(self.seeds[sequence], self.first_head + head)
        first = _units(rows)[:, None] ^ np.uint64(key >> 32)
        words = np.stack(np.broadcast_arrays(*philox(first, _units(columns)[None, :], key & _WORD)))  # (half of column, units, units)
        numbers = np.stack([words & np.uint64(LEVELS - 1), words >> np.uint64(16)])  # (half of row, half of column, units, units)
        half = SQUARE // 2
        squares: NDArray[Any] = numbers.reshape(2, 2, len(rows) // SQUARE, half, len(columns) // SQUARE, half)
        kept: NDArray[np.bool_] = squares.transpose(2, 0, 3, 4, 1, 5).reshape(len(rows), len(columns)) < self.threshold
        return kept


def _units(positions: range) -> UInts:
    assert positions.start % SQUARE == positions.stop % SQUARE == 0
    return np.arange(positions.start // 2, positions.stop // 2, dtype=np.uint64)
