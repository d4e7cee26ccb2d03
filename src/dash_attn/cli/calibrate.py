"""`dash-attn calibrate`: measure what a task costs on this machine and write the constants that the simulator reads."""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..simulation.machines import Calibrated
from .device import add_device, choose
from .files import check_files, say_written, write_text
from .parser import numbers
from .table import LONG_WORK, progress_bar

if TYPE_CHECKING:
    from ..tools.calibrate.measured import Device

HELP = "fit the simulator's constants to this machine"
TEXT = """Runs a few schedules of the attention backward, records when their tasks ran, and fits the constants of the simulator to
the times: compute, reduce, hand-over latency and start of a chain. On a GPU they are those of the kernel; on the CPU those
of the executor in threads, which share the processors with everything else, so their times vary far more."""
EXAMPLES = """examples:
  dash-attn calibrate --output machine.json
  dash-attn plan --seqlen 8192 --heads 16 --machine machine.json --gantt predicted.png
  dash-attn calibrate --from benchmarks/results/h200-prediction.json --plot prediction.png --plot-schedules errors.png
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_device(parser)
    parser.add_argument("--head-dims", type=numbers, metavar="N,N", help="head dims to calibrate (default: 64,128; 64 on the CPU)")
    parser.add_argument("--output", type=Path, default=Path("machine.json"), metavar="FILE", help="default: machine.json")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw measured over predicted times, as .png or .svg")
    parser.add_argument("--plot-schedules", type=Path, metavar="FILE", help="draw the errors of the prediction, schedule by schedule")
    from_help = "draw an earlier calibration, or what benchmarks/predict.py wrote; measures nothing"
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help=from_help)


def run(arguments: argparse.Namespace) -> int:
    from ..tools.calibrate.pictures import errors_figure, prediction_figure, read, write

    check_files(arguments, "plot", "plot_schedules", *(("output",) if arguments.source is None else ()), read="source")
    asked = ((arguments.plot, prediction_figure), (arguments.plot_schedules, errors_figure))
    pictures = {path: figure for path, figure in asked if path is not None}
    if arguments.source is None:
        _measure(arguments)
    elif not pictures:
        raise ValueError("--from goes with --plot or --plot-schedules: there is nothing else to do")
    if pictures:
        prediction = read(arguments.source or arguments.output)
        for path, figure in pictures.items():
            write(path, partial(figure, prediction))
            say_written(path)
    return 0


def _measure(arguments: argparse.Namespace) -> None:
    """Calibrate every head dim and write the file."""
    from ..tools.calibrate.measured import CPU_SWEEP, GPU_SWEEP, calibrate

    device = choose(arguments)
    constants, tiles, rows = {}, {}, []
    for head_dim in _head_dims(arguments.head_dims, device):
        plan = CPU_SWEEP if device.backend == "cpu" else GPU_SWEEP
        with progress_bar(f"measuring, head dim {head_dim}", LONG_WORK) as progress:
            found, measured = calibrate(device, head_dim, plan, progress)
        constants[head_dim], tiles[head_dim] = found.machine, device.tiles[head_dim]
        rows += measured
        _print(head_dim, found, measured)
    machine = Calibrated(device.name, device.backend, device.workers, constants, tiles)
    write_text(arguments.output, json.dumps({**machine.to_json(), "measured": rows}, indent=1))


def _head_dims(asked: tuple[int, ...] | None, device: Device) -> tuple[int, ...]:
    if asked is None:
        return (64,) if device.backend == "cpu" else (64, 128)
    if not set(asked) <= set(device.tiles):
        taken, got = (", ".join(map(str, dims)) for dims in (device.tiles, asked))
        raise ValueError(f"--head-dims takes {taken} on {device.name}; got {got}")
    return asked


def _print(head_dim: int, found: Any, rows: list[dict[str, Any]]) -> None:
    machine = found.machine
    print(
        f"head dim {head_dim}: compute {machine.compute:g} us, reduce {machine.reduce:g}, hand-over {machine.latency:g},"
        f" start of a chain {machine.startup:g}; predictions off by {found.median_error:.1%} in the median"
    )
    for row in rows:
        what = f"{row['mask']} {row['seqlen']} x {row['batch']}, {row['schedule']}"
        print(f"  {what:40}  measured {row['measured_us']:10,.1f} us   predicted {row['predicted_us']:10,.1f}   {row['error']:+.1%}")
