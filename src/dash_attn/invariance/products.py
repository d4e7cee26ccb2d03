"""Products of rows with a weight: one row is computed as two, and shapes for which that is not enough in blocks of rows.

The gradient of the rows is such a product, too. The gradient of the weight is a sum over rows, which no row of a forward depends on:
it is computed with the settings that were there before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Parameter, functional

from ..door import Change
from ..errors import Unsupported
from .probe import Way, ways
from .rows import aligned, as_rows, at_least, in_blocks, on_gpu
from .switches import LOCK, SWITCHES

PLAIN = (Tensor, Parameter)
_linear: Any = functional.linear


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """What functional.linear gives for a weight of two dimensions."""
    if type(x) not in PLAIN or type(weight) not in PLAIN:
        raise Unsupported(
            f"dash_attn.invariance takes plain tensors; got a product of {type(x).__name__} and {type(weight).__name__}, whose parts"
            " may be on other ranks or in another format"
        )
    if x.is_meta or x.layout != torch.strided or not x.numel() or not x.is_floating_point():
        out: Tensor = _linear(x, weight, bias)
        return out
    device = x.device.type
    if torch.is_autocast_enabled(device):
        rows = _computed(as_rows(x.to(torch.get_autocast_dtype(device))), weight, bias)  # PyTorch keeps the weight's cast
    else:
        grads = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad))
        rows = (_Product.apply if grads else _computed)(as_rows(x), weight, bias)
    return rows.view(*x.shape[:-1], len(weight))


def _computed(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if not on_gpu(rows):
        return in_blocks(lambda block: _linear(block, weight, bias), rows)
    with LOCK:
        SWITCHES.check()
        return _in_proved_way(rows, aligned(weight), None if bias is None else aligned(bias))


def _in_proved_way(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    way = ways.of_product(_linear, rows, weight, bias)
    if way.block:
        return in_blocks(lambda block: _linear(block, weight, bias), rows, way.block)
    if len(rows) > way.most:
        return torch.cat([_in_proved_way(part, weight, bias) for part in rows.split(way.most)])
    out: Tensor = _linear(at_least(way.fewest, rows), weight, bias)
    return out if len(out) == len(rows) else out[: len(rows)]


def way_of(weight: Tensor, bias: Tensor | None) -> Way:
    """How products with this weight are computed on its GPU."""
    return ways.of_product(_linear, weight.new_zeros(1, weight.shape[1]), weight, bias)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        needs_rows, needs_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(rows if needs_weight else None, weight if needs_rows else None)
        return _computed(rows, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        of_rows, of_weight, of_bias = ctx.needs_input_grad
        grad = as_rows(grad)
        grad_rows = _computed(grad, weight.t(), None) if of_rows else None
        grad_weight = gradient_of_weight(grad, rows) if of_weight else None
        return grad_rows, grad_weight, grad.sum(0) if of_bias else None


def gradient_of_weight(grad: Tensor, rows: Tensor) -> Tensor:
    """A sum over rows."""
    with SWITCHES.as_before():
        summed: Tensor = _mm(grad.t(), rows)
    return summed


def _linear_of_rows(original: Any) -> Callable[..., Tensor]:
    @wraps(original)
    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out: Tensor = product(input, weight, bias) if weight.ndim == 2 else original(input, weight, bias)
        return out

    return linear


def _product_with_matrix(original: Any) -> Callable[..., Tensor]:
    """Rows of any shape with a matrix. All else is PyTorch's: attention, tables of angles."""

    @wraps(original)
    def matmul(input: Tensor, other: Any, *, out: Tensor | None = None, **rest: Any) -> Tensor:
        if not rest and isinstance(other, Tensor) and other.ndim == 2 and input.ndim >= 2:
            rows = product(input, other.t())
            return rows if out is None else out.copy_(rows)
        result: Tensor = original(input, other, **rest, **({} if out is None else {"out": out}))
        return result

    return matmul


def _added_to_bias(original: Any) -> Callable[..., Tensor]:
    @wraps(original)
    def addmm(input: Tensor, *arguments: Any, **rest: Any) -> Tensor:
        if not rest and len(arguments) == 2 and input.ndim == 1:
            return product(arguments[0], arguments[1].t(), input)
        out: Tensor = original(input, *arguments, **rest)
        return out

    return addmm


_mm: Any = torch.mm
MATRICES = ((torch, "matmul"), (torch, "mm"), (Tensor, "matmul"), (Tensor, "mm"), (Tensor, "__matmul__"))
_MADE = [
    (Change(owner, name, make(getattr(owner, name))), getattr(owner, name))
    for owner, name, make in (
        (functional, "linear", _linear_of_rows),
        *((owner, "addmm", _added_to_bias) for owner in (torch, Tensor)),
        *((owner, name, _product_with_matrix) for owner, name in MATRICES),
    )
]


def changes() -> Iterator[tuple[Change, Any]]:
    """Each with PyTorch's own function."""
    yield from _MADE
