"""Attention over a sequence that ranks share: cases, their inputs, and what one process makes of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dash_attn import Documents, Prefix, TileMap, flash_attn_func
from dash_attn.distributed import Sharding

RANKS = 4
NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")
SEQUENCE_DIM = {"out": 1, "lse": 2, "dq": 1, "dk": 1, "dv": 1}
F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Case:
    """On `ranks` ranks. `ulysses` and `sharding` are for these alone; one process needs neither."""

    ranks: int
    rows: int
    heads: tuple[int, int] = (2, 2)
    dims: tuple[int, int] = (16, 16)
    batch: int = 1
    dtype: torch.dtype = F32
    sharding: str | Sharding = "zigzag"
    ulysses: int = 1
    sinks: bool = False
    lse_gradient: bool = False
    call: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Inputs:
    """Of the whole sequence."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    sinks: Tensor | None

    @classmethod
    def of(cls, case: Case) -> Inputs:
        generator = torch.Generator().manual_seed(7)
        (q_heads, kv_heads), (dim, v_dim) = case.heads, case.dims

        def random(*shape: int, dtype: torch.dtype = case.dtype) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=F64).to(dtype)

        rows = case.batch, case.rows
        sinks = random(q_heads, dtype=torch.promote_types(case.dtype, F32)).requires_grad_() if case.sinks else None
        return cls(
            random(*rows, q_heads, dim),
            random(*rows, kv_heads, dim),
            random(*rows, kv_heads, v_dim),
            random(*rows, q_heads, v_dim),
            random(case.batch, q_heads, case.rows, dtype=torch.promote_types(case.dtype, F32)),
            sinks,
        )


def results(
    case: Case, out: Tensor, lse: Tensor, leaves: list[Tensor], gradients_of: tuple[Tensor, Tensor], retain_graph: bool = False
) -> dict[str, Tensor]:
    """Output, LSE and the gradients of leaves: q, k, v and maybe sinks."""
    used = 2 if case.lse_gradient else 1
    gradients = torch.autograd.grad((out, lse)[:used], leaves, gradients_of[:used], retain_graph=retain_graph)
    return dict(zip(NAMES, (out.detach(), lse.detach(), *gradients), strict=False))


def on_one_process(case: Case) -> dict[str, Tensor]:
    """The truth: flash_attn_func of the whole sequence."""
    inputs = Inputs.of(case)
    q, k, v = (x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    out, lse = flash_attn_func(q, k, v, sinks=inputs.sinks, return_lse=True, **case.call)  # type: ignore[misc]
    leaves = [q, k, v] + ([] if inputs.sinks is None else [inputs.sinks])
    return results(case, out, lse, leaves, (inputs.dout, inputs.dlse))


def rows_of(case: Case, rank: int) -> Tensor:
    """By the definition of each sharding."""
    if isinstance(case.sharding, Sharding):
        chunks = torch.arange(case.rows).split(list(case.sharding.lengths))
        return torch.cat([chunk for chunk, owner in zip(chunks, case.sharding.owners, strict=True) if owner == rank])
    if case.sharding == "contiguous":
        return torch.arange(case.rows).chunk(case.ranks)[rank]
    chunks = torch.arange(case.rows).chunk(2 * case.ranks)
    return torch.cat([chunks[rank], chunks[-1 - rank]])


def zigzag_of(lengths: tuple[int, ...], ranks: int) -> Sharding:
    """Chunks of lengths of their own, dealt as zigzag deals them."""
    there = list(range(ranks))
    return Sharding(lengths, (*there, *reversed(there)))


def banded(rows: int, tiles: int) -> TileMap:
    """A band, and the first block for everybody. Some keys are attended by nobody."""
    blocks = torch.ones(tiles, tiles, dtype=torch.bool).tril().triu(-1)
    blocks[:, 0] = True
    blocks[:, tiles // 2] = False
    return TileMap(blocks.numpy(), rows // tiles, rows // tiles)


def dropout(batch: int) -> dict[str, Any]:
    return {"dropout_p": 0.3, "dropout_seed": torch.arange(batch) + 5}


CAUSAL: dict[str, Any] = {"causal": True}
ALTERNATING: dict[str, Any] = {"schedule": "alternating"}
UNEVEN = zigzag_of((128, 256, 128, 100), 2)
ODD_OWNERS = Sharding((128, 256, 128, 128, 70), (2, 0, 1, 2, 0))

# In `make test`: each choice at least once, most numbers of ranks with each. Times are those of one rank of a small machine.
CASES: dict[str, Case] = {
    "one rank": Case(1, 300, sharding="contiguous", call=CAUSAL),
    "one rank, zigzag, sinks": Case(1, 256, sinks=True, lse_gradient=True, call=CAUSAL),
    "causal, 2 ranks": Case(2, 512, call=CAUSAL),
    "causal, 3 ranks, batch 2": Case(3, 768, batch=2, dims=(16, 24), call=CAUSAL),
    "causal, 4 ranks, grouped": Case(4, 1024, (4, 2), call=CAUSAL),
    "causal, contiguous, 4 ranks, bf16": Case(4, 512, sharding="contiguous", dtype=BF16, call=CAUSAL),
    "causal, contiguous, ragged end": Case(3, 316, (3, 1), sharding=Sharding((128, 128, 60), (0, 1, 2)), sinks=True, call=CAUSAL),
    "causal, uneven zigzag, fp64": Case(2, 612, dtype=F64, sharding=UNEVEN, lse_gradient=True, call=CAUSAL),
    "causal, odd owners, head offset": Case(3, 710, (3, 3), sharding=ODD_OWNERS, call={**CAUSAL, "head_offset": 1}),
    "causal, grouped, head offset": Case(3, 768, (4, 2), batch=2, call={**CAUSAL, "head_offset": 1}),
    "full, 2 ranks": Case(2, 512, (4, 2), batch=2),
    "full, 3 ranks, contiguous": Case(3, 384, sharding="contiguous", sinks=True),
    "full, 4 ranks, softcap": Case(4, 1024, (2, 1), call={"softcap": 3.0}),
    "full, uneven": Case(3, 710, (1, 1), sharding=ODD_OWNERS, dtype=BF16),
    "window, 4 ranks": Case(4, 1024, sinks=True, call={"window_size": (200, 0)}),
    "window, 2 ranks, two sides": Case(2, 512, batch=2, lse_gradient=True, call={"window_size": (150, 70)}),
    "window, 3 ranks, no left limit": Case(3, 768, call={"window_size": (-1, 130)}),
    # The third KV head is needed before the second.
    "window, 4 ranks, contiguous, fp16": Case(4, 512, (4, 4), dtype=F16, sharding="contiguous", call={"window_size": (100, 0)}),
    "window, uneven": Case(2, 612, sharding=UNEVEN, call={"window_size": (100, 60)}),
    "prefix, alternating": Case(3, 768, (2, 1), call={"mask": Prefix(300), **ALTERNATING}),
    "blocks, alternating": Case(2, 512, call={"mask": banded(512, 8), **ALTERNATING}),
    "full, alternating": Case(4, 1024, call=ALTERNATING),
    "parts of a group": Case(2, 2304, (4, 1), dims=(8, 8), sharding=Sharding((1152, 1152), (0, 1)), call={"window_size": (128, 0)}),
    "dropout, 3 ranks": Case(3, 384, (4, 2), (8, 8), batch=2, sharding="contiguous", lse_gradient=True, call={**CAUSAL, **dropout(2)}),
    "dropout and ALiBi, ulysses and states": Case(
        4, 512, (4, 2), (8, 8), ulysses=2, sinks=True, call={**CAUSAL, **dropout(1), "alibi_slopes": torch.arange(4) / 32, "head_offset": 1}
    ),
    "ulysses alone": Case(4, 512, (4, 4), ulysses=4, sharding="contiguous", sinks=True, lse_gradient=True, call=CAUSAL),
    "ulysses alone, no multiple of a tile": Case(2, 252, (4, 2), ulysses=2, dtype=BF16),
    "ulysses alone, documents": Case(2, 444, (2, 2), ulysses=2, sinks=True, lse_gradient=True, call={"mask": Documents((300, 131, 13))}),
    "ulysses and states": Case(4, 1024, (4, 2), ulysses=2, batch=2, sinks=True, lse_gradient=True, call=CAUSAL),
    "ulysses and states, full": Case(4, 512, (2, 2), ulysses=2, sharding="contiguous", dtype=BF16),
    "ulysses and states, uneven": Case(4, 838, (2, 2), (16, 8), ulysses=2, sharding=Sharding((200, 184, 128, 326), (0, 1, 2, 3))),
}
