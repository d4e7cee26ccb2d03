"""Small models, their micro-batches, and sums written from the definition of the tree."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3))


class OddModel(nn.Module):
    """Tied, frozen, unused and empty parameters, three dtypes, two parameters in one storage, one that few micro-batches use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(6, 6)
        self.tied = self.first
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.narrow = nn.Linear(6, 6).to(torch.bfloat16)
        self.scale = nn.Parameter(torch.ones(6, dtype=torch.float64))
        self.seldom = nn.Parameter(torch.randn(6))
        self.seldom.register_hook(lambda gradient: torch.cat([gradient.new_full((1,), -0.0), gradient[1:]]))  # a zero added would show
        self.never = nn.Parameter(torch.randn(3))
        self.empty = nn.Parameter(torch.randn(0, 4))
        storage = torch.randn(12)
        self.low, self.high = nn.Parameter(storage[:8]), nn.Parameter(storage[4:])

    def forward(self, x: Tensor) -> Tensor:
        used = x[0, 0].abs() > 5
        x = self.tied(self.frozen(self.first(x)))
        x = self.narrow(x.to(torch.bfloat16)).float() * self.scale + self.empty.sum()
        if used:
            x = x * self.seldom
        return x * self.low[:6] + self.high[2:]


def micro_batch(index: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 + index)) * 10.0 ** (index % 5 - 2)


def backward(model: nn.Module, index: int) -> None:
    device = next(model.parameters()).device
    model(micro_batch(index).to(device)).square().sum().backward()


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters()}


def bits(tensors: Iterable[Tensor | None]) -> str:
    """A hash that tells -0.0 from 0.0 and no gradient from zeros."""
    found = [
        b"none" if t is None else str(t.dtype).encode() + t.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() for t in tensors
    ]
    return hashlib.sha256(b"|".join(found)).hexdigest()[:16]


def tree_by_definition(terms: list[Any]) -> Any:
    """Split at the largest power of two below; None adds nothing. Strings are written as a formula."""
    if len(terms) == 1:
        return terms[0]
    power = 1
    while power * 2 < len(terms):
        power *= 2
    left, right = tree_by_definition(terms[:power]), tree_by_definition(terms[power:])
    if left is None or right is None:
        return right if left is None else left
    return f"({left}+{right})" if isinstance(left, str) else left + right


def mean_by_definition(model: nn.Module, micro_batches: int) -> dict[str, Tensor | None]:
    """All gradients kept, then added."""
    found: list[dict[str, Tensor | None]] = []
    for index in range(micro_batches):
        model.zero_grad()
        backward(model, index)
        found.append(
            {name: None if g is None else g.to(torch.promote_types(g.dtype, torch.float32)) for name, g in gradients(model).items()}
        )
    model.zero_grad()
    sums = {name: tree_by_definition([one[name] for one in found]) for name in found[0]}
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    return {
        name: None if total is None else (total / torch.full_like(total, micro_batches)).to(dtypes[name]) for name, total in sums.items()
    }
