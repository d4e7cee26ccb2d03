"""The first forward of a model that asked for dash_attn is watched: attention that does not go through here raises.

Two hooks that any model can be pickled and copied with; they take themselves off after one forward that ended well. A
compiled forward is not watched (tracing would keep the hooks in the graph); the check of the model's classes, and masks
that only we can read, also hold there.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ._layer_mask import NAME

ATTENTION = (functional.scaled_dot_product_attention, functional.multi_head_attention_forward)
SOFTMAX = (functional.softmax, torch.softmax, torch.Tensor.softmax, torch.special.softmax)
SCORES_NDIM = 4  # (batch, heads, queries, keys); in a layer that calls itself attention also (batch x heads, queries, keys)


class _Watches(threading.local):
    def __init__(self) -> None:
        self.open: list[_Watch] = []


_watches = _Watches()


def note_call() -> None:
    """The attention function of ours has been called."""
    if not torch.compiler.is_compiling() and _watches.open:
        for watch in _watches.open:
            watch.calls += 1


def watched_model() -> str | None:
    """The class of the model that is in its first forward."""
    return type(_watches.open[0].model).__name__ if _watches.open else None


def watch_first_forward(model: nn.Module) -> None:
    if _before not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_before)
        model.register_forward_hook(_after, always_call=True)


def is_attention(layer: type) -> bool:
    name = layer.__name__.lower()
    return "attention" in name or "attn" in name


class _Watch(TorchFunctionMode):
    """Counts our calls and finds attention that is computed elsewhere, inside one forward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.calls = model, 0
        self.foreign: str | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.foreign is None and (func in ATTENTION or func in SOFTMAX):
            self.foreign = _foreign_layer(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _foreign_layer(func: Any, args: Any, kwargs: dict[str, Any]) -> str | None:
    """The class of the layer that computes attention by itself here, if that is what this call is."""
    layer, owner = _calling_modules()
    if layer is None or _implementation(owner) != NAME or _implementation(layer) not in (None, NAME):
        return None  # a part of the model for which another implementation was asked
    scores = args[0] if args else kwargs.get("input")
    ndim = SCORES_NDIM - is_attention(type(layer))
    return type(layer).__name__ if func in ATTENTION or getattr(scores, "ndim", 0) >= ndim else None


def _calling_modules() -> tuple[nn.Module | None, nn.Module | None]:
    """The innermost module on the stack whose code is not PyTorch's, and the innermost model of transformers."""
    from transformers import PreTrainedModel

    layer = None
    for module in _modules_on_the_stack():
        if layer is None and not type(module).__module__.startswith("torch."):
            layer = module
        if isinstance(module, PreTrainedModel):
            return layer, module
    return layer, None


def _modules_on_the_stack() -> Iterator[nn.Module]:
    """Innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            yield module
        frame = frame.f_back


def _implementation(module: nn.Module | None) -> str | None:
    return getattr(getattr(module, "config", None), "_attn_implementation", None)


def _before(model: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling():
        return
    _close_interrupted()
    watch = _Watch(model)
    _watches.open.append(watch)
    watch.__enter__()  # type: ignore[no-untyped-call]


def _close_interrupted() -> None:
    """PyTorch calls no hook after an interrupt from the keyboard."""
    running = {id(module) for module in _modules_on_the_stack()}
    while _watches.open and id(_watches.open[-1].model) not in running:
        _watches.open.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]


def _after(model: nn.Module, args: Any, result: Any) -> None:
    """Also called, with no result, when the forward has raised: that error is the one to see."""
    if torch.compiler.is_compiling() or not _watches.open or _watches.open[-1].model is not model:
        return
    watch = _watches.open.pop()
    watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    if result is None or _implementation(model) != NAME:
        return
    if watch.foreign is not None:
        raise RuntimeError(not_ours(type(model).__name__, f"{watch.foreign} computes attention of its own"))
    if watch.calls == 0 and not _watches.open:
        raise RuntimeError(not_ours(type(model).__name__, "its forward did not call dash_attn once"))
    _take_off(model)


def _take_off(model: nn.Module) -> None:
    for hooks in (model._forward_pre_hooks, model._forward_hooks):
        for key in [key for key, hook in hooks.items() if hook in (_before, _after)]:
            del hooks[key]
            for flags in (model._forward_hooks_always_called, model._forward_hooks_with_kwargs, model._forward_pre_hooks_with_kwargs):
                flags.pop(key, None)


def not_ours(model: str, why: str) -> str:
    return f'{model} does not work with attn_implementation="dash_attn": {why}. Use "eager" or "sdpa" for this model'
