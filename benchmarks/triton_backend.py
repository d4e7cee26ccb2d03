"""The Triton backend on this GPU: python -m benchmarks.triton_backend --time | --sweep | --warm

--time:  paper shapes beside PyTorch's deterministic flash backward and FlexAttention; writes JSON.
--sweep: every pass with other tiles, to choose src/dash_attn/backends/triton/tiles.json; writes JSON, and with --table the new table.
--warm:  compiles what the others (and tests/gpu/test_gpu_triton.py) need, in processes side by side.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from dash_attn.backends.triton import tiles
from dash_attn.backends.triton.support import architecture_of, triton_version
from dash_attn.cli.bench import numbers, words
from dash_attn.tools.bench.candidates import OURS, ours
from dash_attn.tools.bench.measure import cuda_times, measure
from dash_attn.tools.bench.report import Row, save
from dash_attn.tools.machine import gpu_environment

from . import triton_sweep
from .peers import flex, pytorch_peers
from .suites import choose
from .triton_sweep import SWEEP, compile_all, launches_to_warm, limits_of, place_of, table_with

DEVICE = torch.device("cuda", 0)
TARGETS = {"backward": {"PyTorch flash deterministic": 1.1, "FlexAttention": 1.0}, "forward": {"FlexAttention": 0.95}}


def timed(arguments: argparse.Namespace) -> int:
    """1 if a target is missed."""
    candidates = [*ours(False, "triton"), *(peer for peer in pytorch_peers() if peer.deterministic), flex()]
    shapes = choose("paper", arguments.seqlens, arguments.head_dims, arguments.masks)
    results: dict[str, Any] = {"environment": gpu_environment("triton"), "repeats": arguments.repeats, "rows": []}
    missed = 0
    for shape in shapes:
        rows = measure(shape, candidates, arguments.repeats, cuda_times, DEVICE)
        results["rows"] += rows
        save(results, arguments.output)
        for direction in TARGETS:
            said, misses = beside_peers(direction, {row["candidate"]: row for row in rows if row["pass"] == direction})
            missed += misses
            print(f"{shape} {direction}: {said}", flush=True)
        torch.cuda.empty_cache()
    print(json.dumps({"shapes": len(shapes), "missed": missed, "file": str(arguments.output)}))
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


def sweep(arguments: argparse.Namespace) -> int:
    jobs = triton_sweep.jobs_of(arguments.head_dims or tuple(SWEEP))
    launches = {job: triton_sweep.to_compile(job) for job in jobs}
    kernels = {(launch.kernel, str(launch.constants), launch.tile): launch for of_job in launches.values() for launch in of_job}
    longest_first = sorted(kernels.values(), key=lambda launch: launch.kernel != "gradients")
    troubles = [trouble for trouble in compile_all(longest_first, arguments.processes) if trouble]
    rows, failures = triton_sweep.measure_tiles(jobs, arguments.seqlens or (512, 2048, 16384), arguments.repeats, DEVICE)
    limits = limits_of(json.loads(arguments.limits.read_text(encoding="utf-8"))["rows"], TARGETS) if arguments.limits else {}
    architecture, chosen = architecture_of(DEVICE), triton_sweep.choose_tiles(jobs, rows, limits)
    found = {"environment": {"gpu": torch.cuda.get_device_name(DEVICE), "triton": triton_version()}, "architecture": architecture}
    found |= {"rows": rows, "failures": failures, "chosen": [job._asdict() for job in chosen]}
    save(found, arguments.output)
    for why in (*troubles, *failures.values()):
        print(f"cannot: {why}")
    for job in chosen:
        missed = [place for row in rows if row["ms"].get(job.key, 0.0) > limits.get(place := place_of(row), float("inf"))]
        print(f"chosen: {architecture} head dim {job.dim} {job.name}: {job.key}; {len(missed)} missed of {len(limits)}: {missed}")
    if arguments.table is not None:
        arguments.table.write_text(table_with(architecture, chosen), encoding="utf-8")
    return 0


def warm(arguments: argparse.Namespace) -> int:
    """Compiles side by side what tests, checks, times and sweeps will ask for one by one."""
    launches = launches_to_warm(architecture_of(DEVICE))
    began = time.perf_counter()
    failed = [trouble for trouble in compile_all(launches, arguments.processes) if trouble]
    print(f"{len(launches)} kernels compiled in {time.perf_counter() - began:.0f} s, {len(failed)} cannot: {failed[:5]}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    for name in RUNS:
        what.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--repeats", type=int, help="of each run (default: 20 to time, 7 to sweep)")
    parser.add_argument("--seqlens", type=numbers, metavar="N,N")
    parser.add_argument("--head-dims", type=numbers, metavar="N,N")
    parser.add_argument("--masks", type=words, metavar="NAME,NAME")
    parser.add_argument("--processes", type=int, default=12, help="that compile at once")
    parser.add_argument("--table", type=Path, metavar="FILE", help="--sweep writes tiles.json with the best tiles there")
    parser.add_argument("--limits", type=Path, metavar="FILE", help="--sweep prefers tiles that reach the targets beside the peers in FILE")
    parser.add_argument("--tiles", type=Path, metavar="FILE", help="take tiles from there, not from the package")
    parser.add_argument("--output", type=Path, default=Path("triton-backend.json"), metavar="FILE")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this needs a GPU; PyTorch finds none")
    if arguments.repeats is None:
        arguments.repeats = 20 if arguments.time else 7
    if arguments.tiles is not None:
        tiles.TABLE = arguments.tiles
    return next(run for name, run in RUNS.items() if getattr(arguments, name))(arguments)


RUNS = {"time": timed, "sweep": sweep, "warm": warm}


if __name__ == "__main__":
    sys.exit(main())
