"""What two ranks do in the tests of their ledgers. Functions of a module, so that new processes can import them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import dash_attn
import train_example
from dash_attn.distributed import context_parallel_attention, shard
from tiny_gpt import VOCABULARY, TinyGpt

STEPS = 3
FAULTS = ("weight", "reduction")  # a weight on rank 1 alone; a gradient on both ranks, as after a sum over ranks in another order
MOVED = "moved"  # a run of the example that one process began
ROWS = 512  # of a sequence that both ranks share


def everything(folder: str, rank: int) -> dict[str, Any]:
    """All in one, because starting processes takes longer than what they do."""
    runs = Path(folder)
    for kind, wrap in (("ddp", DistributedDataParallel), ("fsdp", _sharded)):
        for name in ("a", "b", *FAULTS):
            _train(runs / f"{kind}-{name}", wrap(_model()), rank, name)
    for name, sharding in (("zigzag", "zigzag"), ("again", "zigzag"), ("contiguous", "contiguous")):
        _share(runs / f"context-{name}", sharding)
    _share(runs / "context-ulysses", "zigzag", ulysses=2)
    return {
        "example": train_example.train(runs / "example", detail_from=6),
        "moved": train_example.train(runs / MOVED, resume=True),
    }


def _model() -> TinyGpt:
    torch.manual_seed(0)
    return TinyGpt()


def _sharded(model: TinyGpt) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def _train(folder: Path, model: nn.Module, rank: int, name: str) -> None:
    """Step 1 has detail. Faults are in it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    source = torch.Generator().manual_seed(rank)
    with dash_attn.ledger(folder, detail=range(1, 2), keep=8) as ledger:
        ledger.watch(model, optimizer)
        for step in range(STEPS):
            tokens = torch.randint(VOCABULARY, (1, 65), generator=source)
            if (step, name, rank) == (1, "weight", 1):
                _flip(_weight(model))
            loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            if (step, name) == (1, "reduction"):
                _flip(_weight(model).grad)
            optimizer.step()
            ledger.step(model, optimizer, loss=loss, batch=tokens)
            optimizer.zero_grad()


def _weight(model: nn.Module) -> Any:
    return next(weight for name, weight in model.named_parameters() if name.endswith("layers.2.mlp.0.weight"))


def _flip(tensor: Any) -> None:
    """A bit of what this rank has of it."""
    mine = tensor.detach()
    mine = mine.to_local() if hasattr(mine, "to_local") else mine
    mine.view(-1).view(torch.int32)[3] ^= 1 << 12


class Shared(nn.Module):
    """One layer of attention over a sequence that all ranks share."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.qkv, self.options = nn.Linear(32, 96), options

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).unbind(2)
        return context_parallel_attention(q, k, v, causal=True, **self.options)


def _share(folder: Path, sharding: str, **options: Any) -> None:
    torch.manual_seed(0)
    model = Shared(sharding=sharding, **options)
    x = shard(torch.randn(1, ROWS, 32), sharding=sharding)
    with dash_attn.ledger(folder, detail=True) as ledger:
        ledger.watch(model)
        loss = model(x).square().mean()
        loss.backward()
        ledger.step(model, loss=loss)
    dist.barrier()
