"""`dash-attn plan`: simulate schedules of a problem and show them as a table, JSON, a Gantt chart or a trace.

cluster.py does so for several ranks that share a sequence.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..scheduling.generators import generate
from ..scheduling.problem import Problem
from ..scheduling.validate import ScheduleError
from ..simulation.simulate import Machine, Timeline, simulate
from ..viewing.task_times import Recorded
from ..viewing.words import counted, describe_machine, describe_problem
from .arguments import add_machine, add_problem, read_machine, read_problem, read_schedules
from .cluster import add_cluster, refuse_without_ranks, run_cluster
from .devices import add_device
from .files import check_different, check_file, check_picture
from .progress import progress_bar
from .table import Named, print_table

if TYPE_CHECKING:
    from .measured import Pair

EXAMPLES = """examples:
  dash-attn plan --mask causal --q-tiles 8 --kv-tiles 8 --heads 4 --workers 8 --compute 3 --reduce 1
  dash-attn plan --seqlen 16384 --heads 16 --overlap 2 --latency 2 --schedule descending,alternating --gantt chart.png
  dash-attn plan --mask window:1024,0 --seqlen 8192 --schedule auto --json
  dash-attn plan --seqlen 4096 --heads 16 --schedule ascending,auto --measured --machine h200 --gantt measured.png
  dash-attn plan --ranks 8 --seqlen 131072 --heads 8 --group 4 --gantt ranks.png
"""


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="compare schedules of an attention backward pass in model time",
        description="Simulates schedules of one attention backward pass and compares them with the lower bound.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_problem(parser)
    add_machine(parser)
    add_cluster(parser)
    schedule_help = "one or more names, separated by spaces or commas; auto; or all (default; with --ranks: auto)"
    parser.add_argument("--schedule", nargs="+", action="extend", metavar="NAME", help=schedule_help)
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    parser.add_argument("--gantt", type=Path, metavar="FILE", help="draw workers (or ranks) over time, as .png or .svg")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a trace for Perfetto or chrome://tracing")
    measured_help = "also run the schedules and show the measured times: on a Hopper GPU, or on the CPU in threads"
    parser.add_argument("--measured", action="store_true", help=measured_help)
    add_device(parser)
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the schedule itself as JSON (one schedule)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.ranks is not None:
        check_picture("--gantt", arguments.gantt)
        return run_cluster(arguments)
    refuse_without_ranks(arguments)
    names = read_schedules(arguments.schedule or ["all"])
    _check_files(arguments, names)
    if arguments.measured:
        return _run_measured(arguments, names)
    refuse_ignored(arguments)
    machine = read_machine(arguments)
    problem = read_problem(arguments)
    runs, refused = simulate_all(names, problem, machine, arguments.workers)
    if len(names) == 1 and refused:
        raise ScheduleError(refused[0][1])
    _print(arguments, problem, machine, runs, refused)
    _write_files(arguments, problem, machine, [timeline for _, timeline in runs])
    return 0 if runs else 2


def refuse_ignored(arguments: argparse.Namespace) -> None:
    """What only a measured run looks at."""
    if arguments.threads is not None or arguments.device != "auto":
        raise ValueError("--device and --threads go with --measured; without it nothing is run")
    if arguments.head_dim is not None and arguments.machine is None:
        raise ValueError("--head-dim goes with --machine or --measured; a simulation by constants knows no head dim")


def _run_measured(arguments: argparse.Namespace, names: list[str]) -> int:
    """The same, with what a device noted beside what was simulated."""
    from .measured import measure_all, print_measured, read_measured

    device, problem = read_measured(arguments)
    pairs, machine, refused = measure_all(names, arguments, device, problem)
    if len(names) == 1 and refused:
        raise ScheduleError(refused[0][1])
    runs = [(pair.name, pair.timeline) for pair in pairs]
    _print(arguments, problem, machine, runs, refused, {pair.name: pair.measured.makespan for pair in pairs})
    if not arguments.json:
        print_measured(pairs, device)
    _write_files(arguments, problem, machine, [timeline for _, timeline in runs], pairs)
    return 0 if runs else 2


def _print(
    arguments: argparse.Namespace,
    problem: Problem,
    machine: Machine,
    runs: list[Named],
    refused: list[tuple[str, str]],
    measured: dict[str, float] | None = None,
) -> None:
    if arguments.json:
        _print_json(arguments, problem, runs, refused, measured or {})
        return
    header = plan_header(problem, machine, arguments.workers, arguments.mask)
    print_table(header, runs, auto_order_name(problem, arguments.workers))
    print_refused(refused)


def plan_header(problem: Problem, machine: Machine, workers: int, mask: str) -> str:
    size = f"{counted(problem.tasks, 'task')} in {counted(problem.chains, 'chain')}"
    return f"{describe_problem(problem, mask)}: {size}\n{describe_machine(machine, workers)}"


def simulate_all(names: list[str], problem: Problem, machine: Machine, workers: int) -> tuple[list[Named], list[tuple[str, str]]]:
    """Runs of the schedules that can serve the problem, and (name, reason) of those that cannot."""
    runs, refused = [], []
    for name in names:
        try:
            schedule = generate(name, problem, workers)
        except ScheduleError as error:
            refused.append((name, str(error)))
            continue
        with progress_bar(f"simulating {name}", problem.tasks) as progress:
            runs.append((name, simulate(schedule, machine, progress)))
    return runs, refused


def print_refused(refused: list[tuple[str, str]]) -> None:
    if refused:
        print("Cannot serve this problem:")
    for name, reason in refused:
        print(f"  {name}: {_first_line(name, reason)}")


def _first_line(name: str, reason: str) -> str:
    return reason.splitlines()[0].removeprefix(name + " ")


def auto_order_name(problem: Problem, workers: int) -> str | None:
    try:
        return generate("auto", problem, workers).name
    except ScheduleError:
        return None


def _print_json(
    arguments: argparse.Namespace, problem: Problem, runs: list[Named], refused: list[tuple[str, str]], measured: dict[str, float]
) -> None:
    for name, reason in refused:
        print(f"dash-attn: {name} cannot serve this problem: {_first_line(name, reason)}", file=sys.stderr)
    rows = [_json_row(name, arguments.mask, problem, timeline) for name, timeline in runs]
    for row in rows:
        row |= {"measured": measured[row["schedule"]]} if row["schedule"] in measured else {}
    single = len(runs) + len(refused) == 1
    print(json.dumps(rows[0] if single else rows, indent=2))


def _json_row(name: str, mask: str, problem: Problem, timeline: Timeline) -> dict[str, Any]:
    row = {
        "schedule": name,
        "mask": mask,
        "q_tiles": problem.q_tiles,
        "kv_tiles": problem.kv_tiles,
        "heads": problem.heads,
        "workers": timeline.schedule.workers,
        "tasks": problem.tasks,
        "makespan": timeline.makespan,
        "lower_bound": timeline.lower_bound,
        "gap": timeline.gap,
        "utilization": timeline.utilization,
        "stalled": timeline.stalled,
    }
    return {key: int(value) if isinstance(value, float) and value.is_integer() else value for key, value in row.items()}


def _check_files(arguments: argparse.Namespace, names: list[str]) -> None:
    """Complain about files before the work, not after it."""
    if arguments.save is not None and len(names) != 1:
        raise ValueError(f"--save writes one schedule; name it with --schedule (got {len(names)})")
    check_picture("--gantt", arguments.gantt)
    check_file("--trace", arguments.trace)
    check_file("--save", arguments.save)
    check_different(arguments, "gantt", "trace", "save")


def _write_files(
    arguments: argparse.Namespace, problem: Problem, machine: Machine, timelines: list[Timeline], pairs: Sequence[Pair] = ()
) -> None:
    """`pairs`: measured runs, shown beside the simulated ones."""
    if not timelines:
        return
    if arguments.gantt is not None:
        from ..viewing.gantt import gantt

        title = f"{describe_problem(problem, arguments.mask)}\n{describe_machine(machine, arguments.workers)}"
        gantt([panel for pair in pairs for panel in pair.panels()] or timelines, arguments.gantt, title)
    if arguments.trace is not None:
        from ..viewing.trace import write_trace

        traced: list[Timeline | Recorded] = [*timelines, *(Recorded(pair.timeline.schedule, pair.measured) for pair in pairs)]
        with progress_bar("writing the trace", problem.tasks * len(traced)) as progress:
            write_trace(traced, arguments.trace, progress)
    if arguments.save is not None:
        arguments.save.write_text(timelines[0].schedule.to_json() + "\n", encoding="utf-8")
    for path in (arguments.gantt, arguments.trace, arguments.save):
        if path is not None:
            print(f"wrote {path}", file=sys.stderr)
