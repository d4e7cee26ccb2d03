"""Tiles of the Triton backend: tried on this GPU, so that src/dash_attn/backends/triton/tiles.json can be chosen offline.

Part of triton_backend.py (--sweep, --warm). `table_with` is the table of the package with what a sweep chose.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from math import log
from multiprocessing import get_context
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from dash_attn import Causal, Documents, Full, Mask, Prefix
from dash_attn.backends.triton import passes
from dash_attn.backends.triton.explain import _as_run, _launches
from dash_attn.backends.triton.launch import Launch
from dash_attn.backends.triton.tiles import Tile, Tiles, read_table
from dash_attn.call.call import Call
from dash_attn.call.options import AttentionOptions
from dash_attn.masks import TilePattern

from .timing import milliseconds

BF16, FP32 = torch.bfloat16, torch.float32
BITS = TilePattern(np.arange(64, dtype=np.uint8).reshape(8, 8) % 3)
Row = dict[str, Any]
Limits = dict[tuple[Any, ...], float]  # milliseconds, by direction, head dim, mask and length

APART, TOGETHER = False, True  # whether the two passes of the backward are two launches or one
LEAD_IN = 1_000_000  # cycles
LEFT_OUT = 0.02  # ms: row statistics are part of a peer's backward and of no sweep
# Loops over partial tiles of one stage make ptxas serialise every product of a Hopper kernel.
SMALL, WIDE, TALL = (64, 64, 4, 3, 2), (64, 128, 8, 3, 2), (128, 64, 8, 3, 2)
SWEEP: dict[int, dict[str, tuple[Any, ...]]] = {
    64: {
        "forward": ((64, 128, 4, 3, 2), SMALL, TALL, (128, 64, 4, 3, 2), (128, 128, 4, 3, 3), (64, 128, 4, 2, 2)),
        "backward": ((SMALL, SMALL, TOGETHER), (SMALL, SMALL, APART), (WIDE, SMALL, APART), (WIDE, TALL, TOGETHER)),
    },
    128: {
        "forward": (TALL, SMALL, (64, 64, 4, 2, 2)),
        "backward": (
            *((WIDE, TALL, TOGETHER), (WIDE, TALL, APART), (WIDE, (64, 64, 4, 2, 2), APART)),
            ((64, 64, 4, 2, 2), (64, 64, 4, 2, 2), TOGETHER),
        ),
    },
    256: {
        "forward": ((128, 32, 8, 2, 2), (128, 64, 8, 2, 2), (64, 64, 4, 2, 2), (64, 32, 4, 3, 2)),
        "backward": (
            *(((32, 64, 8, 2, 2), (64, 32, 8, 2, 2), launches) for launches in (TOGETHER, APART)),
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


def measure_tiles(jobs: list[Job], lengths: tuple[int, ...], repeats: int, device: torch.device) -> tuple[list[Row], dict[str, str]]:
    """A row for each direction, head dim, length and mask; and the tiles that cannot run, with the reason."""
    rows: list[Row] = []
    failures: dict[str, str] = {}
    memory = partial(torch.randn, device=device, dtype=BF16)
    places = dict.fromkeys((job.dim, job.name) for job in jobs)
    for (dim, name), length, mask in product(places, lengths, (Causal(), Full())):
        times: dict[str, float] = {}
        for job in (job for job in jobs if (job.dim, job.name) == (dim, name)):
            what = f"{dim} {name} {job.key}"
            if what in failures:
                continue
            try:
                launches = launches_of(job, (16384 // length, length, 2048 // dim), mask, memory)
                (times[job.key],) = milliseconds([lambda launches=launches: [launch.run() for launch in launches]], repeats, LEAD_IN)
            except Exception as error:
                failures[what] = f"{type(error).__name__}: {str(error)[:200]}"
        rows.append({"dim": dim, "pass": name, "length": length, "mask": str(mask), "ms": times})
        listed = ", ".join(f"{key}: {ms:.3f}" for key, ms in sorted(times.items(), key=lambda item: item[1]))
        print(f"{dim} {name} {mask} {length}: {listed}", flush=True)
    return rows, failures


def choose_tiles(jobs: list[Job], rows: list[Row], limits: Limits) -> list[Job]:
    """Of the tiles that ran everywhere: those that keep most limits (milliseconds, see `limits_of`), then by the geometric mean over
    lengths and masks; the first listed of equals."""
    chosen = []
    for dim, name in dict.fromkeys((row["dim"], row["pass"]) for row in rows):
        of_pass = [row for row in rows if (row["dim"], row["pass"]) == (dim, name)]
        able = [job for job in jobs if (job.dim, job.name) == (dim, name) and all(job.key in row["ms"] for row in of_pass)]

        def rank(job: Job, of_pass: list[Row] = of_pass) -> tuple[int, float]:
            missed = sum(row["ms"][job.key] > limits.get(place_of(row), float("inf")) for row in of_pass)
            return missed, sum(log(row["ms"][job.key]) for row in of_pass)

        chosen += [min(able, key=rank)] if able else []
    return chosen


def place_of(row: Row) -> tuple[Any, ...]:
    return row["pass"], row["dim"], row["mask"], row["length"]


def limits_of(rows: list[Row], targets: dict[str, dict[str, float]]) -> Limits:
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
    text = json.dumps(table, indent=1)  # a head dim per line
    return re.sub(r"\{[^{}]*\}", lambda found: re.sub(r"(?<=[\[{]) | (?=[\]}])", "", " ".join(found[0].split())), text) + "\n"


# ---- kernels compiled in processes side by side, into Triton's cache on disk


def compile_one(launch: Launch) -> str | None:
    """Why it cannot be."""
    try:
        launch.machine_code()
    except Exception as error:
        return f"{launch.kernel} {launch.tile}: {type(error).__name__}: {str(error)[:200]}"
    return None


def compile_all(launches: list[Launch], processes: int) -> list[str | None]:
    """By the current GPU, of which each process makes a context."""
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        return list(pool.map(compile_one, map(without_memory, launches), chunksize=1))


def without_memory(launch: Launch) -> Launch:
    """The dtype of each tensor in its place: all that a compiler looks at."""
    numbers = {name: value.dtype if isinstance(value, Tensor) else value for name, value in launch.numbers.items()}
    return replace(launch, numbers=numbers)


def launches_to_warm(architecture: str) -> list[Launch]:
    """Each kernel once, those that take longest to compile first."""
    found: dict[Any, Launch] = {}
    with patch.object(passes, "architecture_of", return_value=architecture):
        for call in calls():
            for launch in every_launch(call):
                numbers = without_memory(launch).numbers.values()
                dtypes = tuple(str(value) for value in numbers if value is None or isinstance(value, torch.dtype))
                found.setdefault((launch.kernel, str(launch.constants), launch.tile, dtypes), launch)
    return sorted(found.values(), key=lambda launch: -launch.constants.get("BLOCK_DIM", 0))


def every_launch(call: passes.Passes) -> Iterator[Launch]:
    yield from _launches(call).values()
    if call.offsets is not None:
        yield passes.offsets_launch(call)
    out, lse = (torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in ((call.q.shape, call.q.dtype), (call.lse_shape, FP32)))
    rows, sinks = passes.RowValues.empty(call), torch.empty(call.heads[0], device="meta")
    yield passes.sink_launch(call, rows, sinks, sinks)
    if call.q.dtype == BF16 and call.q.shape[-1] in (64, 128):
        yield passes.forward_launch(call, out, lse, sinks)
        yield passes.statistics_launch(call, out, out, lse, lse, rows)


def calls() -> Iterator[passes.Passes]:
    """Of the grid of the tests, and of every kind of mask at the head dims that most tests have."""
    from gpu_helpers import ragged_map
    from grid import dim_cases, length_cases, softcap_cases

    for case in (*length_cases(), *dim_cases(), *softcap_cases()):
        yield call_of(case.mask, case.heads, (case.dim, case.v_dim or case.dim), case.dtype, case.softcap)
    for dim in (64, 128):
        for group in (1, 2):
            for mask in (Prefix(100), Documents((200, 312)), ragged_map(512, 512), BITS):
                yield call_of(mask, (2 * group, 2), (dim, dim))
    for dim in (64, 128, 256):
        yield call_of(Causal(), (4, 2), (dim, dim), FP32)


def call_of(mask: Mask, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype = BF16, softcap: float = 0.0) -> passes.Passes:
    """Lengths decide no kernel."""
    shapes = (heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1])
    q, k, v = (torch.empty(1, 512, *shape, dtype=dtype, device="meta") for shape in shapes)
    return passes.Passes(_as_run(Call(q, k, v, AttentionOptions(mask, 0.1, softcap))))
