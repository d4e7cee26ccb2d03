"""A small training run whose weights are hashed after every step, to see whether two runs agree bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..attention.functions import flash_attn_func
from ..execution.interleaving import interleaving

VOCABULARY, WIDTH, HEADS, LAYERS = 32, 128, 2, 2
BATCH, LENGTH = 2, 512  # four KV tiles: enough that the order of a sum can change it
LEARNING_RATE = 3e-3
SEED = 0


class Step(NamedTuple):
    """What a run looked like after a step."""

    loss: float
    weights: str  # hash of all weights


class Block(nn.Module):
    """Pre-norm causal attention and a two-layer perceptron."""

    def __init__(self, accumulation: str) -> None:
        super().__init__()
        self.accumulation = accumulation
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS)).unbind(2)
        attended = flash_attn_func(q, k, v, causal=True, accumulation=self.accumulation)
        x = x + self.out(attended.flatten(-2))
        x = x + self.mlp(self.mlp_norm(x))
        return x


class Transformer(nn.Module):
    def __init__(self, accumulation: str) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block(accumulation) for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))

    def forward(self, tokens: Tensor) -> Tensor:
        # A product with one-hot rows instead of a look-up: on a GPU the gradient of a look-up is a sum in no fixed order.
        x = nn.functional.one_hot(tokens, VOCABULARY).to(self.tokens.weight.dtype) @ self.tokens.weight
        logits: Tensor = self.head(self.blocks(x + self.positions.weight[: tokens.shape[1]]))
        return logits


def synthetic_tokens(steps: int) -> Tensor:
    """Sequences in which a token decides the next one, with a little noise."""
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(VOCABULARY, (steps, BATCH, LENGTH + 1), generator=generator)
    noise = torch.rand(tokens.shape, generator=generator) < 0.1
    for i in range(1, LENGTH + 1):
        following = (5 * tokens[..., i - 1] + 3) % VOCABULARY
        tokens[..., i] = torch.where(noise[..., i], tokens[..., i], following)
    return tokens


def train(accumulation: str, steps: int, arrival_seed: int, device: str) -> tuple[list[Step], Tensor]:
    """Train from a fixed seed on fixed data. `arrival_seed` decides which attention tile happens to finish first (CPU).

    Returns what every step looked like, and the final weights.
    """
    torch.manual_seed(SEED)
    model: Any = Transformer(accumulation)
    # The GPU kernels take 16-bit inputs; on the CPU single precision keeps the demo readable.
    model = model.to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    history = []
    with _one_thread(), _arrival(arrival_seed, device):
        for batch in synthetic_tokens(steps).to(device):
            logits = model(batch[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history.append(Step(loss.item(), _hash(model)))
    return history, torch.cat([p.detach().float().cpu().flatten() for p in model.parameters()])


@contextmanager
def _one_thread() -> Iterator[None]:
    """The model is so small that threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _arrival(seed: int, device: str) -> AbstractContextManager[Any]:
    """On a GPU the hardware itself varies which tile finishes first."""
    return nullcontext() if device == "cuda" else interleaving(seed)


def _hash(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:12]


def weight_count() -> int:
    return sum(p.numel() for p in Transformer("ordered").parameters())
