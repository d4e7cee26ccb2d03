"""What the functions share in their signatures: the keywords that are ours, and what comes back."""

from __future__ import annotations

from typing import TypedDict

from torch import Tensor

from ..masks import Mask
from ..scheduling.schedule import Schedule

OutAndLse = tuple[Tensor, Tensor]
OutLseNone = tuple[Tensor, Tensor, None]
AnyResults = Tensor | OutAndLse | OutLseNone


class OwnKeywords(TypedDict, total=False):
    """Keyword-only arguments of flash_attn_func that FlashAttention does not have, except return_lse."""

    mask: Mask | None
    sinks: Tensor | None
    dropout_seed: Tensor | None
    schedule: str | Schedule
    accumulation: str
    backend: str
    head_offset: int
