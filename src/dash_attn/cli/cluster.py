"""`dash-attn plan --ranks P`: one sequence on several ranks, beside ring attention and Ulysses."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any, NamedTuple

from ..scheduling.generators import generate
from ..scheduling.problem import Problem, whole_number
from ..scheduling.ranks.sharding import SHARDINGS, Sharding
from ..scheduling.ranks.share import share
from ..scheduling.ranks.together import heads_that_fill
from ..scheduling.ranks.units import SharedSchedule
from ..simulation.cluster import (
    EXECUTIONS,
    MODELS,
    MOST_TASKS_OF_TILES,
    Cluster,
    PeerEstimate,
    RankTimeline,
    Widths,
    ring_attention,
    simulate_ranks,
    ulysses,
)
from ..viewing.words import bytes_in_words, counted, describe_cluster, describe_machine, describe_problem, plain_number
from .arguments import COSTS, read_machine, read_problem, read_schedules
from .progress import progress_bar
from .table import print_rows

DEFAULTS: dict[str, Any] = {"sharding": "zigzag", "hop_latency": 10.0, "bandwidth": 400.0, "heads_together": None, "execution": None}
ONLY_HERE = (*DEFAULTS, "model")
COLUMNS = ("", "makespan us", "efficiency", "hops", "sent forward", "sent backward", "states waiting")
DEFAULT_HEAD_DIM = 128
DEFAULT_MACHINE = "h200"


def add_cluster(parser: argparse.ArgumentParser) -> None:
    about = "one sequence shared by several ranks (context parallelism); times in microseconds, by default of an H200"
    cluster = parser.add_argument_group("cluster", about)
    cluster.add_argument("--ranks", type=int, metavar="P", help="how many share the sequence")
    cluster.add_argument("--sharding", choices=SHARDINGS, help=f"who has which rows (default: {DEFAULTS['sharding']})")
    hop_help = f"microseconds from rank to rank, beside the transfer (default: {DEFAULTS['hop_latency']:g})"
    cluster.add_argument("--hop-latency", type=float, metavar="TIME", help=hop_help)
    bandwidth_help = f"GB per second that a rank can send (default: {DEFAULTS['bandwidth']:g})"
    cluster.add_argument("--bandwidth", type=float, metavar="N", help=bandwidth_help)
    cluster.add_argument("--execution", choices=EXECUTIONS, help="how a rank runs its units (default: show both)")
    together_help = "heads of one kind that a unit has side by side (default: as many as fill the workers)"
    cluster.add_argument("--heads-together", type=int, metavar="N", help=together_help)
    model_help = f"every task, or units as blocks of work (default: tiles up to {MOST_TASKS_OF_TILES:,} tasks, else chunks)"
    cluster.add_argument("--model", choices=MODELS, help=model_help)


def refuse_without_ranks(arguments: argparse.Namespace) -> None:
    for name in ONLY_HERE:
        if getattr(arguments, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} goes with --ranks")


class Planned(NamedTuple):
    problem: Problem
    shared: SharedSchedule
    cluster: Cluster
    runs: list[RankTimeline]
    peers: list[PeerEstimate | str]  # a reason, where a peer cannot serve the problem
    one_rank: float


def plan_cluster(arguments: argparse.Namespace) -> Planned:
    """Deal the schedule that the arguments ask for, and simulate it."""
    cluster = _read_cluster(arguments)
    problem = read_problem(arguments)
    return _plan(arguments, _share(arguments, problem, cluster), cluster)


def run_cluster(arguments: argparse.Namespace) -> int:
    _refuse_ignored(arguments)
    planned = plan_cluster(arguments)
    if arguments.json:
        _print_json(arguments, planned)
    else:
        _print(arguments, planned)
    if arguments.gantt is not None:
        from ..viewing.gantt_ranks import gantt_of_ranks

        gantt_of_ranks(planned.runs, arguments.gantt, title_of_cluster(arguments, planned))
        print(f"wrote {arguments.gantt}", file=sys.stderr)
    return 0


def _refuse_ignored(arguments: argparse.Namespace) -> None:
    """What a cluster of the simulator cannot do."""
    for name in ("trace", "save", "threads"):
        if getattr(arguments, name) is not None:
            raise ValueError(f"--{name} does not go with --ranks")
    if arguments.measured or arguments.device != "auto":
        raise ValueError("--ranks is a simulation; --measured and --device do not go with it")
    if arguments.seqlen is None:
        raise ValueError("--ranks needs --seqlen: rows are dealt to ranks, and bytes are counted, in tokens")


def _read_cluster(arguments: argparse.Namespace) -> Cluster:
    """Also settles machine, workers and tiles."""
    if arguments.machine is None and all(getattr(arguments, name) is None for name in COSTS):
        arguments.machine = DEFAULT_MACHINE
    machine = read_machine(arguments)
    head_dim = DEFAULT_HEAD_DIM if arguments.head_dim is None else whole_number("head_dim", arguments.head_dim)
    hop_latency, bandwidth = (_chosen(arguments, name) for name in ("hop_latency", "bandwidth"))
    if not 0 <= hop_latency < float("inf"):
        raise ValueError(f"--hop-latency must be a finite number >= 0; got {hop_latency:g}")
    if not bandwidth > 0:
        raise ValueError(f"--bandwidth must be a number > 0; got {bandwidth:g}")
    return Cluster(machine, arguments.workers, hop_latency, bandwidth, Widths(head_dim, head_dim))


def _chosen(arguments: argparse.Namespace, name: str) -> Any:
    given = getattr(arguments, name)
    return DEFAULTS[name] if given is None else given


def _share(arguments: argparse.Namespace, problem: Problem, cluster: Cluster) -> SharedSchedule:
    names = read_schedules(arguments.schedule or ["auto"])
    if len(names) != 1:
        raise ValueError(f"--ranks takes one schedule; name it with --schedule (got {len(names)})")
    sharding = Sharding.named(_chosen(arguments, "sharding"), problem.q_len, arguments.ranks)
    sharding.check(problem)  # before the work
    schedule = generate(names[0], problem, cluster.workers)
    together = arguments.heads_together
    return share(schedule, sharding, heads_that_fill(schedule, sharding, cluster.workers) if together is None else together)


def _plan(arguments: argparse.Namespace, shared: SharedSchedule, cluster: Cluster) -> Planned:
    problem = shared.problem
    model = arguments.model or ("tiles" if problem.tasks <= MOST_TASKS_OF_TILES else "chunks")
    runs: list[RankTimeline] = []
    for execution in [arguments.execution] if arguments.execution else EXECUTIONS:
        with progress_bar(f"simulating {execution}", problem.tasks if model == "tiles" else 0) as progress:
            one_rank = runs[0].one_rank if runs else None
            runs.append(simulate_ranks(shared, cluster, execution, model, one_rank=one_rank, progress=progress))
    one_rank = runs[0].one_rank
    peers = [peer(problem, shared.sharding, cluster, one_rank) for peer in (ring_attention, ulysses)]
    return Planned(problem, shared, cluster, runs, peers, one_rank)


def title_of_cluster(arguments: argparse.Namespace, planned: Planned) -> str:
    sharding = _chosen(arguments, "sharding")
    lines = (
        describe_problem(planned.problem, arguments.mask),
        describe_cluster(planned.cluster, arguments.ranks, sharding, planned.shared.heads_together),
        describe_machine(planned.cluster.machine, planned.cluster.workers),
    )
    return "\n".join(lines)


def _print(arguments: argparse.Namespace, planned: Planned) -> None:
    rows = [_row(run) for run in planned.runs] + [_peer_row(peer) for peer in planned.peers if isinstance(peer, PeerEstimate)]
    best = max(run.efficiency for run in planned.runs)
    size = f"{counted(planned.problem.tasks, 'task')} in {counted(len(planned.shared.units), 'unit')}"
    header = f"{title_of_cluster(arguments, planned)}\n{planned.shared.schedule.name}: {size}; one rank takes {_us(planned.one_rank)} us"
    print_rows(header, COLUMNS, rows, [run.efficiency == best for run in planned.runs] + [False] * (len(rows) - len(planned.runs)))
    for peer in planned.peers:
        if isinstance(peer, str):
            print(f"Ulysses cannot serve this problem: it {peer}")
    print(_about_the_model(arguments, planned))


def _about_the_model(arguments: argparse.Namespace, planned: Planned) -> str:
    if planned.runs[0].model == "tiles":
        text = "Simulated task by task."
    else:
        asked = "" if arguments.model else f", because there are more than {MOST_TASKS_OF_TILES:,} tasks"
        text = f"Simulated by the chunk model{asked}. It knows no hand-overs inside of a unit, so it is kinder than the tile model."
    return f"{text} Ring attention and Ulysses are models, shown at their best. Bytes are those of the rank that sends most."


def _us(time: float) -> str:
    return f"{time:,.0f}"


def _row(run: RankTimeline) -> tuple[str, ...]:
    waiting = f"{max(run.waiting)} ({bytes_in_words(max(run.waiting_bytes))})"
    sent = bytes_in_words(max(run.gathered)), bytes_in_words(max(run.sent))
    return f"dash-attn, {run.execution}", _us(run.makespan), f"{run.efficiency:.3f}", plain_number(max(run.hops)), *sent, waiting


def _peer_row(peer: PeerEstimate) -> tuple[str, ...]:
    sent = bytes_in_words(peer.forward_bytes), bytes_in_words(peer.backward_bytes)
    return peer.name, _us(peer.makespan), f"{peer.efficiency:.3f}", "-", *sent, "-"


def _print_json(arguments: argparse.Namespace, planned: Planned) -> None:
    value = {
        "ranks": arguments.ranks,
        "sharding": _chosen(arguments, "sharding"),
        "schedule": planned.shared.schedule.name,
        "mask": arguments.mask,
        "model": planned.runs[0].model,
        "tasks": planned.problem.tasks,
        "units": len(planned.shared.units),
        "heads_together": planned.shared.heads_together,
        "one_rank_us": planned.one_rank,
        "runs": [_json_run(run) for run in planned.runs],
        "peers": [asdict(peer) for peer in planned.peers if isinstance(peer, PeerEstimate)],
    }
    for peer in planned.peers:
        if isinstance(peer, str):
            print(f"dash-attn: Ulysses cannot serve this problem: it {peer}", file=sys.stderr)
    print(json.dumps(value, indent=2))


def _json_run(run: RankTimeline) -> dict[str, Any]:
    return {
        "execution": run.execution,
        "makespan_us": run.makespan,
        "efficiency": run.efficiency,
        "work_efficiency": run.work_efficiency,
        "hops": list(run.hops),
        "forward_bytes": list(run.gathered),
        "backward_bytes": list(run.sent),
        "states_waiting": list(run.waiting),
        "states_waiting_bytes": list(run.waiting_bytes),
    }
