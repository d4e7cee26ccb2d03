"""Sequences of different lengths laid end to end: where each begins and ends."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..masks import is_whole
from .tensor_checks import check_strided

Packed = tuple[Tensor, Tensor, int, int]  # SequenceOffsets' fields, not yet checked
# In place of every offset: whoever computed them found on the device, where nobody can raise, that there are none.
NO_OFFSETS = -2
FROM_A_MASK = (
    "dash_attn needs an attention_mask that keeps one stretch of each row, with zeros only before it and behind it:"
    " give holes as a 4-d mask; beside cu_seq_lens_q, one of ones"
)


@dataclass(frozen=True, eq=False)
class SequenceOffsets:
    """Sequence i has the query tokens cu_seqlens_q[i] to cu_seqlens_q[i + 1], and likewise the key tokens.

    The values are on the tensors' device and are not read here: reading them would stop the host until the GPU is done.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int

    def __post_init__(self) -> None:
        for side, ends, longest in (("q", self.cu_seqlens_q, self.max_seqlen_q), ("k", self.cu_seqlens_k, self.max_seqlen_k)):
            _check_offsets(f"cu_seqlens_{side}", ends)
            if not is_whole(longest) or longest < 0:
                raise ValueError(f"max_seqlen_{side} must be a whole number >= 0; got {longest!r}")
        entries = len(self.cu_seqlens_q), len(self.cu_seqlens_k)
        if entries[0] != entries[1]:
            raise ValueError(f"cu_seqlens_q and cu_seqlens_k must have the same length; got {entries[0]} and {entries[1]}")

    @classmethod
    def known(cls, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int) -> SequenceOffsets:
        """Where tensors and numbers like these have passed the checks before."""
        offsets = cls.__new__(cls)
        vars(offsets).update(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
        return offsets

    def check_device(self, device: torch.device) -> None:
        for name, ends in (("cu_seqlens_q", self.cu_seqlens_q), ("cu_seqlens_k", self.cu_seqlens_k)):
            if ends.device != device:
                raise ValueError(f"{name} must be on the device of q, k and v ({device}); got {ends.device}")

    def on(self, device: torch.device) -> SequenceOffsets:
        """The same, on this device."""
        if self.cu_seqlens_q.device == device:
            return self
        return SequenceOffsets(self.cu_seqlens_q.to(device), self.cu_seqlens_k.to(device), self.max_seqlen_q, self.max_seqlen_k)

    def named(self) -> dict[str, Any]:
        """As arguments of flash_attn_varlen_func."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def sequences(self, q_tokens: int, kv_tokens: int) -> list[tuple[slice, slice]]:
        """The query and key tokens of each sequence. Reads and checks the values, so for tensors on the CPU only."""
        q = _slices("q", self.cu_seqlens_q, q_tokens, self.max_seqlen_q)
        k = _slices("k", self.cu_seqlens_k, kv_tokens, self.max_seqlen_k)
        return list(zip(q, k, strict=True))


def _check_offsets(name: str, ends: Tensor) -> None:
    check_strided(**{name: ends})
    if ends.dtype != torch.int32 or ends.ndim != 1 or len(ends) < 2:
        raise ValueError(
            f"{name} must be a 1-d int32 tensor with one entry more than there are sequences, at least two;"
            f" got {ends.dtype} of shape {tuple(ends.shape)}"
        )
    if not ends.is_contiguous():
        raise ValueError(f"{name} must be contiguous; got stride {ends.stride(0)}")


def _slices(side: str, cu_seqlens: Tensor, tokens: int, longest: int) -> list[slice]:
    name, ends = f"cu_seqlens_{side}", cu_seqlens.tolist()
    if ends[0] == NO_OFFSETS:
        raise ValueError(FROM_A_MASK)
    for entry, (start, end) in enumerate(pairwise(ends), 1):
        if end < start:
            raise ValueError(f"{name} must not decrease; got {start} followed by {end} at entry {entry}")
    if ends[0] != 0 or ends[-1] != tokens:
        raise ValueError(f"{name} must start at 0 and end at the number of tokens ({tokens}); got {ends[0]} and {ends[-1]}")
    found = max(end - start for start, end in pairwise(ends))
    if longest < found:
        raise ValueError(f"max_seqlen_{side} must be at least the longest sequence ({found}); got {longest}")
    return [slice(start, end) for start, end in pairwise(ends)]
