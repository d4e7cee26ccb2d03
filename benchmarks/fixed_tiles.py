"""A product as batch-invariant libraries make it: a Triton kernel whose tiles and order of sums are the same for any number of rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from dash_attn import invariance
from dash_attn.invariance.products import gradient_of_weight

TILES = {"ROWS": 128, "COLUMNS": 128, "DEPTH": 64, "num_warps": 8, "num_stages": 3}


@triton.jit
def _product(x, weight, out, rows, columns, depth, x_step, w_row, w_column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, depth, DEPTH):
        k = start + tl.arange(0, DEPTH)
        of_x = tl.load(x + row * x_step + k[None, :], (row < rows) & (k[None, :] < depth), 0.0)
        of_w = tl.load(weight + column * w_row + k[:, None] * w_column, (column < columns) & (k[:, None] < depth), 0.0)
        total = tl.dot(of_x, of_w, total)
    tl.store(out + row * columns + column, total.to(out.dtype.element_ty), (row < rows) & (column < columns))


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Rows (n, k) with a weight (columns, k)."""
    columns, out = len(weight), x.new_empty(len(x), len(weight))
    grid = (triton.cdiv(len(x), TILES["ROWS"]), triton.cdiv(columns, TILES["COLUMNS"]))
    _product[grid](x, weight, out, len(x), columns, x.shape[1], x.stride(0), *weight.stride(), **TILES)
    return out


class _Linear(torch.autograd.Function):
    """The gradient of the weight is cuBLAS's, with the settings of before, as in ours."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return product(rows, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        rows, weight = ctx.saved_tensors
        grad = grad.contiguous()
        return product(grad, weight.t()), gradient_of_weight(grad, rows)


_apply: Any = _Linear.apply


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out: Tensor = _apply(input.reshape(-1, input.shape[-1]).contiguous(), weight).view(*input.shape[:-1], len(weight))
    return out if bias is None else out + bias


@contextmanager
def products_replaced() -> Iterator[None]:
    """Inside `invariance.enable()`, but for products."""
    with invariance.enable():
        ours, functional.linear = functional.linear, linear
        try:
            yield
        finally:
            functional.linear = ours
