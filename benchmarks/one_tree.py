"""The part of compare.py that runs once per process, in one source tree: python -m benchmarks.one_tree TREE REQUEST.json

Of the package it uses only what every version has: the attention functions, masks by name, and BooleanMask.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from .timing import Call, milliseconds, replayed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Shape = dict[str, Any]
Attend = Callable[..., Tensor]


def tensors_of(shape: Shape) -> tuple[list[Tensor], Tensor]:
    """q, k, v and perhaps sinks, which want gradients; and dO."""
    source = torch.Generator(DEVICE).manual_seed(0)
    rows, keys, heads, dim = shape.get("q_seqlen", shape["seqlen"]), shape["seqlen"], shape["q_heads"], shape["head_dim"]
    v_dim = shape.get("v_head_dim", dim)
    sizes = [(rows, heads, dim), (keys, shape["kv_heads"], dim), (keys, shape["kv_heads"], v_dim), (rows, heads, v_dim)]
    q, k, v, dout = (torch.randn(shape["batch"], *size, generator=source, device=DEVICE).to(_dtype(shape)) for size in sizes)
    sinks = [torch.randn(heads, generator=source, device=DEVICE).to(_dtype(shape))] if shape.get("sinks") else []
    return [x.requires_grad_() for x in (q, k, v, *sinks)], dout


def _dtype(shape: Shape) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, shape.get("dtype", "bfloat16"))
    return dtype


def attention_of(shape: Shape) -> Attend:
    """Ours, of q, k, v and perhaps sinks."""
    from dash_attn import flash_attn_func, flash_attn_varlen_func

    options: dict[str, Any] = {"softcap": shape["softcap"]} if shape.get("softcap") else {}
    if "lengths" not in shape:
        mask = mask_of(shape)
        return lambda q, k, v, *sinks: flash_attn_func(q, k, v, mask=mask, **options, **({"sinks": sinks[0]} if sinks else {}))
    ends = torch.tensor([0, *accumulate(shape["lengths"])], dtype=torch.int32, device=DEVICE)
    packed = (ends, ends, max(shape["lengths"]), max(shape["lengths"]))
    causal = shape["mask"] == "causal"
    return lambda q, k, v: flash_attn_varlen_func(q[0], k[0], v[0], *packed, causal=causal, **options)[None]


def mask_of(shape: Shape) -> Any:
    """A matrix was drawn by the parent, so that every tree has the same."""
    from dash_attn import BooleanMask, parse_mask

    if "matrix" not in shape:
        return parse_mask(shape["mask"])
    bits = np.unpackbits(np.load(shape["matrix"]), axis=1)[:, : shape["seqlen"]]
    return BooleanMask(bits.astype(np.bool_))


def yardstick_of(shape: Shape) -> Attend:
    """cuDNN on the same tensors, causal or full, whatever else the shape asks for: a measure of the clocks of this process."""
    causal = shape["mask"] != "full" and shape.get("q_seqlen", shape["seqlen"]) == shape["seqlen"]

    def attend(q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION if DEVICE == "cuda" else SDPBackend.MATH):
            turned = (x.transpose(1, 2) for x in (q, k, v))
            return scaled_dot_product_attention(*turned, is_causal=causal, enable_gqa=True).transpose(1, 2)

    return attend


def measure(shape: Shape, forward: bool, graphs: bool, runs: int) -> dict[str, Any]:
    """Milliseconds of ours and of the yardstick, and a sum of the bits of ours."""
    inputs, dout = tensors_of(shape)
    attend = attention_of(shape)

    def prepare(attend: Attend, leaves: list[Tensor]) -> Call:
        if forward:
            return lambda: attend(*inputs)
        out = attend(*inputs)
        return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)

    made = [lambda: prepare(attend, inputs), lambda: prepare(yardstick_of(shape), inputs[:3])]
    ours, yardstick = milliseconds([replayed(one) if graphs else one() for one in made], runs)
    out = attend(*inputs)
    return {"ms": ours, "yardstick_ms": yardstick, "bits": [bit_sum(x) for x in (out, *torch.autograd.grad(out, inputs, dout))]}


def bit_sum(x: Tensor) -> int:
    """Another one, nearly always, when a bit is another."""
    bits = x.detach().contiguous().view(torch.int16).flatten().long()
    return int((bits * (torch.arange(len(bits), device=x.device) % 65521 + 1)).sum())


def main(tree: str, request: str) -> None:
    sys.path.insert(0, tree)
    import dash_attn

    found = Path(dash_attn.__file__).resolve()
    if Path(tree).resolve() not in found.parents:
        raise SystemExit(f"dash_attn was imported from {found}, not from {tree}")
    asked = json.loads(Path(request).read_text(encoding="utf-8"))
    for shape in asked["shapes"]:
        print(json.dumps(measure(shape, asked["forward"], asked["graphs"], asked["runs"])), flush=True)
        if DEVICE == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main(*sys.argv[1:])
