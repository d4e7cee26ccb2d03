"""Train a small model that calls PyTorch's scaled_dot_product_attention. Run it twice: the hashes agree.

python examples/train_sdpa.py
"""

from __future__ import annotations

import argparse
import hashlib

import torch
from torch import Tensor, nn
from torch.nn import functional

from dash_attn.integrations import sdpa

VOCABULARY, WIDTH, HEADS, LENGTH, STEPS = 64, 64, 2, 256, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norms[1](x))


def batches(steps: int) -> Tensor:
    """Sequences that count up, each from its own start in its own stride."""
    source = torch.Generator().manual_seed(1)
    start, stride = torch.randint(1, VOCABULARY, (2, steps, 2, 1), generator=source)
    return (start + stride * torch.arange(LENGTH + 1)) % VOCABULARY


def train() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), Block(), Block(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step, tokens in enumerate(batches(STEPS)):
        loss = functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}  loss {loss.item():.4f}")
    return model


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()  # --help
    with sdpa.enable():  # the one changed line; the model is as it was
        model = train()
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    print("weights", hashlib.sha256(weights).hexdigest()[:16])


if __name__ == "__main__":
    main()
