"""`dash_attn.ledger`: what a run computed, step by step, in one file per rank."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Container, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ..errors import LedgerError
from ..tools.doctor import doctor
from ..tools.machine import is_distributed, process_environment
from . import tensors
from .collecting import AttentionCalls, Collector, ModuleHooks, UnderWay, View, sees_modules
from .format import END, HEAD, IS_DETAILED, IS_START, LAYOUT, PLAN, STEP, STEP_FIELDS, Entry, LedgerFile, as_json

Steps = Container[int] | bool
Records = list[tuple[bytes, bytes]]  # kind, payload
MOST_SETTINGS = 8  # numbers of a hyper-parameter that are kept: betas are two


def ledger(
    folder: str | os.PathLike[str],
    *,
    detail: Steps = (),
    keep: int = 0,
    view: View | None = None,
    optimizer_every: int = 100,
    resume_from: int | None = None,
    rank: int | None = None,
) -> Ledger:
    """A ledger of this run, to be used in a `with` statement. `dash-attn diff` compares two.

    folder: has one file per rank. Two processes cannot write to one file, and a run is not overwritten.
    detail: steps at which inputs and outputs of every module are recorded too, forward and backward: a range, a set, or True for all.
    keep: how many of the first elements of every tensor are kept at these steps, so that `diff` can show values.
    view: which part of inputs and outputs of modules is recorded at these steps, as a function of the tensor: for example, one row of many.
    optimizer_every: at which steps the optimizer's state is recorded; also at those of `detail`.
    resume_from: the number of the first step, for a run that continues from a checkpoint. Appends to the ledger in `folder`, if any.
    rank: whose file it is; by default the rank in torch.distributed, or in the environment variable RANK.
    """
    numbers = (("keep", keep, 0), ("optimizer_every", optimizer_every, 1), ("resume_from", resume_from, 0), ("rank", rank, 0))
    for name, value, least in numbers:
        if value is None and name in ("resume_from", "rank"):
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name} must be a whole number >= {least}; got {value!r}")
    if isinstance(detail, str) or not (isinstance(detail, bool) or hasattr(detail, "__contains__")):
        raise TypeError(f"detail must be a range, a set or a list of steps, or True for all; got {detail!r}")
    if not callable(view or len):
        raise TypeError(f"view must be a function of a tensor, or None; got {view!r}")
    number = rank
    if number is None:
        number = int(torch.distributed.get_rank()) if is_distributed() else _from_environment("RANK") or 0
    file = LedgerFile(Path(folder) / f"rank-{number}.ledger", append=resume_from is not None)
    environment = {**process_environment(), "doctor": {finding.id: finding.found for finding in doctor()}}
    head = {"first_step": resume_from or 0, "rank": number, "world_size": _world_size(rank is not None), "environment": environment}
    file.append((HEAD, as_json(head)))
    return Ledger(file, detail, keep, optimizer_every, resume_from or 0, view)


class Ledger:
    """Made by `dash_attn.ledger`. Call `step` once per step, after the backward and the update, before gradients are set to zero.

    On a GPU the record of a step is written when the next one is recorded, or at the end, so that the host never waits for the device.
    """

    def __init__(self, file: LedgerFile, detail: Steps, keep: int, optimizer_every: int, first_step: int, view: View | None = None) -> None:
        self.next_step = first_step
        self._file, self._keep, self._view, self._optimizer_every = file, keep, view, optimizer_every
        self._detail = range(sys.maxsize if detail else 0) if isinstance(detail, bool) else detail
        self._layouts: dict[tuple[Any, ...], int] = {}
        self._plans_written: set[str] = set()
        self._unwritten: tuple[Records, bytes, UnderWay] | None = None  # a step whose sums are on their way from a GPU
        self._collector, self._hooks = Collector(), None  # type: Collector, ModuleHooks | None
        self._attention = AttentionCalls(lambda: None if self._hooks is None else self._hooks.current_module())
        self._has_detail = bool(getattr(self._detail, "__len__", lambda: 1)())
        self._outer_error = id(sys.exc_info()[1])  # one that is being handled already; not kept alive, with all its frames

    @property
    def stopped(self) -> str:
        """Why nothing is recorded any more (a full disk); empty while it is."""
        return self._file.stopped

    def watch(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Record what the run starts with, and get ready for the first step. Needed before it where its detail is wanted.

        Weights, optimizer state and random number generators are those after the step before, so that a run which resumes from a
        checkpoint compares with one that went on.
        """
        if self.stopped:
            return
        self._check_detail(model)
        start = Collector()
        start.add(tensors.weights(model, tensors.parameters_of(model)))
        self._add_others(start, model, optimizer, with_optimizer=True)
        self._write(self.next_step - 1, start, (), IS_START)
        self._prepare(model)

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, loss: Any = None, batch: Any = None) -> None:
        """Record a step: batch, loss, gradients, weights, random number generators, and every so often the optimizer's state.

        loss, batch: tensors, arrays, numbers and texts, in lists, tuples, dicts or dataclasses.
        """
        number, detailed = self.next_step, self.next_step in self._detail
        if self.stopped:
            self.next_step += 1
            return
        self._check_detail(model)
        if detailed and self._hooks is None:
            raise LedgerError(f"detail of step {number} is recorded while it runs: call ledger.watch(model) before it")
        collector, calls = self._collector, self._attention.take()
        if detailed and not collector.entries:
            raise LedgerError(f"detail of step {number}: no module of the model ran where hooks see it; record it without torch.compile")
        collector.add((Entry("batch", "", name), leaf) for name, leaf in tensors.all_leaves(batch, "batch"))
        collector.add(((Entry("loss", "", name), leaf) for name, leaf in tensors.all_leaves(loss, "loss")), keep=1)
        parameters = tensors.parameters_of(model)
        collector.add(tensors.gradients(parameters))
        collector.add(tensors.weights(model, parameters))
        self._add_others(collector, model, optimizer, with_optimizer=detailed or number % self._optimizer_every == 0)
        self._write(number, collector, calls, IS_DETAILED if detailed else 0)
        self.next_step = number + 1
        self._prepare(model)

    def close(self, reason: str | None = None) -> None:
        """End the ledger. `reason`: why the run did not go on, if not because it was done; by default the exception on its way, if any."""
        error = sys.exc_info()[1]
        if reason is None:
            reason = "" if error is None or id(error) == self._outer_error else _in_words(error)
        self._remove_hooks()
        self._attention.stop()
        try:
            self._write_before()
        except RuntimeError as failure:  # the device failed: what it had not yet told is lost, what was written before is not
            warnings.warn(f"the ledger lacks its last step: {str(failure).splitlines()[0]}", RuntimeWarning, stacklevel=2)
            reason = reason or _in_words(failure)
        self._file.append((END, as_json({"next_step": self.next_step, "reason": reason})))
        self._file.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close("" if error is None or (isinstance(error, SystemExit) and not error.code) else _in_words(error))

    def _check_detail(self, model: nn.Module) -> None:
        """Once, and not at the first step with detail, which may be hours away."""
        if self._has_detail and not sees_modules(model):
            raise LedgerError("detail needs modules that hooks see; model.compile() leaves none: use torch.compile(model), or no detail")
        self._has_detail = False

    def _prepare(self, model: nn.Module) -> None:
        """For the next step."""
        self._remove_hooks()
        self._attention.take()
        detailed = self.next_step in self._detail and not self.stopped
        self._collector = Collector(self._keep if detailed else 0)
        self._hooks = ModuleHooks(model, self._collector, self._view) if detailed else None
        if self.stopped:
            self._attention.stop()

    def _remove_hooks(self) -> None:
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None

    def _add_others(self, collector: Collector, model: nn.Module, optimizer: torch.optim.Optimizer | None, with_optimizer: bool) -> None:
        """What a training carries from step to step beside its weights."""
        if optimizer is not None:
            collector.add(tensors.optimizer_settings(optimizer), keep=MOST_SETTINGS)
            if with_optimizer:
                collector.add(tensors.optimizer_state(model, optimizer))
        collector.add(tensors.generators())

    def _write(self, step: int, collector: Collector, calls: Iterable[tuple[str | None, str]], flags: int) -> None:
        order = _execution_order(collector.entries)
        layout, before = self._layout(tuple(collector.entries[i] for i in order), tuple(calls))
        head = STEP_FIELDS.pack(step, time.time(), flags, layout)
        self._write_before()
        found = collector.collect(order)
        self._unwritten = before, head, found
        if found.copies.on_host:
            self._write_before()

    def _write_before(self) -> None:
        """The step before, whose copies had a whole step to arrive."""
        if self._unwritten is not None:
            (before, head, found), self._unwritten = self._unwritten, None
            self._file.append(*before, (STEP, head + found.wait()))

    def _layout(self, entries: tuple[Entry, ...], calls: tuple[tuple[str | None, str], ...]) -> tuple[int, Records]:
        """Its number, and the records that have to be written before a step refers to it."""
        new = {name: self._attention.plans[name] for _, name in calls if name not in self._plans_written}
        before = [(PLAN, as_json({"name": name, **plan})) for name, plan in new.items()]
        self._plans_written |= set(new)
        key = (entries, calls)
        if key not in self._layouts:
            self._layouts[key] = len(self._layouts)
            before.append((LAYOUT, as_json({"entries": entries, "attention": calls})))
        return self._layouts[key], before


def _execution_order(entries: Sequence[Entry]) -> list[int]:
    """They were collected modules first, then the rest: the batch comes before the modules, the loss after the last forward."""
    phases = [entry.phase for entry in entries]
    last_forward = max((place for place, phase in enumerate(phases) if phase == "forward"), default=-1)
    where = {"batch": (0.0, 0.0), "loss": (1.0, last_forward + 0.5)}
    return sorted(range(len(phases)), key=lambda place: (*where.get(phases[place], (1.0, float(place))), place))


def _world_size(rank_is_given: bool) -> int | None:
    """None: ranks are numbered by hand, and nobody says how many there are."""
    if is_distributed():
        return int(torch.distributed.get_world_size())
    size = _from_environment("WORLD_SIZE")
    return size if size else None if rank_is_given or "RANK" in os.environ else 1


def _from_environment(variable: str) -> int | None:
    text = os.environ.get(variable, "").strip()
    if text and not text.isdecimal():
        raise ValueError(f"the environment variable {variable} must be a whole number >= 0; got {text!r}")
    return int(text) if text else None


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
