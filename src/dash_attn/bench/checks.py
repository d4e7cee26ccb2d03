"""No speed without correctness: results against dense attention, and bits against bits where a candidate claims them."""

from __future__ import annotations

import torch
from torch import Tensor

from .candidates import Runner, Tensors
from .suites import Shape

REPEATS = 3
FLOOR = 1e-3  # of the norm of a result
NAMES = {"forward": ("out",), "backward": ("dq", "dk", "dv")}


class Reference:
    """Dense attention of one KV head and its query heads, the last ones of the last sequence, at the size that is timed.

    A candidate may be off by twice what plain PyTorch in the same dtype is off from fp32, in the norm of each result.
    """

    def __init__(self, shape: Shape, tensors: Tensors) -> None:
        self.group = shape.group
        part = tuple(x[-1:, :, -heads:] for x, heads in zip(tensors, self._heads, strict=True))
        self.exact = dense(tuple(x.float() for x in part), shape.causal)
        plain = dense(part, shape.causal)
        self.budgets = {name: 2 * distance(plain[name], exact) + FLOOR for name, exact in self.exact.items()}

    @property
    def _heads(self) -> tuple[int, int, int, int]:
        return self.group, 1, 1, self.group

    def complaint(self, direction: str, results: tuple[Tensor, ...]) -> str | None:
        """What is wrong with a candidate's results, if anything."""
        for name, result in zip(NAMES[direction], results, strict=True):
            heads = 1 if name in ("dk", "dv") else self.group
            error, budget = distance(result[-1:, :, -heads:], self.exact[name]), self.budgets[name]
            if not error <= budget:  # NaN is wrong too
                return f"{name} is off by {error:.2g} of its norm; {budget:.2g} is allowed"
        return None


def dense(tensors: tuple[Tensor, ...], causal: bool) -> dict[str, Tensor]:
    """Attention and its gradients with the full score matrix, in the dtype of the inputs."""
    q, k, v = (x.detach().transpose(1, 2).requires_grad_() for x in tensors[:3])
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    out = torch.softmax(scores, -1) @ v
    gradients = torch.autograd.grad(out, (q, k, v), tensors[3].transpose(1, 2))
    return {name: x.detach().transpose(1, 2) for name, x in zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True)}


def distance(actual: Tensor, exact: Tensor) -> float:
    """Norm of the difference over the norm of the truth."""
    exact = exact.double()
    return float((actual.double() - exact).norm() / exact.norm().clamp_min(1e-30))


def repeats_differ(runner: Runner, direction: str, first: tuple[Tensor, ...]) -> str | None:
    """Whether running again changes a bit, in words."""
    for _ in range(REPEATS):
        for name, a, b in zip(NAMES[direction], runner.results(direction), first, strict=True):
            if not torch.equal(_bits(a), _bits(b)):
                return f"{name} changes from run to run"
    return None


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
