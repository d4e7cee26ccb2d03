"""`dash-attn bench`: time our kernels beside others on this GPU, or draw a picture of earlier results."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..tools.bench.suites import EQUAL_HEADS_SUITES, FLEX_SUITES, HOST_SUITE, PASSES, SUITES, Shape, Suite, choose
from .files import check_different, check_folder, check_picture

REPEATS, SUSTAINED_SECONDS = 30, 2.0
EXAMPLES = """examples:
  dash-attn bench --suite paper --plot speed.png
  dash-attn bench --suite quick --seqlens 4096 --masks causal --schedules
  dash-attn bench --suite masks --list
  dash-attn bench --suite ranks --processes 5 --passes backward
  dash-attn bench --suite ranks --sustained --passes backward --plot power.png
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
    masks_help = "of causal, full (default: both); of the suites masks and ranks these options keep the cases that fit"
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
        path, results = _measure_anew(arguments)
    else:
        path, results = _measure(arguments)
    print_report(results)
    if arguments.plot:
        _drawing_of(results)(results, arguments.plot, arguments.plot_pass)
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
    candidates, missing = _candidates(arguments)
    for shape in shapes:
        said = who_runs(shape, candidates)
        print(f"{said['case']}\n  can run it: {', '.join(said['runs'])}")
        for name, why in said["cannot"].items():
            print(f"  cannot: {name} ({why})")
    for name, why in missing.items():
        print(f"not installed: {name} ({why})")
    return 0


def _candidates(arguments: argparse.Namespace) -> tuple[list[Any], dict[str, str]]:
    """Everybody who is installed, and why the others are not."""
    from ..tools.bench.candidates import ours
    from ..tools.bench.peers import peers

    others, missing = ([], {}) if arguments.no_peers else peers(arguments.suite in FLEX_SUITES)
    left_out = set(arguments.without)
    unknown = left_out - {candidate.name for candidate in others} - set(missing)
    if unknown:
        raise ValueError(f"--without: no such kernel: {', '.join(sorted(unknown))}; there are {', '.join(c.name for c in others)}")
    missing |= dict.fromkeys(left_out, "--without")
    mine = ours(arguments.schedules, arguments.suite in EQUAL_HEADS_SUITES)
    kept = [*mine, *(c for c in others if c.name not in left_out)]
    timed = [replace(c, passes=tuple(name for name in c.passes if name in arguments.passes)) for c in kept]
    return [c for c in timed if c.passes], missing


def _measure(arguments: argparse.Namespace) -> tuple[Path, dict[str, Any]]:
    """Run the suite; results are on disk after every shape."""
    check_folder("--output", arguments.output)
    host = arguments.suite == HOST_SUITE
    shapes = [] if host else choose(arguments.suite, arguments.seqlens, arguments.head_dims, arguments.masks)
    _require_gpu()
    from ..tools.bench.environment import environment, short_name
    from ..tools.bench.results import FORMAT, save

    where = environment()
    kind = "" if arguments.sustained is None else "-sustained"
    path = arguments.output / f"{short_name(where['gpu'])}-{arguments.suite}{kind}.json"
    results: dict[str, Any] = {"format": FORMAT, "suite": arguments.suite, "repeats": arguments.repeats, "environment": where, "rows": []}
    if host:
        _measure_host(results)
    else:
        for rows in _measured_shapes(arguments, shapes, results):
            results["rows"] += rows
            save(results, path)
    save(results, path)
    return path, results


def _measure_anew(arguments: argparse.Namespace) -> tuple[Path, dict[str, Any]]:
    """Run the suite in fresh processes; results are on disk after every process."""
    from ..tools.bench.processes import measured_anew
    from ..tools.bench.results import save

    check_folder("--output", arguments.output)
    choose(arguments.suite, arguments.seqlens, arguments.head_dims, arguments.masks)
    _require_gpu()
    path, results = arguments.output, dict[str, Any]()
    for name, results in measured_anew(_words_of(arguments), arguments.processes):
        path = arguments.output / name
        save(results, path)
    return path, results


def _words_of(arguments: argparse.Namespace) -> list[str]:
    """The options of one of several processes: those that say what is measured, and how."""
    lists = {"--seqlens": arguments.seqlens, "--head-dims": arguments.head_dims, "--masks": arguments.masks, "--passes": arguments.passes}
    lists["--without"] = arguments.without
    flags = {"--schedules": arguments.schedules, "--no-peers": arguments.no_peers, "--no-energy": not arguments.energy}
    words = ["--suite", arguments.suite, "--repeats", str(arguments.repeats)]
    words += [word for flag, values in lists.items() if values for word in (flag, ",".join(map(str, values)))]
    words += [flag for flag, given in flags.items() if given]
    return words if arguments.sustained is None else [*words, "--sustained", str(arguments.sustained)]


def _measure_host(results: dict[str, Any]) -> None:
    import torch

    from ..tools.bench.host import SHAPE, measure_host

    results["host_shape"] = str(SHAPE)
    results["host"] = measure_host(torch.device("cuda", torch.cuda.current_device()), torch.cuda.synchronize)


def _measured_shapes(arguments: argparse.Namespace, shapes: list[Shape], results: dict[str, Any]) -> Any:
    """Rows of one shape after the other."""
    import torch

    from ..tools.bench.measure import measure
    from ..tools.bench.peers import who_runs
    from ..tools.bench.timing import CudaStopwatch

    candidates, results["missing"] = _candidates(arguments)
    results["cases"] = [who_runs(shape, candidates) for shape in shapes]
    scale, results["energy"] = _scale(arguments)
    device = torch.device("cuda", torch.cuda.current_device())
    for number, shape in enumerate(shapes, start=1):
        print(f"[{number}/{len(shapes)}] {shape}", file=sys.stderr, flush=True)
        yield measure(shape, candidates, arguments.repeats, CudaStopwatch, device, scale)
        torch.cuda.empty_cache()


def _scale(arguments: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """What weighs each kernel: the GPU's energy counter, or why there is none. A sustained run does not go without."""
    from ..tools.bench.energy import SECONDS, NoCounter, gpu_meter
    from ..tools.bench.sustained import gpu_endurance

    if arguments.sustained is not None:
        try:
            return gpu_endurance(arguments.sustained), {"seconds": arguments.sustained}
        except NoCounter as error:
            raise ValueError(f"--sustained needs the GPU's energy counter and its clock (NVML): {error}") from None
    if not arguments.energy:
        return None, {"missing": "--no-energy"}
    try:
        return gpu_meter(), {"seconds": SECONDS}
    except NoCounter as error:
        return None, {"missing": str(error)}


def _require_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise ValueError("bench needs a CUDA GPU of compute capability 9.0 (H100, H200); PyTorch finds none here. `--from FILE` needs none")
    from ..backends.hopper.support import sm_count

    sm_count(torch.cuda.current_device())


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
