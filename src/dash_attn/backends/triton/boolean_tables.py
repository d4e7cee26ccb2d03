"""Boolean matrices as kernels read them: lists of tiles for each, blocks of 64 x 64, and 64 elements per word of the partial ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...masks import EMPTY, FULL, BooleanMask, PatternPerHead, TileMap, TilePattern
from ...masks.bit_matrix import words_and_places
from ..kept import upload
from .kept_tables import Tables, kept_on

Boolean = TilePattern | PatternPerHead


@dataclass(frozen=True, eq=False)
class Matrices:
    """Of a call. Words of all matrices stand behind each other; `places` count in blocks of 64 words."""

    patterns: tuple[TilePattern | TileMap, ...]  # one per matrix
    words: Tensor
    places: Tensor  # (matrices, blocks)
    numbers: Tensor  # (sequences or 1, query heads or 1): which matrix each has

    def arguments(self) -> dict[str, Any]:
        sequences, heads = self.numbers.shape
        return {
            **{"blocks": self.words, "places": self.places, "matrices": self.numbers},
            "block_columns": self.patterns[0].blocks.shape[1],
            "matrix_batch": heads if sequences > 1 else 0,
            "matrix_head": 1 if heads > 1 else 0,
            "matrix_blocks": self.places.shape[1],
        }


_OF_MASKS: WeakKeyDictionary[BooleanMask, dict[Any, Any]] = WeakKeyDictionary()  # tables live as long as their mask


def kept_with(elements: BooleanMask, key: Any, make: Callable[[], Tables]) -> Tables:
    """What was made of a mask before, for this key."""
    found: dict[Any, Tables] = _OF_MASKS.setdefault(elements, {})
    if key not in found:
        found[key] = make()
    return found[key]


def matrices_of(mask: Boolean, elements: BooleanMask | None, device: torch.device) -> Matrices:
    """Without elements: of a mask that has no partial blocks, or that is only explained."""
    if elements is None:
        return kept_on(device, mask, lambda: _of_pattern(mask, device))
    return kept_with(elements, device, lambda: _of_elements(elements, device))


def _of_elements(elements: BooleanMask, device: torch.device) -> Matrices:
    patterns = tuple(TilePattern.of(matrix.blocks) for matrix in elements.matrices)
    tables = [(matrix.words, matrix.places) for matrix in elements.matrices]
    return _uploaded(patterns, tables, elements.numbers, device)


def _of_pattern(mask: Boolean, device: torch.device) -> Matrices:
    patterns = mask.patterns if isinstance(mask, PatternPerHead) else (mask,)
    numbers = np.array(mask.numbers if isinstance(mask, PatternPerHead) else [[0]])
    return _uploaded(patterns, [words_and_places(blocks_of(pattern)) for pattern in patterns], numbers, device)


def blocks_of(pattern: TilePattern | TileMap) -> NDArray[np.uint8]:
    return pattern.blocks if isinstance(pattern, TilePattern) else np.where(pattern.blocks, FULL, EMPTY).astype(np.uint8)


def _uploaded(
    patterns: tuple[TilePattern | TileMap, ...],
    tables: Sequence[tuple[NDArray[Any], NDArray[Any]]],
    numbers: NDArray[Any],
    device: torch.device,
) -> Matrices:
    words = np.concatenate([words for words, _ in tables]).view(np.int64)
    begins = np.cumsum([0, *(len(words) for words, _ in tables[:-1])])
    places = np.stack([(begin + places).ravel() for begin, (_, places) in zip(begins, tables, strict=True)])
    return Matrices(patterns, *(upload(table, device) for table in (words, places.astype(np.int32), numbers.astype(np.int32))))
