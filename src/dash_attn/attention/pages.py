"""Packed queries that attend keys and values in pages: flash_attn_varlen_func with a block table."""

from __future__ import annotations

import torch
from torch import Tensor

from ..call.kv_cache import CachePlaces, CacheTensors
from ..call.offsets import SequenceOffsets
from ..call.options import Choices, is_zero
from ..masks import Causal, Full, Window
from .kv_cache import refuse_gradients, run


def attention_of_pages(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    block_table: Tensor,
    packed: tuple[Tensor, Tensor, int, int],
    choices: Choices,
) -> tuple[Tensor, Tensor]:
    """Output and LSE. packed: SequenceOffsets' fields; of those of the keys only the lengths count."""
    _refuse_choices(choices)
    refuse_gradients(q=q, k=k, v=v, sinks=sinks)
    if not torch.compiler.is_compiling():
        SequenceOffsets(*packed)  # checks its fields
    ends = packed[1]
    places = CachePlaces(ends[1:] - ends[:-1], block_table=block_table)
    return run(CacheTensors(q, k, v, sinks=sinks), places, packed, choices)


def _refuse_choices(choices: Choices) -> None:
    """What only a backward needs, and masks that pages do not take."""
    if choices.mask is not None and not isinstance(choices.mask, (Full, Causal, Window)):
        raise ValueError(f"keys in pages take a full or causal mask or a window; got mask={choices.mask!r}")
    if not isinstance(choices.schedule, str) or choices.schedule != "auto":
        raise ValueError(
            f"keys in pages have no backward, so there is nothing to schedule: schedule must be 'auto'; got {choices.schedule!r}"
        )
    if not is_zero(choices.dropout_p) or choices.alibi:
        asked = "alibi_slopes" if choices.alibi else f"dropout_p={choices.dropout_p!r}"
        raise ValueError(f"keys in pages take no dropout and no ALiBi: dropout_p must be 0 and alibi_slopes None; got {asked}")
    if choices.accumulation != "ordered":
        raise ValueError(f"keys in pages have no backward: accumulation must be 'ordered'; got {choices.accumulation!r}")
