"""Gradients of micro-batches, summed in one order for any number of ranks.

Before partial sums are added, all ranks tell what they have. Where they disagree, every rank raises the same error.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from ...call.tensor_checks import check_flags
from ...scheduling.json_fields import shortened
from ...scheduling.problem import whole_number
from ..hosts import FINISH, number_of, odd_rank
from ..peers import Group, Peers
from .buckets import Layout, Parameters, Presence, add, buckets_of, layout_of, reduce_bucket, take, trainable
from .tree import CarryStack, share_of

MOST_WEIGHT = 2**40  # of a micro-batch: a trillion tokens


class TreeAccumulator:
    """Adds the gradients of a step's micro-batches in one fixed binary tree over their global index.

    The mean then has the same bits for every number of ranks. `add` replaces PyTorch's accumulation into .grad, and `finish`
    replaces the all-reduce. Sums are float32 (float64 for float64 gradients). They are divided once, at the root of the tree,
    and rounded once to the dtype of the gradient.

    A tree of n micro-batches splits at the largest power of two below n, recursively. Each rank has one subtree.

    micro_batches: of all ranks together, per step.
    group: a ProcessGroup or a one-dimensional DeviceMesh; None for all processes, or for this one where torch.distributed
        is not initialised. A number of ranks that does not fit raises an error that says which do.
    """

    def __init__(self, micro_batches: int, group: Group = None) -> None:
        self._peers = Peers.of(group)
        self.owned = share_of(self._peers.rank, self._peers.count, micro_batches)  # global indices of this rank's micro-batches
        self.micro_batches = micro_batches  # of all ranks, per step
        self._step = 0
        self._delivered: dict[str, ref[Tensor]] = {}  # .grad as the last finish left it
        self.reset()

    def reset(self) -> None:
        """Forgets what was added in this step. All ranks must do so together."""
        self._stacks: dict[str, CarryStack[Tensor | None]] = {}
        self._layout: Layout | None = None
        self._added = self._weight = 0

    def add(self, model: nn.Module, weight: int = 1) -> None:
        """Takes the gradients of one micro-batch, in the order of `owned`; .grad is None afterwards.

        weight: what `finish` divides by is the sum of the weights. 1 gives the mean over micro-batches. The number of
            tokens gives the mean over tokens, if the loss of a micro-batch is a sum over its tokens.
        """
        parameters = self._parameters(model)
        weight = whole_number("weight", weight, least=0)
        if weight >= MOST_WEIGHT:
            raise ValueError(f"weight must be below {MOST_WEIGHT:,}, so that ranks can add all weights; got {shortened(weight)}")
        self._check_room(1)
        if all(p.grad is None for p in parameters.values()):
            raise RuntimeError("no parameter has a gradient: call add once after the backward of each micro-batch")
        self._check_not_delivered(parameters)
        for name, parameter in parameters.items():
            self._stacks.setdefault(name, CarryStack(add)).push(take(parameter))
        self._added += 1
        self._weight += weight

    @contextmanager
    def taking(self, model: nn.Module, count: int) -> Iterator[Callable[[str, Tensor], None]]:
        """`add` for `count` micro-batches whose gradients come parameter by parameter: to be called with the name of one and its gradients,
        in the order of the micro-batches and in the dtype of sums. One that does not come has none. An error in the block ends the step.
        """
        parameters, came = self._parameters(model), Counter[str]()
        self._check_room(count)
        if given := [name for name, p in parameters.items() if p.grad is not None]:
            raise RuntimeError(f"{given[0]!r} has a gradient already: call zero_grad(set_to_none=True) before the forward")

        def take(name: str, gradient: Tensor | None) -> None:
            self._stacks.setdefault(name, CarryStack(add)).push(gradient)
            came[name] += 1

        try:
            yield take
        except BaseException:
            self.reset()
            raise
        for name in parameters:
            for _ in range(count - came[name]):
                take(name, None)
        self._added += count
        self._weight += count

    def _check_room(self, count: int) -> None:
        if self._added + count > len(self.owned):
            done = f"rank {self._peers.rank} has added {self._added} of its {len(self.owned)} micro-batches"
            raise RuntimeError(f"{done}, and cannot add {count} more: call finish, or reset on all ranks to give this step up")

    @torch.no_grad()
    def finish(self, model: nn.Module, divide: bool = True) -> None:
        """Sets .grad, on every rank, to the sum of all micro-batches divided by the sum of their weights. All ranks must call it.

        A parameter without a gradient in some micro-batches has the sum of the others; without any, .grad stays None.

        divide: False leaves the sum as it is, for losses that were divided by a total of the whole step before backward.
        """
        try:
            with self._peers.hosts.refusing(FINISH):
                check_flags(divide=divide)
                parameters = self._parameters(model)
            sums = {name: self._stacks[name].total() if self._added else None for name in parameters}
            mine = {name: partial is not None for name, partial in sums.items()}
            left_over = sum(p.grad is not None for p in parameters.values())
            done = self._added, self._weight, left_over, all(mine.values())
            report = Report(int(self.micro_batches), self._step, number_of(layout_of(parameters)), bool(divide), *done)
        finally:
            self._step += 1
            self.reset()  # an error ends the step, too: nothing of it may reach the next one
        reports = compare(report, self._peers)
        presence = presence_on(self._peers, parameters, mine, all(other.complete for other in reports))
        divisor = sum(other.weight for other in reports) if divide else None
        with self._peers.hosts.telling():
            for bucket in buckets_of(parameters, presence):
                reduce_bucket(bucket, sums, self._peers, divisor)
        self._delivered = {name: ref(p.grad) for name, p in parameters.items() if p.grad is not None}

    def _check_not_delivered(self, parameters: Parameters) -> None:
        """Zeros would do, too, were it not for -0.0: 0.0 + -0.0 is 0.0, but only in the first micro-batch of a rank."""
        for name, parameter in parameters.items():
            if name in self._delivered and parameter.grad is not None and self._delivered[name]() is parameter.grad:
                raise RuntimeError(
                    f"{name!r} still has the gradient of the last step: call zero_grad(set_to_none=True), PyTorch's default, "
                    "between finish and the next backward"
                )

    def _parameters(self, model: nn.Module) -> Parameters:
        parameters = trainable(model)
        layout = layout_of(parameters)
        if self._layout is None:
            self._layout = layout
        elif layout != self._layout:
            changed = sorted({name for name, _ in {*layout} ^ {*self._layout}}) or ["their order"]
            raise ValueError(f"the trainable parameters must not change within a step; what changed: {', '.join(changed[:3])}")
        return parameters


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
        if odd := odd_rank(values):
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
