"""Quick runs of one layer, and what `dash-attn diff` says of two."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dash_attn
from dash_attn.cli.main import main
from dash_attn.ledgers.format import records

FILE = "rank-0.ledger"
AGREE, DIFFER, ERROR, INCOMPLETE = 0, 1, 2, 3


def run(
    folder: Path,
    steps: int = 4,
    *,
    first: int = 0,
    before_step: Callable[[int, Any, Any], None] = lambda step, model, optimizer: None,
    left_out: tuple[str, ...] = (),
    model: Any = None,
    **options: Any,
) -> Any:
    """A training of one layer, whose batches are functions of the step. The layer and its optimizer, to go on with."""
    if model is None:
        torch.manual_seed(0)
        layer = nn.Linear(4, 4)
        model = layer, torch.optim.AdamW(layer.parameters())
    layer, optimizer = model
    with dash_attn.ledger(folder, resume_from=first or None, **options) as ledger:
        ledger.watch(layer, optimizer)
        for step in range(first, first + steps):
            before_step(step, layer, optimizer)
            layer.zero_grad()
            batch = torch.full((2, 4), float(step))
            loss = layer(batch).square().mean()
            loss.backward()
            optimizer.step()
            given = {"optimizer": optimizer, "loss": loss, "batch": batch}
            ledger.step(layer, **{name: value for name, value in given.items() if name not in left_out})
    return model


def cut_behind(file: Path, place: int) -> None:
    """Without the records from `place` on."""
    os.truncate(file, list(records(file))[place].place)


def said(a: Path, b: Path, *options: str) -> tuple[int, str, str]:
    """Exit code, first line and all lines of a comparison."""
    with redirect_stdout(io.StringIO()) as printed, redirect_stderr(printed):
        code = main(["diff", str(a), str(b), *options])
    return code, printed.getvalue().splitlines()[0], printed.getvalue()
