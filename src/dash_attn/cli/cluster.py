"""`dash-attn plan --ranks P`: one sequence on several ranks, beside ring attention and Ulysses."""

import argparse
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import NamedTuple

from ..formats import PLANS
from ..scheduling.generators import generate
from ..scheduling.problem import Problem
from ..scheduling.ranks.sharding import Sharding
from ..scheduling.ranks.share import heads_that_fill, share
from ..scheduling.ranks.units import SharedSchedule
from ..simulation.cluster import (
    EXECUTIONS,
    MOST_TASKS_OF_TILES,
    Cluster,
    PeerEstimate,
    RankTimeline,
    Widths,
    ring_attention,
    simulate_ranks,
    ulysses,
)
from ..viewing.words import bytes_in_words, counted, describe_cluster, describe_machine, describe_problem, figures_of_ranks
from .arguments import COSTS, DEFAULT_HEAD_DIM, WITH_RANKS, check_tasks, either, read_machine, read_problem, read_schedules, refuse
from .mask_files import read_mask_file
from .table import Report, progress_bar

COLUMNS = ("", "makespan us", "efficiency", "hops", "sent forward", "sent backward", "states waiting")
DEFAULT_MACHINE = "h200"
# Names in JSON, and what they are of a run.
OF_A_RUN = {"execution": "execution", "makespan_us": "makespan", "efficiency": "efficiency", "work_efficiency": "work_efficiency"}
OF_EACH_RANK = {
    **{"hops": "hops", "forward_bytes": "gathered", "backward_bytes": "sent"},
    **{"states_waiting": "waiting", "states_waiting_bytes": "waiting_bytes"},
}


class PlannedRanks(NamedTuple):
    """A schedule dealt to ranks, simulated in one or two executions, and what other methods would take."""

    arguments: argparse.Namespace  # with the defaults in place
    shared: SharedSchedule
    cluster: Cluster
    runs: list[RankTimeline]
    peers: list[PeerEstimate | str]  # a reason, where a peer cannot serve the problem

    @property
    def title(self) -> list[str]:
        arguments, cluster = self.arguments, self.cluster
        return [
            describe_problem(self.shared.problem, arguments.mask),
            describe_cluster(cluster, arguments.ranks, arguments.sharding, self.shared.heads_together),
            describe_machine(cluster.machine, cluster.workers),
        ]

    def report(self) -> Report:
        """Only Ulysses can be refused: rings serve whatever can be dealt."""
        peers = [peer for peer in self.peers if isinstance(peer, PeerEstimate)]
        refused = [("Ulysses", f"it {peer}") for peer in self.peers if isinstance(peer, str)]
        size = f"{counted(self.shared.problem.tasks, 'task')} in {counted(len(self.shared.units), 'unit')}"
        last = f"{self.shared.schedule.name}: {size}; one rank takes {self.runs[0].one_rank:,.0f} us"
        best = max(run.efficiency for run in self.runs)
        is_best = [run.efficiency == best for run in self.runs] + [False] * len(peers)
        notes = [f"{name} cannot serve this problem: {why}" for name, why in refused] + [self._about_the_model()]
        rows = [*map(_row, self.runs), *map(_peer_row, peers)]
        return Report("\n".join([*self.title, last]), COLUMNS, rows, is_best, notes, self._value(peers), refused)

    def _about_the_model(self) -> str:
        if self.runs[0].model == "tiles":
            text = "Simulated task by task."
        else:
            asked = "" if self.arguments.model else f", because there are more than {MOST_TASKS_OF_TILES:,} tasks"
            text = f"Simulated by the chunk model{asked}. It leaves out hand-overs inside a unit, so it is kinder than the tile model."
        return f"{text} Ring attention and Ulysses are models, shown at their best. Bytes are those of the rank that sends most."

    def _value(self, peers: list[PeerEstimate]) -> dict[str, object]:
        return {
            **PLANS.mark,
            **{name: getattr(self.arguments, name) for name in ("ranks", "sharding")},
            "schedule": self.shared.schedule.name,
            "mask": self.arguments.mask,
            "model": self.runs[0].model,
            "tasks": self.shared.problem.tasks,
            "units": len(self.shared.units),
            "heads_together": self.shared.heads_together,
            "one_rank_us": self.runs[0].one_rank,
            "runs": [_value_of(run) for run in self.runs],
            "peers": [asdict(peer) for peer in peers],
        }


def plan_ranks(arguments: argparse.Namespace, check: Callable[[SharedSchedule], None] = lambda shared: None) -> PlannedRanks:
    """Deal the schedule that is asked for, and simulate what `check` lets pass. Defaults take the place of what was not given."""
    refuse(arguments, ("trace", "save", "threads", "measured", "device"), "does not go with --ranks, which only simulates")
    read_mask_file(arguments)
    if arguments.seqlen is None:
        raise ValueError("--ranks needs --seqlen: rows are dealt to ranks, and bytes are counted, in tokens")
    for name, default in WITH_RANKS.items():
        setattr(arguments, name, either(getattr(arguments, name), default))
    cluster = _read_cluster(arguments)
    shared = _share(arguments, read_problem(arguments), cluster)
    check(shared)
    runs = _simulate(arguments, shared, cluster)
    peers = [peer(shared.problem, shared.sharding, cluster, runs[0].one_rank) for peer in (ring_attention, ulysses)]
    return PlannedRanks(arguments, shared, cluster, runs, peers)


def _read_cluster(arguments: argparse.Namespace) -> Cluster:
    """Also settles machine, workers and tiles."""
    if arguments.machine is None and all(getattr(arguments, name) is None for name in COSTS):
        arguments.machine = DEFAULT_MACHINE
    machine = read_machine(arguments)
    head_dim = either(arguments.head_dim, DEFAULT_HEAD_DIM)
    return Cluster(machine, arguments.workers, arguments.hop_latency, arguments.bandwidth, Widths(head_dim, head_dim))


def _share(arguments: argparse.Namespace, problem: Problem, cluster: Cluster) -> SharedSchedule:
    names = read_schedules(arguments.schedule or ["auto"])
    if len(names) != 1:
        raise ValueError(f"--ranks takes one schedule; name it with --schedule (got {len(names)})")
    sharding = Sharding.named(arguments.sharding, problem.q_len, arguments.ranks)
    sharding.check(problem)  # before the work
    check_tasks(problem if arguments.model == "tiles" else replace(problem, heads=1, group=1, batch=1))
    schedule = generate(names[0], problem, cluster.workers)
    together = either(arguments.heads_together, heads_that_fill(schedule, sharding, cluster.workers))
    with progress_bar("dealing units to ranks", 0) as progress:
        return share(schedule, sharding, together, progress)


def _simulate(arguments: argparse.Namespace, shared: SharedSchedule, cluster: Cluster) -> list[RankTimeline]:
    tasks = shared.problem.tasks
    model = arguments.model or ("tiles" if tasks <= MOST_TASKS_OF_TILES else "chunks")
    runs: list[RankTimeline] = []
    for execution in [arguments.execution] if arguments.execution else EXECUTIONS:
        with progress_bar(f"simulating {execution}", tasks if model == "tiles" else 0) as progress:
            one_rank = runs[0].one_rank if runs else None
            runs.append(simulate_ranks(shared, cluster, execution, model, one_rank=one_rank, progress=progress))
    return runs


def _row(run: RankTimeline) -> tuple[str, ...]:
    figures = figures_of_ranks(run)
    return f"dash-attn, {run.execution}", f"{run.makespan:,.0f}", *(figures[name] for name in COLUMNS[2:])


def _peer_row(peer: PeerEstimate) -> tuple[str, ...]:
    sent = bytes_in_words(peer.forward_bytes), bytes_in_words(peer.backward_bytes)
    return peer.name, f"{peer.makespan:,.0f}", f"{peer.efficiency:.3f}", "-", *sent, "-"


def _value_of(run: RankTimeline) -> dict[str, object]:
    alone = {name: getattr(run, attribute) for name, attribute in OF_A_RUN.items()}
    return alone | {name: list(getattr(run, attribute)) for name, attribute in OF_EACH_RANK.items()}
