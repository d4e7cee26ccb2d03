"""Gradients of micro-batches, summed in one order for any number of ranks."""

from __future__ import annotations

from weakref import ref

import torch
from torch import Tensor, nn

from ...call.tensor_checks import check_flags
from ...scheduling.problem import whole_number
from ..hosts import FINISH, number_of
from ..peers import Group, Peers
from .agreement import Report, compare, presence_on
from .buckets import buckets_of, reduce_bucket
from .gradients import Layout, Parameters, add, layout_of, take, trainable
from .tree import CarryStack, share_of


class TreeAccumulator:
    """Adds the gradients of a step's micro-batches in one fixed binary tree over their global index.

    The mean then has the same bits for every number of ranks. `add` replaces PyTorch's accumulation into .grad, and `finish`
    replaces the all-reduce. Sums are float32 (float64 for float64 gradients). They are divided once, at the root of the tree,
    and rounded once to the dtype of the gradient.

    A tree of n micro-batches splits at the largest power of two below n, again and again. Each rank has one subtree.

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
        if self._added == len(self.owned):
            raise RuntimeError(f"rank {self._peers.rank} has added its {len(self.owned)} micro-batches; call finish before the next step")
        if all(p.grad is None for p in parameters.values()):
            raise RuntimeError("no parameter has a gradient: call add once after the backward of each micro-batch")
        self._check_not_delivered(parameters)
        for name, parameter in parameters.items():
            self._stacks.setdefault(name, CarryStack(add)).push(take(parameter))
        self._added += 1
        self._weight += weight

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
