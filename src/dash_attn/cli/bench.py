"""`dash-attn bench`: time our kernels beside those that PyTorch brings, on this GPU."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..formats import RESULTS
from ..tools.bench.shape import HOST_SUITE, PASSES, SUITES, Shape, choose
from .device import GPU_BACKENDS, gpu_trouble
from .files import check_folder
from .parser import numbers, whole, words
from .table import Report, print_report

if TYPE_CHECKING:
    from ..tools.bench.candidates import Candidate
    from ..tools.bench.measure import Scale
    from ..tools.bench.report import Table

REPEATS = 30
HELP = "compare the speed of forward and backward with PyTorch's on this GPU"
TEXT = "Times our kernels and PyTorch's, interleaved in one process. A kernel that fails its check gets no figure."
EXAMPLES = """examples:
  dash-attn bench
  dash-attn bench --seqlens 4096 --masks causal --schedules
  dash-attn bench --suite host
"""
Results = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--suite", choices=(*SUITES, HOST_SUITE), default="quick", help="which shapes (default: quick)")
    add_options(parser, Path("."))


def add_options(parser: argparse.ArgumentParser, output: Path) -> None:
    """What is measured, and where the results go; also for benchmarks/suite.py."""
    parser.add_argument("--seqlens", type=numbers, metavar="N,N", help="these lengths instead of the suite's")
    parser.add_argument("--head-dims", type=numbers, metavar="N,N", help="these head dims instead of the suite's")
    parser.add_argument("--masks", type=words, metavar="NAME,NAME", help="these masks instead of the suite's")
    parser.add_argument("--repeats", type=whole(), default=REPEATS, metavar="N", help=f"timed runs of each kernel (default: {REPEATS})")
    passes_help = f"some of {', '.join(PASSES)} (default: both)"
    parser.add_argument("--passes", type=words, default=PASSES, metavar="NAME,NAME", help=passes_help)
    parser.add_argument("--schedules", action="store_true", help="also time the backward of every schedule")
    backend_help = "which of our kernels (default: auto, as calls choose it)"
    parser.add_argument("--backend", choices=GPU_BACKENDS, default="auto", help=backend_help)
    parser.add_argument("--no-peers", action="store_true", help="only our kernels")
    parser.add_argument("--output", type=Path, default=output, metavar="DIR", help=f"where results go (default: {output})")


def run(arguments: argparse.Namespace) -> int:
    from ..tools.bench.candidates import ours
    from ..tools.bench.pytorch_peers import pytorch_peers
    from ..tools.bench.report import tables

    check_options(arguments)
    shapes = choose(SUITES, arguments.suite, arguments.seqlens, arguments.head_dims, arguments.masks)
    path, results = begin(arguments)
    kernels = [*ours(arguments.schedules, arguments.backend), *([] if arguments.no_peers else pytorch_peers())]
    measure_suite(results, path, shapes, in_passes(kernels, arguments.passes))
    show(results, tables(results))
    return conclude(results, path)


def check_options(arguments: argparse.Namespace) -> None:
    if not set(arguments.passes) <= set(PASSES):
        raise ValueError(f"--passes takes {' and '.join(PASSES)}; got {', '.join(arguments.passes)}")


def in_passes(kernels: Iterable[Candidate], passes: Sequence[str]) -> list[Candidate]:
    timed = [replace(kernel, passes=tuple(name for name in kernel.passes if name in passes)) for kernel in kernels]
    return [kernel for kernel in timed if kernel.passes]


def begin(arguments: argparse.Namespace, kind: str = "") -> tuple[Path, Results]:
    """The file of results, and results without rows."""
    check_folder("--output", arguments.output)
    require_gpu(arguments.backend)
    from ..tools.machine import gpu_environment, short_name

    where = gpu_environment(arguments.backend)
    backend = "" if arguments.backend == "auto" else f"-{arguments.backend}"
    path = arguments.output / f"{short_name(where['gpu'])}-{arguments.suite}{backend}{kind}.json"
    return path, {**RESULTS.mark, "suite": arguments.suite, "repeats": arguments.repeats, "environment": where, "rows": []}


def measure_suite(results: Results, path: Path, shapes: Sequence[Shape], kernels: Sequence[Candidate], scale: Scale | None = None) -> None:
    """Rows of one shape after the other, or those of the host. Results are on disk after every shape."""
    import torch

    from ..tools.bench.candidates import who_runs
    from ..tools.bench.host import SHAPE, measure_host
    from ..tools.bench.measure import cuda_times, measure
    from ..tools.bench.report import save

    if results["suite"] == HOST_SUITE:
        results |= {"host_shape": str(SHAPE), "host": measure_host(current_device(), torch.cuda.synchronize)}
    else:
        results["cases"] = [who_runs(shape, kernels) for shape in shapes]
    for number, shape in enumerate(shapes, start=1):
        print(f"[{number}/{len(shapes)}] {shape}", file=sys.stderr, flush=True)
        results["rows"] += measure(shape, kernels, results["repeats"], cuda_times, current_device(), scale)
        save(results, path)
        torch.cuda.empty_cache()
    save(results, path)


def show(results: Results, tables: Iterable[Table]) -> None:
    from ..tools.bench.candidates import OURS
    from ..tools.bench.report import heading, reasons

    print(heading(results))
    for title, columns, cells in tables:
        print_report(Report(title, columns, list(map(tuple, cells)), [row[0] == OURS for row in cells]))
    for reason in reasons(results):
        print(f"  {reason}")


def conclude(results: Results, path: Path) -> int:
    """1 if a kernel of ours failed."""
    from ..tools.bench.report import summary

    said = summary(results, path)
    print(json.dumps(said))
    return 1 if said["failed"] else 0


def current_device() -> Any:
    import torch

    return torch.device("cuda", torch.cuda.current_device())


def require_gpu(backend: str) -> None:
    import torch

    if not torch.cuda.is_available():
        raise ValueError("bench needs a CUDA GPU of compute capability 8.0 or later; PyTorch finds none here")
    trouble = gpu_trouble(backend)
    if trouble is not None:
        raise ValueError(trouble)
