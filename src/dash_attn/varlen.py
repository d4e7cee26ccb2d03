"""flash_attn_varlen_func: sequences of different lengths laid end to end, each computed as if it were alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .api import flash_attn_func
from .masks import is_whole


def flash_attn_varlen_func(
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
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """Attention of packed sequences on the CPU. A sequence's bits are those of flash_attn_func on it alone.

    q is (q tokens, q_heads, dim), k and v are (KV tokens, kv_heads, dim). Sequence i has the query tokens
    cu_seqlens_q[i] to cu_seqlens_q[i + 1], and the key tokens alike; either may be none.
    options: mask (applied to each sequence), schedule, accumulation, backend, head_offset, as in flash_attn_func.

    Returns out; (out, lse) with `return_lse`; (out, lse, None) with `return_attn_probs`. lse is (q_heads, q tokens).
    """
    if block_table is not None:
        raise ValueError("paged keys and values are not supported: block_table must be None")
    _check_tokens(q, k, v)
    q_lengths = _lengths("q", cu_seqlens_q, len(q), max_seqlen_q)
    kv_lengths = _lengths("k", cu_seqlens_k, len(k), max_seqlen_k)
    if len(q_lengths) != len(kv_lengths):
        raise ValueError(f"cu_seqlens_q and cu_seqlens_k must have one length; got {len(q_lengths) + 1} and {len(kv_lengths) + 1}")
    shared: tuple[Any, ...] = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, False)
    options["return_lse"] = True
    # Gradients of `split` are concatenated, not added up: not even the sign of a zero changes.
    sequences = zip(q.split(q_lengths), k.split(kv_lengths), v.split(kv_lengths), strict=True)
    results = [flash_attn_func(one_q[None], one_k[None], one_v[None], *shared, **options) for one_q, one_k, one_v in sequences]
    out, lse = torch.cat([one[0][0] for one in results]), torch.cat([one[1][0] for one in results], dim=1)
    if return_attn_probs:
        return out, lse, None
    return (out, lse) if return_lse else out


def _check_tokens(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor; got {type(tensor).__name__}")
        if tensor.ndim != 3:
            raise ValueError(f"{name} must be 3-d (tokens, heads, head dim); got shape {tuple(tensor.shape)}")
        if tensor.device.type == "cuda":
            raise NotImplementedError(
                "flash_attn_varlen_func runs on CPU tensors only; packed batches on the GPU come later."
                " There, flash_attn_func with mask=Documents(lengths) serves sequences packed in one row"
            )
    if len(k) != len(v):
        raise ValueError(f"k and v must have the same number of tokens; got {len(k)} and {len(v)}")


def _lengths(side: str, cu_seqlens: Tensor, tokens: int, longest: int) -> list[int]:
    """Lengths of the sequences, from the places where they start and end."""
    name = f"cu_seqlens_{side}"
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"{name} must be a tensor; got {type(cu_seqlens).__name__}")
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.ndim != 1 or len(cu_seqlens) < 2:
        raise ValueError(
            f"{name} must be a 1-d int32 tensor with one entry more than there are sequences, at least two;"
            f" got {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}"
        )
    places = cu_seqlens.tolist()
    lengths = [end - start for start, end in pairwise(places)]
    if min(lengths) < 0:
        where = next(i for i, length in enumerate(lengths) if length < 0)
        raise ValueError(f"{name} must not decrease; got {places[where]} followed by {places[where + 1]} at entry {where + 1}")
    if places[0] != 0 or places[-1] != tokens:
        raise ValueError(f"{name} must start at 0 and end at the number of tokens ({tokens}); got {places[0]} and {places[-1]}")
    if not is_whole(longest) or longest < max(lengths):
        raise ValueError(f"max_seqlen_{side} must be a whole number >= the longest sequence ({max(lengths)}); got {longest!r}")
    return lengths
