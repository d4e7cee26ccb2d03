"""Runs the Triton kernels in Triton's interpreter beside the CPU backend. A process of its own: `python triton_interpreted.py CASES`
prints one JSON line per case. Triton reads the variable that turns its interpreter on when a kernel is defined.

The interpreter knows no bfloat16 products, so cases are float32 or float16.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpreterOptions, interpreter_builder

from dash_attn import BooleanMask, Causal, Documents, Full, Mask, Prefix, TileMap, Window
from dash_attn.backends import cpu, run
from dash_attn.backends import triton as ours
from dash_attn.backends.triton import mask_tables, passes
from dash_attn.backends.triton.tiles import Tile, Tiles
from dash_attn.call.call import Call, Grads, Modifiers
from dash_attn.call.offsets import NO_OFFSETS, SequenceOffsets
from dash_attn.call.options import AttentionOptions
from dash_attn.integrations._layer_mask import Padding

NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")
TILES = Tiles("a test", Tile(32, 16, 4, 1), Tile(16, 32, 4, 1), Tile(16, 16, 4, 1))  # small, so that few rows are many tiles
LARGE = Tiles("a test", *(Tile(128, 128, 4, 1),) * 3)  # tiles of more than one block of a boolean matrix


@dataclass(frozen=True)
class Interpreted:
    """One call. `packed`: lengths of queries and of keys, sequence by sequence."""

    mask: Mask = Causal()  # noqa: RUF009 (a mask is a value)
    lengths: tuple[int, int] = (43, 43)
    heads: tuple[int, int] = (1, 1)
    dims: tuple[int, int] = (16, 16)
    dtype: torch.dtype = torch.float32
    batch: int = 1
    softcap: float = 0.0
    sinks: tuple[float, ...] = ()
    dlse: bool = False
    packed: tuple[tuple[int, int], ...] = ()
    matrices: tuple[int, int] | None = None  # of a boolean mask instead: how many, for sequences and for heads
    partial: bool = True  # whether it has partial blocks
    tiles: Tiles = TILES

    @property
    def options(self) -> AttentionOptions:
        return AttentionOptions(self.mask if self.boolean is None else self.boolean.pattern, self.dims[0] ** -0.5, self.softcap)

    @cached_property
    def boolean(self) -> BooleanMask | None:
        """Blocks of each kind; rows and a strip of columns that attend to nothing."""
        if self.matrices is None:
            return None
        draw = np.random.default_rng(sum(self.lengths))
        whole = draw.integers(0, 3, (*self.matrices, *(-(-length // 64) for length in self.lengths)))
        kinds = whole.repeat(64, -2).repeat(64, -1)[..., : self.lengths[0], : self.lengths[1]]
        matrix = (kinds == 2) | ((kinds == 1) & (draw.random(kinds.shape) < 0.3) & self.partial)
        matrix[..., 5:9, :], matrix[..., :, 17:35] = (False, False) if self.partial else (matrix[..., 5:9, :], matrix[..., :, 17:35])
        return BooleanMask(matrix)

    @property
    def modifiers(self) -> Modifiers | None:
        found = self.boolean
        return None if found is None or not found.has_partial_blocks else Modifiers(elements=found)

    def inputs(self, seed: int = 0) -> tuple[Tensor, ...]:
        """q, k, v, dO and the gradient of the LSE."""
        source = torch.Generator().manual_seed(seed)
        q_len, kv_len = (sum(side) for side in zip(*self.packed, strict=True)) if self.packed else self.lengths
        rows = [(q_len, self.heads[0]), (kv_len, self.heads[1]), (kv_len, self.heads[1]), (q_len, self.heads[0])]
        dims = (self.dims[0], self.dims[0], self.dims[1], self.dims[1])
        of_batch = () if self.packed else (self.batch,)
        tensors = [torch.randn(*of_batch, *shape, dim, generator=source).to(self.dtype) for shape, dim in zip(rows, dims, strict=True)]
        return *tensors, torch.randn(*of_batch, self.heads[0], q_len, generator=source)

    @property
    def offsets(self) -> SequenceOffsets | None:
        if not self.packed:
            return None
        q, k = (torch.tensor([0, *accumulate(side)], dtype=torch.int32) for side in zip(*self.packed, strict=True))
        return SequenceOffsets(q, k, *(max(side) for side in zip(*self.packed, strict=True)))


BOOLEAN = {
    "boolean": Interpreted(matrices=(1, 1), lengths=(80, 150), dlse=True),
    "boolean, per head": Interpreted(matrices=(2, 2), heads=(2, 1), batch=2, lengths=(70, 70), sinks=(0.3, -0.5)),
    "boolean, per sequence": Interpreted(matrices=(2, 1), heads=(2, 1), batch=2, lengths=(70, 100), softcap=2.0),
    "boolean, whole blocks per head": Interpreted(matrices=(1, 2), heads=(2, 2), lengths=(140, 130), partial=False),
    "boolean, large tiles": Interpreted(matrices=(1, 2), heads=(2, 1), lengths=(200, 300), tiles=LARGE),
}


def padded(lengths: tuple[int, ...], length: int) -> tuple[tuple[int, int], ...]:
    """Rows padded on the left, as an integration gives them to a backend: packed, with sequences that have no queries or no keys."""
    kept = torch.arange(length) >= length - torch.tensor(lengths)[:, None]
    offsets = Padding(kept, length, Causal()).offsets(torch.nn.Module)
    return tuple(zip(*(ends.diff().tolist() for ends in (offsets.cu_seqlens_q, offsets.cu_seqlens_k)), strict=True))


RAGGED = TileMap(np.random.default_rng(0).random((7, 5)) < 0.4, 7, 9)
CASES: dict[str, Interpreted] = {
    "full": Interpreted(Full(), (40, 43)),
    "causal": Interpreted(batch=2),
    "causal, more keys": Interpreted(lengths=(30, 50)),
    "causal, more queries": Interpreted(lengths=(50, 30), dlse=True),
    "whole tiles": Interpreted(lengths=(64, 64)),
    "window": Interpreted(Window(10, 3)),
    "window without a right end": Interpreted(Window(10, -1)),
    "window without a left end": Interpreted(Window(-1, 4)),
    "prefix": Interpreted(Prefix(20)),
    "tile map": Interpreted(RAGGED, (45, 41)),
    "documents": Interpreted(Documents((20, 23)), batch=2),
    "documents, not causal": Interpreted(Documents((20, 3, 20), causal=False)),
    "grouped heads": Interpreted(heads=(4, 2), lengths=(20, 35)),
    "softcap": Interpreted(softcap=2.0),
    "sinks": Interpreted(heads=(2, 1), lengths=(40, 20), sinks=(0.7, -torch.inf), dlse=True),
    "gradient of the LSE": Interpreted(lengths=(30, 40), dlse=True),
    "padded head dims": Interpreted(dims=(24, 33), lengths=(20, 40)),
    "float16": Interpreted(dtype=torch.float16, dims=(32, 16)),
    "packed": Interpreted(packed=((20, 33), (0, 7), (35, 20), (5, 0))),
    "packed, full, sinks": Interpreted(Full(), packed=((20, 33), (33, 1)), sinks=(0.3,), dlse=True),
    "padded rows": Interpreted(packed=padded((10, 17, 0), 17)),
    "packed window": Interpreted(Window(7, -1), packed=((40, 33), (3, 20))),
    **BOOLEAN,
}


def random_case(seed: int) -> Interpreted:
    """Any mask, lengths, heads and dims, small."""
    draw = np.random.default_rng(seed)
    lengths = int(draw.integers(1, 80)), int(draw.integers(1, 80))
    sides = [int(draw.integers(-1, 40)) for _ in range(2)]
    packed = tuple((int(draw.integers(0, 50)), int(draw.integers(0, 50))) for _ in range(int(draw.integers(1, 5))))
    masks: list[Mask] = [Full(), Causal(), Window(*sides), Window(sides[0], 0)]
    blocks = tuple(int(draw.integers(1, 20)) for _ in range(2))
    if seed % 3:
        packed = ()
        shape = tuple(-(-length // block) for length, block in zip(lengths, blocks, strict=True))
        masks += [Prefix(int(draw.integers(0, lengths[1] + 1))), TileMap(draw.random(shape) < 0.5, *blocks)]
    matrices = None
    if seed % 7 == 0:
        packed, matrices = (), (1, int(draw.integers(1, 3)))
    if packed and not all(map(sum, zip(*packed, strict=True))):
        packed += ((3, 5),)
    group, kv_heads = int(draw.integers(1, 4)), int(draw.integers(1, 3))
    heads = group * kv_heads, kv_heads
    matrices = None if matrices is None else (1, heads[0] if matrices[1] > 1 else 1)
    sinks = tuple(float(x) for x in draw.normal(size=heads[0])) if seed % 4 == 0 else ()
    dims = int(draw.integers(1, 40)), int(draw.integers(1, 40))
    softcap = 3.0 if seed % 5 == 0 else 0.0
    mask = masks[int(draw.integers(len(masks)))]
    return Interpreted(mask, lengths, heads, dims, softcap=softcap, sinks=sinks, dlse=seed % 2 == 0, packed=packed, matrices=matrices)


FAULTS = ("a key too many", "a tile too few", "the matrix of another head")


def results(backend: Any, case: Interpreted, inputs: tuple[Tensor, ...], offsets: SequenceOffsets | None) -> dict[str, Tensor]:
    q, k, v, dout, dlse = inputs
    sinks = torch.tensor(case.sinks) if case.sinks else None
    call = Call(q, k, v, case.options, offsets, sinks, case.modifiers)
    with patch.object(run, "backend_for", lambda *_: backend):
        saved = run.forward(call)
        gradients = run.backward(call, saved, Grads(dout, dlse if case.dlse else None))
    return {name: x for name, x in zip(NAMES, (*saved, *gradients), strict=True) if x is not None}


def error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest value; infinity where shapes, dtypes, NaNs or infinities differ."""
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype) or bool(actual.isnan().any()):
        return float("inf")
    if not torch.equal(actual.isinf(), expected.isinf()):
        return float("inf")
    finite = expected.isfinite()
    if not finite.any():
        return 0.0
    size = max(1.0, expected[finite].abs().max().item())
    return (actual.double() - expected.double())[finite].abs().max().item() / size


def compare(case: Interpreted) -> dict[str, float]:
    inputs = case.inputs()
    with patch.object(passes, "tiles_for", lambda *_: case.tiles):
        mine, theirs = (results(backend, case, inputs, case.offsets) for backend in (ours, cpu))
    return {name: error(mine[name], theirs[name]) for name in theirs}


def swapped(arguments: Any) -> Any:
    """Matrices in another order."""
    return lambda found: {**(given := arguments(found)), "matrices": given["matrices"].flip(1).contiguous()}


def planted(fault: str) -> dict[str, float]:
    """A causal case with a fault in its tables: the control."""
    if fault == "a key too many":
        with patch.object(mask_tables, "distances", lambda mask: (mask_tables.FAR_AWAY, 1)):
            return compare(Interpreted())
    if fault == "the matrix of another head":
        per_head = replace(BOOLEAN["boolean, per head"], batch=1, matrices=(1, 2))
        with patch.object(mask_tables.Matrices, "arguments", swapped(mask_tables.Matrices.arguments)):
            return compare(per_head)
    whole = mask_tables.visit_lists

    def without_the_last(tile_map: Any) -> Any:
        bounds, visits = whole(tile_map)
        bounds[0, 1:] -= 1
        return bounds, visits

    with patch.object(mask_tables, "visit_lists", without_the_last):
        return compare(CASES["prefix"])


def alone() -> dict[str, bool]:
    """Whether packed sequences, and sequences of a batch, have the bits that each has alone; and a control that has others."""
    case = Interpreted(packed=((20, 33), (35, 20), (16, 16)), heads=(2, 1))
    inputs, offsets = case.inputs(), case.offsets
    assert offsets is not None
    together = results(ours, case, inputs, offsets)
    places = zip(pairwise(offsets.cu_seqlens_q.tolist()), pairwise(offsets.cu_seqlens_k.tolist()), strict=True)
    same = []
    for (a, b), (c, d) in places:
        q, k, v, dout, dlse = inputs
        one = results(ours, case, (q[None, a:b], k[None, c:d], v[None, c:d], dout[None, a:b], dlse[None, :, a:b]), None)
        of_packed = {"out": (a, b), "dq": (a, b), "dk": (c, d), "dv": (c, d)}
        same += [torch.equal(one[name][0], together[name][slice(*rows)]) for name, rows in of_packed.items()]
    dense = Interpreted(batch=3, lengths=(35, 35))
    whole, swapped = dense.inputs(), tuple(x[[2, 0, 1]] for x in dense.inputs())
    of_whole, of_swapped = (results(ours, dense, x, None) for x in (whole, swapped))
    moved = [torch.equal(of_whole[name][[2, 0, 1]], of_swapped[name]) for name in of_whole]
    differ = not torch.equal(of_whole["dq"], of_swapped["dq"])
    return {"packed": all(same), "moved": all(moved), "control": differ}


def together() -> dict[str, bool]:
    """Whether one launch of both passes has the bits of two; and a control that has others."""
    tile, other = Tile(16, 32, 4, 1), Interpreted(heads=(2, 1), lengths=(20, 35), softcap=3.0)
    cases = {
        "grouped": Interpreted(heads=(2, 1), lengths=(20, 35), softcap=2.0),
        "packed": Interpreted(Window(10, 3), packed=((20, 33), (0, 7), (5, 0)), dlse=True),
    }
    found, bits = {}, {}
    for name, case in cases.items():
        bits[name] = []
        for tiles in (Tiles("a test", tile, tile, replace(tile, kv_rows=16), one) for one in (False, True)):
            with patch.object(passes, "tiles_for", lambda *_, tiles=tiles: tiles):
                bits[name].append(results(ours, case, case.inputs(), case.offsets))
        found[name] = all(torch.equal(one, two) for one, two in zip(*(run.values() for run in bits[name]), strict=True))
    return {**found, "control": not torch.equal(bits["grouped"][0]["dq"], results(ours, other, other.inputs(), None)["dq"])}


def wrong_offsets() -> dict[str, str]:
    """What is said of offsets that no sequence fits."""
    said = {}
    case = CASES["packed"]
    wrong = {
        "start": ([1, 20, 60, 60], 40),
        "end": ([0, 20, 30, 59], 40),
        "decrease": ([0, 40, 30, 60], 40),
        "longer": ([0, 20, 55, 60], 30),
        "mask": ([NO_OFFSETS] * 4, 40),
    }
    for name, (ends, longest) in wrong.items():
        q, k, v, *_ = case.inputs()
        offsets = SequenceOffsets(torch.tensor(ends, dtype=torch.int32), torch.tensor([0, 33, 40, 60], dtype=torch.int32), longest, 60)
        try:
            with patch.object(interpreter_builder, "options", InterpreterOptions(debug=True)):  # as check_offsets is compiled
                ours.forward(Call(q, k, v, case.options, offsets))
            said[name] = ""
        except Exception as found:  # the interpreter wraps an assertion
            said[name] = str(found)
    return said


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    special = {"alone": alone, "together": together, "wrong offsets": wrong_offsets}
    with patch.object(passes, "tiles_for", lambda *_: TILES):
        for name in names:
            if name in special:
                found: Any = special[name]()
            elif name.startswith("seed "):
                found = compare(random_case(int(name.removeprefix("seed "))))
            else:
                found = planted(name) if name in FAULTS else compare(CASES[name])
            print(json.dumps({name: found}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
