"""Before partial sums are added, all ranks tell what they have. Where they disagree, every rank raises the same error."""

from __future__ import annotations

from typing import NamedTuple

from ..hosts import FINISH, odd_rank
from ..peers import Peers
from .buckets import Presence
from .gradients import Parameters
from .tree import share_of


class Report(NamedTuple):
    """What one rank has at the end of a step. Whole numbers only, so that it fits one small message."""

    micro_batches: int
    step: int
    layout: int
    divide: int
    added: int
    weight: int
    left_over: int  # parameters whose gradient was not added
    complete: int  # every parameter has a partial sum


MUST_AGREE = {
    "micro_batches": "micro_batches must be the same on every rank",
    "step": "all ranks must have finished as many steps",
    "layout": "names, shapes, dtypes, devices and order of trainable parameters must be the same on every rank (this is a hash of them)",
    "divide": "divide must be the same on every rank",
}


def compare(mine: Report, peers: Peers) -> list[Report]:
    """The reports of all ranks, if they can be added."""
    reports = [Report(*numbers) for numbers in peers.hosts.begin(FINISH, mine)]
    for field, rule in MUST_AGREE.items():
        values = [getattr(report, field) for report in reports]
        odd = odd_rank(values)
        if odd:
            raise RuntimeError(f"{rule}; got {values[0]} on rank 0 and {values[odd]} on rank {odd}")
    for rank, report in enumerate(reports):
        _check_complete(rank, report, len(share_of(rank, peers.count, report.micro_batches)))
    if mine.divide and sum(report.weight for report in reports) == 0:
        raise ValueError("the weights of all micro-batches are 0, so their sum cannot be divided by")
    return reports


def _check_complete(rank: int, report: Report, due: int) -> None:
    if report.added != due:
        raise RuntimeError(f"rank {rank} must add {due} of the {report.micro_batches} micro-batches before finish; it added {report.added}")
    if report.left_over:
        raise RuntimeError(
            f"{report.left_over} parameters of rank {rank} have gradients that were not added: "
            "call add once after the backward of each micro-batch, and no backward between the last add and finish"
        )


def presence_on(peers: Peers, parameters: Parameters, mine: dict[str, bool], all_complete: bool) -> dict[str, Presence]:
    """Which ranks have a partial sum of which parameter."""
    if all_complete:
        return dict.fromkeys(parameters, (True,) * peers.count)
    rows = peers.hosts.gather([mine[name] for name in parameters])
    return {name: tuple(bool(row[place]) for row in rows) for place, name in enumerate(parameters)}
