"""Train a small language model written for FlashAttention. Run it twice: the hashes agree.

python examples/train_flash_attn.py
"""

from __future__ import annotations

import argparse
import hashlib

import torch
from torch import Tensor, nn

from dash_attn import flash_attn_func  # the one changed line; it was: from flash_attn import flash_attn_func

VOCABULARY, WIDTH, HEADS, LENGTH, STEPS = 64, 64, 2, 256, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).unbind(2)
        x = x + self.out(flash_attn_func(q, k, v, causal=True).flatten(-2))
        return x + self.mlp(self.norms[1](x))


def batches(steps: int) -> Tensor:
    """Sequences that count up, each from its own start in its own stride."""
    source = torch.Generator().manual_seed(1)
    start, stride = torch.randint(1, VOCABULARY, (2, steps, 2, 1), generator=source)
    return (start + stride * torch.arange(LENGTH + 1)) % VOCABULARY


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()  # --help
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), Block(), Block(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step, tokens in enumerate(batches(STEPS)):
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}  loss {loss.item():.4f}")
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    print("weights", hashlib.sha256(weights).hexdigest()[:16])


if __name__ == "__main__":
    main()
