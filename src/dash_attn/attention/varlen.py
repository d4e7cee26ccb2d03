"""flash_attn_varlen_func: sequences of different lengths laid end to end, each computed as if it were alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from ..call.call import Given
from ..call.offsets import Packed, SequenceOffsets
from ..call.options import Accumulation, BackendName, Choices, check_options, options_for, refuse_given_schedule
from ..call.tensor_checks import check_sinks, check_tensors
from ..masks import BooleanMask, Mask
from ..scheduling.generators import ScheduleName
from ..scheduling.schedule import Schedule
from .functions import new_attention
from .known import known_of
from .kv_cache import attention_of_pages
from .pytorch import refuse_transforms
from .signatures import AnyResults, No, OutAndLse, OutLseNone, PackedKeywords, Yes

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
    cu_seqlens_q[i] to cu_seqlens_q[i + 1], and likewise the key tokens; either may be empty. The mask applies to each
    sequence. The arguments before block_table are FlashAttention-2's, the others those of flash_attn_func; a schedule is
    "auto" or, on the CPU, a name: each sequence is planned by its own lengths, so a Schedule fits none of them and raises.

    mask may be a list with a mask for each sequence, boolean matrices too (docs/masks.md). Each is then a separate call, and on a
    GPU the host waits for the lengths.

    dropout_seed is (sequences,): each sequence drops the pairs that it drops alone with its seed. alibi_slopes are (q_heads,) or
    (sequences, q_heads).

    On the GPU the values of cu_seqlens are not read on the host, so the call does not wait for the GPU: they must
    start at 0, not decrease, and end at the number of tokens. On the CPU this is checked. On the GPU a kernel checks
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
        check_options(choices, deterministic=deterministic, return_attn_probs=return_attn_probs, return_lse=return_lse)
        if block_table is not None:
            out, lse = attention_of_pages(q, k, v, sinks, block_table, packed, choices)
        elif isinstance(mask, Sequence) and not isinstance(mask, str):
            out, lse = attention_of_each((q, k, v), Given(sinks, dropout_seed, alibi_slopes), choices, packed)
        else:
            out, lse = new_attention(q, k, v, Given(sinks, dropout_seed, alibi_slopes), choices, known, packed)
    if return_attn_probs:
        return out, lse, None
    return (out, lse) if return_lse else out


def attention_of_each(tensors: tuple[Tensor, Tensor, Tensor], given: Given, choices: Choices, packed: Packed) -> tuple[Tensor, Tensor]:
    """Output and LSE where each sequence has a mask of its own, for example a boolean matrix: calls of their own, one after the other.
    choices.mask: the masks. The host reads the offsets, as it reads the masks."""
    if torch.compiler.is_compiling():
        raise TypeError("a compiled program cannot take masks of packed sequences, whose lengths the host reads: leave this call out of it")
    masks, (q, k, v) = choices.mask, tensors
    check_tensors(q, k, v, ndim=3)
    check_sinks(given.sinks, q)
    refuse_given_schedule(options_for(choices._replace(mask=None), q.shape[-1]))
    offsets = SequenceOffsets(*packed)
    offsets.check_device(q.device)
    sequences = offsets.on(torch.device("cpu")).sequences(len(q), len(k))
    if len(masks) != len(sequences):
        raise ValueError(f"masks of packed sequences must be one for each of the {len(sequences)} sequences; got {len(masks)}")
    given = given.drawn(q, len(sequences), choices.dropout_p)
    # So that the gradient of the sinks is one sum over the sequences.
    sinks = [None] * len(masks) if given.sinks is None else given.sinks.expand(len(masks), -1).unbind()
    results = []
    for number, (rows, columns) in enumerate(sequences):
        own = given.modifiers and given.modifiers.of_sequences(slice(number, number + 1))
        one = Given(sinks[number], own and own.seeds, own and own.slopes)
        out, lse = new_attention(q[None, rows], k[None, columns], v[None, columns], one, choices._replace(mask=masks[number]), None)
        results.append((out[0], lse[0]))
    return torch.cat([out for out, _ in results]), torch.cat([lse for _, lse in results], dim=-1)
