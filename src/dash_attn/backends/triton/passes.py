"""Runs the passes of a call on the current stream. Shapes and options decide their launches, so `explain` and tests can ask for those
without a GPU."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...call.call import Call, Gradients, Grads, Saved, cut
from .launch import Launch
from .mask_tables import TABLES, Masked
from .support import architecture_of, check_call, check_elements
from .tiles import Tile, tiles_for

UNIT = 8  # numbers: strides are multiples of it, and so are the head dims that kernels see
SMALLEST_BLOCK = 16  # columns of a product
STATISTIC_ROWS = {64: 64, 128: 32, 256: 16}  # of a tile of the row statistics, by columns
SINK_ROWS = 4096
OFFSETS = 1024  # that are checked at once
SMALL = Tile(1, 1, 4, 1)  # of kernels that have no tiles: their warps


def forward(call: Call) -> Saved:
    """The LSE is float32."""
    check_elements(call)
    with on_device(call.q):
        passes = Passes(call)
        if call.offsets is not None:
            offsets_launch(passes).run()
        out = passes.q.new_empty((*call.q.shape[:-1], passes.v.shape[-1]))
        lse = call.q.new_empty(passes.lse_shape, dtype=torch.float32)
        forward_launch(passes, out, lse, None if call.sinks is None else logits_of(call.sinks)).run()
    return Saved(cut(out, call.v.shape[-1]), lse)


def backward(call: Call, saved: Saved, grads: Grads) -> Gradients:
    check_elements(call)
    with on_device(call.q):
        passes = Passes(call)
        dout, rows = aligned(grads.out), RowValues.empty(passes)
        dlse = None if grads.lse is None else readable(grads.lse)
        statistics_launch(passes, aligned(saved.out), dout, readable(saved.lse), dlse, rows).run()
        dq, dk, dv = (x.new_empty(x.shape) for x in (passes.q, passes.k, passes.v))
        for launch in gradient_launches(passes, dout, rows, (dq, dk, dv)):
            launch.run()
        dsinks = None if call.sinks is None else _sink_gradient(passes, rows, call.sinks)
    return Gradients(cut(dq, call.q.shape[-1]), cut(dk, call.k.shape[-1]), cut(dv, call.v.shape[-1]), dsinks)


class Passes:
    """The launches of a call, on tensors as kernels can read them (`aligned`)."""

    def __init__(self, call: Call) -> None:
        check_call(call)
        self.q, self.k, self.v = map(aligned, call.tensors)
        self.options, self.offsets, self.elements = call.options, call.offsets, call.elements
        self.tiles = tiles_for(architecture_of(self.q.device), self.q.dtype, self.q.shape[-1], self.v.shape[-1])
        self.packed = call.offsets is not None
        self.batch = 1 if self.packed else self.q.shape[0]
        self.sequences = 1 if call.offsets is None else len(call.offsets.cu_seqlens_q) - 1  # that are packed
        self.lengths = self.q.shape[-3], self.k.shape[-3]  # of packed sequences: all tokens
        self.heads = self.q.shape[-2], self.k.shape[-2]
        self.lse_shape = *self.q.shape[:-3], self.heads[0], self.lengths[0]

    def slots(self, tile: Tile, by_keys: bool) -> int:
        """Programs of a head: its tiles, and of packed sequences one more for each."""
        length, rows = self.lengths[by_keys], (tile.q_rows, tile.kv_rows)[by_keys]
        return length // rows + self.sequences if self.packed else -(-length // rows)

    def launch(self, kernel: str, tile: Tile, own: dict[str, Any], by_keys: bool = False, **constants: Any) -> Launch:
        """One of the passes over tiles: what they share, and its own arguments."""
        heads, kv_heads = self.heads
        tiles, mask = self.slots(tile, by_keys), Masked(self.options.mask, self.lengths, self.q.device, self.elements).tables(tile, by_keys)
        numbers = {
            **{"q": self.q, "k": self.k, "v": self.v},
            **{**strides("q", self.q), **strides("k", self.k), **strides("v", self.v)},
            "q_ends": None if self.offsets is None else readable(self.offsets.cu_seqlens_q),
            "kv_ends": None if self.offsets is None else readable(self.offsets.cu_seqlens_k),
            "heads": kv_heads if by_keys else heads,
            "group": heads // kv_heads,
            "tiles": tiles,
            "sequences": self.sequences,
            **{"q_len": self.lengths[0], "kv_len": self.lengths[1]},
            **self.options.kernel_scales,
            **mask.arguments(),
            **own,
        }
        fixed = {
            "HEAD_DIM": self.q.shape[-1],
            "VALUE_DIM": self.v.shape[-1],
            "BLOCK_DIM": block_of(self.q.shape[-1]),
            "BLOCK_VALUE": block_of(self.v.shape[-1]),
            "BLOCK_Q": tile.q_rows,
            "BLOCK_KV": tile.kv_rows,
            "PARTIAL_STAGES": tile.partial_stages,
            "MASK": mask.kind,
            "PACKED": self.packed,
            "SOFTCAP": bool(self.options.softcap),
            **constants,
        }
        return Launch(kernel, self.batch * numbers["heads"] * tiles, numbers, fixed, tile)


def forward_launch(passes: Passes, out: Tensor, lse: Tensor, sinks: Tensor | None) -> Launch:
    """sinks: in float32."""
    return passes.launch("attention_forward", passes.tiles.forward, {"out": out, "lse": lse, "sinks": sinks}, SINKS=sinks is not None)


@dataclass(frozen=True)
class RowValues:
    """What the backward knows of each row, laid out as the LSE, but with whole units for each head: kernels then read pairs at once."""

    minus_lse: Tensor  # in base 2
    delta: Tensor

    @classmethod
    def empty(cls, passes: Passes, device: torch.device | str | None = None) -> RowValues:
        *heads, rows = passes.lse_shape
        shape = (*heads, -(-rows // UNIT) * UNIT)
        return cls(*(torch.empty(shape, dtype=torch.float32, device=passes.q.device if device is None else device) for _ in range(2)))

    @property
    def units(self) -> int:
        return self.delta.shape[-1] // UNIT


def statistics_launch(passes: Passes, out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None, rows: RowValues) -> Launch:
    block = block_of(passes.v.shape[-1])
    tile = Tile(STATISTIC_ROWS[max(64, block)], 1, 4, 1)
    q_len, heads = passes.lengths[0], passes.heads[0]
    numbers = {
        **{"out": out, "dout": dout, "lse": lse, "dlse": dlse, "minus_lse": rows.minus_lse, "delta": rows.delta},
        **strides("out", out),
        **strides("do", dout),
        **{"heads": heads, "q_len": q_len, "row_units": rows.units},
    }
    constants = {"VALUE_DIM": passes.v.shape[-1], "BLOCK_VALUE": block, "BLOCK_Q": tile.q_rows, "WITH_DLSE": dlse is not None}
    return Launch("row_statistics", passes.batch * heads * -(-q_len // tile.q_rows), numbers, constants, tile)


def gradient_launches(passes: Passes, dout: Tensor, rows: RowValues, gradients: tuple[Tensor, Tensor, Tensor]) -> tuple[Launch, ...]:
    """dK and dV by KV tile, then dQ by Q tile; or both in one launch."""
    dq, dk, dv = gradients
    shared = {
        "number": None,
        "dout": dout,
        "minus_lse": rows.minus_lse,
        "delta": rows.delta,
        "scale": passes.options.scale,
        "row_units": rows.units,
        **strides("do", dout),
    }
    tiles, grouped = passes.tiles, passes.heads[0] > passes.heads[1]
    keys = passes.launch("key_gradients", tiles.key_gradients, {**shared, "dk": dk, "dv": dv}, by_keys=True, GROUPED=grouped)
    queries = passes.launch("query_gradients", tiles.query_gradients, {**shared, "dq": dq})
    return (together(keys, queries),) if tiles.together and passes.options.mask.sides is not None else (keys, queries)


def together(keys: Launch, queries: Launch) -> Launch:
    """One launch for two. Bands have no tables, of which each launch would have its own."""
    left_out = ("number", "tiles", *TABLES, "block_q", "block_kv", "block_columns", "matrix_batch", "matrix_head", "matrix_blocks")
    numbers = {name: value for name, value in {**queries.numbers, **keys.numbers}.items() if name not in left_out}
    numbers |= {"key_tiles": keys.numbers["tiles"], "query_tiles": queries.numbers["tiles"]}
    constants = {name: value for name, value in keys.constants.items() if name not in ("BLOCK_Q", "BLOCK_KV", "PARTIAL_STAGES", "MASK")}
    for name, tile in (("KEYS", keys.tile), ("QUERIES", queries.tile)):
        constants |= {f"{name}_Q": tile.q_rows, f"{name}_KV": tile.kv_rows, f"{name}_PARTIAL": tile.partial_stages}
    return Launch("gradients", keys.programs + queries.programs, numbers, constants, keys.tile)


def sink_launch(passes: Passes, rows: RowValues, sinks: Tensor, dsinks: Tensor) -> Launch:
    """Both in float32."""
    q_len, heads = passes.lengths[0], passes.heads[0]
    numbers = {
        **{"minus_lse": rows.minus_lse, "delta": rows.delta, "sinks": sinks, "dsinks": dsinks},
        **{"heads": heads, "q_len": q_len, "row_units": rows.units, "count": passes.batch * q_len},
    }
    return Launch("sink_gradient", heads, numbers, {"BLOCK": SINK_ROWS}, Tile(SINK_ROWS, 1, 8, 1))


def offsets_launch(passes: Passes) -> Launch:
    assert passes.offsets is not None
    q_len, kv_len = passes.lengths
    numbers = {
        **{"q_ends": readable(passes.offsets.cu_seqlens_q), "kv_ends": readable(passes.offsets.cu_seqlens_k)},
        "entries": len(passes.offsets.cu_seqlens_q),
        **{"q_tokens": q_len, "kv_tokens": kv_len},
        **{"q_longest": int(passes.offsets.max_seqlen_q), "kv_longest": int(passes.offsets.max_seqlen_k)},
    }
    return Launch("check_offsets", 1, numbers, {"BLOCK": OFFSETS}, SMALL)


def block_of(dim: int) -> int:
    """Columns of a tile: a power of two."""
    return max(SMALLEST_BLOCK, 1 << (dim - 1).bit_length())


def strides(name: str, x: Tensor) -> dict[str, int]:
    """Of batch, row and head, in units; packed tokens are one batch."""
    of_batch = [0] if x.ndim == 3 else []
    found = [*of_batch, *(0 if size == 1 else stride // UNIT for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True))]
    return dict(zip((f"{name}_batch", f"{name}_row", f"{name}_head"), found, strict=True))


def readable(x: Tensor) -> Tensor:
    """Numbers in a row that begin at a multiple of 16 bytes: an address must not choose another variant of a kernel."""
    return x if x.is_contiguous() and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)


def aligned(x: Tensor) -> Tensor:
    """The tensor, or a copy whose rows begin at multiples of 16 bytes and have whole units: the same kernel then reads all."""
    if x.shape[-1] % UNIT:
        return torch.nn.functional.pad(x, (0, -x.shape[-1] % UNIT))
    if x.stride(-1) == 1 and x.data_ptr() % 16 == 0:
        used = [stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
        if all(stride % UNIT == 0 and 0 <= stride < 2**40 for stride in used) and x.stride(-3) < 2**23:
            return x
    return x.clone(memory_format=torch.contiguous_format)


def _sink_gradient(passes: Passes, rows: RowValues, sinks: Tensor) -> Tensor:
    logits = logits_of(sinks)
    gradient = torch.empty_like(logits)
    sink_launch(passes, rows, logits, gradient).run()
    return gradient.to(sinks.dtype)


def logits_of(sinks: Tensor) -> Tensor:
    """In float32, where kernels can read them."""
    return readable(sinks.detach().float())


def on_device(x: Tensor) -> AbstractContextManager[object]:
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
