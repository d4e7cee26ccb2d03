"""Masks as JSON."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..masks import Mask, TileMap, TilePattern, parse_mask
from .json_fields import as_list, as_text, as_whole, read_fields, shortened

LETTERS = ".+#"  # empty, partial, full


def mask_to_json(mask: Mask) -> dict[str, Any] | str:
    """A JSON value that `mask_from_json` reads back."""
    if isinstance(mask, TileMap):
        rows = ["".join(".#"[int(x)] for x in row) for row in mask.blocks]
        return {"tiles": rows, "block_q": mask.block_q, "block_kv": mask.block_kv}
    if isinstance(mask, TilePattern):  # the elements are data of a call
        return {"pattern": ["".join(LETTERS[block] for block in row) for row in mask.blocks.tolist()]}
    return str(mask)


def mask_from_json(value: dict[str, Any] | str) -> Mask:
    if isinstance(value, str):
        return parse_mask(value)
    if isinstance(value, dict) and "pattern" in value:
        rows = _rows(read_fields(value, "mask", ("pattern",))["pattern"], "mask.pattern", LETTERS)
        return TilePattern(np.array([[LETTERS.index(c) for c in row] for row in rows], dtype=np.uint8))
    read = read_fields(value, "mask", ("tiles", "block_q", "block_kv"))
    rows = _rows(read["tiles"], "mask.tiles", ".#")
    blocks = np.array([[c == "#" for c in row] for row in rows])
    return TileMap(blocks, *(as_whole(read[name], f"mask.{name}", least=1) for name in ("block_q", "block_kv")))


def _rows(value: Any, name: str, letters: str) -> list[str]:
    rows = [as_text(row, name) for row in as_list(value, name)]
    if not rows or any(not row or len(row) != len(rows[0]) or set(row) - set(letters) for row in rows):
        allowed = f"{', '.join(letters[:-1])} and {letters[-1]}"
        raise ValueError(f"{name} must be rows of {allowed}, at least one, all equally long; got {shortened(rows)}")
    return rows
