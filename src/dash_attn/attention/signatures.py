"""What the functions share in their signatures: keywords, and what comes back.

Overloads tell type checkers what a call returns. They name the options once, as keywords; the functions themselves take FlashAttention's
in its order, too.
"""

from collections.abc import Sequence
from typing import Literal, TypedDict

from torch import Tensor

from ..call.options import Accumulation, BackendName
from ..masks import BooleanMask, Mask
from ..scheduling.generators import ScheduleName
from ..scheduling.schedule import Schedule

Yes = Literal[True]
No = Literal[False]
OutAndLse = tuple[Tensor, Tensor]
OutLseNone = tuple[Tensor, Tensor, None]
AnyResults = Tensor | OutAndLse | OutLseNone


class ChoiceKeywords(TypedDict, total=False):
    """What decides the values, wherever they are computed."""

    dropout_p: float
    softmax_scale: float | None
    causal: bool
    window_size: tuple[int, int]
    softcap: float
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    dropout_seed: Tensor | None
    head_offset: int


class SharedKeywords(ChoiceKeywords, total=False):
    """FlashAttention's choices, and ours."""

    deterministic: bool
    schedule: ScheduleName | Schedule
    accumulation: Accumulation
    backend: BackendName


class Keywords(SharedKeywords, total=False):
    """Those of flash_attn_func."""

    mask: Mask | BooleanMask | Tensor | None


class PackedKeywords(SharedKeywords, total=False):
    """Those of flash_attn_varlen_func: one mask for all sequences, or a list with one for each."""

    mask: Mask | Sequence[Mask | BooleanMask | Tensor] | None
    block_table: Tensor | None


class CacheKeywords(TypedDict, total=False):
    """Those of flash_attn_with_kvcache."""

    k: Tensor | None
    v: Tensor | None
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    cache_seqlens: int | Tensor | None
    cache_batch_idx: Tensor | None
    cache_leftpad: Tensor | None
    block_table: Tensor | None
    softmax_scale: float | None
    causal: bool
    window_size: tuple[int, int]
    softcap: float
    rotary_interleaved: bool
    alibi_slopes: None
    num_splits: int
    sinks: Tensor | None
    first_position: int | Tensor
    backend: BackendName
