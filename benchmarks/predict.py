"""Compares the backward kernel's time under every schedule with the simulator's prediction (machines.H200).

On a Hopper GPU:  python -m benchmarks.predict measure FILE.json
Then, anywhere:   python -m benchmarks.predict compare FILE.json     adds the predictions
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

from dash_attn import Causal, Full, Mask, ScheduleError
from dash_attn.backends.hopper.tiles import backward_tiles
from dash_attn.formats import PREDICTIONS
from dash_attn.scheduling import Problem, generate
from dash_attn.scheduling.generators import GENERATORS
from dash_attn.simulation import simulate
from dash_attn.simulation.machines import H200
from dash_attn.tools.calibrate.measured import hopper_device, kernel_time, make_call
from dash_attn.tools.machine import gpu_environment

TOKENS, WIDTH = 16384, 2048  # batch x seqlen, heads x head dim
MASKS: dict[str, Mask] = {str(mask): mask for mask in (Causal(), Full())}


def measure(path: Path) -> None:
    device, rows = hopper_device(), []
    for dim, seqlen, mask, name in product((128, 64), (1024, 4096, 16384), MASKS, GENERATORS):
        row = {"head_dim": dim, "mask": mask, "seqlen": seqlen, "schedule": name}
        try:
            measured = kernel_time(*make_call(problem_of(row), dim, device, name))
        except ScheduleError:
            continue
        rows.append({**row, "measured_us": round(measured, 1)})
        print(rows[-1], file=sys.stderr, flush=True)
    path.write_text(json.dumps({**PREDICTIONS.mark, "environment": gpu_environment(), "rows": rows}, indent=1) + "\n")


def problem_of(row: dict[str, Any]) -> Problem:
    dim, seqlen = row["head_dim"], row["seqlen"]
    tiles = backward_tiles(dim)
    return Problem(MASKS[row["mask"]], seqlen, seqlen, tiles.q_rows, tiles.kv_rows, WIDTH // dim, batch=TOKENS // seqlen)


def compare(path: Path) -> None:
    results = json.loads(path.read_text())
    PREDICTIONS.check(results, str(path))
    for row in results["rows"]:
        schedule = generate(row["schedule"], problem_of(row), results["environment"]["sms"])
        makespan = simulate(schedule, H200[row["head_dim"]]).makespan
        row |= {"predicted_us": round(makespan, 1), "error": round(makespan / row["measured_us"] - 1, 4)}
    rows = results.pop("rows")
    within = sum(abs(row["error"]) <= 0.1 for row in rows) / len(rows)
    path.write_text(json.dumps({**results, "within_10_percent": round(within, 3), "rows": rows}, indent=1) + "\n")
    print(f"{within:.0%} of {len(rows)} schedules within 10 % of the prediction")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("step", choices=("measure", "compare"), help="measure needs a Hopper GPU; compare adds the predictions, anywhere")
    parser.add_argument("file", type=Path, metavar="FILE.json")
    asked = parser.parse_args()
    (measure if asked.step == "measure" else compare)(asked.file)
