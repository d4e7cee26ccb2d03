"""`dash-attn plan`: simulate schedules of a problem and show them as a table, JSON, a Gantt chart or a trace.

cluster.py does so for several ranks that share a sequence.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import ScheduleError
from ..formats import PLANS
from ..scheduling.generators import choice_of_auto, generate
from ..scheduling.problem import Problem
from ..scheduling.schedule import Schedule
from ..simulation.simulate import Machine, Timeline, simulate
from ..viewing.task_times import MICROSECONDS, Recorded, TaskTimes, times_of
from ..viewing.words import counted, describe_machine, describe_problem, figures_of, label_of
from .arguments import (
    COSTS,
    DEFAULT_HEAD_DIM,
    ONLY_WITH_RANKS,
    add_question,
    check_tasks,
    either,
    flag_of,
    read_machine,
    read_problem,
    read_schedules,
    refuse,
)
from .cluster import plan_ranks
from .device import choose
from .files import check_files, named_in_errors, say_written, write_text
from .mask_files import MaskFile, read_mask_file
from .table import Refusals, Report, print_report, progress_bar

if TYPE_CHECKING:
    from ..masks import BooleanMask
    from ..tools.calibrate.measured import Device

HELP = "compare schedules of an attention backward pass in model time"
TEXT = "Simulates schedules of one attention backward pass and compares them with the lower bound."
EXAMPLES = """examples:
  dash-attn plan --mask causal --q-tiles 8 --kv-tiles 8 --heads 4 --workers 8 --compute 3 --reduce 1
  dash-attn plan --seqlen 16384 --heads 16 --overlap 2 --latency 2 --schedule descending,alternating --gantt chart.png
  dash-attn plan --mask window:1024,0 --seqlen 8192 --schedule auto --json
  dash-attn plan --seqlen 4096 --heads 16 --schedule ascending,auto --measured --machine h200 --gantt measured.png
  dash-attn plan --mask tree.npy --schedule auto,ascending
  dash-attn plan --ranks 8 --seqlen 131072 --heads 8 --group 4 --gantt ranks.png
"""
COLUMNS = ("schedule", "makespan", "lower bound", "gap", "utilised", "stalled", "slack", "gang")
FILES = ("gantt", "trace", "save")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_question(parser, "one or more names, separated by spaces or commas; auto; or all (default; with --ranks: auto)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--gantt", type=Path, metavar="FILE", help="draw workers (or ranks) over time, as .png or .svg")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a trace for Perfetto or chrome://tracing")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the schedule itself as JSON (one schedule)")


def run(arguments: argparse.Namespace) -> int:
    if arguments.ranks is not None:
        return _run_ranks(arguments)
    names = read_schedules(arguments.schedule or ["all"])
    if arguments.save is not None and len(names) != 1:
        raise ValueError(f"--save writes one schedule; name it with --schedule (got {len(names)})")
    check_files(arguments, *FILES)
    planned = plan(arguments, names)
    if len(names) == 1 and planned.refused:
        raise ScheduleError(planned.refused[0][1])
    print_report(report_of(planned), arguments.json)
    if planned.runs:
        _write_files(arguments, planned)
    return 0 if planned.runs else 2


def _run_ranks(arguments: argparse.Namespace) -> int:
    check_files(arguments, "gantt")
    planned = plan_ranks(arguments)
    print_report(planned.report(), arguments.json)
    if arguments.gantt is not None:
        from ..viewing.gantt_ranks import gantt_of_ranks

        gantt_of_ranks(planned.runs, arguments.gantt, "\n".join(planned.title))
        say_written(arguments.gantt)
    return 0


class PlannedRun(NamedTuple):
    """A schedule, by the name that was asked for: simulated, and perhaps measured as well."""

    name: str
    timeline: Timeline
    measured: TaskTimes | None = None

    def panels(self) -> list[TaskTimes]:
        """Of a chart: what was measured stands below what was simulated."""
        simulated = times_of(self.timeline)
        if self.measured is None:
            return [simulated]
        return [replace(simulated, name=f"{simulated.name}, simulated", time_label=MICROSECONDS), self.measured]

    def beside(self, device: Device) -> str:
        """What was measured, beside what was simulated."""
        assert self.measured is not None
        simulated, measured = self.timeline.makespan, self.measured.makespan
        where = f"measured on {device.name} ({device.backend})"
        return f"{where}: {self.name} {measured:,.1f} us; simulated {simulated:,.1f} us ({simulated / measured - 1:+.1%})"


class Planned(NamedTuple):
    """Schedules of one problem, simulated. `device`: where they were measured as well."""

    problem: Problem
    mask: str  # as it was asked for
    machine: Machine
    workers: int
    runs: list[PlannedRun]
    refused: Refusals
    device: Device | None = None

    @property
    def title(self) -> list[str]:
        return [describe_problem(self.problem, self.mask), describe_machine(self.machine, self.workers)]


def plan(arguments: argparse.Namespace, names: list[str], check: Callable[[Problem], None] = check_tasks) -> Planned:
    """Run what the arguments ask for. `check` may refuse the problem before the work."""
    refuse(arguments, ONLY_WITH_RANKS, "goes with --ranks")
    read_mask_file(arguments)
    if arguments.measured:
        device, problem = _read_measured(arguments)
        check(problem)
        return _measure_all(names, arguments, device, problem)
    refuse(arguments, ("threads", "device"), "goes with --measured; without it nothing is run")
    if arguments.machine is None:
        refuse(arguments, ("head_dim",), "goes with --machine or --measured; a simulation by constants knows no head dim")
    machine, problem = read_machine(arguments), read_problem(arguments)
    check(problem)
    return simulate_all(names, problem, machine, arguments.workers, arguments.mask)


def simulate_all(names: list[str], problem: Problem, machine: Machine, workers: int, mask: str) -> Planned:
    """Every schedule that can serve the problem."""
    schedules, refused = _generate_all(names, problem, workers)
    planned = Planned(problem, mask, machine, workers, [], refused)
    for name, schedule in schedules:
        with progress_bar(f"simulating {name}", problem.tasks) as progress:
            planned.runs.append(PlannedRun(name, simulate(schedule, machine, progress)))
    return planned


def _generate_all(names: list[str], problem: Problem, workers: int) -> tuple[list[tuple[str, Schedule]], Refusals]:
    """Those that serve the problem, and why the others do not."""
    found, refused = [], []
    for name in names:
        try:
            found.append((name, generate(name, problem, workers)))
        except ScheduleError as error:
            refused.append((name, str(error)))
    return found, refused


def _read_measured(arguments: argparse.Namespace) -> tuple[Device, Problem]:
    """Where to measure, and a problem in the tiles of its kernels."""
    if arguments.seqlen is None:
        raise ValueError("--measured needs --seqlen: a kernel has tiles of its own, so tile counts alone describe no tensors")
    device = choose(arguments)
    head_dim = arguments.head_dim = either(arguments.head_dim, DEFAULT_HEAD_DIM)
    if head_dim not in device.tiles:
        raise ValueError(f"--head-dim: {device.backend} measures {', '.join(map(str, device.tiles))}; got {head_dim}")
    for name, size in zip(("tile_q", "tile_kv"), device.tiles[head_dim], strict=True):
        if getattr(arguments, name) not in (None, size):
            raise ValueError(f"{flag_of(name)} is {size} in the kernel that is measured; got {getattr(arguments, name)}")
        setattr(arguments, name, size)
    if arguments.workers not in (None, device.workers):
        how = ", which --threads chooses" if device.backend == "cpu" else ""
        raise ValueError(f"--measured runs on the {device.workers} workers of {device.name}{how}; got --workers {arguments.workers}")
    arguments.workers = device.workers
    return device, read_problem(arguments)


def _measure_all(names: list[str], arguments: argparse.Namespace, device: Device, problem: Problem) -> Planned:
    """Every schedule that serves the problem: run for real, then simulated."""
    from ..tools.calibrate.fit import estimate
    from ..tools.calibrate.measured import make_call

    schedules, refused = _generate_all(names, problem, device.workers)
    recorded, elements = [], _elements_of(arguments.mask, device)
    for name, schedule in schedules:
        with progress_bar(f"measuring {name}", problem.tasks) as progress:
            spans = device.record(*make_call(problem, arguments.head_dim, device, name, elements), progress)
            recorded.append((name, schedule, spans))
    given = arguments.machine is not None or any(getattr(arguments, name) is not None for name in COSTS)
    # As given or calibrated; else read off these very runs.
    machine = read_machine(arguments) if given or not recorded else estimate([(schedule, spans) for _, schedule, spans in recorded])
    runs = [PlannedRun(name, simulate(schedule, machine), spans) for name, schedule, spans in recorded]
    return Planned(problem, arguments.mask, machine, arguments.workers, runs, refused, device)


def _elements_of(given: str, device: Device) -> BooleanMask | None:
    """Of a matrix that has partial blocks."""
    if not isinstance(given, MaskFile) or not given.mask.has_partial_blocks:
        return None
    if device.backend != "cpu":  # no GPU has tried
        raise ValueError(
            f"--measured takes masks by name and matrices of whole 64 x 64 blocks on a GPU, any matrix on the CPU; got {given}"
        )
    return given.mask


def report_of(planned: Planned) -> Report:
    problem, auto_choice = planned.problem, choice_of_auto(planned.problem).__name__
    about, machine = planned.title
    header = f"{about}: {counted(problem.tasks, 'task')} in {counted(problem.chains, 'chain')}\n{machine}"
    makespans = [run.timeline.makespan for run in planned.runs]
    refused = [(name, why.splitlines()[0].removeprefix(name + " ")) for name, why in planned.refused]
    notes = ["Cannot serve this problem:"] if refused else []
    notes += [f"  {name}: {why}" for name, why in refused]
    if planned.device is not None:
        notes += [run.beside(planned.device) for run in planned.runs]
    rows = [_row(run.name, run.timeline, auto_choice) for run in planned.runs]
    values = _values(planned)
    value = values[0] if len(values) + len(refused) == 1 else values
    return Report(header, COLUMNS, rows, [makespan == min(makespans) for makespan in makespans], notes, value, refused)


def _row(asked: str, timeline: Timeline, auto_choice: str) -> tuple[str, ...]:
    """What `auto` would choose is marked."""
    label, figures = label_of(asked, timeline.schedule.name), figures_of(timeline)
    return f"{label} (auto)" if label == auto_choice else label, *(figures[name] for name in COLUMNS[1:])


def _values(planned: Planned) -> list[dict[str, Any]]:
    """The rows as JSON. Whole numbers have no point."""
    problem = planned.problem
    sizes = {"mask": planned.mask, "q_tiles": problem.q_tiles, "kv_tiles": problem.kv_tiles, "heads": problem.heads}
    names = ("makespan", "lower_bound", "gap", "utilization", "stalled")
    return [
        PLANS.mark
        | {"asked": run.name, "schedule": run.timeline.schedule.name, **sizes, "workers": planned.workers, "tasks": problem.tasks}
        | {key: int(value) if float(value := getattr(run.timeline, key)).is_integer() else value for key in names}
        | ({} if run.measured is None else {"measured": run.measured.makespan})
        for run in planned.runs
    ]


def _write_files(arguments: argparse.Namespace, planned: Planned) -> None:
    """Measured runs stand beside the simulated ones."""
    runs = planned.runs
    if arguments.gantt is not None:
        from ..viewing.gantt import gantt

        gantt([panel for run in runs for panel in run.panels()], arguments.gantt, "\n".join(planned.title))
        say_written(arguments.gantt)
    if arguments.trace is not None:
        from ..viewing.trace import write_trace

        traced: list[Timeline | Recorded] = [run.timeline for run in runs]
        traced += [Recorded(run.timeline.schedule, run.measured) for run in runs if run.measured is not None]
        with named_in_errors(arguments.trace), progress_bar("writing the trace", planned.problem.tasks * len(traced)) as progress:
            write_trace(traced, arguments.trace, progress)
        say_written(arguments.trace)
    if arguments.save is not None:
        write_text(arguments.save, runs[0].timeline.schedule.to_json())
