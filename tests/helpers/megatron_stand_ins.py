"""What Megatron-Core passes to a core attention, without Megatron: a configuration, mask types, a group of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

from torch import Tensor

# As in megatron.core.transformer.enums; tests/integrations/test_megatron_core.py compares them.
MaskType = Enum("MaskType", {"padding": 1, "causal": 2, "no_mask": 3, "padding_causal": 4, "arbitrary": 5, "causal_bottom_right": 6})


@dataclass
class PackedSeqParams:
    """The fields of Megatron-Core 0.16, and one of a later version."""

    qkv_format: str | None = "thd"
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_kv: Tensor | None = None
    cu_seqlens_q_padded: Tensor | None = None
    cu_seqlens_kv_padded: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None
    local_cp_size: int | None = None
    cp_group: Any = None
    pad_between_seqs: bool | None = None


@dataclass(frozen=True)
class Group:
    """A process group that knows only where this rank is."""

    place: int
    places: int

    def rank(self) -> int:
        return self.place

    def size(self) -> int:
        return self.places


def ranks(place: int = 0, places: int = 1) -> Any:
    return SimpleNamespace(tp=Group(place, places))


def config(**changes: Any) -> Any:
    """A TransformerConfig as far as a core attention reads it: 4 query heads, 2 key heads."""
    plain = {
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "attention_dropout": 0.0,
        "window_size": None,
        "window_attn_skip_freq": None,
        "softmax_type": "vanilla",
        "context_parallel_size": 1,
    }
    return SimpleNamespace(**plain | changes)
