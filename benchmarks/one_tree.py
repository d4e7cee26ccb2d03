"""The part of compare.py that runs in one source tree, in a process of its own, and how it is started.

Of the package it uses only what every version has: the attention functions, masks by name, BooleanMask, and explain.
"""

from __future__ import annotations

import json
import subprocess
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

from . import ROOT
from .timing import LEAD_IN, Call, milliseconds, replayed

HERE = ROOT / "src"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
AT_ONCE, SHORT_LEAD_IN = 3, 600_000  # launched: a third of a millisecond of sleep hides some of the host's time
Shape = dict[str, Any]
Attend = Callable[..., Tensor]


def sizes_of(shape: Shape) -> list[tuple[int, ...]]:
    """Of q, k, v and dO."""
    rows, keys, heads, dim = shape.get("q_seqlen", shape["seqlen"]), shape["seqlen"], shape["q_heads"], shape["head_dim"]
    v_dim = shape.get("v_head_dim", dim)
    sizes = [(rows, heads, dim), (keys, shape["kv_heads"], dim), (keys, shape["kv_heads"], v_dim), (rows, heads, v_dim)]
    return [(shape["batch"], *size) for size in sizes]


def tensors_of(shape: Shape) -> tuple[list[Tensor], Tensor]:
    """q, k, v and perhaps sinks, which want gradients; and dO."""
    source = torch.Generator(DEVICE).manual_seed(0)
    sizes = [*sizes_of(shape), *([(shape["q_heads"],)] if shape.get("sinks") else [])]
    dtype = getattr(torch, shape.get("dtype", "bfloat16"))
    q, k, v, dout, *sinks = (torch.randn(size, generator=source, device=DEVICE).to(dtype) for size in sizes)
    return [x.requires_grad_() for x in (q, k, v, *sinks)], dout


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
    attend = sdpa("CUDNN_ATTENTION" if DEVICE == "cuda" else "MATH", is_causal=causal, enable_gqa=True)
    return lambda q, k, v, *sinks: attend(q, k, v)


def sdpa(backend: str, **options: Any) -> Attend:
    """PyTorch's, of (batch, length, heads, head dim)."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), **options).transpose(1, 2)

    return attend


def measure(shape: Shape, forward: bool, way: str, runs: int) -> dict[str, Any]:
    """Milliseconds of ours and of the yardstick, and a sum of the bits of ours. way: queued, launched or graphs."""
    inputs, dout = tensors_of(shape)
    attend = attention_of(shape)

    def prepare(attend: Attend, leaves: list[Tensor]) -> Call:
        if forward:
            return lambda: attend(*inputs)
        out = attend(*inputs)
        return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)

    made = [lambda: prepare(attend, inputs), lambda: prepare(yardstick_of(shape), inputs[:3])]
    calls = [replayed(one) if way == "graphs" else one() for one in made]
    at_once, lead_in = (AT_ONCE, SHORT_LEAD_IN) if way == "launched" else (1, LEAD_IN)
    several = [lambda call=call: [call() for _ in range(at_once)] for call in calls]
    ours, yardstick = (ms / at_once for ms in milliseconds(several, runs, lead_in))
    out = attend(*inputs)
    return {"ms": ours, "yardstick_ms": yardstick, "bits": [bit_sum(x) for x in (out, *torch.autograd.grad(out, inputs, dout))]}


def bit_sum(x: Tensor) -> int:
    """Another one, nearly always, when a bit is another."""
    bits = x.detach().contiguous().view(torch.int16).flatten().long()
    return int((bits * (torch.arange(len(bits), device=x.device) % 65521 + 1)).sum())


def memory(shape: Shape) -> dict[str, Any]:
    """Bytes of the workspace that a causal backward tells of; on a GPU also by how much the memory in use rises, without gradients."""
    from dash_attn import explain, flash_attn_func

    meta = [torch.empty(size, dtype=getattr(torch, shape["dtype"]), device="meta") for size in sizes_of(shape)[:3]]
    found = {"workspace_bytes": explain(flash_attn_func, *meta, causal=True, backend="hopper", predict_time=False).workspace_bytes}
    if DEVICE == "cuda":
        inputs, dout = tensors_of(shape)
        out = attention_of(shape)(*inputs)
        torch.autograd.grad(out, inputs, dout, retain_graph=True)  # compiles, and allocates what stays
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gradients = torch.autograd.grad(out, inputs, dout, retain_graph=True)
        torch.cuda.synchronize()
        found["measured_bytes"] = torch.cuda.max_memory_allocated() - before - sum(x.nbytes for x in gradients)
    return found


def measured_in(tree: Path, what: str, shapes: list[Shape], *options: Any) -> list[dict[str, Any]]:
    """What `measure` or `memory` finds in a tree, shape by shape, in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.one_tree", str(tree.resolve()), what]
    asked = json.dumps([shapes, options])
    lines = subprocess.run(command, check=True, cwd=ROOT, input=asked, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    return [json.loads(line) for line in lines]


def gpu_and_torch() -> tuple[str, str]:
    """A child asks PyTorch, so that this process holds no memory of the GPU."""
    asked = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else 'none'); print(torch.__version__)"
    gpu, version = subprocess.run([sys.executable, "-c", asked], check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    return gpu, version


def main(tree: str, what: str) -> None:
    sys.path.insert(0, tree)
    import dash_attn

    found = Path(dash_attn.__file__).resolve()
    if Path(tree).resolve() not in found.parents:
        raise SystemExit(f"dash_attn was imported from {found}, not from {tree}")
    shapes, options = json.load(sys.stdin)
    for shape in shapes:
        print(json.dumps({"measure": measure, "memory": memory}[what](shape, *options)), flush=True)
        if DEVICE == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main(*sys.argv[1:])
