"""A GPT of a few thousand parameters and a training of it into which faults can be planted, for tests of ledgers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dash_attn
from dash_attn.nn import SelfAttention

VOCABULARY, WIDTH, LENGTH, LAYERS = 32, 16, 64, 5
Fault = Callable[[int, nn.Module], None]


class Block(nn.Module):
    def __init__(self, dropout: float, **attention: Any) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = SelfAttention(WIDTH, 1, **attention)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TinyGpt(nn.Module):
    def __init__(self, dropout: float = 0.0, unordered_in: int | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        kinds = [{"accumulation": "unordered"} if layer == unordered_in else {} for layer in range(LAYERS)]
        self.layers = nn.ModuleList(Block(dropout, **kind) for kind in kinds)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@dataclass
class Training:
    """One run. `before_step` and `after_backward` are where faults are planted."""

    folder: Path
    steps: int = 3
    seed: int = 0
    model: dict[str, Any] = field(default_factory=dict)
    length: int = LENGTH  # with 1,024, eight KV tiles, unordered sums differ every time
    worker_seeds: tuple[int, ...] = (0, 1)
    before_step: Fault = lambda step, model: None
    after_backward: Fault = lambda step, model: None
    changed_model: Callable[[nn.Module], None] = lambda model: None
    first_step: int = 0
    checkpoint: dict[str, Any] | None = None  # to resume from
    restores_generators: bool = True
    ledger: dict[str, Any] = field(default_factory=dict)
    watched: bool = True

    def run(self) -> dict[str, Any]:
        """A checkpoint of its end."""
        torch.manual_seed(self.seed)
        random.seed(self.seed)
        model = TinyGpt(**self.model)
        self.changed_model(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self._resume(model, optimizer)
        options = {"resume_from": self.first_step or None, **self.ledger}
        with dash_attn.ledger(self.folder, **options) as ledger:
            if self.watched:
                ledger.watch(model, optimizer)
            for step, tokens in zip(range(self.first_step, self.first_step + self.steps), self._batches(), strict=False):
                self.before_step(step, model)
                loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
                loss.backward()
                self.after_backward(step, model)
                optimizer.step()
                ledger.step(model, optimizer, loss=loss, batch={"tokens": tokens})
                optimizer.zero_grad()
        return {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
        }

    def _resume(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if self.checkpoint is None:
            return
        model.load_state_dict(self.checkpoint["model"])
        optimizer.load_state_dict(self.checkpoint["optimizer"])
        if self.restores_generators:
            torch.set_rng_state(self.checkpoint["torch"])
            random.setstate(self.checkpoint["python"])

    def _batches(self) -> Iterator[Tensor]:
        """Data workers take turns, each with a generator of its own."""
        workers = [torch.Generator().manual_seed(seed) for seed in self.worker_seeds]
        step = 0
        while True:
            tokens = torch.randint(VOCABULARY, (2, self.length + 1), generator=workers[step % len(workers)])
            if step >= self.first_step:
                yield tokens
            step += 1


def flip_bit(tensor: Tensor, place: int = 3, bit: int = 12) -> None:
    with torch.no_grad():
        tensor.view(-1).view(torch.int32)[place] ^= 1 << bit
