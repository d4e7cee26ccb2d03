"""Masks as JSON."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..masks import Mask, TileMap, parse_mask
from .json_fields import as_list, as_text, as_whole, read_fields, shortened


def mask_to_json(mask: Mask) -> dict[str, Any] | str:
    """A JSON value that `mask_from_json` reads back."""
    if isinstance(mask, TileMap):
        rows = ["".join(".#"[int(x)] for x in row) for row in mask.blocks]
        return {"tiles": rows, "block_q": mask.block_q, "block_kv": mask.block_kv}
    return str(mask)


def mask_from_json(value: dict[str, Any] | str) -> Mask:
    if isinstance(value, str):
        return parse_mask(value)
    read = read_fields(value, "mask", ("tiles", "block_q", "block_kv"))
    rows = [as_text(row, "mask.tiles") for row in as_list(read["tiles"], "mask.tiles")]
    if not rows or any(len(row) != len(rows[0]) or set(row) - set(".#") for row in rows):
        raise ValueError(f"mask.tiles must be rows of . and #, at least one, all equally long; got {shortened(rows)}")
    blocks = np.array([[c == "#" for c in row] for row in rows])
    return TileMap(blocks, *(as_whole(read[name], f"mask.{name}", least=1) for name in ("block_q", "block_kv")))
