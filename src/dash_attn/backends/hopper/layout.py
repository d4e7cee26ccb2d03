"""Shapes, strides and options of a call: the key under which everything prepared for it is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ...options import AttentionOptions
from ...packing import Packing
from .driver import device_index, on_device
from .shapes import kernel_dim
from .support import DTYPES, check_call
from .tensor_map import is_tma_ready, tma_ready

Call = TypeVar("Call")
MOST_CALLS = 256  # prepared calls kept; the oldest goes first


@dataclass(frozen=True)
class Layout:
    """What kernels and workspaces are chosen by. A packed batch counts as one, its lengths are all tokens."""

    device: int
    dtype: str
    dim: int  # of the kernel
    q_dim: int  # of the caller's q and k, before padding to a multiple of 8
    v_dim: int
    batch: int
    q_len: int
    kv_len: int
    q_heads: int
    kv_heads: int
    count: int  # sequences
    q_longest: int | None  # longest sequence of a packed batch
    k_longest: int | None

    @classmethod
    def of(cls, tensors: tuple[Tensor, ...], options: AttentionOptions, packing: Packing | None = None) -> Layout:
        q, k, v = tensors[:3]
        check_call(q, v, options, packing is not None)
        batch = 1 if packing is not None else q.shape[0]
        return cls(
            device=device_index(q.device),
            dtype=DTYPES[q.dtype],
            dim=kernel_dim(q.shape[-1], v.shape[-1]),
            q_dim=q.shape[-1],
            v_dim=v.shape[-1],
            batch=batch,
            q_len=q.shape[-3],
            kv_len=k.shape[-3],
            q_heads=q.shape[-2],
            kv_heads=k.shape[-2],
            count=batch if packing is None else len(packing.cu_seqlens_q) - 1,
            q_longest=None if packing is None else packing.max_seqlen_q,
            k_longest=None if packing is None else packing.max_seqlen_k,
        )

    @property
    def packed(self) -> bool:
        return self.q_longest is not None

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    def tiles_of_queries(self, rows: int) -> int:
        """Q tiles of a head of one sequence; of a packed batch, room for those of all."""
        return _tiles(self.q_len, rows, self.count if self.packed else None)

    def tiles_of_keys(self, rows: int) -> int:
        return _tiles(self.kv_len, rows, self.count if self.packed else None)

    def without_padding(self, dq: Tensor, dk: Tensor, dv: Tensor, *rest: Tensor | None) -> tuple[Any, ...]:
        """The gradients with the caller's head dims."""
        return cut(dq, self.q_dim), cut(dk, self.q_dim), cut(dv, self.v_dim), *rest


def empty_contiguous(like: Tensor) -> Tensor:
    """Uninitialised and contiguous; the shortest way to it, because every call comes by."""
    return torch.empty_like(like) if like.is_contiguous() else like.new_empty(like.shape)


def cut(tensor: Tensor, dim: int) -> Tensor:
    """The first `dim` columns: what is there without padding."""
    return tensor if tensor.shape[-1] == dim else tensor[..., :dim].contiguous()


def _tiles(tokens: int, rows: int, sequences: int | None) -> int:
    """Whole tiles; every sequence of a packed batch may end with a partial one, wherever they end."""
    return -(-tokens // rows) if sequences is None else tokens // rows + sequences


class CallCache(Generic[Call]):
    """Calls by shapes, strides, dtype, device and options. A call that was made before costs one look-up."""

    def __init__(self, prepare: Callable[[Layout, tuple[Tensor, ...], AttentionOptions], Call]) -> None:
        self._prepare = prepare
        self._calls: dict[Any, Call] = {}

    def find(self, tensors: tuple[Tensor, ...], options: AttentionOptions, packing: Packing | None) -> tuple[Call, tuple[Tensor, ...]]:
        """The prepared call and the tensors it can work on (copies of those that TMA cannot read)."""
        call = self._calls.get(self._key(tensors, options, packing))
        if call is not None and all(t.data_ptr() % 16 == 0 for t in tensors):
            return call, tensors
        layout = Layout.of(tensors, options, packing)
        if not all(is_tma_ready(t) and t.shape[-1] % 8 == 0 for t in tensors):
            tensors = tuple(tma_ready(t) for t in tensors)
        key = (self._key(tensors, options, packing), layout.q_dim, layout.v_dim)
        call = self._calls.get(key)
        if call is None:
            with on_device(layout.device):
                call = self._prepare(layout, tensors, options)
            if len(self._calls) >= MOST_CALLS:
                del self._calls[next(iter(self._calls))]
            self._calls[key] = call
            if (tensors[0].shape[-1], tensors[2].shape[-1]) == (layout.q_dim, layout.v_dim):
                self._calls[key[0]] = call
        return call, tensors

    def clear(self) -> None:
        self._calls.clear()

    @staticmethod
    def _key(tensors: tuple[Tensor, ...], options: AttentionOptions, packing: Packing | None) -> tuple:
        first = tensors[0]
        packed = None if packing is None else (len(packing.cu_seqlens_q), packing.max_seqlen_q, packing.max_seqlen_k)
        return options, packed, first.dtype, first.device, *((t.shape, t.stride()) for t in tensors)
