"""`dash-attn bench`: time our kernels beside others on this GPU, or draw a picture of earlier results."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ..tools.bench.suites import FLEX_SUITES, HOST_SUITE, PASSES, SUITES, Shape, Suite, choose
from .files import check_different, check_folder, check_picture

REPEATS = 30
EXAMPLES = """examples:
  dash-attn bench --suite paper --plot speed.png
  dash-attn bench --suite quick --seqlens 4096 --masks causal --schedules
  dash-attn bench --suite masks --list
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
    masks_help = "of causal, full (default: both); of the suite masks these options keep the cases that fit"
    parser.add_argument("--masks", type=_words, metavar="NAME,NAME", help=masks_help)
    parser.add_argument("--list", action="store_true", help="list the cases and which kernels can run each; needs no GPU")
    parser.add_argument("--repeats", type=int, default=REPEATS, metavar="N", help=f"timed runs of each kernel (default: {REPEATS})")
    parser.add_argument("--schedules", action="store_true", help="also time the backward of every schedule")
    parser.add_argument("--no-peers", action="store_true", help="only our kernels")
    parser.add_argument("--without", type=_words, default=[], metavar="NAME,NAME", help="leave these kernels out (names as in --list)")
    parser.add_argument(
        "--no-energy", dest="energy", action="store_false", help="do not measure energy, which takes half a second per kernel"
    )
    results_help = "where results go (default: benchmarks/results)"
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"), metavar="DIR", help=results_help)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw relative speeds, as .png or .svg")
    parser.add_argument("--plot-pass", choices=PASSES, default="backward", help="the pass to draw (default: backward)")
    parser.add_argument("--plot-schedules", type=Path, metavar="FILE", help="draw the schedules relative to the unordered backward")
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="show earlier results; needs no GPU")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from ..tools.bench.picture import draw
    from ..tools.bench.picture_cases import draw_cases
    from ..tools.bench.picture_schedules import draw_schedules
    from ..tools.bench.report import print_report
    from ..tools.bench.results import read, summary

    check_picture("--plot", arguments.plot)
    check_picture("--plot-schedules", arguments.plot_schedules)
    check_different(arguments, "plot", "plot_schedules", "source")
    if arguments.list:
        return _list(arguments)
    if arguments.source:
        path, results = arguments.source, read(arguments.source)
    else:
        path, results = _measure(arguments)
    print_report(results)
    if arguments.plot:
        by_length = isinstance(SUITES.get(results["suite"]), Suite)
        (draw if by_length else draw_cases)(results, arguments.plot, arguments.plot_pass)
        print(f"picture: {arguments.plot}")
    if arguments.plot_schedules:
        draw_schedules(results, arguments.plot_schedules)
        print(f"picture: {arguments.plot_schedules}")
    said = summary(results, path)
    print(json.dumps(said))
    return 1 if said["failed"] else 0


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
    return [*ours(arguments.schedules), *(c for c in others if c.name not in left_out)], missing


def _measure(arguments: argparse.Namespace) -> tuple[Path, dict[str, Any]]:
    """Run the suite; results are on disk after every shape."""
    if arguments.repeats < 1:
        raise ValueError(f"--repeats must be at least 1; got {arguments.repeats}")
    check_folder("--output", arguments.output)
    host = arguments.suite == HOST_SUITE
    shapes = [] if host else choose(arguments.suite, arguments.seqlens, arguments.head_dims, arguments.masks)
    _require_gpu()
    from ..tools.bench.environment import environment, short_name
    from ..tools.bench.results import FORMAT, save

    where = environment()
    path = arguments.output / f"{short_name(where['gpu'])}-{arguments.suite}.json"
    results: dict[str, Any] = {"format": FORMAT, "suite": arguments.suite, "repeats": arguments.repeats, "environment": where, "rows": []}
    if host:
        _measure_host(results)
    else:
        for rows in _measured_shapes(arguments, shapes, results):
            results["rows"] += rows
            save(results, path)
    save(results, path)
    return path, results


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
    meter, results["energy"] = _meter() if arguments.energy else (None, {"missing": "--no-energy"})
    device = torch.device("cuda", torch.cuda.current_device())
    for number, shape in enumerate(shapes, start=1):
        print(f"[{number}/{len(shapes)}] {shape}", file=sys.stderr, flush=True)
        yield measure(shape, candidates, arguments.repeats, CudaStopwatch, device, meter)
        torch.cuda.empty_cache()


def _meter() -> tuple[Any, dict[str, Any]]:
    """The GPU's energy counter, or why there is none."""
    from ..tools.bench.energy import SECONDS, NoCounter, gpu_meter

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
