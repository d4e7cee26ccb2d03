"""What a step of a ledger costs, with the model of benchmarks/training.py: python -m benchmarks.ledger_cost [--json FILE]

Milliseconds of the host, which prepares the kernels, and of the GPU, which runs them; and how long the GPU takes to read the same bytes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median

import torch

import dash_attn
from dash_attn.tools.bench.report import save
from dash_attn.tools.machine import gpu_environment

from .timing import timed
from .training import REAL, example

STEPS, WARM_UP = 12, 2
AHEAD = 20_000_000  # cycles that the GPU waits, so that the host is ahead of it


def model_with_gradients() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    module = example()
    config = module.Config(out="", **{name: value for name, value in REAL.items() if name != "workers"}, device="cuda")
    model = module.Gpt(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    model, optimizer = model_with_gradients()
    given = {"loss": torch.ones(2, device="cuda"), "batch": torch.zeros(2, 8193, dtype=torch.long, device="cuda")}
    tensors = [x for parameter in model.parameters() for x in (parameter.detach(), parameter.grad)]
    with tempfile.TemporaryDirectory() as folder, dash_attn.ledger(folder) as ledger:
        ledger.watch(model, optimizer)
        steps = [timed(lambda: ledger.step(model, optimizer, **given), AHEAD) for _ in range(STEPS)][WARM_UP:]
    read = [timed(lambda: torch._foreach_norm(tensors, 1), AHEAD).gpu for _ in range(STEPS)][WARM_UP:]
    found = {
        "tensors": len(tensors),
        "bytes": sum(x.nbytes for x in tensors if x is not None),
        "host_ms": round(median(host for host, _ in steps), 3),
        "gpu_ms": round(median(gpu for _, gpu in steps), 3),
        "reading_ms": round(median(read), 3),
    }
    print(json.dumps(found))
    if arguments.json:
        save({"environment": gpu_environment(), **found}, arguments.json)


if __name__ == "__main__":
    main()
