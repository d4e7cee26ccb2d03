"""Where attention runs. A backend is a module with `forward` and `backward`; it is imported when first used.

Backends never import each other, and an explicit request never falls back to another one.
"""

from collections.abc import Callable
from functools import cache, lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from ..call.call import Call, Gradients, Grads, Saved
from ..call.explain import CacheExplanation, Explanation
from ..call.kv_cache import CacheCall
from ..scheduling.problem import Problem
from ..scheduling.ranks.sharding import Sharding
from ..scheduling.ranks.units import SharedSchedule, Unit
from .gpus import is_hopper

DEVICE_OF = {"cpu": "cpu", "hopper": "cuda", "triton": "cuda"}
ALWAYS_ORDERED = ("triton",)  # backends in which no sum could be unordered


class Prepared(Protocol):
    """What a backend keeps for calls with certain shapes, strides, dtype, device and options."""

    def forward(self, call: Any) -> Saved | None:
        """Of a Call or a CacheCall. None where tensors lie so that it cannot be used, or a graph is captured."""

    def backward(self, call: Call, saved: Saved, grads: Grads) -> Gradients | None:
        """Likewise, or where strides are others."""


class Backend(Protocol):
    """Calls have at least one query and one key. Documents in a row come as packed sequences (run.py)."""

    HEADS_AT_ONCE: bool  # whether a call may have a PatternPerHead; else its heads come pattern by pattern
    EXACT_PARTS: bool  # whether gradients of float32 tensors are not rounded

    def forward(self, call: Call) -> Saved: ...
    def backward(self, call: Call, saved: Saved, grads: Grads) -> Gradients: ...

    def prepared(self, call: Call, *of_backward: Any) -> Callable[[], Prepared | None] | None:
        """How to come back to what was prepared for a forward, or with Saved and Grads for a backward, as long as it is kept. None: nothing
        is prepared."""

    def check_schedule(self, call: Call) -> None:
        """Raise where a schedule that was given does not fit."""

    def order_in_words(self, call: Call) -> str:
        """What the backward of these dense tensors walks, for a log."""

    def explain(self, call: Call, predict_time: bool = True) -> Explanation:
        """What forward and backward of these tensors, which may be on the meta device, would do."""


class RankBackward(Protocol):
    """The backward of one of several ranks that share a sequence."""

    @property
    def rows_of_sinks(self) -> Tensor:
        """What the sinks' gradient needs of the rank's rows, by Q tile: (..., tiles, rows of a tile)."""

    def take_keys(self, k: Tensor, v: Tensor, first_head: int) -> None:
        """All keys and values of some KV heads, before the first unit that needs them."""

    def drop_keys(self, first_head: int, heads: int) -> None:
        """No unit needs them any more."""

    def state_size(self, unit: Unit) -> int:
        """Numbers in the states of a unit."""

    def new_state(self, unit: Unit) -> Tensor:
        """Where a trip begins."""

    def run(self, unit: Unit, state: Tensor) -> None:
        """Walk a leg, or end a trip. The states are added to in their memory."""

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """dQ, dK and dV of the rank's rows."""

    def sink_gradients(self, rows: Tensor, sinks: Tensor) -> Tensor:
        """(batch, query heads), from the `rows_of_sinks` of all ranks."""


def walk_in_legs(backward: RankBackward, legs: SharedSchedule) -> None:
    """All units of a rank that is alone. Between two legs of a chain its state rests in memory."""
    resting: dict[int, Tensor] = {}  # states, by the unit that they come from
    for unit in legs.units:
        state = backward.new_state(unit) if unit.before is None else resting.pop(unit.before)
        backward.run(unit, state)
        if unit.after is not None:
            resting[unit.number] = state
        del state  # else one that has ended would be there beside the next one that begins


class Ranks(Protocol):
    """The module `ranks` of a backend that can run one of several ranks that share a sequence."""

    RankBackward: type  # (plan, shared, rank, options, rows, of_rows, modifiers=) -> RankBackward

    def backward_tiles(self, head_dim: int, value_dim: int) -> tuple[int, int]:
        """Rows of a Q tile and of a KV tile."""

    def tile_size(self, head_dim: int, value_dim: int) -> int:
        """Numbers in the state of a KV tile."""

    def heads_together(self, problem: Problem, sharding: Sharding) -> int:
        """How many heads a unit should have side by side."""

    def machine_code(self) -> str:
        """What must be equal on all ranks besides the plan, because it decides the bits."""

    def forward(self, call: Call, problem: Problem, sharding: Sharding, rank: int) -> Saved:
        """Of the rank's queries; k and v are those of the whole sequence, all of some heads."""


class Cache(Protocol):
    """The module `kv_cache` of a backend that can attend to a cache of keys and values."""

    def attention_with_cache(self, call: CacheCall) -> Saved:
        """Appends the new keys and values in place, then as `Backend.forward`."""

    def prepared(self, call: CacheCall) -> Callable[[], Prepared | None] | None:
        """As `Backend.prepared`."""

    def explain_cache(self, call: CacheCall) -> CacheExplanation:
        """What `attention_with_cache` of these tensors, which may be on the meta device, would do."""


def resolve(name: str, device: torch.device) -> str:
    """The backend for tensors on this device, or an error if the one asked for does not run there."""
    if name == "auto":
        if device.type not in DEVICE_OF.values():
            raise ValueError(f"no backend runs on {device}; tensors may be on {' or '.join(dict.fromkeys(DEVICE_OF.values()))}")
        return "cpu" if device.type == "cpu" else _backend_of_gpu(device)
    if DEVICE_OF[name] != device.type:
        raise ValueError(f"backend {name!r} needs {DEVICE_OF[name]} tensors; got tensors on {device}")
    return name


@cache
def _backend_of_gpu(device: torch.device) -> str:
    """A function of the GPU alone, so that all GPUs of a model have the same bits."""
    if not torch.cuda.is_available():
        return "hopper"  # a program is traced for a GPU that is not here; nothing runs
    return "hopper" if is_hopper(device) else "triton"


def resolve_to_explain(name: str, device: torch.device) -> str:
    """As `resolve`; tensors on the meta device stand for those of any backend that is named."""
    if device.type != "meta":
        return resolve(name, device)
    if name == "auto":
        raise ValueError(f"tensors on meta fit every backend: say which one to explain, backend={' or '.join(map(repr, DEVICE_OF))}")
    return name


@lru_cache(maxsize=64)
def backend_for(name: str, device: torch.device) -> Backend:
    """The module that runs calls of tensors on this device."""
    return import_backend(resolve(name, device))


@cache
def import_ranks(name: str) -> Ranks:
    """The module of a backend for ranks that share a sequence."""
    instead = "With ulysses equal to the number of ranks nothing is shared but heads"
    return cast(Ranks, _import_part(name, "ranks", "share a sequence between ranks", instead))


@lru_cache(maxsize=64)
def cache_backend_for(name: str, device: torch.device) -> Cache:
    """The module that runs calls with a cache on this device."""
    return import_cache(resolve(name, device))


@cache
def import_cache(name: str) -> Cache:
    """The module of a backend for calls with a cache."""
    instead = "Without a cache, flash_attn_func takes all keys and values in every call"
    return cast(Cache, _import_part(name, "kv_cache", "attend to a cache of keys and values", instead))


def _import_part(name: str, part: str, what: str, instead: str) -> Any:
    """Raises where a backend has no module for something."""
    served = [other for other in DEVICE_OF if find_spec(f"{__name__}.{other}.{part}") is not None]
    if name not in served:
        raise NotImplementedError(
            f"backend {name!r} ({DEVICE_OF[name]} tensors) cannot {what} in this version of dash-attn;"
            f" {' and '.join(map(repr, served))} can. {instead}"
        )
    return import_module(f"{__name__}.{name}.{part}")


def has_cache(name: str) -> bool:
    return find_spec(f"{__name__}.{name}.kv_cache") is not None


@cache
def import_backend(name: str) -> Backend:
    """The module of a backend."""
    module = f"{__name__}.{name}"
    if find_spec(module) is None:
        raise NotImplementedError(f"backend {name!r} ({DEVICE_OF[name]} tensors) is not part of this build of dash-attn")
    return cast(Backend, import_module(module))
