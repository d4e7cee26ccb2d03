"""The tensors of one step become entries and sums. Sums stay on their devices until the step is over: one copy per device then.

Nothing waits for a GPU: copies are under way when a step returns, and are read when the next one is recorded.

Of a step with detail, hooks collect inputs and outputs of every module, forward and backward, in execution order.
Gradients are heard of by hooks on tensors, which leave the graph as it is. (Backward hooks of modules insert nodes into it, forbid
changes in place, and could change the order in which gradients are added.) So a gradient is that of a tensor, summed over all who took it.

Of every call of attention there is what decides its bits: schedule, hash of the order, hashes of the kernels.
"""

import json
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from hashlib import sha256
from io import BytesIO
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..attention.observers import SharedPart, observers
from ..backends import backend_for, resolve
from ..call.call import Call
from ..call.planning import describe_call
from .bit_sums import PartSums, in_logical_order, part_sums
from .format import Entry, Plan
from .tensors import Leaf, plain_name, strided, tensors_in, unwrapped

View = Callable[[Tensor], Tensor]
DIGITS = 16  # of the hash that names a plan
TOLD = ("backend", "schedule", "accumulation", "order_hash", "backward_tiles", "forward_tiles", "kernels")  # what decides bits


class HostCopies:
    """Tensors on their way to the host: one copy per device, into memory that a GPU writes to without anybody waiting.

    Copies are under way when this is made; `wait` waits for them.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._places = [(tensor.device, tensor.nbytes) for tensor in tensors]
        devices = dict.fromkeys(device for device, _ in self._places)
        joined = {device: torch.cat([tensor.view(torch.uint8) for tensor in tensors if tensor.device == device]) for device in devices}
        self._copies = {device: _copy(octets) for device, octets in joined.items()}

    @property
    def on_host(self) -> bool:
        """Whether everything was on the host from the beginning, so that `wait` waits for nothing."""
        return all(event is None for _, event in self._copies.values())

    def wait(self) -> list[bytes]:
        """Of each tensor."""
        for _, event in self._copies.values():
            if event is not None:
                event.synchronize()
        files = {device: BytesIO(copy.numpy().tobytes()) for device, (copy, _) in self._copies.items()}
        return [files[device].read(size) for device, size in self._places]


def _copy(octets: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    if octets.device.type != "cuda":
        return octets.cpu(), None
    copy = torch.empty(octets.shape, dtype=octets.dtype, pin_memory=True)
    with torch.cuda.device(octets.device):
        copy.copy_(octets, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
    return copy, event


@dataclass(frozen=True)
class UnderWay:
    """What was collected, on its way to the host."""

    order: tuple[int, ...]  # places of the entries, as they are wanted
    owners: tuple[int, ...]  # of the sums
    keepers: tuple[int, ...]  # entries whose first elements were kept
    copies: HostCopies  # of the sums, then of first elements

    def wait(self) -> bytes:
        """The sum of each entry, then first elements where they were kept: as a record has them."""
        found = self.copies.wait()
        of_sums = len(found) - len(self.keepers)
        totals = np.zeros(max((*self.order, *self.owners), default=-1) + 1, dtype=np.uint64)
        np.add.at(totals, np.array(self.owners, dtype=np.intp), np.frombuffer(b"".join(found[:of_sums]), dtype=np.uint64))
        kept = dict(zip(self.keepers, found[of_sums:], strict=True))
        return totals[list(self.order)].astype(np.dtype("<u8")).tobytes() + b"".join(kept.get(place, b"") for place in self.order)


@dataclass
class Collector:
    """`keep`: how many first elements of every tensor are kept."""

    keep: int = 0
    entries: list[Entry] = field(default_factory=list)
    _sums: list[PartSums] = field(default_factory=list)
    _kept: dict[int, Tensor] = field(default_factory=dict)  # by place of the entry
    _lock: threading.Lock = field(default_factory=threading.Lock)  # gradients of several devices arrive in several threads

    def add(self, named: Iterable[tuple[Entry, Tensor]], keep: int | None = None) -> None:
        """Record tensors as they are now. Their entries say where they are; dtype and shape are filled in."""
        keep = self.keep if keep is None else keep
        found = [(entry, name, leaf) for entry, tensor in named for name, leaf in strided(entry.tensor, tensor)]
        with self._lock, torch.no_grad():
            first = len(self.entries)
            self.entries += [entry.of(name, leaf, keep) for entry, name, leaf in found]
            for part in part_sums([leaf for _, _, leaf in found]):
                self._sums.append(PartSums(part.sums, tuple(owner + first for owner in part.owners)))
            if keep:
                for place, (_, _, leaf) in enumerate(found, first):  # a copy: the tensor may be changed before the step is over
                    self._kept[place] = in_logical_order(leaf.reshape(-1)[:keep]).view(-1).view(torch.uint8).clone()

    def collect(self, order: Sequence[int]) -> UnderWay:
        """Start to copy everything to the host. `order`: places of the entries, as they are wanted."""
        owners = tuple(owner for part in self._sums for owner in part.owners)
        return UnderWay(tuple(order), owners, tuple(self._kept), HostCopies([*(part.sums for part in self._sums), *self._kept.values()]))


class ModuleHooks:
    """Records into a collector from construction until `remove`."""

    def __init__(self, model: nn.Module, collector: Collector, view: View | None = None) -> None:
        self._collector, self._view = collector, view or (lambda tensor: tensor)
        self._running: list[Entry] = []  # modules that have begun and not ended, as entries without a tensor
        self._calls: Counter[tuple[str, str]] = Counter()
        self._takers: dict[tuple[int, int], tuple[weakref.ref[Tensor], list[str]]] = {}
        self._handles: list[RemovableHandle] = []
        for name, module in _seen(unwrapped(model, compiled=False)):
            self._handles.append(module.register_forward_pre_hook(partial(self._begins, name), with_kwargs=True))
            # Always: a module that raises has ended, too, and a program may go on.
            self._handles.append(module.register_forward_hook(self._ends, with_kwargs=True, always_call=True))

    def current_module(self) -> str | None:
        return self._running[-1].module if self._running else None

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._takers.clear()

    def _begins(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        in_backward = torch._C._current_graph_task_id() != -1
        phase = "recompute" if in_backward else "forward"
        entry = Entry(phase, name, "", call=self._calls[phase, name], caller=self.current_module())
        self._calls[phase, name] += 1
        self._running.append(entry)
        arguments = {**{str(place): argument for place, argument in enumerate(args)}, **kwargs}
        inputs = [leaf for path, argument in arguments.items() for leaf in tensors_in(argument, path)]
        self._add(entry, input=self._viewed(inputs), parameter=_own(module._parameters), buffer=_own(module._buffers))
        for path, tensor in inputs:
            self._watch(entry._replace(phase="backward", role="input", tensor=path), tensor, taker=name)

    def _ends(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        entry = self._running.pop()
        outputs = list(tensors_in(result))
        self._add(entry, output=self._viewed(outputs))
        for path, tensor in outputs:
            self._watch(entry._replace(phase="backward", role="output", tensor=path), tensor)

    def _add(self, entry: Entry, **leaves: list[Leaf]) -> None:
        """Leaves by their role; all at once, so that they share a launch."""
        self._collector.add((entry._replace(role=role, tensor=path), tensor) for role, found in leaves.items() for path, tensor in found)

    def _viewed(self, leaves: list[Leaf]) -> list[Leaf]:
        return [(path, self._view(tensor)) for path, tensor in leaves]

    def _watch(self, entry: Entry, tensor: Tensor, taker: str | None = None) -> None:
        """Record the gradient of a tensor when it arrives: once, under the first name the tensor had."""
        if not tensor.requires_grad or not torch.is_grad_enabled() or isinstance(tensor, nn.Parameter):
            return
        key = (id(tensor), tensor._version)
        known, takers = self._takers.get(key, (None, []))
        if known is None or known() is not tensor:
            takers = []
            self._takers[key] = weakref.ref(tensor), takers
            tensor.register_hook(lambda gradient: self._collector.add([(entry._replace(takers=tuple(takers)), self._view(gradient))]))
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


class AttentionCalls:
    """Calls since the last step, each as (module, name of its plan). A kind of call is explained once."""

    def __init__(self, current_module: Callable[[], str | None]) -> None:
        self.plans: dict[str, Plan] = {}
        self._calls: list[tuple[str | None, str]] = []
        self._names: dict[tuple[Any, ...], str] = {}
        self._current_module = current_module
        observers.append(self._observe)

    def take(self) -> tuple[tuple[str | None, str], ...]:
        calls, self._calls = tuple(self._calls), []
        return calls

    def stop(self) -> None:
        if self._observe in observers:
            observers.remove(self._observe)

    def _observe(self, call: Call, shared: SharedPart | None) -> None:
        (q, k, v), options = call.tensors, call.options
        key = (q.shape, k.shape, v.shape, q.dtype, q.device, options, call.offsets is not None, None if shared is None else shared.key)
        name = self._names.get(key)
        if name is None:
            # Of a shared call these are the rows of this rank; schedule and order are those of the whole sequence.
            whole = None if shared is None else {"accumulation": options.accumulation, **shared.describe()}
            plan = {"call": describe_call(call), **(whole or _decided(call))}
            name = sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()[:DIGITS]
            self._names[key], self.plans[name] = name, plan
        self._calls.append((self._current_module(), name))


def _decided(call: Call) -> Plan:
    options, device = call.options, call.q.device
    if call.offsets is not None:
        asked = {"backend": resolve(options.backend, device), "schedule": options.schedule, "accumulation": options.accumulation}
        return {**asked, "order_hash": "planned sequence by sequence"}
    try:
        explained = asdict(backend_for(options.backend, device).explain(call, predict_time=False))
    except (ValueError, NotImplementedError) as error:  # the forward has run; what is wrong with the backward, it says itself
        return {"order_hash": f"not explained: {error}"}
    return {name: explained[name] for name in TOLD}
