"""A small training run that keeps a ledger, to see whether two runs agree bit for bit, and where they part."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..call.options import Accumulation
from ..execution.interleaving import interleaving
from ..ledgers.recorder import ledger
from ..nn import SelfAttention

VOCABULARY, WIDTH, HEADS, LAYERS = 32, 128, 2, 4
BATCH, LENGTH = 2, 512  # four KV tiles: enough that the order of a sum can change it
LEARNING_RATE = 3e-3
SEED = 0


class Block(nn.Module):
    """Pre-norm attention and a two-layer perceptron."""

    def __init__(self, accumulation: Accumulation) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = SelfAttention(WIDTH, HEADS, bias=True, accumulation=accumulation)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x


class Transformer(nn.Module):
    """`unordered`: the layer whose attention adds gradients as they arrive; None: none does."""

    def __init__(self, unordered: int | None) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block("unordered" if layer == unordered else "ordered") for layer in range(LAYERS)))
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


def train(unordered: int | None, steps: int, arrival_seed: int, device: str, folder: Path) -> list[float]:
    """Train from a fixed seed on fixed data, and keep a ledger of it in a folder. Returns the loss of every step.

    arrival_seed: decides which attention tile happens to finish first (CPU).
    """
    torch.manual_seed(SEED)
    model: Any = Transformer(unordered)
    # The GPU kernels take 16-bit inputs; on the CPU single precision keeps the demo readable.
    model = model.to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses = []
    (folder / "rank-0.ledger").unlink(missing_ok=True)  # of the demo before
    with _arrival(arrival_seed, device), ledger(folder, detail=True) as book:
        book.watch(model, optimizer)
        for batch in synthetic_tokens(steps).to(device):
            logits = model(batch[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            book.step(model, optimizer, loss=loss, batch=batch)
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


@contextmanager
def _arrival(seed: int, device: str) -> Iterator[None]:
    """Decides which tile finishes first; on a GPU the hardware itself varies that. In one thread: the model is so small that threads only
    wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with nullcontext() if device == "cuda" else interleaving(seed):
            yield
    finally:
        torch.set_num_threads(before)
