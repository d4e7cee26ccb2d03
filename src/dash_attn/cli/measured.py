"""`dash-attn plan --measured`: run the schedules for real and put what was noted beside what was simulated."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ..errors import ScheduleError
from ..scheduling.generators import generate
from ..scheduling.problem import Problem
from ..simulation.simulate import Machine, Timeline, simulate
from ..viewing.recorded import MICROSECONDS
from ..viewing.task_times import TaskTimes, times_of
from .arguments import COSTS, read_machine, read_problem
from .device import choose

if TYPE_CHECKING:
    from ..tools.calibrate.measured import Device

DEFAULT_HEAD_DIM = 128


class Pair(NamedTuple):
    """One schedule, simulated and measured."""

    name: str
    timeline: Timeline
    measured: TaskTimes

    @property
    def error(self) -> float:
        return self.timeline.makespan / self.measured.makespan - 1

    def panels(self) -> tuple[TaskTimes, TaskTimes]:
        simulated = times_of(self.timeline)
        return replace(simulated, name=f"{simulated.name}, simulated", time_label=MICROSECONDS), self.measured


def read_measured(arguments: argparse.Namespace) -> tuple[Device, Problem]:
    """Where to measure, and a problem in the tiles of its kernels."""
    if arguments.seqlen is None:
        raise ValueError("--measured needs --seqlen: a kernel has tiles of its own, so tile counts alone describe no tensors")
    device = choose(arguments)
    head_dim = arguments.head_dim = DEFAULT_HEAD_DIM if arguments.head_dim is None else arguments.head_dim
    if head_dim not in device.tiles:
        raise ValueError(f"--head-dim: {device.backend} measures {', '.join(map(str, device.tiles))}; got {head_dim}")
    for name, size in zip(("tile_q", "tile_kv"), device.tiles[head_dim], strict=True):
        if getattr(arguments, name) not in (None, size):
            raise ValueError(f"--{name.replace('_', '-')} is {size} in the kernel that is measured; got {getattr(arguments, name)}")
        setattr(arguments, name, size)
    if arguments.workers not in (None, device.workers):
        raise ValueError(f"--workers: {device.name} has {device.workers} workers; got {arguments.workers} (on the CPU: --threads)")
    arguments.workers = device.workers
    return device, read_problem(arguments)


def measure_all(
    names: Sequence[str], arguments: argparse.Namespace, device: Device, problem: Problem
) -> tuple[list[Pair], Machine, list[tuple[str, str]]]:
    """Every schedule that serves the problem, the constants it was simulated with, and (name, reason) of the others."""
    from ..tools.calibrate.fit import estimate
    from ..tools.calibrate.measured import make_call

    runs, refused = [], []
    for name in names:
        try:
            schedule = generate(name, problem, device.workers)
        except ScheduleError as error:
            refused.append((name, str(error)))
            continue
        runs.append((name, schedule, device.record(*make_call(problem, arguments.head_dim, device, name))))
    given = arguments.machine is not None or any(getattr(arguments, name) is not None for name in COSTS)
    # As given or calibrated; else read off these very runs.
    machine = read_machine(arguments) if given or not runs else estimate([(schedule, spans) for _, schedule, spans in runs])
    return [Pair(name, simulate(schedule, machine), spans) for name, schedule, spans in runs], machine, refused


def measured_lines(pairs: Sequence[Pair], device: Device) -> list[str]:
    return [
        f"measured on {device.name} ({device.backend}): {pair.name} {pair.measured.makespan:,.1f} us;"
        f" simulated {pair.timeline.makespan:,.1f} us ({pair.error:+.1%})"
        for pair in pairs
    ]
