"""flash_attn_varlen_func: sequences of different lengths laid end to end, each computed as if it were alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

from torch import Tensor

from ..call.call import modifiers_of
from ..call.offsets import SequenceOffsets
from ..call.options import (
    Accumulation,
    AttentionOptions,
    BackendName,
    Choices,
    check_determinism,
    check_dropout,
    options_for,
    refuse_given_schedule,
)
from ..call.tensor_checks import check_flags, check_sinks, check_strided, check_tensors
from ..masks import BooleanMask, Mask
from ..scheduling.generators import ScheduleName
from ..scheduling.schedule import Schedule
from .autograd import Attention
from .known import KnownCall, known_of
from .kv_cache import attention_of_pages
from .mask_per_sequence import are_masks, attention_of_each
from .pytorch import is_traced, refuse_transforms
from .signatures import AnyResults, No, OutAndLse, OutLseNone, PackedKeywords, Yes
from .torch_ops import traced_attention

if TYPE_CHECKING:
    from typing_extensions import Unpack


@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, *lengths: Any, return_lse: Yes, return_attn_probs: No = ..., **options: Unpack[PackedKeywords]
) -> OutAndLse: ...
@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, *lengths: Any, return_attn_probs: Yes, return_lse: bool = ..., **options: Unpack[PackedKeywords]
) -> OutLseNone: ...
@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, *lengths: Any, return_lse: No = ..., return_attn_probs: No = ..., **options: Unpack[PackedKeywords]
) -> Tensor: ...
@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, *lengths: Any, return_lse: bool = ..., return_attn_probs: bool = ..., **options: Unpack[PackedKeywords]
) -> AnyResults: ...
def flash_attn_varlen_func(  # type: ignore[misc]  # positional choices are FlashAttention's
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    mask: Mask | Sequence[Mask | BooleanMask | Tensor] | None = None,
    sinks: Tensor | None = None,
    dropout_seed: Tensor | None = None,
    schedule: ScheduleName | Schedule = "auto",
    accumulation: Accumulation = "ordered",
    backend: BackendName = "auto",
    return_lse: bool = False,
    head_offset: int = 0,
) -> AnyResults:
    """Attention of packed sequences. A sequence's bits are those of flash_attn_func on it alone.

    q is (q tokens, q_heads, dim), k and v are (KV tokens, kv_heads, dim). Sequence i has the query tokens
    cu_seqlens_q[i] to cu_seqlens_q[i + 1], and likewise the key tokens; either may be none. The mask applies to each
    sequence. The arguments before block_table are FlashAttention-2's, the others those of flash_attn_func; a schedule is
    "auto" or, on the CPU, a name: each sequence is planned by its own lengths, so a Schedule fits none of them and raises.

    mask may be a list with a mask for each sequence, boolean matrices too (docs/masks.md). Each is then a call of its own, and on a
    GPU the host waits for the lengths.

    dropout_seed is (sequences,): each sequence drops the pairs that it drops alone with its seed. alibi_slopes are (q_heads,) or
    (sequences, q_heads).

    On the GPU the values of cu_seqlens are not read on the host, so the call does not wait for the GPU: they must
    start at 0, not decrease, and end at the number of tokens. On the CPU this is checked. On the GPU a kernel looks at
    them and, like PyTorch's device-side assertions, stops the CUDA context with a message.

    block_table: int32 (sequences, entries). k and v are then pages, (pages, page size, kv_heads, dim), as in
    flash_attn_with_kvcache; cu_seqlens_k only says how many keys each sequence has. There is no backward then.

    Returns out; (out, lse) with `return_lse`; (out, lse, None) with `return_attn_probs`. lse is (q_heads, q tokens);
    gradients go through it.
    """
    refuse_transforms()
    of_scores = mask, causal, window_size, softmax_scale, softcap
    choices = Choices(*of_scores, schedule, accumulation, backend, head_offset, dropout_p, alibi_slopes is not None)  # quicker by position
    packed = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    plain = sinks is None and dropout_seed is None and alibi_slopes is None and block_table is None
    flags = deterministic, return_attn_probs, return_lse
    known = known_of((q, k, v, cu_seqlens_q, cu_seqlens_k), choices, max_seqlen_q, max_seqlen_k, *flags) if plain else None
    if known is not None and known.options is not None:
        out, lse = known.attention(q, k, v, SequenceOffsets.known(*packed))
    else:
        check_flags(return_attn_probs=return_attn_probs, return_lse=return_lse)
        check_determinism(deterministic, accumulation)
        check_dropout(dropout_p)
        if block_table is not None:
            out, lse = attention_of_pages(q, k, v, sinks, block_table, packed, choices)
        elif are_masks(mask):
            out, lse = attention_of_each((q, k, v), sinks, packed, choices, dropout_seed, alibi_slopes)
        else:
            out, lse = new_attention(q, k, v, sinks, packed, choices, dropout_seed, alibi_slopes, known)
    if return_attn_probs:
        return out, lse, None
    return (out, lse) if return_lse else out


def new_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    packed: tuple[Tensor, Tensor, int, int],
    choices: Choices,
    dropout_seed: Tensor | None,
    alibi_slopes: Tensor | None,
    known: KnownCall | None,
) -> tuple[Tensor, Tensor]:
    """Of a call that is looked at for the first time, or each time anew. packed: SequenceOffsets' fields."""
    ends = packed[:2]
    if is_traced(q, k, v, sinks, *ends, dropout_seed, alibi_slopes):
        check_strided(q=q, k=k, v=v, cu_seqlens_q=ends[0], cu_seqlens_k=ends[1])
        modifiers = modifiers_of(q, len(ends[0]) - 1, choices.dropout_p, dropout_seed, alibi_slopes)
        return traced_attention(q, k, v, sinks, packed, choices, modifiers)
    options, offsets = packed_options_of(q, k, v, sinks, packed, choices)
    modifiers = modifiers_of(q, len(ends[0]) - 1, choices.dropout_p, dropout_seed, alibi_slopes)
    if known is not None and modifiers is None:
        known.options = options
        return known.attention(q, k, v, offsets)
    result: tuple[Tensor, Tensor] = Attention.apply(q, k, v, sinks, options, offsets, modifiers)  # type: ignore[no-untyped-call]
    return result


def packed_options_of(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, packed: tuple[Tensor, Tensor, int, int], choices: Choices
) -> tuple[AttentionOptions, SequenceOffsets]:
    """The options of a call of these tensors; everything is checked that can be without the lengths. packed: SequenceOffsets' fields."""
    check_tensors(q, k, v, ndim=3)
    check_sinks(sinks, q)
    offsets = SequenceOffsets(*packed)
    if not q.is_meta:
        offsets.check_device(q.device)
    options = options_for(choices, q.shape[-1])
    refuse_given_schedule(options)
    return options, offsets
