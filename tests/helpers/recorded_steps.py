"""Steps of a ledger that a test records, and what stands in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

import dash_attn
from dash_attn.ledgers.reading import Step, read_rank

FILE = "rank-0.ledger"


def record(folder: Path, model: nn.Module, x: Any, steps: int = 1, **options: Any) -> list[Step]:
    """Steps of a model whose output is squared."""
    with dash_attn.ledger(folder, **{"detail": True, **options}) as ledger:
        ledger.watch(model)
        for _ in range(steps):
            model.zero_grad()
            out = model(x)
            loss = (out["y"] if isinstance(out, dict) else out).square().mean()
            loss.backward()
            ledger.step(model, loss=loss, batch=x)
    return list(read_rank(folder / FILE).steps.values())


def keys(step: Step, phase: str) -> list[tuple[str, str, str, int]]:
    return [(entry.module, entry.role, entry.tensor, entry.call) for entry in step.layout.entries if entry.phase == phase]


def sums(step: Step) -> dict[tuple[str, str, str], int]:
    return {(e.phase, e.module, e.tensor): int(s) for e, s in zip(step.layout.entries, step.sums, strict=True)}
