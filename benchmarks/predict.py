"""Compares the backward kernel's time under every schedule with the simulator's prediction (machines.H200).

On a Hopper GPU:  python -m benchmarks.predict measure FILE.json
Then, anywhere:   python -m benchmarks.predict compare FILE.json     adds the predictions
"""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

from dash_attn import Causal, Full, Mask, ScheduleError
from dash_attn.backends.hopper.tiles import backward_tiles
from dash_attn.call.call import Call, Grads
from dash_attn.call.options import AttentionOptions
from dash_attn.scheduling import Problem, generate
from dash_attn.scheduling.generators import GENERATORS
from dash_attn.simulation import simulate
from dash_attn.simulation.machines import H200

TOKENS, WIDTH = 16384, 2048  # batch x seqlen, heads x head dim
MASKS: dict[str, Mask] = {str(mask): mask for mask in (Causal(), Full())}


def measure(path: Path) -> None:
    import torch

    from dash_attn.tools.calibrate.measured import kernel_time
    from dash_attn.tools.machine import gpu_environment

    rows = []
    for dim, seqlen, mask in product((128, 64), (1024, 4096, 16384), MASKS.values()):
        shape = (TOKENS // seqlen, seqlen, WIDTH // dim, dim)
        q, k, v, dout = (torch.randn(shape, device="cuda").bfloat16() for _ in range(4))
        for name in GENERATORS:
            try:
                measured = kernel_time(Call(q, k, v, AttentionOptions(mask, dim**-0.5, 0.0, name)), Grads(dout))
            except ScheduleError:
                continue
            rows.append({"head_dim": dim, "mask": str(mask), "seqlen": seqlen, "schedule": name, "measured_us": round(measured, 1)})
            print(rows[-1], file=sys.stderr, flush=True)
    path.write_text(json.dumps({"environment": gpu_environment(), "rows": rows}, indent=1) + "\n")


def predicted(row: dict[str, Any], workers: int) -> float:
    dim, seqlen = row["head_dim"], row["seqlen"]
    tiles = backward_tiles(dim)
    problem = Problem(MASKS[row["mask"]], seqlen, seqlen, tiles.q_rows, tiles.kv_rows, WIDTH // dim, batch=TOKENS // seqlen)
    return simulate(generate(row["schedule"], problem, workers), H200[dim]).makespan


def compare(path: Path) -> None:
    results = json.loads(path.read_text())
    for row in results["rows"]:
        makespan = predicted(row, results["environment"]["sms"])
        row |= {"predicted_us": round(makespan, 1), "error": round(makespan / row["measured_us"] - 1, 4)}
    rows = results.pop("rows")
    within = sum(abs(row["error"]) <= 0.1 for row in rows) / len(rows)
    path.write_text(json.dumps({**results, "within_10_percent": round(within, 3), "rows": rows}, indent=1) + "\n")
    print(f"{within:.0%} of {len(rows)} schedules within 10 % of the prediction")


if __name__ == "__main__":
    {"measure": measure, "compare": compare}[sys.argv[1]](Path(sys.argv[2]))
