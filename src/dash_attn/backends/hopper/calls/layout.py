"""Shapes, strides and options of a call: the key under which everything prepared for it is kept."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from ....call.call import Call, Gradients, Saved, cut
from ....call.offsets import SequenceOffsets
from ....call.options import AttentionOptions
from ....scheduling.problem import Problem
from ...kept import Kept, refuse_capture
from ..driver.launch import device_index, on_device
from ..driver.parameters import Strides
from ..driver.tensor_map import tma_ready
from ..support import DTYPES, check_call
from ..tiles import backward_dims, kernel_dim

MOST_CALLS = 256  # prepared calls kept; the least recently used goes first


@dataclass(frozen=True)
class Layout:
    """What kernels and workspaces are chosen by. Packed sequences count as a batch of one; every one may end with a partial tile, wherever
    it ends."""

    device: int
    dtype: str
    dim: int  # of KERNEL_DIMS: decides the tiles of the forward
    q_dim: int  # of the caller's q and k, before padding to a multiple of 8
    v_dim: int
    q_len: int  # of a packed batch: all tokens
    kv_len: int
    q_heads: int
    kv_heads: int
    batch: int
    count: int  # sequences
    longest: tuple[int, int]  # sequence there may be, in queries and in keys
    packed: bool

    @staticmethod
    def of(call: Call) -> Layout:
        (q, k, v), offsets = call.tensors, call.offsets
        check_call(q, v, call.options, offsets is not None)
        return Layout(
            device=device_index(q.device),
            dtype=DTYPES[q.dtype],
            dim=kernel_dim(q.shape[-1], v.shape[-1]),
            q_dim=q.shape[-1],
            v_dim=v.shape[-1],
            q_len=q.shape[-3],
            kv_len=k.shape[-3],
            q_heads=q.shape[-2],
            kv_heads=k.shape[-2],
            batch=q.shape[0] if offsets is None else 1,
            count=q.shape[0] if offsets is None else len(offsets.cu_seqlens_q) - 1,
            longest=(q.shape[1], k.shape[1]) if offsets is None else _longest(q, k, offsets),
            packed=offsets is not None,
        )

    @property
    def backward_dims(self) -> tuple[int, int]:
        """Of the backward kernel: of q and k, and of v."""
        return backward_dims(self.q_dim, self.v_dim)

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    @property
    def lse_shape(self) -> tuple[int, ...]:
        return (self.q_heads, self.q_len) if self.packed else (self.batch, self.q_heads, self.q_len)

    @property
    def lse_strides(self) -> tuple[int, ...]:
        return (self.q_heads * self.q_len, self.q_len, 1)[-len(self.lse_shape) :]

    def tiles(self, length: int, rows: int) -> int:
        """Of a head; of packed sequences, room for those of all."""
        return length // rows + self.count if self.packed else -(-length // rows)

    def problem(self, options: AttentionOptions, tile_q: int, tile_kv: int) -> Problem:
        """Of sequences of one length."""
        shape = self.kv_heads, self.group, self.batch
        return Problem(options.mask, self.q_len, self.kv_len, tile_q, tile_kv, *shape, head_offset=options.head_offset)

    def without_padding(self, dq: Tensor, dk: Tensor, dv: Tensor, dsinks: Tensor | None) -> Gradients:
        """The gradients with the caller's head dims."""
        return Gradients(cut(dq, self.q_dim), cut(dk, self.q_dim), cut(dv, self.v_dim), dsinks)


def empty_contiguous(like: Tensor) -> Tensor:
    """Uninitialised and contiguous; the shortest way to it, because every call passes here."""
    return torch.empty_like(like) if like.is_contiguous() else like.new_empty(like.shape)


def masked_score(options: AttentionOptions) -> float:
    """Far below every score, but with softcap its square must still be a number: the slope of the cap is 1 - score^2."""
    return -1e18 if options.softcap else -1e30


def row_strides(tensor: Tensor) -> Any:
    """Strides of batch, row and head; packed tokens are one batch."""
    return Strides(*tensor.stride()[:3]) if tensor.ndim == 4 else Strides(0, *tensor.stride()[:2])


class Prepared(Protocol):
    """What is kept for a layout. `holds_tables`: it owns device memory that launches in flight may still read."""

    device: torch.device
    holds_tables: bool


class PreparedForward(ABC):
    """Runs a call as it is prepared for its shapes, strides and options."""

    def forward(self, call: Call) -> Saved | None:
        """None where TMA cannot read the tensors at their addresses, or a graph is captured, which has to be noted."""
        q, k, v = call.tensors
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16 or torch.cuda.is_current_stream_capturing():
            return None
        return self.run((q, k, v), call)

    @abstractmethod
    def run(self, tensors: tuple[Tensor, ...], call: Call) -> Saved:
        """tensors: q, k and v, as TMA can read them."""


Made = TypeVar("Made", bound=Prepared)


class CallCache(Generic[Made]):
    """Calls by shapes, strides, dtype, device and options. A call that was made before costs one look-up."""

    def __init__(self, prepare: Callable[[Layout, tuple[Tensor, ...], AttentionOptions], Made]) -> None:
        self._prepare = prepare
        self._kept: Kept[Made] = Kept(MOST_CALLS)

    def find(self, call: Call, *others: Tensor) -> tuple[Made, tuple[Tensor, ...]]:
        """What is prepared for a call, and the tensors it can work on: q, k, v and others, copies of those that TMA cannot read."""
        tensors = (*call.tensors, *others)
        key = _key(call, tensors)
        prepared = self._kept.get(key)
        if prepared is not None and not any(t.data_ptr() % 16 for t in tensors):
            return prepared, tensors
        layout = Layout.of(call)
        tensors = tuple(tma_ready(t) for t in tensors)
        key = _key(call, tensors)
        prepared = self._kept.get(key)
        return (self._make(key, layout, tensors, call.options) if prepared is None else prepared), tensors

    def weakly(self, call: Call, *others: Tensor) -> Callable[[], Made | None] | None:
        """How to come back to what is prepared, until it goes. None where TMA cannot read the tensors: copies are made call by call."""
        made, tensors = self.find(call, *others)
        return weakref.ref(made) if all(own is given for own, given in zip(tensors, (*call.tensors, *others), strict=True)) else None

    def _make(self, key: tuple[Any, ...], layout: Layout, tensors: tuple[Tensor, ...], options: AttentionOptions) -> Made:
        refuse_capture()
        with on_device(layout.device):
            prepared = self._prepare(layout, tensors, options)
        for old in self._kept.put(key, prepared):
            if old.holds_tables:
                torch.cuda.synchronize(old.device)  # launches on any stream may still read them; here they go
        return prepared

    def clear(self) -> None:
        self._kept.clear()


def _key(call: Call, tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """tensors: padded to whole units, where those of the call are not; so their head dims count, too."""
    q, k, v, options, offsets, *_ = call
    packed = None if offsets is None else (len(offsets.cu_seqlens_q), *_longest(q, k, offsets))
    return options, packed, q.shape[-1], v.shape[-1], q.dtype, q.device, *[(t.shape, t.stride()) for t in tensors]


def _longest(q: Tensor, k: Tensor, offsets: SequenceOffsets) -> tuple[int, int]:
    """The longest sequences there can be; callers may pass any larger number."""
    return min(offsets.max_seqlen_q, q.shape[0]), min(offsets.max_seqlen_k, k.shape[0])
