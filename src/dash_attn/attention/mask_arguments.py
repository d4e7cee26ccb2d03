"""A mask as one word and a list of whole numbers, and back: the form in which it is an argument of a torch operator.

`encode_mask` is traced by torch.compile, so it only looks at plain attributes. Sizes are numbers and not text because
a traced program may know them as symbols.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..masks import BooleanMask, Causal, Documents, Full, Mask, Prefix, TileMap, Window

BY_TENSOR = "tensor"  # a boolean matrix is a tensor argument of its own
TILES = "tiles:"  # followed by the blocks, row by row, eight per byte, in hexadecimal


def encode_mask(mask: Mask | BooleanMask) -> tuple[str, list[int]]:
    if isinstance(mask, Full):
        return "full", []
    if isinstance(mask, Causal):
        return "causal", []
    if isinstance(mask, Window):
        return "window", [mask.left, mask.right]
    if isinstance(mask, Prefix):
        return "prefix", [mask.length]
    if isinstance(mask, Documents):
        return "documents" if mask.causal else "documents-full", list(mask.lengths)
    if isinstance(mask, TileMap):
        return TILES + mask.hexadecimal, [mask.rows, mask.columns, mask.block_q, mask.block_kv]
    if isinstance(mask, BooleanMask):
        raise TypeError(
            "a compiled or exported program takes a boolean mask as a tensor, of which it makes a BooleanMask in each call: pass the tensor"
            " as mask; got a BooleanMask"
        )
    raise TypeError(f"mask must be a dash_attn mask (Full, Causal, Window, Documents, Prefix, TileMap) or a boolean tensor; got {mask!r}")


def decode_mask(name: str, sizes: Sequence[int]) -> Mask:
    if name.startswith(TILES) and len(sizes) == 4:
        return _decode_tiles(name[len(TILES) :], *sizes)
    if name == "full" and not sizes:
        return Full()
    if name == "causal" and not sizes:
        return Causal()
    if name == "window" and len(sizes) == 2:
        return Window(*sizes)
    if name == "prefix" and len(sizes) == 1:
        return Prefix(*sizes)
    if name in ("documents", "documents-full"):
        return Documents(tuple(sizes), causal=name == "documents")
    raise ValueError(
        f"unknown mask {name[:80]!r} with sizes {list(sizes)}; masks are encoded by dash_attn.attention.mask_arguments.encode_mask"
    )


def _decode_tiles(hexadecimal: str, rows: int, columns: int, block_q: int, block_kv: int) -> TileMap:
    packed = np.frombuffer(bytes.fromhex(hexadecimal), dtype=np.uint8)
    if min(rows, columns) < 1 or len(packed) != -(-rows * columns // 8):
        raise ValueError(f"a tile map of {rows} x {columns} blocks needs {-(-rows * columns // 8)} bytes; got {len(packed)}")
    return TileMap(np.unpackbits(packed, count=rows * columns).astype(np.bool_).reshape(rows, columns), block_q, block_kv)
