"""Backwards that take the GPU less time than the host, beside cuDNN's: python -m benchmarks.host_limits [FILE.json]

Launched from Python, three at once behind a sleep of the GPU of a third of a millisecond, which hides some of the host's time;
and replayed from CUDA graphs, which leave the host out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dash_attn.tools.bench.candidates import CUDNN, OURS, Candidate, make_tensors, ours
from dash_attn.tools.bench.pytorch_peers import pytorch_peers
from dash_attn.tools.bench.shape import Shape
from dash_attn.tools.machine import gpu_environment

from .timing import milliseconds, replayed

SHAPES = (
    Shape("causal", 384, 8, 16, 16, 128),
    Shape("causal", 200, 32, 16, 16, 64),
    Shape("full", 1000, 4, 16, 16, 128),
    Shape("causal", 4096, 1, 8, 8, 128),
)
AT_ONCE, LEAD_IN, RUNS = 3, 600_000, 25


def measured(shape: Shape, device: torch.device) -> dict[str, Any]:
    """Microseconds of a backward of each kernel."""
    tensors = make_tensors(shape, device)
    kernels: dict[str, Candidate] = {one.name: one for one in (*ours(False), *pytorch_peers()) if one.name in (OURS, CUDNN)}

    def several(call: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(AT_ONCE):
                call()

        return run

    launched = [several(kernel.prepare(shape, tensors).backward) for kernel in kernels.values()]
    graphs = [several(replayed(lambda kernel=kernel: kernel.prepare(shape, tensors).backward)) for kernel in kernels.values()]
    row: dict[str, Any] = {"shape": shape.to_json()}
    for way, calls in (("launched", launched), ("graphs", graphs)):
        took = [1e3 * ms / AT_ONCE for ms in milliseconds(calls, RUNS, LEAD_IN)]
        row[way] = dict(zip(kernels, took, strict=True)) | {"ratio_to_cudnn": took[1] / took[0]}
    return row


def main() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    rows = [measured(shape, device) for shape in SHAPES]
    for row in rows:
        print(Shape.from_json(row["shape"]), *(f"{way} {row[way]['ratio_to_cudnn']:.2f}" for way in ("launched", "graphs")), sep=", ")
    for path in sys.argv[1:]:
        Path(path).write_text(json.dumps({"environment": gpu_environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
