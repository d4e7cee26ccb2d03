"""Measures the backward kernel under every schedule and compares with the simulator's prediction (machines.H200).

Usage, on a Hopper GPU: python benchmarks/predict.py OUTPUT.json
"""

from __future__ import annotations

import json
import sys
from itertools import product
from typing import Any

import torch

from dash_attn import Causal, Full, Mask, Problem, ScheduleError, generate, simulate
from dash_attn.bench.environment import environment
from dash_attn.calibration.hopper import kernel_time
from dash_attn.generators import GENERATORS
from dash_attn.machines import H200
from dash_attn.options import AttentionOptions

TOKENS, WIDTH = 16384, 2048  # batch x seqlen, heads x head dim
Q_ROWS = {64: 128, 128: 64}


def compare(dim: int, seqlen: int, mask: Mask) -> list[dict[str, Any]]:
    batch, heads = TOKENS // seqlen, WIDTH // dim
    q, k, v, dout = (torch.randn(batch, seqlen, heads, dim, device="cuda").bfloat16() for _ in range(4))
    problem = Problem(mask, seqlen, seqlen, Q_ROWS[dim], 128, heads, batch=batch)
    workers = torch.cuda.get_device_properties(0).multi_processor_count
    rows = []
    for name in GENERATORS:
        try:
            timeline = simulate(generate(name, problem, workers), H200[dim])
        except ScheduleError:
            continue
        measured = kernel_time((q, k, v, dout), AttentionOptions(mask, dim**-0.5, 0.0, name))
        error = timeline.makespan / measured - 1
        rows.append({"head_dim": dim, "mask": str(mask), "seqlen": seqlen, "schedule": name})
        rows[-1] |= {"measured_us": round(measured, 1), "predicted_us": round(timeline.makespan, 1), "error": round(error, 4)}
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def main() -> None:
    rows = [row for dim, seqlen, mask in product((128, 64), (1024, 4096, 16384), (Causal(), Full())) for row in compare(dim, seqlen, mask)]
    within = sum(abs(row["error"]) <= 0.1 for row in rows) / len(rows)
    with open(sys.argv[1], "w") as file:
        json.dump({"environment": environment(), "within_10_percent": round(within, 3), "rows": rows}, file, indent=1)
    print(f"{within:.0%} of {len(rows)} schedules within 10 % of the prediction")


if __name__ == "__main__":
    main()
