"""What the functions share in their signatures: the keywords that are ours, and what comes back."""

from __future__ import annotations

from typing import TypedDict

from torch import Tensor

from ..masks import BooleanMask, Mask
from ..scheduling.schedule import Schedule

OutAndLse = tuple[Tensor, Tensor]
OutLseNone = tuple[Tensor, Tensor, None]
AnyResults = Tensor | OutAndLse | OutLseNone


class SharedKeywords(TypedDict, total=False):
    """Keyword-only arguments that FlashAttention does not have, except mask and return_lse."""

    sinks: Tensor | None
    dropout_seed: Tensor | None
    schedule: str | Schedule
    accumulation: str
    backend: str
    head_offset: int


class OwnKeywords(SharedKeywords, total=False):
    """Those of flash_attn_func."""

    mask: Mask | BooleanMask | Tensor | None


class PackedKeywords(SharedKeywords, total=False):
    """Those of flash_attn_varlen_func: a matrix is for sequences of one length."""

    mask: Mask | None
