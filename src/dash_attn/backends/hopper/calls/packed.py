"""Packed sequences: tables that are made on the device, from cu_seqlens, before every pass."""

from typing import Any

from ....call.offsets import SequenceOffsets
from ....call.options import AttentionOptions
from ....masks import Mask
from ....scheduling.generators.shift import largest_block
from ..driver.parameters import GroupSplit, PackedChain, PackedParams, PackedTile, PackedTilesParams, Sequence, SequenceStarts
from ..driver.trouble import register_call, report_address
from ..support import sm_count
from ..tiles import BackwardTiles, backward_tiles
from .kernel_names import KernelName, flag
from .layout import Layout
from .tables import MaskOnDevice


class SequenceLayout:
    """The first of two kernels of either pass: cu_seqlens become sequences, and where each begins in the tables."""

    def __init__(self, layout: Layout, mask: MaskOnDevice, tile: tuple[int, int], tickets_are_chains: bool = False) -> None:
        self._rows, self.head_tiles = "{}, {}".format(*tile), layout.tiles(layout.q_len, tile[0])
        self.params = PackedParams(
            count=layout.count,
            q_tokens=layout.q_len,
            k_tokens=layout.kv_len,
            q_longest=layout.longest[0],
            k_longest=layout.longest[1],
            heads=layout.kv_heads,
            head_tiles=self.head_tiles,
            workers=sm_count(layout.device),
            mask=mask.params,
            report=report_address(),
            call=register_call(layout.q_heads, self.head_tiles),
        )
        kernel = KernelName("planning/chains.cuh", f"packed_layout<{self._rows}, {flag(tickets_are_chains)}>")
        self._launches = [kernel.by_thread(layout.device, layout.count, self.params)]

    def work_in(self, at: dict[str, int]) -> None:
        params = self.params
        params.sequences, params.starts, params.ticket_count = at["sequences"], at["starts"], at["next_ticket"] + 4

    def launch(self, offsets: SequenceOffsets, stream: Any) -> None:
        params = self.params
        params.cu_q, params.cu_k = offsets.cu_seqlens_q.data_ptr(), offsets.cu_seqlens_k.data_ptr()
        for launch in self._launches:
            launch.on(stream)


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


class PackedPlanner(SequenceLayout):
    """Sequences, dQ tiles, chains and tickets of the backward."""

    def __init__(self, layout: Layout, mask: MaskOnDevice, split: GroupSplit, options: AttentionOptions) -> None:
        tiles = backward_tiles(*layout.backward_dims)
        super().__init__(layout, mask, (tiles.q_rows, tiles.kv_rows), tickets_are_chains=True)
        chains = layout.tiles(layout.kv_len, tiles.kv_rows)
        self.params.head_offset, self.params.chain_rows, self.params.split = options.head_offset % 2, chains, split
        kernel = KernelName("planning/chains.cuh", f"packed_plan<{self._rows}>")
        self._launches.append(kernel.by_thread(layout.device, max(self.head_tiles, 2 * chains), self.params))

    def work_in(self, at: dict[str, int]) -> None:
        super().work_in(at)
        for name in ("tile_places", "q_turns", "chains", "sum_places", "tickets"):
            setattr(self.params, name, at[name])  # both kernels take the same


class PackedTiler(SequenceLayout):
    """Sequences and Q tiles of the forward."""

    def __init__(self, layout: Layout, mask: MaskOnDevice, tile: tuple[int, int]) -> None:
        super().__init__(layout, mask, tile)
        self._tiles = PackedTilesParams(count=layout.count, tile_room=self.head_tiles, mask=mask.params)
        kernel = KernelName("planning/forward_tiles.cuh", f"packed_tiles<{self._rows}>")
        self._launches.append(kernel.by_thread(layout.device, self.head_tiles, self._tiles))
        self.sizes = {**sequence_sizes(layout), "tiles": PackedTile.bytes() * self.head_tiles}

    def work_in(self, at: dict[str, int]) -> None:
        super().work_in(at)
        for name in ("sequences", "starts", "tiles", "next_ticket"):
            setattr(self._tiles, name, at[name])
