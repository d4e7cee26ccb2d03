"""Tiles of the Triton backend: tried on this GPU, so that src/dash_attn/backends/triton/tiles.json can be chosen offline.

Part of triton_backend.py (--sweep). `table_with` is the table of the package with what a sweep chose.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import partial
from math import log
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from dash_attn import Causal, Full, Mask
from dash_attn.backends.triton import passes
from dash_attn.backends.triton.launch import Launch
from dash_attn.backends.triton.tiles import Tile, Tiles, read_table
from dash_attn.call.call import Call
from dash_attn.call.options import AttentionOptions

from .timing import milliseconds

BF16 = torch.bfloat16
Limits = dict[tuple[Any, ...], float]  # milliseconds, by direction, head dim, mask and length

APART, TOGETHER = False, True  # whether the two passes of the backward are two launches or one
LEAD_IN = 1_000_000  # cycles
LEFT_OUT = 0.02  # ms: row statistics are part of a peer's backward and of no sweep
# Loops over partial tiles of one stage make ptxas serialise every product of a Hopper kernel.
SWEEP: dict[int, dict[str, tuple[Any, ...]]] = {
    64: {
        "forward": ((64, 128, 4, 3, 2), (64, 64, 4, 3, 2), (128, 64, 8, 3, 2), (128, 64, 4, 3, 2), (128, 128, 4, 3, 3), (64, 128, 4, 2, 2)),
        "backward": (
            ((64, 64, 4, 3, 2), (64, 64, 4, 3, 2), TOGETHER),
            ((64, 64, 4, 3, 2), (64, 64, 4, 3, 2), APART),
            ((64, 128, 8, 3, 2), (64, 64, 4, 3, 2), APART),
            ((64, 128, 8, 3, 2), (128, 64, 8, 3, 2), TOGETHER),
        ),
    },
    128: {
        "forward": ((128, 64, 8, 3, 2), (64, 64, 4, 3, 2), (64, 64, 4, 2, 2)),
        "backward": (
            ((64, 128, 8, 3, 2), (128, 64, 8, 3, 2), TOGETHER),
            ((64, 128, 8, 3, 2), (128, 64, 8, 3, 2), APART),
            ((64, 128, 8, 3, 2), (64, 64, 4, 2, 2), APART),
            ((64, 64, 4, 2, 2), (64, 64, 4, 2, 2), TOGETHER),
        ),
    },
    256: {
        "forward": ((128, 32, 8, 2, 2), (128, 64, 8, 2, 2), (64, 64, 4, 2, 2), (64, 32, 4, 3, 2)),
        "backward": (
            ((32, 64, 8, 2, 2), (64, 32, 8, 2, 2), TOGETHER),
            ((32, 64, 8, 2, 2), (64, 32, 8, 2, 2), APART),
            ((64, 64, 8, 2, 2), (64, 64, 8, 2, 2), APART),
        ),
    },
}


class Job(NamedTuple):
    """A direction with its tiles: one, or those of the two passes and whether they are one launch."""

    dim: int
    name: str
    tiles: tuple[Any, ...]

    @property
    def entry(self) -> dict[str, Any]:
        """Of tiles.json."""
        if self.name == "forward":
            return {"forward": list(self.tiles)}
        keys, queries, together = self.tiles
        return {"key_gradients": list(keys), "query_gradients": list(queries), "together": together}

    @property
    def key(self) -> str:
        tiles = " and ".join(" ".join(map(str, tile)) for tile in self.entry.values() if isinstance(tile, list))
        return f"{tiles}{', together' if self.entry.get('together') else ''}"

    def of_call(self) -> Tiles:
        tiles = [Tile(*tile) for tile in self.entry.values() if isinstance(tile, list)]
        return Tiles("a sweep", tiles[0], tiles[0], tiles[-1], self.entry.get("together", False))


def jobs_of(dims: tuple[int, ...]) -> list[Job]:
    return [Job(dim, name, tiles) for dim in dims for name, of_name in SWEEP[dim].items() for tiles in of_name]


def launches_of(job: Job, shape: tuple[int, int, int], mask: Mask, memory: Any) -> tuple[Launch, ...]:
    """Of a call with those tiles; `memory` makes its tensors."""
    batch, length, heads = shape
    q, k, v, out, dq, dk, dv = (memory(batch, length, heads, job.dim) for _ in range(7))
    lse, delta = (memory(batch, heads, length).float() for _ in range(2))  # lengths are whole units
    tiles = job.of_call()
    with patch.object(passes, "tiles_for", lambda *_: tiles):
        call = passes.Passes(Call(q, k, v, AttentionOptions(mask, job.dim**-0.5)))
        if job.name == "forward":
            return (passes.forward_launch(call, out, lse, None),)
        return passes.gradient_launches(call, out, passes.RowValues(-lse.abs() - 20, delta), (dq, dk, dv))


def to_compile(job: Job) -> tuple[Launch, ...]:
    """The same kernels on no memory: no length decides them."""
    return launches_of(job, (1, 256, 1), Causal(), partial(torch.empty, dtype=BF16, device="meta"))


def time_of(launches: Iterable[Any], runs: int) -> float:
    """The median of `runs` in milliseconds. Launches are run one after the other; each has a method for it."""
    return milliseconds([lambda: [launch.run() for launch in launches]], runs, LEAD_IN)[0]


def measure_tiles(
    jobs: list[Job], lengths: tuple[int, ...], repeats: int, device: torch.device
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """A row for each direction, head dim, length and mask; and the tiles that cannot run, with the reason."""
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
                        times[job.key] = time_of(launches_of(job, (16384 // length, length, 2048 // dim), mask, memory), repeats)
                    except Exception as error:
                        failures[what] = f"{type(error).__name__}: {str(error)[:200]}"
                rows.append({"dim": dim, "pass": name, "length": length, "mask": str(mask), "ms": times})
                listed = ", ".join(f"{key}: {ms:.3f}" for key, ms in sorted(times.items(), key=lambda item: item[1]))
                print(f"{dim} {name} {mask} {length}: {listed}", flush=True)
    return rows, failures


def choose_tiles(jobs: list[Job], rows: list[dict[str, Any]], limits: Limits) -> list[Job]:
    """Of the tiles that ran everywhere: those that keep most limits (milliseconds, see `limits_of`), then by the geometric mean over
    lengths and masks; the first listed of equals."""
    chosen = []
    for dim, name in dict.fromkeys((row["dim"], row["pass"]) for row in rows):
        of_pass = [row for row in rows if (row["dim"], row["pass"]) == (dim, name)]
        able = [job for job in jobs if (job.dim, job.name) == (dim, name) and all(job.key in row["ms"] for row in of_pass)]

        def rank(job: Job, of_pass: list[dict[str, Any]] = of_pass) -> tuple[int, float]:
            missed = sum(row["ms"][job.key] > limits.get(place_of(row), float("inf")) for row in of_pass)
            return missed, sum(log(row["ms"][job.key]) for row in of_pass)

        chosen += [min(able, key=rank)] if able else []
    return chosen


def place_of(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["pass"], row["dim"], row["mask"], row["length"]


def limits_of(rows: list[dict[str, Any]], targets: dict[str, dict[str, float]]) -> Limits:
    """Of the rows of a file that --time wrote: the milliseconds at which every target of a shape is reached."""
    limits: Limits = {}
    for row in rows:
        least = targets[row["pass"]].get(row["candidate"]) if row["pass"] in targets else None
        if least is not None and "median_ms" in row:
            shape, left_out = row["shape"], LEFT_OUT if row["pass"] == "backward" else 0.0
            place = row["pass"], shape["head_dim"], shape["mask"], shape["seqlen"]
            limits[place] = min(limits.get(place, float("inf")), row["median_ms"] / least - left_out)
    return limits


def table_with(architecture: str, chosen: list[Job]) -> str:
    """The text of tiles.json with the chosen tiles in it."""
    table = json.loads(json.dumps(read_table()))
    for job in chosen:
        table["16 bits"][architecture][str(job.dim)] |= job.entry
    return table_text(table)


def table_text(table: dict[str, Any]) -> str:
    """As tiles.json is written: a head dim per line."""
    text = json.dumps(table, indent=1)
    return re.sub(r"\{[^{}]*\}", lambda found: re.sub(r"(?<=[\[{]) | (?=[\]}])", "", " ".join(found[0].split())), text) + "\n"
