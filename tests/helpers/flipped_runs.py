"""A tiny training with a ledger, and with a weight that is changed before one step: for tests of where runs differ."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import dash_attn

FLIPPED = 2  # the step before which a weight is changed


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(self.first(x))
        return found


def train(folder: Path, steps: int = 4, detail: bool = True, flip: bool = False, keep: int = 0) -> Path:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dash_attn.ledger(folder, detail=detail, keep=keep) as ledger:
        ledger.watch(model, optimizer)
        for step in range(steps):
            if flip and step == FLIPPED:
                with torch.no_grad():
                    model.second[0].weight[0, 0] += 0.5
            loss = model(torch.full((3, 4), float(step))).square().sum()
            loss.backward()
            optimizer.step()
            ledger.step(model, optimizer, loss=loss)
            optimizer.zero_grad()
    return folder
