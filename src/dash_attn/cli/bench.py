"""`dash-attn bench`: time our kernels beside others on this GPU, or draw a picture of earlier results."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ..tools.bench.suites import DECODE_SUITES, HOST_SUITE, PASSES, SUITES, Suite, choose
from .bench_measuring import candidates, measure_anew, measure_here
from .devices import GPU_BACKENDS
from .files import check_different, check_picture

REPEATS, SUSTAINED_SECONDS = 30, 2.0
EXAMPLES = """examples:
  dash-attn bench --suite paper --plot speed.png
  dash-attn bench --suite quick --seqlens 4096 --masks causal --schedules
  dash-attn bench --suite masks --list
  dash-attn bench --suite ranks --processes 5 --passes backward
  dash-attn bench --suite ranks --sustained --passes backward --plot power.png
  dash-attn bench --suite decode --processes 5
  dash-attn bench --from benchmarks/results/h200-paper.json --plot speed.png --plot-schedules schedules.png
"""


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="time forward and backward beside cuDNN and FlashAttention on this GPU",
        description="Times our kernels and others, interleaved in one process. A kernel that fails its check gets no figure.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--suite", choices=(*SUITES, HOST_SUITE), default="quick", help="which shapes (default: quick)")
    parser.add_argument("--seqlens", type=_numbers, metavar="N,N", help="these lengths instead of the suite's")
    parser.add_argument("--head-dims", type=_numbers, metavar="N,N", help="these head dims instead of the suite's")
    masks_help = "of causal, full (default: both); of the suites masks, ranks and decode these options keep the cases that fit"
    parser.add_argument("--masks", type=_words, metavar="NAME,NAME", help=masks_help)
    parser.add_argument("--list", action="store_true", help="list the cases and which kernels can run each; needs no GPU")
    parser.add_argument("--repeats", type=int, default=REPEATS, metavar="N", help=f"timed runs of each kernel (default: {REPEATS})")
    passes_help = f"of {', '.join(PASSES)} (default: both)"
    parser.add_argument("--passes", type=_words, default=PASSES, metavar="NAME,NAME", help=passes_help)
    processes_help = "repeat everything in that many fresh processes; medians, and the lowest and highest of each ratio"
    parser.add_argument("--processes", type=int, metavar="N", help=processes_help)
    sustained_help = f"also run each kernel that long without a pause (default: {SUSTAINED_SECONDS:g}): TFLOP/s, W, SM clock, J per step"
    parser.add_argument("--sustained", type=float, nargs="?", const=SUSTAINED_SECONDS, metavar="SECONDS", help=sustained_help)
    parser.add_argument("--schedules", action="store_true", help="also time the backward of every schedule")
    backend_help = "which kernels of ours (default: auto, as calls choose it)"
    parser.add_argument("--backend", choices=GPU_BACKENDS, default="auto", help=backend_help)
    parser.add_argument("--no-peers", action="store_true", help="only our kernels")
    parser.add_argument("--without", type=_words, default=[], metavar="NAME,NAME", help="leave these kernels out (names as in --list)")
    parser.add_argument(
        "--no-energy", dest="energy", action="store_false", help="do not measure energy, which takes half a second per kernel"
    )
    results_help = "where results go (default: benchmarks/results)"
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"), metavar="DIR", help=results_help)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw relative speeds, or sustained ones, as .png or .svg")
    parser.add_argument("--plot-pass", choices=PASSES, default="backward", help="the pass to draw (default: backward)")
    parser.add_argument("--plot-schedules", type=Path, metavar="FILE", help="draw the schedules relative to the unordered backward")
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="show earlier results; needs no GPU")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from ..tools.bench.picture_schedules import draw_schedules
    from ..tools.bench.report import print_report
    from ..tools.bench.results import read, summary

    check_picture("--plot", arguments.plot)
    check_picture("--plot-schedules", arguments.plot_schedules)
    check_different(arguments, "plot", "plot_schedules", "source")
    _check_measuring(arguments)
    if arguments.list:
        return _list(arguments)
    if arguments.source:
        path, results = arguments.source, read(arguments.source)
    elif arguments.processes:
        path, results = measure_anew(arguments)
    else:
        path, results = measure_here(arguments)
    print_report(results)
    if arguments.plot:
        direction = "forward" if results["suite"] in DECODE_SUITES else arguments.plot_pass
        _drawing_of(results)(results, arguments.plot, direction)
        print(f"picture: {arguments.plot}")
    if arguments.plot_schedules:
        draw_schedules(results, arguments.plot_schedules)
        print(f"picture: {arguments.plot_schedules}")
    said = summary(results, path)
    print(json.dumps(said))
    return 1 if said["failed"] else 0


def _check_measuring(arguments: argparse.Namespace) -> None:
    """Whether the options of a measurement fit each other."""
    from ..tools.bench.sustained import check_seconds

    if arguments.repeats < 1:
        raise ValueError(f"--repeats must be at least 1; got {arguments.repeats}")
    if not set(arguments.passes) <= set(PASSES):
        raise ValueError(f"--passes takes {' and '.join(PASSES)}; got {', '.join(arguments.passes)}")
    if arguments.suite in DECODE_SUITES and not arguments.source and (arguments.schedules or "forward" not in arguments.passes):
        asked = "--schedules" if arguments.schedules else f"--passes {','.join(arguments.passes)}"
        raise ValueError(f"--suite {arguments.suite} has a forward only: caches have no backward; got {asked}")
    if arguments.processes is not None and arguments.processes < 1:
        raise ValueError(f"--processes must be at least 1; got {arguments.processes}")
    if arguments.sustained is not None:
        check_seconds(arguments.sustained)
    for flag, value in (("--processes", arguments.processes), ("--sustained", arguments.sustained)):
        if value is not None and (arguments.source or arguments.suite == HOST_SUITE):
            other = "--from, which measures nothing" if arguments.source else f"--suite {HOST_SUITE}, which measures the host"
            raise ValueError(f"{flag} does not go with {other}")


def _drawing_of(results: dict[str, Any]) -> Any:
    from ..tools.bench.picture import draw
    from ..tools.bench.picture_cases import draw_cases
    from ..tools.bench.picture_sustained import draw_sustained

    if any("sustained" in row for row in results["rows"]):
        return draw_sustained
    return draw if isinstance(SUITES.get(results["suite"]), Suite) else draw_cases


def _list(arguments: argparse.Namespace) -> int:
    """The cases of a suite and who runs them."""
    from ..tools.bench.peers import who_runs

    shapes = [] if arguments.suite == HOST_SUITE else choose(arguments.suite, arguments.seqlens, arguments.head_dims, arguments.masks)
    kernels, missing = candidates(arguments)
    for shape in shapes:
        said = who_runs(shape, kernels)
        print(f"{said['case']}\n  can run it: {', '.join(said['runs'])}")
        for name, why in said["cannot"].items():
            print(f"  cannot: {name} ({why})")
    for name, why in missing.items():
        print(f"not installed: {name} ({why})")
    return 0


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in _words(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"whole numbers separated by commas; got {text!r}") from None


def _words(text: str) -> tuple[str, ...]:
    words = tuple(word.strip() for word in text.split(",") if word.strip())
    if not words:
        raise argparse.ArgumentTypeError("at least one, separated by commas")
    return words
