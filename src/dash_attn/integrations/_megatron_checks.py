"""What Megatron-Core asks of a core attention: what is used, what says nothing, and what is refused.

Enums of Megatron are known by their names, so nothing here imports it.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch import Tensor

from ..call.offsets import SequenceOffsets
from ..masks import Causal, Full, Mask, Window

WHO = "dash_attn's core attention for Megatron"
# Field of TransformerConfig -> the values that can be honoured, and what to do about another one.
ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "context_parallel_size": ((1,), "use dash_attn.distributed.context_parallel_attention in a layer of your own"),
    "qk_clip": ((False,), "the largest logits are never there to give"),
    "log_max_attention_logit": ((False,), "the largest logits are never there to give"),
    "fp8_dot_product_attention": ((False,), "there is no FP8 attention here"),
    "fp8_multi_head_attention": ((False,), "there is no FP8 attention here"),
    "flash_decode": ((False,), "with it Megatron's layer calls flash-attn instead of its core attention"),
    "softmax_type": (("vanilla", "off-by-one", "learnable"), "other denominators are not known here"),
}
CAUSAL, FULL = ("causal", "causal_bottom_right", "padding_causal"), ("no_mask", "padding")
WITH_OFFSETS_ONLY = ("padding", "padding_causal")
# Fields of PackedSeqParams that say nothing about what is attended.
WITHOUT_EFFECT = ("total_tokens", "seq_idx", "tokens_per_sample")
USED = ("qkv_format", "cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv")
ONE_TENSOR = {"cu_seqlens_q_padded": "cu_seqlens_q", "cu_seqlens_kv_padded": "cu_seqlens_kv"}


def check_config(config: Any, attention_dropout: float | None) -> None:
    """Raise for a configuration that cannot be honoured. Called when the layer is built."""
    for name, (allowed, hint) in ONLY.items():
        found = getattr(config, name, allowed[0])
        if found not in allowed:
            raise ValueError(f"{WHO} takes {name}={' or '.join(map(repr, allowed))}; the config has {found!r}: {hint}")
    backend = getattr(getattr(config, "attention_backend", None), "name", "auto")
    if backend != "auto":
        raise ValueError(f"{WHO} takes attention_backend=auto, because it is the backend itself; the config has {backend}")
    dropout = config.attention_dropout if attention_dropout is None else attention_dropout
    if dropout:
        raise ValueError(
            f"{WHO} does not support attention dropout; got {dropout}. Set attention_dropout=0.0 in the TransformerConfig,"
            " whose default is 0.1 (Megatron-LM: --attention-dropout 0.0)"
        )


def check_tensors(query: Tensor, key: Tensor, heads: tuple[int, int], packed: bool) -> None:
    """Raise unless each has the layout Megatron passes, and the heads of this tensor-parallel rank."""
    layout = "(tokens, heads, head dim)" if packed else "(length, batch, heads, head dim)"
    if query.ndim != (3 if packed else 4) or key.ndim != query.ndim:
        raise ValueError(f"{WHO} takes {layout}; got a query of shape {tuple(query.shape)} and a key of shape {tuple(key.shape)}")
    found = query.shape[-2], key.shape[-2]
    if found != heads:
        raise ValueError(
            f"{WHO} was built for {heads[0]} query heads and {heads[1]} key heads on this tensor-parallel rank; got {found[0]} and"
            f" {found[1]}. Which heads these are decides the order of sums, so they must be those of the config"
        )


def refuse_tensors(attention_mask: Tensor | None, attention_bias: Tensor | None, other: dict[str, Any]) -> None:
    if attention_mask is not None:
        raise ValueError(
            f"{WHO} does not take mask tensors; got an attention_mask of shape {tuple(attention_mask.shape)}. Pass None, and let"
            " attn_mask_type and packed_seq_params say what is attended (Megatron-LM: --no-create-attention-mask-in-dataloader)"
        )
    if attention_bias is not None:
        raise ValueError(f"{WHO} does not support attention_bias; got a tensor of shape {tuple(attention_bias.shape)}")
    unknown = [name for name, value in other.items() if value is not None]
    if unknown:
        raise ValueError(f"{WHO} does not know what {', '.join(unknown)} would mean, which the layer passed")


def mask_of(kind: str, window: tuple[int, int] | None, lengths: tuple[int, int], offsets: SequenceOffsets | None) -> Mask:
    """The mask that an AttnMaskType and a window mean, for lengths of queries and keys."""
    if kind not in CAUSAL + FULL:
        allowed = ", ".join(CAUSAL + FULL)
        raise ValueError(f"{WHO} takes the mask types {allowed}; got {kind}")
    if kind in WITH_OFFSETS_ONLY and offsets is None:
        raise ValueError(
            f"{WHO} takes attn_mask_type={kind} with packed sequences only (packed_seq_params with qkv_format='thd'); got none"
        )
    if kind in CAUSAL:
        _check_alignment(kind, lengths, offsets)
    if window is None:
        return Causal() if kind in CAUSAL else Full()
    if kind in CAUSAL and window[1] != 0:
        raise ValueError(
            f"{WHO} takes window_size=(left, 0) with attn_mask_type={kind}; got {window}. Megatron's own attention and Transformer"
            " Engine's read other windows differently"
        )
    return Window(*window)


def _check_alignment(kind: str, lengths: tuple[int, int], offsets: SequenceOffsets | None) -> None:
    """Megatron's causal masks start at the first key, ours end at the last: the same for equal lengths only."""
    if kind != "causal_bottom_right" and lengths[0] != lengths[1]:
        raise ValueError(
            f"{WHO} takes attn_mask_type={kind} for as many keys as queries; got {lengths[0]} queries and {lengths[1]} keys."
            " causal_bottom_right aligns the last query with the last key"
        )
    if offsets is not None and offsets.cu_seqlens_q is not offsets.cu_seqlens_k:
        raise ValueError(
            f"{WHO} takes attn_mask_type={kind} for packed sequences if cu_seqlens_q and cu_seqlens_kv are one tensor: lengths on a"
            " GPU cannot be compared without waiting for it"
        )


def offsets_of(packed: Any, tokens: tuple[int, int]) -> SequenceOffsets | None:
    """Where packed sequences begin and end. Raises for anything in PackedSeqParams that cannot be honoured."""
    if packed is None:
        return None
    _check_fields(packed)
    longest = [count if given is None else given for given, count in zip((packed.max_seqlen_q, packed.max_seqlen_kv), tokens, strict=True)]
    return SequenceOffsets(packed.cu_seqlens_q, packed.cu_seqlens_kv, *longest)


def _check_fields(packed: Any) -> None:
    if packed.qkv_format != "thd":
        raise ValueError(f"{WHO} takes packed_seq_params with qkv_format='thd'; got {packed.qkv_format!r}")
    given = {field.name: getattr(packed, field.name) for field in fields(packed)}
    for name, value in given.items():
        if value is None or name in USED + WITHOUT_EFFECT:
            continue
        if name in ONE_TENSOR:
            if value is not given[ONE_TENSOR[name]]:
                raise ValueError(
                    f"{WHO} takes packed sequences that lie end to end: {name} must be None or the tensor {ONE_TENSOR[name]};"
                    " got another tensor"
                )
        elif not (name == "local_cp_size" and value == 1) and value is not False:
            raise ValueError(f"{WHO} does not support {name} of packed_seq_params; got {value!r}")
