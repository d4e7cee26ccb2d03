"""Packed sequences: tables that are made on the device, from cu_seqlens, before every pass."""

from __future__ import annotations

from ctypes import addressof
from typing import Any

from ...options import AttentionOptions
from ...packing import Packing
from .driver import Arguments, load
from .layout import Layout
from .shapes import HELPER_THREADS, BackwardTiles, backward_tiles
from .structs import PackedParams, PackedTilesParams
from .support import check_device, check_gang
from .tables import MaskOnDevice
from .trouble import register_call, report_address

SEQUENCE_BYTES, PARTS_BYTES, CHAIN_BYTES, TILE_BYTES = 32, 16, 64, 32  # structs of sequence.cuh, packed_*.cuh, forward_config.cuh


def packed_sizes(layout: Layout, head_tiles: int, chains: int) -> dict[str, int]:
    """Bytes of the backward's tables: linear in tokens and sequences."""
    return {
        "sequences": SEQUENCE_BYTES * layout.count,
        "parts": PARTS_BYTES * layout.count,
        "tile_places": 8 * head_tiles,
        "chains": CHAIN_BYTES * 2 * chains,
    }


def packed_params(layout: Layout, mask: MaskOnDevice, head_tiles: int) -> PackedParams:
    return PackedParams(
        count=layout.count,
        q_tokens=layout.q_len,
        k_tokens=layout.kv_len,
        q_longest=layout.q_longest,
        k_longest=layout.k_longest,
        heads=layout.kv_heads,
        group=layout.group,
        head_tiles=head_tiles,
        workers=check_device(layout.device),
        mask=mask.params,
        report=report_address(),
        call=register_call(layout.q_heads, head_tiles),
    )


def largest_gang(layout: Layout, tiles: BackwardTiles) -> int:
    """Most chains that may wait for each other: in_ring of packed_plan.cuh, for the longest sequence."""
    q_tiles, kv_tiles = -(-(layout.q_longest or 1) // tiles.q_rows), -(-(layout.k_longest or 1) // tiles.kv_rows)
    return min(max(1, min(64, q_tiles // 2)), kv_tiles)


class PackedPlanner:
    """Sequences, dQ tiles, chains and tickets of the backward."""

    def __init__(self, layout: Layout, mask: MaskOnDevice, head_tiles: int, options: AttentionOptions) -> None:
        tiles = backward_tiles(layout.dim)
        rows = f"{tiles.q_rows}, {tiles.kv_rows}"
        self._layout_kernel = load(layout.device, "packed_plan.cuh", f"packed_layout<{rows}, true>", HELPER_THREADS, 0)
        self._plan_kernel = load(layout.device, "packed_plan.cuh", f"packed_plan<{rows}>", HELPER_THREADS, 0)
        chains = layout.tiles_of_keys(tiles.kv_rows)
        check_gang(largest_gang(layout, tiles), check_device(layout.device))
        self._params = packed_params(layout, mask, head_tiles)
        self._params.head_offset, self._params.chain_rows = options.head_offset, chains
        self._arguments = Arguments([addressof(self._params)])
        self._grids = -(-layout.count // HELPER_THREADS), -(-max(head_tiles, 2 * chains) // HELPER_THREADS)

    def launch(self, packing: Packing, at: dict[str, int], stream: Any) -> None:
        params = self._params
        params.cu_q, params.cu_k = packing.cu_seqlens_q.data_ptr(), packing.cu_seqlens_k.data_ptr()
        for name in ("sequences", "parts", "tile_places", "chains", "tickets"):
            setattr(params, name, at[name])
        params.ticket_count = at["next_ticket"] + 4
        self._layout_kernel.launch(self._grids[0], self._arguments, stream)
        self._plan_kernel.launch(self._grids[1], self._arguments, stream)


class PackedTiler:
    """Sequences and Q tiles of the forward."""

    def __init__(self, layout: Layout, mask: MaskOnDevice, q_rows: int, kv_rows: int) -> None:
        rows = f"{q_rows}, {kv_rows}"
        self._layout_kernel = load(layout.device, "packed_plan.cuh", f"packed_layout<{rows}, false>", HELPER_THREADS, 0)
        self._tiles_kernel = load(layout.device, "packed_tiles.cuh", f"packed_tiles<{rows}>", HELPER_THREADS, 0)
        self.room = layout.tiles_of_queries(q_rows)
        self._params = packed_params(layout, mask, self.room)
        self._tiles = PackedTilesParams(count=layout.count, tile_room=self.room, mask=mask.params)
        self._layout_arguments, self._tiles_arguments = Arguments([addressof(self._params)]), Arguments([addressof(self._tiles)])
        self._grids = -(-layout.count // HELPER_THREADS), -(-self.room // HELPER_THREADS)

    def sizes(self, layout: Layout) -> dict[str, int]:
        return {"sequences": SEQUENCE_BYTES * layout.count, "parts": PARTS_BYTES * layout.count, "tiles": TILE_BYTES * self.room}

    def launch(self, packing: Packing, at: dict[str, int], stream: Any) -> None:
        params, tiles = self._params, self._tiles
        params.cu_q, params.cu_k = packing.cu_seqlens_q.data_ptr(), packing.cu_seqlens_k.data_ptr()
        params.sequences = tiles.sequences = at["sequences"]
        params.parts = tiles.parts = at["parts"]
        tiles.tiles, tiles.next_ticket = at["tiles"], at["next_ticket"]
        params.ticket_count = at["next_ticket"] + 4
        self._layout_kernel.launch(self._grids[0], self._layout_arguments, stream)
        self._tiles_kernel.launch(self._grids[1], self._tiles_arguments, stream)
