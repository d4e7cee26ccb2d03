"""transformers' Trainer with a ledger: `Trainer(..., callbacks=[ledger_callback("runs/a")])`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..errors import LedgerError
from ..ledgers.recorder import Ledger, ledger

if TYPE_CHECKING:
    from transformers import TrainerCallback

BEGINS_FIRST = "a trainer calls on_train_begin before any step"


def ledger_callback(folder: str | os.PathLike[str], **options: Any) -> TrainerCallback:
    """A callback that records every step of a training in a ledger. The options are those of `dash_attn.ledger`.

    The batch is what the model is called with, the loss is what it returns. A run that resumes from a checkpoint appends to the
    ledger in `folder`.
    """
    from transformers import TrainerCallback

    class LedgerCallback(_Recording, TrainerCallback):  # type: ignore[misc]
        pass

    return LedgerCallback(folder, options)


class _Recording:
    """A ledger, and what the model is called with between two steps: the trainer shows callbacks neither batch nor loss."""

    def __init__(self, folder: str | os.PathLike[str], options: dict[str, Any]) -> None:
        if "resume_from" in options:
            raise LedgerError(f"the trainer says where a training resumes: leave out resume_from; got {options['resume_from']!r}")
        self._folder, self._options = folder, options
        self._ledger: Ledger | None = None
        self._watched = False
        self._batches: list[dict[str, Any]] = []
        self._losses: list[Tensor] = []
        self._handles: list[Any] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: nn.Module, **kwargs: Any) -> None:
        self._end("another training, before this one was done")
        self._watched = False
        self._ledger = ledger(self._folder, **self._options, resume_from=state.global_step or None)
        self._handles = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, with_kwargs=True),
        ]

    def on_step_begin(self, args: Any, state: Any, control: Any, *, model: nn.Module, optimizer: Any, **kwargs: Any) -> None:
        """Before the first step, not when the training begins: a trainer that resumes restores the generators in between."""
        assert self._ledger is not None, BEGINS_FIRST
        if not self._watched:
            self._ledger.watch(model, getattr(optimizer, "optimizer", optimizer))  # accelerate wraps it
            self._watched = True

    def on_optimizer_step(self, args: Any, state: Any, control: Any, *, model: nn.Module, optimizer: Any, **kwargs: Any) -> None:
        assert self._ledger is not None, BEGINS_FIRST
        self._ledger.step(model, getattr(optimizer, "optimizer", optimizer), loss=self._losses, batch=self._batches)
        self._batches, self._losses = [], []

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._end()

    def _end(self, reason: str = "") -> None:
        for handle in self._handles:
            handle.remove()
        if self._ledger is not None:
            self._ledger.close(reason)
        self._handles, self._ledger = [], None

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if model.training:  # evaluations are no part of a step
            self._batches.append({"args": args, **kwargs})

    def _after(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        loss = output.get("loss") if isinstance(output, dict) else None
        if model.training and isinstance(loss, Tensor):
            self._losses.append(loss.detach())
