"""Packed sequences: tables that are made on the device, from cu_seqlens, before every pass."""

from ctypes import addressof
from typing import Any

from ....call.offsets import SequenceOffsets
from ....call.options import AttentionOptions
from ....masks import Mask
from ....scheduling.generators.shift import largest_block
from ..driver.parameters import GroupSplit, PackedChain, PackedParams, PackedTile, PackedTilesParams, Sequence, SequenceStarts
from ..driver.trouble import register_call, report_address
from ..support import sm_count
from ..tiles import BackwardTiles, backward_tiles, helper_blocks
from .kernel_names import KernelName, flag
from .layout import Layout
from .tables import MaskOnDevice


class SequenceLayout:
    """The first of two kernels of either pass: cu_seqlens become sequences, and where each begins in the tables."""

    def __init__(self, layout: Layout, mask: MaskOnDevice, rows: str, head_tiles: int, tickets_are_chains: bool) -> None:
        name = f"packed_layout<{rows}, {flag(tickets_are_chains)}>"
        kernel = KernelName("planning/chains.cuh", name).load(layout.device)
        self.params = PackedParams(
            count=layout.count,
            q_tokens=layout.q_len,
            k_tokens=layout.kv_len,
            q_longest=layout.longest[0],
            k_longest=layout.longest[1],
            heads=layout.kv_heads,
            head_tiles=head_tiles,
            workers=sm_count(layout.device),
            mask=mask.params,
            report=report_address(),
            call=register_call(layout.q_heads, head_tiles),
        )
        self._launch = kernel.prepare(helper_blocks(layout.count), [addressof(self.params)])

    def work_in(self, at: dict[str, int]) -> None:
        params = self.params
        params.sequences, params.starts, params.ticket_count = at["sequences"], at["starts"], at["next_ticket"] + 4

    def launch(self, offsets: SequenceOffsets, stream: Any) -> None:
        params = self.params
        params.cu_q, params.cu_k = offsets.cu_seqlens_q.data_ptr(), offsets.cu_seqlens_k.data_ptr()
        self._launch.on(stream)


def sequence_sizes(layout: Layout) -> dict[str, int]:
    """Bytes of what SequenceLayout writes."""
    return {"sequences": Sequence.bytes() * layout.count, "starts": SequenceStarts.bytes() * layout.count}


def packed_sizes(layout: Layout, head_tiles: int, chains: int) -> dict[str, int]:
    """Bytes of the backward's tables: linear in tokens and sequences."""
    return {
        **sequence_sizes(layout),
        "tile_places": 8 * head_tiles,
        "q_turns": 4 * head_tiles,
        "chains": PackedChain.bytes() * 2 * chains,
        "sum_places": 16 * chains,
    }


def largest_gang(layout: Layout, tiles: BackwardTiles, mask: Mask) -> int:
    """Most chains that may wait for each other: in_ring of planning/chains.cuh, for the longest sequence.

    A causal sequence of which every tile is kept has so few Q tiles that its blocks are single chains.
    """
    if mask.is_causal:
        return 1
    q_tiles, kv_tiles = (-(-(longest or 1) // rows) for longest, rows in zip(layout.longest, (tiles.q_rows, tiles.kv_rows), strict=True))
    return min(largest_block(q_tiles), kv_tiles)


class PackedPlanner:
    """Sequences, dQ tiles, chains and tickets of the backward."""

    def __init__(self, layout: Layout, mask: MaskOnDevice, split: GroupSplit, options: AttentionOptions) -> None:
        tiles = backward_tiles(*layout.backward_dims)
        rows = f"{tiles.q_rows}, {tiles.kv_rows}"
        head_tiles, chains = layout.tiles_of_queries(tiles.q_rows), layout.tiles_of_keys(tiles.kv_rows)
        self._sequences = SequenceLayout(layout, mask, rows, head_tiles, tickets_are_chains=True)
        params = self._sequences.params
        params.head_offset, params.chain_rows, params.split = options.head_offset % 2, chains, split
        kernel = KernelName("planning/chains.cuh", f"packed_plan<{rows}>").load(layout.device)
        self._launch = kernel.prepare(helper_blocks(max(head_tiles, 2 * chains)), [addressof(self._sequences.params)])

    def work_in(self, at: dict[str, int]) -> None:
        self._sequences.work_in(at)
        for name in ("tile_places", "q_turns", "chains", "sum_places", "tickets"):
            setattr(self._sequences.params, name, at[name])  # both kernels take the same

    def launch(self, offsets: SequenceOffsets, stream: Any) -> None:
        self._sequences.launch(offsets, stream)
        self._launch.on(stream)


class PackedTiler:
    """Sequences and Q tiles of the forward."""

    def __init__(self, layout: Layout, mask: MaskOnDevice, q_rows: int, kv_rows: int) -> None:
        rows = f"{q_rows}, {kv_rows}"
        self.room = layout.tiles_of_queries(q_rows)
        self._sequences = SequenceLayout(layout, mask, rows, self.room, tickets_are_chains=False)
        kernel = KernelName("planning/forward_tiles.cuh", f"packed_tiles<{rows}>").load(layout.device)
        self._params = PackedTilesParams(count=layout.count, tile_room=self.room, mask=mask.params)
        self._launch = kernel.prepare(helper_blocks(self.room), [addressof(self._params)])

    def sizes(self, layout: Layout) -> dict[str, int]:
        return {**sequence_sizes(layout), "tiles": PackedTile.bytes() * self.room}

    def work_in(self, at: dict[str, int]) -> None:
        self._sequences.work_in(at)
        for name in ("sequences", "starts", "tiles", "next_ticket"):
            setattr(self._params, name, at[name])

    def launch(self, offsets: SequenceOffsets, stream: Any) -> None:
        self._sequences.launch(offsets, stream)
        self._launch.on(stream)
