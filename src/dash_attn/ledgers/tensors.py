"""Tensors by name: inside nested values (batches, arguments and results of modules), and what a training carries from step to step
(gradients, weights, optimizer state, random number generators)."""

import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .format import COUNT, SETTING, Entry

Leaf = tuple[str, Tensor]
Named = Iterator[tuple[Entry, Tensor]]
Parameters = list[tuple[str, nn.Parameter]]
PLAIN = (Tensor, nn.Parameter)
WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")  # torch.compile, FSDP, activation checkpointing


def strided(path: str, tensor: Tensor) -> Iterable[Leaf]:
    """What holds the bits: sparse tensors are made of others, a DTensor has this rank's shard."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"view must give a tensor for each that it takes; got {type(tensor).__name__} for {path}")
    if tensor.is_meta or tensor.is_quantized or tensor.is_nested:  # PyTorch would end the process, or raise without a name
        kind = "on the meta device" if tensor.is_meta else "quantized" if tensor.is_quantized else "nested"
        raise TypeError(f"the ledger takes tensors whose elements it can read; got one that is {kind} in {path}")
    if type(tensor) in PLAIN and tensor.layout is torch.strided:
        return ((path, tensor),)
    to_local = getattr(tensor.detach(), "to_local", None)
    tensor = to_local() if callable(to_local) else tensor.detach()
    if tensor.layout is torch.strided:
        return ((path, tensor),)
    if tensor.layout == torch.sparse_coo:
        return ((f"{path}.indices", tensor._indices()), (f"{path}.values", tensor._values()))
    raise TypeError(f"the ledger takes strided and sparse COO tensors; got layout {tensor.layout} in {path}")


def tensors_in(value: Any, path: str = "") -> Iterator[Leaf]:
    """Tensors alone, as they are; everything else is passed over."""
    for name, leaf in _leaves(value, path):
        if isinstance(leaf, Tensor):
            yield name, leaf


def all_leaves(value: Any, path: str) -> Iterator[Leaf]:
    """Tensors, and numbers and texts as tensors. What has no bits of its own raises."""
    for name, leaf in _leaves(value, path):
        if leaf is not None:
            yield name, leaf if isinstance(leaf, Tensor) else _as_tensor(leaf, name)


def of_text(text: str | bytes) -> Tensor:
    data = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for place, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{place}]")
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _leaves(getattr(value, field.name), f"{path}.{field.name}")
    else:
        yield path, value


def _as_tensor(leaf: Any, name: str) -> Tensor:
    if isinstance(leaf, (str, bytes)):
        return of_text(leaf)
    if isinstance(leaf, int) and not isinstance(leaf, bool) and not -(2**63) <= leaf < 2**63:
        return of_text(str(leaf))
    if isinstance(leaf, (bool, int)):
        return torch.tensor(leaf)
    if isinstance(leaf, (float, complex)):
        return torch.tensor(leaf, dtype=torch.float64 if isinstance(leaf, float) else torch.complex128)
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
        return torch.from_numpy(leaf.astype(leaf.dtype.newbyteorder("=")))
    if isinstance(leaf, np.generic):
        return _as_tensor(leaf.item(), name)
    allowed = "tensors, numpy arrays, numbers, texts, and lists, tuples, dicts and dataclasses of them"
    raise TypeError(f"the ledger records {allowed}; got {type(leaf)} in {name}")


def plain_name(name: str) -> str:
    """Without the names that wrappers add, so that a compiled run compares with one that is not."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def unwrapped(model: nn.Module, compiled: bool = True) -> nn.Module:
    """The model inside DistributedDataParallel, DataParallel and, with `compiled`, torch.compile."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module; got {type(model).__name__}")
    while True:
        inner = getattr(model, "_orig_mod", None) if compiled else None
        if inner is None and isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


@lru_cache(maxsize=2**16)
def split_name(name: str) -> tuple[str, str]:
    """Module and name of a parameter in it."""
    module, _, tensor = plain_name(name).rpartition(".")
    return module, tensor


def parameters_of(model: nn.Module) -> Parameters:
    return list(unwrapped(model).named_parameters())


@lru_cache(maxsize=2**16)
def _entry(phase: str, name: str, role: str = "") -> Entry:
    return Entry(phase, *split_name(name), role=role)


def gradients(parameters: Parameters) -> Named:
    """From the last parameter to the first: about the order in which a backward computes them."""
    for name, parameter in reversed(parameters):
        if parameter.grad is not None:
            yield _entry("gradient", name), parameter.grad


def weights(model: nn.Module, parameters: Parameters) -> Named:
    for name, parameter in parameters:
        yield _entry("weight", name, "parameter"), parameter
    for name, buffer in unwrapped(model).named_buffers():
        yield _entry("weight", name, "buffer"), buffer


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Named:
    """State by the names of the parameters; those that are not the model's have their place in the optimizer."""
    names = {id(parameter): split_name(name) for name, parameter in unwrapped(model).named_parameters()}
    for group_number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            module, name = names.get(id(parameter), ("", f"group {group_number} parameter {place}"))
            for key, value in optimizer.state.get(parameter, {}).items():
                yield from _setting(Entry("optimizer", module, f"{name} {key}"), value)


def optimizer_settings(optimizer: torch.optim.Optimizer) -> Named:
    """Learning rates and all other numbers of the groups: few, and they explain much.

    Behind them two numbers that tell at every step whether an optimizer has lost its state; all of that is read at some.
    """
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params":
                yield from _setting(Entry("optimizer", "", f"group {number} {key}", role=SETTING), value)
    states = [state for state in optimizer.state.values() if isinstance(state, dict)]
    yield Entry("optimizer", "", "of states", role=COUNT), torch.tensor(sum(map(len, states)))
    steps = next((state["step"] for state in states if "step" in state), None)
    yield from _setting(Entry("optimizer", "", "of steps", role=COUNT), steps)


def _setting(entry: Entry, value: Any) -> Named:
    """Numbers, also in tuples; other objects have no bits to compare."""
    if isinstance(value, Tensor):
        yield entry, value
    elif isinstance(value, (bool, int, float)):
        yield entry, torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    elif isinstance(value, (tuple, list)) and value and all(isinstance(part, (int, float)) for part in value):
        yield entry, torch.tensor(value, dtype=torch.float64)


def generators() -> Named:
    """Generators of Python, numpy (where it is in use), PyTorch, and CUDA devices (where CUDA is in use)."""
    yield Entry("rng", "", "python"), of_text(repr(random.getstate()))
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        kind, keys, *rest = numpy_random.get_state()
        yield Entry("rng", "", "numpy"), of_text(f"{kind} {keys.tobytes().hex()} {rest}")
    yield Entry("rng", "", "torch cpu"), torch.get_rng_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for number in range(torch.cuda.device_count()):
            yield Entry("rng", "", f"torch cuda:{number}"), torch.cuda.get_rng_state(number)
