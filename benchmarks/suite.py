"""Time our kernels beside those of other libraries on this GPU, or show earlier results: python -m benchmarks.suite paper

examples:
  python -m benchmarks.suite paper --plot speed.png
  python -m benchmarks.suite quick --seqlens 4096 --masks causal --schedules
  python -m benchmarks.suite masks --list
  python -m benchmarks.suite ranks --processes 5 --passes backward
  python -m benchmarks.suite ranks --sustained --passes backward --plot power.png
  python -m benchmarks.suite decode --processes 5
  python -m benchmarks.suite --from benchmarks/results/h200-paper.json --plot speed.png --plot-schedules schedules.png
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dash_attn.cli import bench
from dash_attn.cli.files import check_files, check_folder
from dash_attn.cli.parser import Parser, whole
from dash_attn.cli.parser import words as read_words
from dash_attn.tools.bench.candidates import Candidate, ours, who_runs
from dash_attn.tools.bench.report import Results, save
from dash_attn.tools.bench.shape import HOST_SUITE, PASSES, Suite

from . import power, result_files
from .cache_peers import decode_candidates
from .peers import FLEX, equal_heads, package_versions, peers
from .pictures import draw, draw_schedules
from .result_files import print_report
from .suites import DECODE_SUITES, EQUAL_HEADS_SUITES, FLEX_SUITES, SUITES, choose, with_planning

RESULTS = Path("benchmarks/results")
BAD_INPUT = 2
Arguments = argparse.Namespace


def parser_of_parent() -> argparse.ArgumentParser:
    """What is done with results, and how many processes measure: each of those gets all other options."""
    parser = argparse.ArgumentParser(add_help=False)
    processes_help = "repeat everything in that many fresh processes; medians, and the lowest and highest of each ratio"
    parser.add_argument("--processes", type=whole(), metavar="N", help=processes_help)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw relative speeds, or sustained ones, as .png or .svg")
    parser.add_argument("--plot-pass", choices=PASSES, default="backward", help="the pass to draw (default: backward)")
    parser.add_argument("--plot-schedules", type=Path, metavar="FILE", help="draw the schedules relative to the unordered backward")
    return parser


def parser_of_suites() -> argparse.ArgumentParser:
    style: Any = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = Parser(prog="benchmarks.suite", parents=[parser_of_parent()], **style)
    names = (*SUITES, HOST_SUITE)
    parser.add_argument("suite", nargs="?", choices=names, default="quick", help="which shapes (default: quick)")
    bench.add_options(parser, RESULTS)
    parser.add_argument("--list", action="store_true", help="list the cases and which kernels can run each; needs no GPU")
    seconds = power.SUSTAINED_SECONDS
    sustained_help = f"also run each kernel that long without a pause (default: {seconds:g}): TFLOP/s, W, SM clock, J per step"
    parser.add_argument("--sustained", type=float, nargs="?", const=seconds, metavar="SECONDS", help=sustained_help)
    without_help = "leave these kernels out (names as in --list)"
    parser.add_argument("--without", type=read_words, default=[], metavar="NAME,NAME", help=without_help)
    energy_help = "do not measure energy, which takes half a second per kernel"
    parser.add_argument("--no-energy", dest="energy", action="store_false", help=energy_help)
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="show earlier results; needs no GPU")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Bad input is one line on stderr."""
    words = sys.argv[1:] if words is None else words
    try:
        return run(parser_of_suites().parse_args(words), parser_of_parent().parse_known_args(words)[1])
    except (ValueError, OSError, NotImplementedError) as error:
        print(f"benchmarks.suite: error: {error}", file=sys.stderr)
        return BAD_INPUT


def run(arguments: Arguments, of_child: list[str]) -> int:
    """of_child: the words of one of several processes."""
    check_files(arguments, "plot", "plot_schedules", read="source")
    _check_options(arguments)
    if arguments.list:
        return _list(arguments)
    if arguments.source:
        path, results = arguments.source, result_files.read(arguments.source)
    else:
        path, results = measure_anew(arguments, of_child) if arguments.processes else measure_here(arguments)
    print_report(results)
    if arguments.plot:
        direction = "forward" if results["suite"] in DECODE_SUITES else arguments.plot_pass
        draw(results, arguments.plot, direction, _drawn_field(results))
        print(f"picture: {arguments.plot}")
    if arguments.plot_schedules:
        draw_schedules(results, arguments.plot_schedules)
        print(f"picture: {arguments.plot_schedules}")
    return bench.conclude(results, path)


def _check_options(arguments: Arguments) -> None:
    """Whether the options of a measurement fit each other."""
    bench.check_options(arguments)
    if arguments.suite in DECODE_SUITES and not arguments.source and (arguments.schedules or "forward" not in arguments.passes):
        asked = "--schedules" if arguments.schedules else f"--passes {','.join(arguments.passes)}"
        raise ValueError(f"suite {arguments.suite} has a forward only: caches have no backward; got {asked}")
    if arguments.sustained is not None and not 0 < arguments.sustained < math.inf:
        raise ValueError(f"--sustained must be a number of seconds > 0; got {arguments.sustained}")
    for flag, value in (("--processes", arguments.processes), ("--sustained", arguments.sustained)):
        if value is not None and (arguments.source or arguments.suite == HOST_SUITE):
            other = "--from, which measures nothing" if arguments.source else f"suite {HOST_SUITE}, which measures the host"
            raise ValueError(f"{flag} does not go with {other}")


def _drawn_field(results: Results) -> str:
    if any("sustained" in row for row in results["rows"]):
        return "sustained"
    return "ratio_to_cudnn" if isinstance(SUITES.get(results["suite"]), Suite) else "ratio_to_fastest_peer"


def _list(arguments: Arguments) -> int:
    """The cases of a suite and who runs them."""
    kernels, missing = candidates(arguments)
    for shape in choose(arguments.suite, arguments.seqlens, arguments.head_dims, arguments.masks):
        said = who_runs(shape, kernels)
        print(f"{said['case']}\n  can run it: {', '.join(said['runs'])}")
        for name, why in said["cannot"].items():
            print(f"  cannot: {name} ({why})")
    for name, why in missing.items():
        print(f"not installed: {name} ({why})")
    return 0


def candidates(arguments: Arguments) -> tuple[list[Candidate], dict[str, str]]:
    """Everybody who is installed, and why the others are not."""
    mine, others, missing = _ours_and_others(arguments)
    left_out = set(arguments.without)
    unknown = left_out - {candidate.name for candidate in others} - {*missing, FLEX}  # which few suites have; nobody minds its absence
    if unknown:
        raise ValueError(f"--without: no such kernel: {', '.join(sorted(unknown))}; there are {', '.join(c.name for c in others)}")
    kept = [*mine, *(c for c in others if c.name not in left_out)]
    return bench.in_passes(kept, arguments.passes), missing | dict.fromkeys(left_out, "--without")


def _ours_and_others(arguments: Arguments) -> tuple[list[Candidate], list[Candidate], dict[str, str]]:
    if arguments.suite in DECODE_SUITES:
        if arguments.backend not in ("auto", "hopper"):
            raise ValueError(f"suite {arguments.suite}: backend {arguments.backend!r} has no cache of keys and values; 'hopper' has")
        (own, *others), missing = decode_candidates(not arguments.no_peers)
        return [own], others, missing
    others, missing = ([], {}) if arguments.no_peers else peers(arguments.suite in FLEX_SUITES)
    default, *mine = ours(arguments.schedules, arguments.backend)
    equal = [equal_heads(arguments.backend)] if arguments.suite in EQUAL_HEADS_SUITES else []
    return [with_planning(default), *mine, *equal], others, missing


def measure_here(arguments: Arguments) -> tuple[Path, Results]:
    shapes = choose(arguments.suite, arguments.seqlens, arguments.head_dims, arguments.masks)
    path, results = bench.begin(arguments, "" if arguments.sustained is None else "-sustained")
    if arguments.suite == HOST_SUITE:
        bench.measure_suite(results, path, [], [])
        return path, results
    kernels, results["missing"] = candidates(arguments)
    results["environment"]["packages"] = package_versions(kernels)
    try:
        scale, results["energy"] = _scale(arguments)
        bench.measure_suite(results, path, shapes, kernels, scale)
    except power.NoCounter as error:
        raise ValueError(f"--sustained needs the GPU's energy counter and its clock (NVML): {error}") from None
    return path, results


def _scale(arguments: Arguments) -> tuple[Any, dict[str, Any]]:
    """What weighs each kernel: the GPU's energy counter, or why there is none. A sustained run does not go without."""
    if not arguments.energy and arguments.sustained is None:
        return None, {"missing": "--no-energy"}
    try:
        meter = power.gpu_meter(arguments.sustained)
    except power.NoCounter as error:
        if arguments.sustained is not None:
            raise
        return None, {"missing": str(error)}
    return meter, {"seconds": meter.seconds}


def measure_anew(arguments: Arguments, of_child: list[str]) -> tuple[Path, Results]:
    """Run the suite in fresh processes; results are on disk after every process."""
    check_folder("--output", arguments.output)
    choose(arguments.suite, arguments.seqlens, arguments.head_dims, arguments.masks)
    bench.require_gpu(arguments.backend)
    path, results = arguments.output, dict[str, Any]()
    for name, results in result_files.measured_anew(of_child, arguments.processes):
        path = arguments.output / name
        save(results, path)
    return path, results


if __name__ == "__main__":
    sys.exit(main())
