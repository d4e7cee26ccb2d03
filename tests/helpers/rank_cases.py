"""Ranks that share a sequence on backend 'hopper': cases, what each gets, and what float32 on the CPU says of it."""

from __future__ import annotations

import torch
from torch import Tensor

from dash_attn import Causal, Documents, Full, Prefix, Window, flash_attn_func
from dash_attn.scheduling.ranks.sharding import Sharding
from played_ranks import Case

UNEVEN = Sharding((128, 256, 128, 128, 256, 200), (0, 1, 2, 2, 1, 0))
CASES = {
    "causal": Case(Causal(), Sharding.zigzag(1024, 2), (2, 2)),
    "causal, fp16, uneven": Case(Causal(), UNEVEN, (2, 2), (128, 128), dtype=torch.float16),
    "causal, contiguous, batch": Case(Causal(), Sharding.contiguous(1024, 4), (2, 2), (128, 128), batch=2, together=3),
    "a group in parts": Case(Causal(), Sharding.zigzag(2560, 2), (6, 2), (64, 64), together=4),
    "a group in parts, batch": Case(Full(), Sharding.contiguous(2304, 2), (2, 1), (64, 64), batch=2, together=4),
    "parts of several heads": Case(Causal(), Sharding.zigzag(1536, 3), (10, 2), (64, 64), together=2, head_offset=1),
    "window": Case(Window(300, 0), Sharding.zigzag(1024, 4), (2, 2), (128, 128)),
    "window ahead": Case(Window(150, 90), UNEVEN, (3, 1), (192, 128), head_offset=1),
    "full": Case(Full(), Sharding.contiguous(2560, 2), (2, 1), (64, 64)),
    "full, few tiles": Case(Full(), Sharding.zigzag(512, 2), (2, 1), (256, 256)),
    "full, one rank, many chunks": Case(Full(), Sharding((640,) * 4, (0,) * 4), (2, 2), (64, 64), together=2),
    "padded head dims": Case(Causal(), Sharding.zigzag(512, 2), (2, 2), (59, 40)),
    "values of another dim": Case(Causal(), Sharding.zigzag(512, 2), (2, 1), (96, 40)),
    "head dim 192": Case(Causal(), Sharding.zigzag(512, 2), (4, 2), (192, 192), together=2),
    "prefix": Case(Prefix(700), Sharding.zigzag(1024, 2), (2, 2), (128, 128), schedule="alternating"),
    "documents": Case(Documents((300, 21, 775)), UNEVEN, (2, 2), (64, 64), schedule="alternating"),
    "weave, listed entries": Case(Window(-1, 100), Sharding((512,), (0,)), (2, 2), (64, 64), schedule="weave"),
}


def inputs_of(case: Case, sinks: Tensor | None = None) -> tuple[tuple[Tensor, ...], list[Tensor], Tensor | None]:
    """What the ranks get, and what float32 on the CPU says of it; dlse, where there are sinks."""
    torch.manual_seed(0)
    (q_heads, kv_heads), (dim, v_dim), rows = case.heads, case.dims, case.sharding.rows
    shapes = [(q_heads, dim), (kv_heads, dim), (kv_heads, v_dim), (q_heads, v_dim)]
    q, k, v, dout = (torch.randn(case.batch, rows, *shape).to(case.dtype) for shape in shapes)
    q32, k32, v32 = (x.float().requires_grad_() for x in (q, k, v))
    options = {"mask": case.mask, "schedule": case.schedule, "return_lse": True, "head_offset": case.head_offset}
    out, lse = flash_attn_func(q32, k32, v32, sinks=sinks, **options)
    dlse = None if sinks is None else torch.randn_like(lse)
    torch.autograd.backward([out, lse], [dout.float(), torch.zeros_like(lse) if dlse is None else dlse])
    return (dout, q, k, v, out.detach().to(case.dtype), lse.detach()), [q32.grad, k32.grad, v32.grad], dlse


def assert_near(found: list[Tensor], expected: list[Tensor]) -> None:
    for name, one, other in zip(("dq", "dk", "dv"), found, expected, strict=True):
        worst = (one.float() - other).abs().max() / other.abs().max()
        assert worst < 0.02, f"{name}: off by {worst:.3f} of the largest"
