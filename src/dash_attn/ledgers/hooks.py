"""Inputs and outputs of every module, forward and backward, in execution order.

Gradients are heard of by hooks on tensors, which leave the graph as it is. (Backward hooks of modules insert nodes into it, forbid
changes in place, and could change the order in which gradients are added.) So a gradient is that of a tensor, summed over all who took it.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .collecting import Collector
from .entries import Entry
from .tensors import Leaf, plain_name, tensors_in, unwrapped


class ModuleHooks:
    """Records into a collector from construction until `remove`."""

    def __init__(self, model: nn.Module, collector: Collector) -> None:
        self._collector = collector
        self._running: list[Entry] = []  # modules that have begun and not ended, as entries without a tensor
        self._calls: Counter[tuple[str, str]] = Counter()
        self._takers: dict[tuple[int, int], tuple[weakref.ref[Tensor], list[str]]] = {}
        self._handles: list[RemovableHandle] = []
        for name, module in _seen(unwrapped(model, compiled=False)):
            self._handles.append(module.register_forward_pre_hook(partial(self._begins, name), with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._ends, with_kwargs=True))

    def current_module(self) -> str | None:
        return self._running[-1].module if self._running else None

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._takers.clear()

    def _begins(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        phase = "recompute" if _in_backward() else "forward"
        entry = Entry(phase, name, "", call=self._calls[phase, name], caller=self.current_module())
        self._calls[phase, name] += 1
        arguments = {**{str(place): argument for place, argument in enumerate(args)}, **kwargs}
        inputs = [leaf for path, argument in arguments.items() for leaf in tensors_in(argument, path)]
        self._add(entry, input=inputs, parameter=_own(module._parameters), buffer=_own(module._buffers))
        for path, tensor in inputs:
            self._watch(replace(entry, phase="backward", role="input", tensor=path), tensor, taker=name)
        self._running.append(entry)

    def _ends(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        entry = self._running.pop()
        outputs = list(tensors_in(result))
        self._add(entry, output=outputs)
        for path, tensor in outputs:
            self._watch(replace(entry, phase="backward", role="output", tensor=path), tensor)

    def _add(self, entry: Entry, **leaves: list[Leaf]) -> None:
        """Leaves by their role; all at once, so that they share a launch."""
        self._collector.add((replace(entry, role=role, tensor=path), tensor) for role, found in leaves.items() for path, tensor in found)

    def _watch(self, entry: Entry, tensor: Tensor, taker: str | None = None) -> None:
        """Record the gradient of a tensor when it arrives: once, under the first name the tensor had."""
        if not tensor.requires_grad or not torch.is_grad_enabled() or isinstance(tensor, nn.Parameter):
            return
        key = (id(tensor), tensor._version)
        known, takers = self._takers.get(key, (None, []))
        if known is None or known() is not tensor:
            takers = []
            self._takers[key] = weakref.ref(tensor), takers
            tensor.register_hook(lambda gradient: self._collector.add([(replace(entry, takers=tuple(takers)), gradient)]))
        if taker is not None:
            takers.append(taker)


def sees_modules(model: nn.Module) -> bool:
    """Whether there is anything to hook: `model.compile()` leaves nothing that hooks see."""
    return all(next(_seen(each), None) is not None for each in (model, unwrapped(model, compiled=False)))


def _seen(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Modules by name. What torch.compile compiled runs without the hooks inside of it: it is one module, or part of its caller."""
    if getattr(module, "_compiled_call_impl", None) is None:
        yield plain_name(name), module
        if not hasattr(module, "_orig_mod"):
            for child, inner in module.named_children():
                yield from _seen(inner, f"{name}.{child}" if name else child)


def _own(tensors: dict[str, Any]) -> list[Leaf]:
    return [(name, tensor) for name, tensor in tensors.items() if tensor is not None]


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
