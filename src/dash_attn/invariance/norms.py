"""Means and norms of rows, computed with at least 16 rows; and on a CPU activations, whose last elements are computed in another way.

PyTorch's loops on a CPU take vectors of elements, and the rest of a thread's share one by one. For some functions that rounds
differently. So there they get whole vectors, in pieces that one thread computes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import pad

from ..door import Change
from .probe import ways
from .rows import OF_NORMS, as_rows, at_least, on_gpu

VECTOR = 64  # elements; PyTorch's loops take at most that many at a time
OF_16_BYTES = 8  # elements, of the smallest type
PIECE = 2**15  # elements; PyTorch deals no less to a thread
LAST = (-1, (-1,), [-1])


def _mean_of_rows(original: Any) -> Callable[..., Tensor]:
    @wraps(original)
    def mean(input: Tensor, dim: Any = None, keepdim: bool = False, **rest: Any) -> Tensor:
        dim = rest.pop("axis", dim)
        if dim is None:
            whole: Tensor = original(input, **rest)
            return whole
        if dim not in LAST or "out" in rest or not input.numel():
            other: Tensor = original(input, dim, keepdim, **rest)
            return other
        out = _with_others(lambda rows: original(rows, -1, True, **rest), input, original)
        return out if keepdim else out[..., 0]

    return mean


def _norm_of_rows(original: Any) -> Callable[..., Tensor]:
    @wraps(original)
    def norm(input: Tensor, normalized_shape: Any, *arguments: Any, **rest: Any) -> Tensor:
        if len(normalized_shape) != 1 or not input.numel():
            whole: Tensor = original(input, normalized_shape, *arguments, **rest)
            return whole
        return _with_others(lambda rows: original(rows, normalized_shape, *arguments, **rest), input, original)

    return norm


def _with_others(compute: Callable[[Tensor], Tensor], x: Tensor, original: Any) -> Tensor:
    if on_gpu(x):
        ways.check_norm(original, x)
    count = x.numel() // x.shape[-1]
    if count >= OF_NORMS and x.stride(-1) == 1:
        return compute(x)
    rows = compute(at_least(OF_NORMS, as_rows(x)))[:count]
    return rows.view(*x.shape[:-1], rows.shape[-1])


def _softmax_of_rows(original: Any) -> Callable[..., Tensor]:
    """A GPU's kernels read 16 bytes at a time, and sum a row that begins in between in another order."""

    @wraps(original)
    def softmax(input: Tensor, dim: Any = None, *arguments: Any, **rest: Any) -> Tensor:
        of_rows = on_gpu(input) and input.ndim and dim in (-1, input.ndim - 1) and "out" not in rest
        missing = -input.shape[-1] % OF_16_BYTES if of_rows else 0
        out: Tensor = original(pad(input, (0, missing), value=-torch.inf) if missing else input, dim, *arguments, **rest)
        return out[..., : input.shape[-1]] if missing else out

    return softmax


def _whole_vectors(original: Any) -> Callable[..., Tensor]:
    @wraps(original)
    def activation(input: Tensor, *arguments: Any, **rest: Any) -> Tensor:
        if input.device.type != "cpu" or not input.numel() or not input.is_floating_point():
            out: Tensor = original(input, *arguments, **rest)
            return out
        rest = {name: value for name, value in rest.items() if name != "inplace"}  # the result is what counts
        elements = input.reshape(-1)
        padded = pad(elements, (0, -len(elements) % VECTOR))
        pieces = [original(piece, *arguments, **rest) for piece in padded.split(PIECE)]
        return torch.cat(pieces)[: len(elements)].view(input.shape)

    return activation


def _kept_function(name: str) -> Callable[[Any, Tensor], Tensor]:
    """Modules of transformers that took PyTorch's function when they were built look for it again."""

    def forward(self: Any, input: Tensor) -> Tensor:
        written_in_python = getattr(self.act, "__self__", None) is self
        options = getattr(self.act, "keywords", {})
        out: Tensor = self.act(input) if written_in_python else getattr(functional, name)(input, **options)
        return out

    return forward


REPLACED = (
    *((owner, "mean", _mean_of_rows) for owner in (torch, Tensor)),
    *((torch, name, _norm_of_rows) for name in ("layer_norm", "rms_norm")),  # those of functional call them
    *((owner, name, _softmax_of_rows) for owner in (torch, Tensor) for name in ("softmax", "log_softmax")),
    *((functional, name, _whole_vectors) for name in ("silu", "gelu", "softplus", "mish", "elu", "selu", "sigmoid")),
    *((owner, name, _whole_vectors) for name in ("sigmoid", "rsqrt") for owner in (torch, Tensor)),
)
KEEPERS = {"GELUTanh": "gelu", "GELUActivation": "gelu", "MishActivation": "mish"}
_MADE = [(Change(owner, name, make(getattr(owner, name))), getattr(owner, name)) for owner, name, make in REPLACED]
_KEPT: list[tuple[Change, Any]] = []


def changes() -> Iterator[tuple[Change, Any]]:
    """Each with PyTorch's own function."""
    yield from _MADE
    activations: Any = sys.modules.get("transformers.activations")
    if activations is not None and not _KEPT:
        classes = [(getattr(activations, name), function) for name, function in KEEPERS.items() if hasattr(activations, name)]
        _KEPT.extend((Change(owner, "forward", _kept_function(function)), owner.forward) for owner, function in classes)
    yield from _KEPT
