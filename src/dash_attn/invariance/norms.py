"""Means, norms and the like of rows, computed with at least 16 rows; and on a CPU activations, whose last elements are computed otherwise.

PyTorch's loops on a CPU take vectors of elements, and the rest of a thread's share one by one. For some functions that rounds
differently. So there they get whole vectors, in pieces that one thread computes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import pad

from ..door import Change
from .probe import ways
from .rows import OF_NORMS, aligned, as_rows, at_least, in_blocks, on_gpu

VECTOR = 64  # elements; PyTorch's loops take at most that many at a time
OF_16_BYTES = 8  # elements, of the smallest type
PIECE = 2**15  # elements; PyTorch deals no less to a thread
Compute = Callable[[Tensor], Tensor]


def _reduced(original: Any, tried: Any = None) -> Callable[..., Tensor]:
    """Of mean and logsumexp. tried: another function, whose sums are the same and whose results show more."""

    @wraps(original)
    def reduce(input: Tensor, dim: Any = None, keepdim: bool = False, **rest: Any) -> Tensor:
        dim, keepdim = rest.pop("axis", dim), rest.pop("keepdims", keepdim)
        if dim is None:
            whole: Tensor = original(input, **rest)
            return whole
        return _of_rows(tried or original, original, input, dim, keepdim, **rest)

    return reduce


def _norm_of_vectors(original: Any) -> Callable[..., Tensor]:
    @wraps(original)
    def vector_norm(x: Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, **rest: Any) -> Tensor:
        return _of_rows(original, lambda x, *where, **rest: original(x, ord, *where, **rest), x, dim, keepdim, **rest)

    return vector_norm


def _of_rows(tried: Any, compute: Any, x: Tensor, dim: Any, keepdim: bool, **rest: Any) -> Tensor:
    """Rows of the last dimension. All else is PyTorch's."""
    (dim,) = dim if isinstance(dim, (tuple, list)) and len(dim) == 1 else (dim,)
    if dim not in (-1, x.ndim - 1) or not x.is_floating_point() or not x.numel() or not x.ndim:
        other: Tensor = compute(x, dim, keepdim, **rest)
        return other
    dtype, into = rest.pop("dtype", None), rest.pop("out", None)
    x = x if dtype is None else x.to(dtype)  # first: some types are summed in others
    out = _with_others(lambda rows: compute(rows, -1, True, **rest), x, tried.__name__, lambda rows: tried(rows, dim=-1, keepdim=True))
    out = out if keepdim else out[..., 0]
    return out if into is None else into.copy_(out)


def _norm_of_rows(original: Any) -> Callable[..., Tensor]:
    @wraps(original)
    def norm(input: Tensor, normalized_shape: Any, *arguments: Any, **rest: Any) -> Tensor:
        def compute(rows: Tensor) -> Tensor:
            found: Tensor = original(rows, normalized_shape, *arguments, **rest)
            return found

        if len(normalized_shape) != 1 or not input.numel():
            return compute(input)
        return _with_others(compute, input, original.__name__, lambda rows: original(rows + 1, rows.shape[1:]))

    return norm


def _with_others(compute: Compute, x: Tensor, kind: str, tried: Compute) -> Tensor:
    rows = as_rows(x)
    blocks = on_gpu(x) and ways.of_norm(kind, tried, rows)
    out = in_blocks(compute, rows) if blocks else compute(at_least(OF_NORMS, rows))[: len(rows)]
    return out.view(*x.shape[:-1], out.shape[-1])


def _softmax_of_rows(original: Any) -> Callable[..., Tensor]:
    """A GPU's kernels read 16 bytes at a time, and sum a row that begins in between in another order."""

    @wraps(original)
    def softmax(input: Tensor, dim: Any = None, dtype: Any = None, *, out: Tensor | None = None, **rest: Any) -> Tensor:
        if not on_gpu(input) or not input.ndim or dim not in (-1, input.ndim - 1):
            given = {"dtype": dtype, "out": out, **rest}
            found: Tensor = original(input, dim, **{name: value for name, value in given.items() if value is not None})
            return found
        x = aligned(input if dtype is None else input.to(dtype))
        missing = -x.shape[-1] % OF_16_BYTES
        found = original(pad(x, (0, missing), value=-torch.inf), -1, **rest)[..., : x.shape[-1]] if missing else original(x, -1, **rest)
        return found if out is None else out.copy_(found)

    return softmax


def _whole_vectors(original: Any) -> Callable[..., Tensor]:
    @wraps(original)
    def activation(input: Tensor, *arguments: Any, **rest: Any) -> Tensor:
        if input.device.type != "cpu" or not input.numel() or not input.is_floating_point():
            out: Tensor = original(input, *arguments, **rest)
            return out
        inplace = rest.pop("inplace", False) or any(given is True for given in arguments)
        into, options = rest.pop("out", input if inplace else None), [given for given in arguments if not isinstance(given, bool)]
        elements = input.reshape(-1)
        padded = pad(elements, (0, -len(elements) % VECTOR))
        pieces = [original(piece, *options, **rest) for piece in padded.split(PIECE)]
        out = torch.cat(pieces)[: len(elements)].view(input.shape)
        return out if into is None else into.copy_(out)

    return activation


def _kept_function(name: str) -> Callable[[Any, Tensor], Tensor]:
    """Modules of transformers that took PyTorch's function when they were built look for it again."""

    def forward(self: Any, input: Tensor) -> Tensor:
        written_in_python = getattr(self.act, "__self__", None) is self
        options = getattr(self.act, "keywords", {})
        out: Tensor = self.act(input) if written_in_python else getattr(functional, name)(input, **options)
        return out

    return forward


REPLACED: tuple[tuple[Any, str, Any], ...] = (
    *((owner, "mean", _reduced) for owner in (torch, Tensor)),
    *((owner, "logsumexp", partial(_reduced, tried=torch.sum)) for owner in (torch, Tensor)),
    (torch.linalg, "vector_norm", _norm_of_vectors),  # which functional.normalize and norm call
    *((torch, name, _norm_of_rows) for name in ("layer_norm", "rms_norm")),  # those of functional call them
    *((owner, name, _softmax_of_rows) for owner in (torch, Tensor) for name in ("softmax", "log_softmax")),
    *((functional, name, _whole_vectors) for name in ("silu", "gelu", "softplus", "mish", "elu", "selu", "celu", "sigmoid")),
    *((owner, name, _whole_vectors) for name in ("sigmoid", "rsqrt", "exp2", "sinh") for owner in (torch, Tensor)),
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
