"""Which query attends which key. rules.py: masks that a few numbers describe. The others: any boolean matrix (docs/masks.md)."""

from __future__ import annotations

from .block_mask import from_block_mask
from .boolean_mask import BooleanMask
from .rules import (
    EMPTY,
    FULL,
    MASK_FORMS,
    PARTIAL,
    Causal,
    Documents,
    Full,
    IntervalMask,
    Mask,
    Prefix,
    TileMap,
    Window,
    check_mask,
    is_whole,
    parse_mask,
)
from .tile_pattern import PatternPerHead, TilePattern

__all__ = [
    "EMPTY",
    "FULL",
    "MASK_FORMS",
    "PARTIAL",
    "BooleanMask",
    "Causal",
    "Documents",
    "Full",
    "IntervalMask",
    "Mask",
    "PatternPerHead",
    "Prefix",
    "TileMap",
    "TilePattern",
    "Window",
    "check_mask",
    "from_block_mask",
    "is_whole",
    "parse_mask",
]
