"""Problems, machines and numbers in words, for people."""

from ..scheduling.problem import Problem
from ..simulation.cluster import Cluster, RankTimeline
from ..simulation.simulate import Machine, Timeline


def plain_number(value: float, digits: int = 6) -> str:
    """128 for 128.0, 46.8 for 46.8."""
    return str(int(value)) if float(value).is_integer() else f"{value:.{digits}g}"


def percent(share: float) -> str:
    """Only what is exactly 0 prints as 0 %, so that a reached bound is not mistaken for a rounded one."""
    if 0 < share < 0.0005:
        return "<0.1 %"
    return f"{plain_number(share * 100)} %" if share in (0.0, 1.0) else f"{share * 100:.1f} %"


def complaint(error: Exception) -> str:
    """What a command or a page says of it. What is too large comes without words of its own."""
    if isinstance(error, MemoryError):
        return "this problem does not fit in memory; use fewer or larger tiles"
    if isinstance(error, OverflowError):
        return "a number is too large for an exact simulation; choose a larger unit of time"
    if isinstance(error, ModuleNotFoundError):
        return f"this needs {error.name}, which is not installed here"
    return str(error)


def counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def describe_problem(problem: Problem, mask: str | None = None) -> str:
    """One line: the mask (as the user wrote it, if given), tiles, heads and tasks."""
    heads = counted(problem.heads, "head")
    if problem.group > 1:
        heads = f"{counted(problem.heads, 'KV head')} of {counted(problem.group, 'query head')} each"
    batch = f"{counted(problem.batch, 'sequence')} of " if problem.batch > 1 else ""
    return f"{mask or problem.mask} mask, {problem.q_tiles} x {problem.kv_tiles} tiles (Q x KV), {batch}{heads}"


def describe_machine(machine: Machine, workers: int) -> str:
    """One line: the workers and what a task costs them."""
    background = "the worker itself reduces"
    if machine.overlap:
        background = f"up to {counted(machine.overlap, 'reduce')} behind the computes"
    latency = f", hand-over latency {plain_number(machine.latency)}" if machine.latency else ""
    startup = f", chain start {plain_number(machine.startup)}" if machine.startup else ""
    costs = f"compute {plain_number(machine.compute)}, reduce {plain_number(machine.reduce)}"
    return f"{counted(workers, 'worker')}; {costs}, {background}{latency}{startup}"


def describe_cluster(cluster: Cluster, ranks: int, sharding: str, heads_together: int) -> str:
    """One line: the ranks, what lies between them, and how much of the work they take at once."""
    between = f"hop {plain_number(cluster.hop_latency_us)} us, {plain_number(cluster.bandwidth_GBs)} GB/s"
    return f"{counted(ranks, 'rank')}, {sharding} sharding, {between}; {counted(heads_together, 'head')} side by side in a unit"


def bytes_in_words(size: int) -> str:
    """1.41 GB for 1409286144: powers of ten, as bandwidths are given."""
    for factor, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size} B"


def label_of(asked: str, name: str) -> str:
    """A schedule, as it was asked for."""
    return f"auto: {name}" if asked == "auto" else name


# A sentence for every figure of a table, for the page and docs/explore.md.
FIGURES = {
    "makespan": "When the last task ends.",
    "lower bound": "No schedule of this problem on this machine can end earlier.",
    "gap": "How much later than the lower bound the run ends, in percent of that bound.",
    "utilised": "The share of all workers' time in which they compute or reduce.",
    "stalled": "The share of all workers' time in which they have a task but must wait; the next three figures say for what.",
    "for turns": "Stalled because an earlier contribution to the same dQ tile has not been added yet.",
    "for buffers": "Stalled because reduces in the background still hold every buffer.",
    "for last reduces": "Stalled at the end of a chain until its last reduces have ended.",
    "slack": "The smallest number of steps between consecutive turns of a dQ tile if no worker waits; below 1, some must wait.",
    "gang": "The number of chains that wait for each other in a circle, and so must run at the same time; 1 means none do.",
    "one rank": "How long a single rank would take for the whole sequence.",
    "efficiency": "The time of one rank, divided by the number of ranks, over the makespan; 1 would be perfect.",
    "hops": "How often states of chains are sent from rank to rank.",
    "sent forward": "Keys and values that a rank sends before it can begin.",
    "sent backward": "States, and sums of dK and dV, that a rank sends.",
    "states waiting": "The most states that a rank holds in memory at once, between two legs of their walks.",
    "model": "Tiles: every task was simulated. Chunks: each unit was simulated as a block of work.",
}


def figures_of(run: Timeline) -> dict[str, str]:
    """What a table or a page says of a simulated run."""
    slack = run.schedule.slack
    return {
        "makespan": plain_number(run.makespan),
        "lower bound": plain_number(run.lower_bound),
        "gap": percent(run.gap),
        "utilised": percent(run.utilization),
        "stalled": percent(run.stalled),
        "for turns": percent(run.stalls.order),
        "for buffers": percent(run.stalls.buffer),
        "for last reduces": percent(run.stalls.drain),
        "slack": "-" if slack is None else str(slack),
        "gang": str(run.schedule.gang),
    }


def figures_of_ranks(run: RankTimeline) -> dict[str, str]:
    """The same of several ranks. Bytes and states are those of the rank that has most."""
    return {
        "makespan": f"{run.makespan:,.0f} us",
        "one rank": f"{run.one_rank:,.0f} us",
        "efficiency": f"{run.efficiency:.3f}",
        "hops": str(max(run.hops)),
        "sent forward": bytes_in_words(max(run.gathered)),
        "sent backward": bytes_in_words(max(run.sent)),
        "states waiting": f"{max(run.waiting)} ({bytes_in_words(max(run.waiting_bytes))})",
        "model": run.model,
    }
