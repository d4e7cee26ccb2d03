"""Tiles of the Triton backend: tried on this GPU, so that src/dash_attn/backends/triton/tiles.json can be chosen offline.

Part of triton_backend.py (--sweep). `table_with` is the table of the package with what a sweep chose.
"""

from __future__ import annotations

import json
import re
from functools import partial
from math import exp, log
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from dash_attn import Causal, Full, Mask
from dash_attn.backends.triton import setup
from dash_attn.backends.triton.launch import Launch
from dash_attn.backends.triton.tiles import PASSES, Tile, Tiles, read_table
from dash_attn.call.options import AttentionOptions

BF16 = torch.bfloat16
Chosen = dict[str, dict[str, list[int]]]  # by head dim and pass

SWEEP: dict[int, dict[str, tuple[tuple[int, ...], ...]]] = {
    64: {
        "forward": (
            (128, 128, 8, 3),
            (128, 128, 8, 2),
            (128, 128, 4, 3),
            (128, 64, 4, 3),
            (128, 64, 8, 3),
            (64, 128, 4, 3),
            (128, 128, 8, 3, 2),
        ),
        "key_gradients": ((64, 128, 8, 3), (64, 128, 8, 2), (128, 128, 8, 2), (64, 64, 4, 3), (64, 128, 4, 3), (64, 128, 8, 3, 2)),
        "query_gradients": ((128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3), (128, 64, 4, 3), (64, 128, 4, 3), (128, 64, 8, 3, 2)),
    },
    128: {
        "forward": (
            (128, 64, 8, 3),
            (128, 64, 8, 2),
            (128, 64, 8, 4),
            (128, 128, 8, 2),
            (128, 128, 8, 3),
            (64, 64, 4, 3),
            (128, 64, 4, 3),
            (128, 64, 8, 3, 2),
        ),
        "key_gradients": (
            (64, 128, 8, 3),
            (64, 128, 8, 2),
            (64, 128, 8, 3, 2),
            (32, 128, 8, 3),
            (64, 64, 4, 3),
            (64, 64, 4, 2),
            (32, 64, 4, 3),
        ),
        "query_gradients": (
            (128, 64, 8, 3),
            (128, 64, 8, 2),
            (128, 128, 8, 2),
            (64, 64, 4, 3),
            (64, 128, 4, 2),
            (128, 32, 8, 3),
            (128, 64, 8, 3, 2),
        ),
    },
    256: {
        "forward": ((128, 32, 8, 2), (128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 3), (128, 64, 8, 1)),
        "key_gradients": ((32, 64, 8, 2), (64, 64, 8, 2), (64, 64, 8, 1), (64, 32, 8, 2), (32, 64, 4, 2), (64, 64, 4, 1)),
        "query_gradients": ((64, 32, 8, 2), (64, 64, 8, 2), (64, 64, 4, 1), (64, 32, 4, 2), (128, 32, 8, 1)),
    },
}


class Job(NamedTuple):
    """A pass with a tile."""

    dim: int
    name: str
    tile: tuple[int, ...]

    @property
    def key(self) -> str:
        return " ".join(map(str, self.tile))


def jobs_of(dims: tuple[int, ...]) -> list[Job]:
    return [Job(dim, name, tile) for dim in dims for name in PASSES for tile in SWEEP[dim][name]]


def launch_of(job: Job, shape: tuple[int, int, int], mask: Mask, memory: Any) -> Launch:
    """One pass of a call with that tile; `memory` makes its tensors."""
    batch, length, heads = shape
    dim, name, tile = job.dim, job.name, Tile(*job.tile)
    q, k, v, out, dq, dk, dv = (memory(batch, length, heads, dim) for _ in range(7))
    lse, delta = (memory(batch, heads, length).float() for _ in range(2))  # lengths are whole units
    tiles = Tiles("a sweep", *(tile,) * 3)
    with patch.object(setup, "tiles_for", lambda *_: tiles):
        call = setup.Call.of(q, k, v, AttentionOptions(mask, dim**-0.5), None)
        if name == "forward":
            return setup.forward_launch(call, out, lse, None)
        keys, queries = setup.gradient_launches(call, out, setup.RowValues(lse.abs() + 20, delta), (dq, dk, dv))
        return keys if name == "key_gradients" else queries


def to_compile(job: Job) -> Launch:
    """The same kernel on no memory: no length decides it."""
    return launch_of(job, (1, 256, 1), Causal(), partial(torch.empty, dtype=BF16, device="meta"))


def milliseconds(launch: Any, runs: int) -> float:
    for _ in range(3):
        launch.run()
    times = []
    for _ in range(runs):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(500_000)
        start.record()
        launch.run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return median(times)


def measure_tiles(
    jobs: list[Job], lengths: tuple[int, ...], repeats: int, device: torch.device
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """A row for each pass, head dim, length and mask; and the tiles that cannot run, with the reason."""
    rows, failures = [], {}
    for dim, name in dict.fromkeys((job.dim, job.name) for job in jobs):
        for length in lengths:
            for mask in (Causal(), Full()):
                times: dict[str, float] = {}
                for job in jobs:
                    what = f"{dim} {name} {job.key}"
                    if (job.dim, job.name) != (dim, name) or what in failures:
                        continue
                    try:
                        memory = partial(torch.randn, device=device, dtype=BF16)
                        times[job.key] = milliseconds(launch_of(job, (16384 // length, length, 2048 // dim), mask, memory), repeats)
                    except Exception as error:
                        failures[what] = f"{type(error).__name__}: {str(error)[:200]}"
                rows.append({"dim": dim, "pass": name, "length": length, "mask": str(mask), "ms": times})
                listed = ", ".join(f"{key}: {ms:.3f}" for key, ms in sorted(times.items(), key=lambda item: item[1]))
                print(f"{dim} {name} {mask} {length}: {listed}", flush=True)
    return rows, failures


def choose_tiles(rows: list[dict[str, Any]]) -> Chosen:
    """By the geometric mean over lengths and masks, of the tiles that ran everywhere. The first listed of equals."""
    chosen: Chosen = {}
    for dim, name in dict.fromkeys((row["dim"], row["pass"]) for row in rows):
        of_pass = [row["ms"] for row in rows if (row["dim"], row["pass"]) == (dim, name)]
        everywhere = [key for key in of_pass[0] if all(key in times for times in of_pass)]
        if everywhere:
            means = {key: exp(sum(log(times[key]) for times in of_pass) / len(of_pass)) for key in everywhere}
            best = min(means, key=lambda key: means[key])
            chosen.setdefault(str(dim), {})[name] = [int(word) for word in best.split()]
    return chosen


def table_with(architecture: str, chosen: Chosen, width: str = "16 bits") -> str:
    """The text of tiles.json with the chosen tiles in it."""
    table = json.loads(json.dumps(read_table()))
    for dim, passes in chosen.items():
        table["tiles"][architecture][width][dim] |= passes
    return table_text(table)


def table_text(table: dict[str, Any]) -> str:
    """As tiles.json is written: a tile per line."""
    return re.sub(r"\[\s+([\d,\s]+?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", json.dumps(table, indent=1)) + "\n"
