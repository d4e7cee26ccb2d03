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
from torch.nn.functional import pad

from ..door import Change
from ..errors import Unsupported
from .probe import Way, ways
from .rows import aligned, as_rows, at_least, in_blocks, on_gpu
from .switches import LOCK, SWITCHES

PLAIN = (Tensor, Parameter)
WHOLE = 16  # K and N are a multiple of it where a CPU computes with vectors of elements
_linear: Any = functional.linear


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """What functional.linear gives for a weight of two dimensions."""
    if type(x) not in PLAIN or type(weight) not in PLAIN:
        raise Unsupported(
            f"dash_attn.invariance takes plain tensors; got a product of {type(x).__name__} and {type(weight).__name__}, whose parts"
            " may be on other ranks or in another format"
        )
    if x.is_meta or x.layout != torch.strided or not x.numel() or not weight.numel() or not x.is_floating_point():
        out: Tensor = _linear(x, weight, bias)
        return out
    weight = weight.contiguous() if 0 in weight.stride() else weight
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:  # which PyTorch does not cast
        rows = _computed(as_rows(x.to(torch.get_autocast_dtype(device))), weight, bias)  # PyTorch keeps the weight's cast
    else:
        grads = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad))
        rows = (_Product.apply if grads else _computed)(as_rows(x), weight, bias)
    return rows.view(*x.shape[:-1], len(weight))


def _computed(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if not on_gpu(rows):
        return _on_cpu(rows, weight, bias)
    with LOCK:
        SWITCHES.check()
        return _in_proved_way(rows, aligned(weight), None if bias is None else aligned(bias.contiguous()))


def _on_cpu(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """In blocks. MKL sums rows of some shapes by their place in a block, so those are computed as larger shapes."""
    n, k = weight.shape
    is_odd = rows.dtype.itemsize > 2 and bool(n % WHOLE or k % WHOLE)
    if is_odd:
        rows, weight = pad(rows, (0, -k % WHOLE)), pad(weight, (0, -k % WHOLE, 0, -n % WHOLE))
        bias = None if bias is None else pad(bias, (0, -n % WHOLE))
    ways.check_blocks(_linear, rows, weight, bias)
    out = in_blocks(lambda block: _linear(block, weight, bias), rows)
    return out[:, :n].contiguous() if is_odd else out


def _in_proved_way(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    way = ways.of_product(_linear, rows, weight, bias)
    if way.block:
        return in_blocks(lambda block: _linear(block, weight, bias), rows, way.block)
    if len(rows) > way.most:
        return torch.cat([_in_proved_way(part, weight, bias) for part in rows.split(way.most)])
    out: Tensor = _linear(at_least(way.fewest, rows), weight, bias)
    return out if len(out) == len(rows) else out[: len(rows)].clone()  # no view, so that it can be changed in place


def way_of(weight: Tensor, bias: Tensor | None) -> Way:
    """How products with this weight are computed on its GPU."""
    return ways.of_product(_linear, weight.new_zeros(1, weight.shape[1]), aligned(weight), bias)


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
        if weight.ndim == 2:
            return product(input, weight, bias)
        out = _with_vector(input, weight)
        return out if bias is None else out + bias

    return linear


def _with_vector(x: Tensor, vector: Tensor) -> Tensor:
    return product(x, vector[None])[..., 0]


def _product_with_matrix(original: Any) -> Callable[..., Tensor]:
    """Rows of any shape with a matrix or a vector. All else is PyTorch's: attention, tables of angles."""

    @wraps(original)
    def matmul(input: Tensor, other: Any = None, *, out: Tensor | None = None, **rest: Any) -> Tensor:
        other = next((rest.pop(name) for name in ("mat2", "vec") if name in rest), other)
        if rest or not isinstance(other, Tensor) or not input.ndim or other.ndim not in (1, 2) or input.ndim == other.ndim == 1:
            result: Tensor = original(input, other, **rest, **({} if out is None else {"out": out}))
            return result
        rows = product(input, other.t()) if other.ndim == 2 else _with_vector(input, other)
        return rows if out is None else out.copy_(rows)

    return matmul


def _added_to_bias(original: Any) -> Callable[..., Tensor]:
    @wraps(original)
    def addmm(input: Tensor, *matrices: Any, beta: float = 1, alpha: float = 1, **rest: Any) -> Tensor:
        out = rest.pop("out", None)
        if rest or len(matrices) != 2:
            result: Tensor = original(input, *matrices, beta=beta, alpha=alpha, **rest, **({} if out is None else {"out": out}))
            return result
        x, weight = matrices[0], matrices[1].t()
        if input.shape == weight.shape[:1] and beta == alpha == 1:
            found = product(x, weight, input)
        else:
            found = alpha * product(x, weight)
            found = found + beta * input if beta else found
        return found if out is None else out.copy_(found)

    return addmm


_mm: Any = torch.mm
MATRICES = *((owner, name) for owner in (torch, Tensor) for name in ("matmul", "mm", "mv")), (Tensor, "__matmul__")
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
