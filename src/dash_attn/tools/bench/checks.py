"""No speed without correctness: results against dense attention, and bits against bits where a candidate claims them."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ...masks import IntervalMask, Mask
from ..machine import bits_of
from .candidates import Runner, Tensors
from .shape import Shape

REPEATS = 3
FLOOR = 1e-3  # of the norm of a result
SINKS_FLOOR = 1e-2  # a few numbers, each a sum of many that nearly cancel
NAMES = {"forward": ("out",), "backward": ("dq", "dk", "dv", "dsinks")}
BLOCK = 2048  # query rows whose scores are held at a time


class Reference:
    """Dense attention of one KV head and its query heads, the last ones of the last row, at the size that is timed.

    A candidate may be off by twice what plain PyTorch in the same dtype is off from fp32, in the norm of each result.
    """

    def __init__(self, shape: Shape, tensors: Tensors) -> None:
        self.group, self.tensors = shape.group, tensors
        q, k, v, dout = (x[-1:, :, -heads:] for x, heads in zip(tensors[:4], (self.group, 1, 1, self.group), strict=True))
        part = Tensors(q, k, v, dout, None if tensors.sinks is None else tensors.sinks[-self.group :])
        self.exact = dense(Tensors(*(None if x is None else x.float() for x in part)), shape.attended, shape.softcap)  # type: ignore[arg-type]
        plain = dense(part, shape.attended, shape.softcap)
        floors = {name: SINKS_FLOOR if name == "dsinks" else FLOOR for name in self.exact}
        self.budgets = {name: 2 * distance(plain[name], exact) + floors[name] for name, exact in self.exact.items()}

    def complaint(self, direction: str, results: tuple[Tensor, ...]) -> str | None:
        """What is wrong with a candidate's results, if anything."""
        for name, result in _named(direction, results):
            error, budget = distance(self._part(name, result), self.exact[name]), self.budgets[name]
            if not error <= budget:  # NaN is also wrong
                return f"{name} is off by {error:.2g} of its norm; {budget:.2g} is allowed"
        return None

    def _part(self, name: str, result: Tensor) -> Tensor:
        """What the reference has of a result."""
        if name == "dsinks":
            return result[-self.group :]
        return result[-1:, :, -(1 if name in ("dk", "dv") else self.group) :]


def dense(tensors: Tensors, mask: Mask, softcap: float = 0.0) -> dict[str, Tensor]:
    """Attention of one row and one KV head, and its gradients, with whole rows of scores, in the dtype of the inputs.

    Sums over query heads and over blocks of rows are at least fp32, so that cutting the work up adds no error.
    """
    q, k, v, dout, sinks = tensors
    wide = torch.promote_types(q.dtype, torch.float32)
    sums = [x.detach().to(wide).requires_grad_() for x in (q, k, v, *(() if sinks is None else (sinks,)))]
    out, length = torch.empty_like(dout), q.shape[1]
    for first in range(0, length, BLOCK):
        rows = slice(first, min(first + BLOCK, length))
        dropped = dropped_keys(mask, rows, length, k.shape[1], q.device)
        for head in range(q.shape[2]):
            inputs = (sums[0][0, rows, head], sums[1][0, :, 0], sums[2][0, :, 0], *(sink[head] for sink in sums[3:]))
            part = _rows(tuple(x.to(q.dtype) for x in inputs), dropped, softcap)
            out[0, rows, head] = part.detach()
            part.backward(dout[0, rows, head])
    return {"out": out, **{name: x.grad.to(q.dtype) for name, x in zip(NAMES["backward"], sums, strict=False) if x.grad is not None}}


def dropped_keys(mask: Mask, rows: slice, q_len: int, kv_len: int, device: torch.device) -> Tensor:
    """Which keys these queries do not attend, compared on the device: with 32k keys the host would take seconds."""
    if not isinstance(mask, IntervalMask):
        return ~torch.from_numpy(mask.keep(rows, slice(0, kv_len), q_len, kv_len)).to(device)
    first, end = (torch.from_numpy(x).to(device)[:, None] for x in mask.clipped_bounds(np.arange(rows.start, rows.stop), q_len, kv_len))
    keys = torch.arange(kv_len, device=device)
    return (keys < first) | (keys >= end)


def _rows(leaves: tuple[Tensor, ...], dropped: Tensor, softcap: float) -> Tensor:
    """Attention of some query rows over all keys. A sink is one more score that has no value."""
    q, k, v, *sink = leaves
    scores = q @ k.t() * q.shape[-1] ** -0.5
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(dropped, -torch.inf)
    if not sink:
        return torch.softmax(scores, -1) @ v
    return torch.softmax(torch.cat([scores, sink[0].expand(len(q), 1)], -1), -1)[:, :-1] @ v


def distance(actual: Tensor, exact: Tensor) -> float:
    """Norm of the difference over the norm of the truth."""
    exact = exact.double()
    return float((actual.double() - exact).norm() / exact.norm().clamp_min(1e-30))


def repeats_differ(runner: Runner, direction: str, first: tuple[Tensor, ...]) -> str | None:
    """Whether running again changes a bit, in words."""
    for _ in range(REPEATS):
        for (name, a), b in zip(_named(direction, runner.results(direction)), first, strict=True):
            if not torch.equal(bits_of(a), bits_of(b)):
                return f"{name} changes from run to run"
    return None


def not_as_promised(results: tuple[Tensor, ...], promised: Tensor) -> str | None:
    """Whether an output has other bits than promised, in words."""
    differs = bits_of(results[0]) != bits_of(promised)
    return f"{int(differs.sum())} of {differs.numel()} elements have other bits than the training forward" if differs.any() else None


def _named(direction: str, results: tuple[Tensor, ...]) -> Iterator[tuple[str, Tensor]]:
    return zip(NAMES[direction], results, strict=False)  # without sinks there is no gradient of them
