"""The Triton backend on this GPU: python -m benchmarks.triton_backend --judge FILE | --sweep | --warm

--judge: what `python -m benchmarks.suite paper --backend triton` wrote, beside PyTorch's deterministic flash backward and FlexAttention;
         exits with 1 if it misses a target. It needs no GPU.
--sweep: every pass with other tiles, to choose src/dash_attn/backends/triton/tiles.json; writes JSON, and with --table the new table.
--warm:  compiles what the others (and tests/gpu/test_gpu_triton.py) need, in processes side by side.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from math import inf, log
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from dash_attn import Causal, Full, Mask
from dash_attn.backends.triton import passes
from dash_attn.backends.triton.launch import Launch
from dash_attn.backends.triton.support import architecture_of, triton_version
from dash_attn.backends.triton.tiles import Tile, Tiles, read_table
from dash_attn.call.call import Call
from dash_attn.call.options import AttentionOptions
from dash_attn.cli.parser import numbers
from dash_attn.tools.bench.candidates import OURS, first_line
from dash_attn.tools.bench.report import Row, save, shape_of, unique
from triton_compiling import Compiled

from .result_files import read
from .timing import milliseconds

DEVICE = torch.device("cuda", 0)
TARGETS = {"backward": {"PyTorch flash deterministic": 1.1, "FlexAttention": 1.0}, "forward": {"FlexAttention": 0.95}}
BF16, FP32 = torch.bfloat16, torch.float32
Limits = dict[tuple[Any, ...], float]  # milliseconds, by direction, head dim, mask and length

APART, TOGETHER = False, True  # whether the two passes of the backward are two launches or one
LEAD_IN = 1_000_000  # cycles
LEFT_OUT = 0.02  # ms: row statistics are part of a peer's backward and of no sweep
# Loops over partial tiles of one stage make ptxas serialise every product of a Hopper kernel.
SMALL, WIDE, TALL = (64, 64, 4, 3, 2), (64, 128, 8, 3, 2), (128, 64, 8, 3, 2)
SHALLOW = (64, 64, 4, 2, 2)
SWEEP: dict[int, dict[str, tuple[Any, ...]]] = {
    64: {
        "forward": ((64, 128, 4, 3, 2), SMALL, TALL, (128, 64, 4, 3, 2), (128, 128, 4, 3, 3), (64, 128, 4, 2, 2)),
        "backward": ((SMALL, SMALL, TOGETHER), (SMALL, SMALL, APART), (WIDE, SMALL, APART), (WIDE, TALL, TOGETHER)),
    },
    128: {
        "forward": (TALL, SMALL, SHALLOW),
        "backward": ((WIDE, TALL, TOGETHER), (WIDE, TALL, APART), (WIDE, SHALLOW, APART), (SHALLOW, SHALLOW, TOGETHER)),
    },
    256: {
        "forward": ((128, 32, 8, 2, 2), (128, 64, 8, 2, 2), SHALLOW, (64, 32, 4, 3, 2)),
        "backward": (
            *(((32, 64, 8, 2, 2), (64, 32, 8, 2, 2), launches) for launches in (TOGETHER, APART)),
            ((64, 64, 8, 2, 2), (64, 64, 8, 2, 2), APART),
        ),
    },
}


# ---- beside others


def judged(path: Path) -> int:
    """1 if a target is missed, by a file of results."""
    rows, missed = read(path)["rows"], 0
    for shape, direction in unique((shape_of(row), row["pass"]) for row in rows):
        of_case = {row["candidate"]: row for row in rows if (shape_of(row), row["pass"]) == (shape, direction)}
        said, misses = beside_peers(direction, of_case)
        missed += misses
        print(f"{shape} {direction}: {said}")
    print(f"{missed} missed")
    return 1 if missed else 0


def beside_peers(direction: str, rows: dict[str, Row]) -> tuple[str, int]:
    """In words, and how many targets are missed. A peer without a figure shows nothing."""
    mine = rows[OURS]
    if "median_ms" not in mine:
        return f"{mine['status']}: {mine['reason']}", 1
    said, missed = [f"{mine['median_ms']:.3f} ms, {mine['tflops']:.0f} TFLOP/s"], 0
    for peer, least in TARGETS[direction].items():
        row = rows.get(peer, {})
        ratio = row["median_ms"] / mine["median_ms"] if "median_ms" in row else 0.0
        missed += ratio < least
        verdict = "" if ratio >= least else f" (MISSED: {least})"
        said.append(f"{ratio:.2f} x {peer}{verdict}" if ratio else f"{peer}: {row.get('reason', 'not there')}")
    return ", ".join(said), missed


# ---- other tiles


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
        found = " and ".join(" ".join(map(str, tile)) for tile in self.entry.values() if isinstance(tile, list))
        return f"{found}{', together' if self.entry.get('together') else ''}"

    def launches(self, shape: tuple[int, int, int], mask: Mask, memory: Any) -> tuple[Launch, ...]:
        """Of a call with those tiles; `memory` makes its tensors."""
        batch, length, heads = shape
        q, k, v, out, dq, dk, dv = (memory(batch, length, heads, self.dim) for _ in range(7))
        lse, delta = (memory(batch, heads, length).float() for _ in range(2))  # lengths are whole units
        of_pass = [Tile(*tile) for tile in self.entry.values() if isinstance(tile, list)]
        chosen = Tiles("a sweep", of_pass[0], of_pass[0], of_pass[-1], self.entry.get("together", False))
        with patch.object(passes, "tiles_for", lambda *_: chosen):
            call = passes.Passes(Call(q, k, v, AttentionOptions(mask, self.dim**-0.5)))
            if self.name == "forward":
                return (passes.forward_launch(call, out, lse, None),)
            return passes.gradient_launches(call, out, passes.RowValues(-lse.abs() - 20, delta), (dq, dk, dv))


Jobs = dict[tuple[int, str], list[Job]]  # by head dim and direction


def sweep(arguments: argparse.Namespace) -> int:
    dims = arguments.head_dims or tuple(SWEEP)
    jobs = {(dim, name): [Job(dim, name, one) for one in listed] for dim in dims for name, listed in SWEEP[dim].items()}
    # The same kernels on no memory: no length decides them.
    memory = partial(torch.empty, dtype=BF16, device="meta")
    launches = (launch for some in jobs.values() for job in some for launch in job.launches((1, 256, 1), Causal(), memory))
    troubles = compile_all(distinct(launches), arguments.processes)
    rows, failures = measure_tiles(jobs, arguments.seqlens or (512, 2048, 16384), arguments.repeats)
    limits = limits_of(read(arguments.limits)["rows"]) if arguments.limits else {}
    architecture, chosen = architecture_of(DEVICE), choose_tiles(jobs, rows, limits)
    found = {"environment": {"gpu": torch.cuda.get_device_name(DEVICE), "triton": triton_version()}, "architecture": architecture}
    found |= {"rows": rows, "failures": failures, "chosen": [job._asdict() for job in chosen]}
    save(found, arguments.output)
    for why in (*troubles, *failures.values()):
        print(f"cannot: {why}")
    for job in chosen:
        missed = [place for row in rows if row["ms"].get(job.key, 0.0) > limits.get(place := place_of(row), inf)]
        print(f"chosen: {architecture} head dim {job.dim} {job.name}: {job.key}; {len(missed)} missed of {len(limits)}: {missed}")
    if arguments.table is not None:
        arguments.table.write_text(table_with(architecture, chosen), encoding="utf-8")
    return 0


def measure_tiles(jobs: Jobs, lengths: tuple[int, ...], repeats: int) -> tuple[list[Row], dict[str, str]]:
    """A row for each direction, head dim, length and mask; and the tiles that cannot run, with the reason."""
    rows: list[Row] = []
    failures: dict[str, str] = {}
    memory = partial(torch.randn, device=DEVICE, dtype=BF16)
    for (dim, name), length, mask in product(jobs, lengths, (Causal(), Full())):
        times: dict[str, float] = {}
        for job in jobs[dim, name]:
            what = f"{dim} {name} {job.key}"
            if what in failures:
                continue
            try:
                launches = job.launches((16384 // length, length, 2048 // dim), mask, memory)
                (times[job.key],) = milliseconds([lambda launches=launches: [launch.run() for launch in launches]], repeats, LEAD_IN)
            except Exception as error:
                failures[what] = first_line(error)
        rows.append({"dim": dim, "pass": name, "length": length, "mask": str(mask), "ms": times})
        listed = ", ".join(f"{key}: {ms:.3f}" for key, ms in sorted(times.items(), key=lambda item: item[1]))
        print(f"{dim} {name} {mask} {length}: {listed}", flush=True)
    return rows, failures


def choose_tiles(jobs: Jobs, rows: list[Row], limits: Limits) -> list[Job]:
    """Of the tiles that ran everywhere: those that keep most limits (milliseconds, see `limits_of`), then by the geometric mean over
    lengths and masks; the first listed of equals."""
    chosen = []
    for place, some in jobs.items():
        of_pass = [row for row in rows if (row["dim"], row["pass"]) == place]
        able = [job for job in some if all(job.key in row["ms"] for row in of_pass)]

        def cost(job: Job, of_pass: list[Row] = of_pass) -> tuple[int, float]:
            missed = sum(row["ms"][job.key] > limits.get(place_of(row), inf) for row in of_pass)
            return missed, sum(log(row["ms"][job.key]) for row in of_pass)

        chosen += [min(able, key=cost)] if able else []
    return chosen


def place_of(row: Row) -> tuple[Any, ...]:
    return row["pass"], row["dim"], row["mask"], row["length"]


def limits_of(rows: list[Row]) -> Limits:
    """Of the rows of a file that the suite wrote: the milliseconds at which every target of a shape is reached."""
    limits: Limits = {}
    for row in rows:
        least = TARGETS.get(row["pass"], {}).get(row["candidate"])
        if least is not None and "median_ms" in row:
            shape, left_out = row["shape"], LEFT_OUT if row["pass"] == "backward" else 0.0
            place = row["pass"], shape["head_dim"], shape["mask"], shape["seqlen"]
            limits[place] = min(limits.get(place, inf), row["median_ms"] / least - left_out)
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
        return f"{launch.kernel} {launch.tile}: {first_line(error)}"
    return None


def compile_all(launches: list[Launch], processes: int) -> list[str]:
    """By the current GPU, of which each process makes a context. What cannot be compiled, and why."""
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        return [trouble for trouble in pool.map(compile_one, launches, chunksize=1) if trouble]


def without_memory(launch: Launch) -> Launch:
    """The dtype of each tensor in its place: all that a compiler looks at."""
    given = {name: value.dtype if isinstance(value, Tensor) else value for name, value in launch.numbers.items()}
    return replace(launch, numbers=given)


def distinct(launches: Iterable[Launch]) -> list[Launch]:
    """Each kernel once, on no memory; those that take longest to compile first."""
    found: dict[Any, Launch] = {}
    for launch in map(without_memory, launches):
        dtypes = tuple(str(value) for value in launch.numbers.values() if value is None or isinstance(value, torch.dtype))
        found.setdefault((launch.kernel, str(launch.constants), launch.tile, dtypes), launch)
    return sorted(found.values(), key=lambda launch: (-launch.constants.get("BLOCK_DIM", 0), launch.kernel != "gradients"))


def warm(arguments: argparse.Namespace) -> int:
    """Compiles side by side what tests, checks, times and sweeps will ask for one by one."""
    launches = distinct(launch for case in cases(architecture_of(DEVICE)) for launch in every_launch(case))
    began = time.perf_counter()
    failed = compile_all(launches, arguments.processes)
    print(f"{len(launches)} kernels compiled in {time.perf_counter() - began:.0f} s, {len(failed)} cannot: {failed[:5]}")
    return 0


def every_launch(case: Compiled) -> Iterator[Launch]:
    """Also those with sinks and with a gradient of the LSE."""
    yield from case.launches().values()
    call = case.passes
    out, lse = (torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in ((call.q.shape, call.q.dtype), (call.lse_shape, FP32)))
    rows, sinks = passes.RowValues.empty(call), torch.empty(call.heads[0], device="meta")
    yield passes.sink_launch(call, rows, sinks, sinks)
    if call.q.dtype == BF16 and call.q.shape[-1] in (64, 128):
        yield passes.forward_launch(call, out, lse, sinks)
        yield passes.statistics_launch(call, out, out, lse, lse, rows)


def cases(architecture: str) -> Iterator[Compiled]:
    """Of the grid of the tests, and of every kind of mask at the head dims that most tests have."""
    from grid import dim_cases, length_cases, softcap_cases

    for case in (*length_cases(), *dim_cases(), *softcap_cases()):
        dims, group = (case.dim, case.v_dim or case.dim), case.heads[0] // case.heads[1]
        yield Compiled(architecture, dims, case.dtype, group=group, softcap=case.softcap)
    for dim, group, kind in product((64, 128), (1, 2), ("rows", "blocks", "bits", "packed")):
        yield Compiled(architecture, (dim, dim), kind=kind, group=group)
    for dim in (64, 128, 256):
        yield Compiled(architecture, (dim, dim), FP32, group=2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--judge", type=Path, metavar="FILE")
    what.add_argument("--sweep", action="store_true")
    what.add_argument("--warm", action="store_true")
    parser.add_argument("--repeats", type=int, default=7, help="of each run (default: 7)")
    parser.add_argument("--seqlens", type=numbers, metavar="N,N")
    parser.add_argument("--head-dims", type=numbers, metavar="N,N")
    parser.add_argument("--processes", type=int, default=12, help="that compile at once")
    parser.add_argument("--table", type=Path, metavar="FILE", help="--sweep writes tiles.json with the best tiles there")
    parser.add_argument("--limits", type=Path, metavar="FILE", help="--sweep prefers tiles that reach the targets beside the peers in FILE")
    parser.add_argument("--output", type=Path, default=Path("triton-backend.json"), metavar="FILE")
    arguments = parser.parse_args()
    if arguments.judge is not None:
        return judged(arguments.judge)
    if not torch.cuda.is_available():
        raise SystemExit("this needs a GPU; PyTorch finds none")
    return (sweep if arguments.sweep else warm)(arguments)


if __name__ == "__main__":
    sys.exit(main())
