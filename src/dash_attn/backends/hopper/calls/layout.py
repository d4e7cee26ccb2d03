"""Shapes, strides and options of a call: the key under which everything prepared for it is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from ....call.call import Call, Gradients
from ....call.offsets import SequenceOffsets
from ....call.options import AttentionOptions
from ...recently_used import Kept
from ...uploading import refuse_capture
from ..driver.launch import device_index, on_device
from ..driver.parameters import Strides
from ..driver.tensor_map import tma_ready
from ..support import DTYPES, check_call
from ..tiles import backward_dims, kernel_dim

LOG2_E = 1.4426950408889634
MOST_CALLS = 256  # prepared calls kept; the least recently used goes first


@dataclass(frozen=True)
class Layout:
    """What kernels and workspaces are chosen by, as far as dense and packed calls have it in common."""

    device: int
    dtype: str
    dim: int  # of KERNEL_DIMS: decides the tiles of the forward
    q_dim: int  # of the caller's q and k, before padding to a multiple of 8
    v_dim: int
    q_len: int  # of a packed batch: all tokens
    kv_len: int
    q_heads: int
    kv_heads: int

    @staticmethod
    def of(call: Call) -> DenseLayout | PackedLayout:
        (q, k, v), offsets = call.tensors, call.offsets
        check_call(q, v, call.options, offsets is not None)
        shared: dict[str, Any] = {
            "device": device_index(q.device),
            "dtype": DTYPES[q.dtype],
            "dim": kernel_dim(q.shape[-1], v.shape[-1]),
            "q_dim": q.shape[-1],
            "v_dim": v.shape[-1],
            "q_len": q.shape[-3],
            "kv_len": k.shape[-3],
            "q_heads": q.shape[-2],
            "kv_heads": k.shape[-2],
        }
        if offsets is None:
            return DenseLayout(batch=q.shape[0], **shared)
        q_longest, k_longest = _longest(q, k, offsets)
        return PackedLayout(count=len(offsets.cu_seqlens_q) - 1, q_longest=q_longest, k_longest=k_longest, **shared)

    @property
    def backward_dims(self) -> tuple[int, int]:
        """Of the backward kernel: of q and k, and of v."""
        return backward_dims(self.q_dim, self.v_dim)

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    def without_padding(self, dq: Tensor, dk: Tensor, dv: Tensor, dsinks: Tensor | None) -> Gradients:
        """The gradients with the caller's head dims."""
        return Gradients(cut(dq, self.q_dim), cut(dk, self.q_dim), cut(dv, self.v_dim), dsinks)


@dataclass(frozen=True)
class DenseLayout(Layout):
    """A batch of sequences of one length."""

    batch: int

    @property
    def count(self) -> int:
        """Sequences."""
        return self.batch

    @property
    def lse_shape(self) -> tuple[int, ...]:
        return self.batch, self.q_heads, self.q_len

    @property
    def longest_keys(self) -> int:
        return self.kv_len

    def tiles_of_queries(self, rows: int) -> int:
        """Q tiles of a head."""
        return -(-self.q_len // rows)

    def tiles_of_keys(self, rows: int) -> int:
        return -(-self.kv_len // rows)


@dataclass(frozen=True)
class PackedLayout(Layout):
    """Sequences laid end to end. They count as a batch of one; every one may end with a partial tile, wherever it ends."""

    count: int  # sequences
    q_longest: int
    k_longest: int
    batch: ClassVar[int] = 1

    @property
    def lse_shape(self) -> tuple[int, ...]:
        return self.q_heads, self.q_len

    @property
    def longest_keys(self) -> int:
        return self.k_longest or 1

    def tiles_of_queries(self, rows: int) -> int:
        """Room for the Q tiles of a head, of all sequences."""
        return self.q_len // rows + self.count

    def tiles_of_keys(self, rows: int) -> int:
        return self.kv_len // rows + self.count


def empty_contiguous(like: Tensor) -> Tensor:
    """Uninitialised and contiguous; the shortest way to it, because every call passes here."""
    return torch.empty_like(like) if like.is_contiguous() else like.new_empty(like.shape)


def cut(tensor: Tensor, dim: int) -> Tensor:
    """The first `dim` columns: what is there without padding."""
    return tensor if tensor.shape[-1] == dim else tensor[..., :dim].contiguous()


def masked_score(options: AttentionOptions) -> float:
    """Far below every score, but with softcap its square must still be a number: the slope of the cap is 1 - score^2."""
    return -1e18 if options.softcap else -1e30


def row_strides(tensor: Tensor) -> Any:
    """Strides of batch, row and head; packed tokens are one batch."""
    return Strides(*tensor.stride()[:3]) if tensor.ndim == 4 else Strides(0, *tensor.stride()[:2])


def kernel_scales(options: AttentionOptions) -> dict[str, float]:
    """What scores are multiplied by before exp2 and, with softcap, before tanh (tanh_half_log2 of common/ptx.cuh)."""
    cap = options.softcap
    return {"scale_log2": (cap or options.scale) * LOG2_E, "cap_scale": 2 * LOG2_E * options.scale / cap if cap else 0.0}


class Prepared(Protocol):
    """What is kept for a layout. `holds_tables`: it owns device memory that launches in flight may still read."""

    device: torch.device
    holds_tables: bool


Made = TypeVar("Made", bound=Prepared)


class CallCache(Generic[Made]):
    """Calls by shapes, strides, dtype, device and options. A call that was made before costs one look-up."""

    def __init__(self, prepare: Callable[[DenseLayout | PackedLayout, tuple[Tensor, ...], AttentionOptions], Made]) -> None:
        self._prepare = prepare
        self._kept: Kept[Made] = Kept(MOST_CALLS)

    def find(self, call: Call, *others: Tensor) -> tuple[Made, tuple[Tensor, ...]]:
        """What is prepared for a call, and the tensors it can work on: q, k, v and others, copies of those that TMA cannot read."""
        tensors = (*call.tensors, *others)
        key = _key(call, tensors)
        prepared = self._kept.get(key)
        if prepared is not None and all(t.data_ptr() % 16 == 0 for t in tensors):
            return prepared, tensors
        layout = Layout.of(call)
        tensors = tuple(tma_ready(t) for t in tensors)
        key = _key(call, tensors)
        prepared = self._kept.get(key)
        return (self._make(key, layout, tensors, call.options) if prepared is None else prepared), tensors

    def _make(
        self, key: tuple[Any, ...], layout: DenseLayout | PackedLayout, tensors: tuple[Tensor, ...], options: AttentionOptions
    ) -> Made:
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
    return options, packed, q.shape[-1], v.shape[-1], q.dtype, q.device, *((t.shape, t.stride()) for t in tensors)


def _longest(q: Tensor, k: Tensor, offsets: SequenceOffsets) -> tuple[int, int]:
    """The longest sequences there can be; callers may pass any larger number."""
    return min(offsets.max_seqlen_q, q.shape[0]), min(offsets.max_seqlen_k, k.shape[0])
