"""Megatron-Core: `DashCoreAttention` stands where a layer's spec names its core attention; `enable(spec)` puts it there.

Megatron is imported inside functions, so this module can be imported without it. Its enums are known by their names.
"""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.functions import flash_attn_func
from ..attention.varlen import flash_attn_varlen_func
from ..call.offsets import SequenceOffsets
from ..call.options import check_dropout
from ..door import refuse_unknown
from ..libraries import check_library
from ..masks import Causal, Full, Mask, Window

__all__ = ["DashCoreAttention", "enable"]
REPLACEABLE = ("DotProductAttention", "TEDotProductAttention")
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
    "attention_backend": (("auto", None), "this is the backend itself"),
}
CAUSAL, FULL = ("causal", "causal_bottom_right", "padding_causal"), ("no_mask", "padding")
WITH_OFFSETS_ONLY = ("padding", "padding_causal")
# Fields of PackedSeqParams that say nothing about what is attended.
WITHOUT_EFFECT = ("total_tokens", "seq_idx", "tokens_per_sample")
USED = ("qkv_format", "cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv")
ONE_TENSOR = {"cu_seqlens_q_padded": "cu_seqlens_q", "cu_seqlens_kv_padded": "cu_seqlens_kv"}


class DashCoreAttention(nn.Module):
    """Attention between the projections of a Megatron-Core layer, with Megatron's arguments.

    Every tensor-parallel rank computes the bits that its heads have in the unsharded model: `head_offset` comes from the rank.
    Dropout draws its seeds from PyTorch's generator, not from Megatron's tensor-parallel one, so tensor-parallel ranks drop as one would.
    What cannot be done raises; if a configuration asks for it, when the layer is built.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        """k_channels and v_channels (multi-latent attention) are read from the tensors; cp_comm_type is for context parallelism."""
        super().__init__()
        _check_config(config)
        self.dropout_p = config.attention_dropout if attention_dropout is None else attention_dropout
        check_dropout(self.dropout_p)
        self.config, self.layer_number = config, layer_number
        self.attn_mask_type, self.attention_type = attn_mask_type, attention_type
        self.softmax_scale = softmax_scale
        self.window = _window_of_layer(config, layer_number)
        self.tp_group = _tensor_parallel_group(pg_collection)
        rank, ranks = (0, 1) if self.tp_group is None else (self.tp_group.rank(), self.tp_group.size())
        groups = config.num_attention_heads if config.num_query_groups is None else config.num_query_groups
        self.heads = _share("num_attention_heads", config.num_attention_heads, ranks), _share("num_query_groups", groups, ranks)
        self.head_offset = rank * self.heads[1]
        self.softmax_offset = self._learnable_sinks() if config.softmax_type == "learnable" else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        **other: Any,
    ) -> Tensor:
        """(length, batch, heads, head dim) -> (length, batch, heads x head dim); packed: (tokens, ...) -> (tokens, heads x head dim)."""
        _refuse_tensors(attention_mask, attention_bias, other)
        _check_tensors(query, key, self.heads, packed_seq_params is not None)
        lengths = query.shape[0], key.shape[0]
        offsets = _offsets_of(packed_seq_params, lengths)
        kind = (self.attn_mask_type if attn_mask_type is None else attn_mask_type).name
        options: dict[str, Any] = {
            "mask": _mask_of(kind, self.window, lengths, offsets),
            "softmax_scale": self.softmax_scale,
            # A logit of 0 adds the one.
            "sinks": query.new_zeros(self.heads[0]) if self.config.softmax_type == "off-by-one" else self.softmax_offset,
            "head_offset": self.head_offset,
            "dropout_p": self.dropout_p if self.training else 0.0,
        }
        if offsets is not None:
            packed: Tensor = flash_attn_varlen_func(query, key, value, **offsets.named(), **options)
            return packed.flatten(1)
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        out: Tensor = flash_attn_func(q, k, v, **options)
        return out.transpose(0, 1).flatten(2).contiguous()  # Megatron views what it gets

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None) -> Any:
        """The learnable sinks, as Megatron's distributed checkpoints name them."""
        if self.softmax_offset is None:
            return {}
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        groups = {"tp_group": self.tp_group, "dp_cp_group": metadata["dp_cp_group"]} if metadata else {}
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"softmax_offset": 0}, sharded_offsets, **groups)

    def _learnable_sinks(self) -> nn.Parameter:
        from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes

        on_cpu = self.config.use_cpu_initialization or not torch.cuda.is_available()
        device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
        sinks = nn.Parameter(torch.empty(self.heads[0], device=device, dtype=self.config.params_dtype))
        set_tensor_model_parallel_attributes(sinks, is_parallel=True, dim=0, stride=1)  # else norms count one rank's only
        if self.config.perform_initialization:
            self.config.init_method(sinks)
        return sinks


def enable(spec: Any) -> Any:
    """A copy of a layer's or block's spec (ModuleSpec) in which every core attention is `DashCoreAttention`.

    Raises if there is none, or if one is neither Megatron's nor Transformer Engine's dot-product attention.
    """
    check_library("megatron-core", WHO)
    replaced: list[str] = []
    copy = _replaced(spec, replaced.append)
    if not replaced:
        raise ValueError(f"found no core_attention in the spec to replace; got {spec!r}")
    return copy


def _replaced(spec: Any, note: Callable[[str], None]) -> Any:
    if isinstance(spec, list):
        return [_replaced(entry, note) for entry in spec]
    if isinstance(spec, partial):
        return partial(spec.func, *spec.args, **{name: _replaced(value, note) for name, value in spec.keywords.items()})
    if not is_dataclass(spec) or isinstance(spec, type):
        return spec
    changed: dict[str, Any] = {}
    for field in fields(spec):
        value = getattr(spec, field.name)
        changed[field.name] = _ours(value, note) if field.name == "core_attention" and value is not None else _replaced(value, note)
    return replace(spec, **changed)


def _ours(found: Any, note: Callable[[str], None]) -> type[DashCoreAttention]:
    name = getattr(getattr(found, "module", found), "__name__", repr(found))
    if name not in (*REPLACEABLE, DashCoreAttention.__name__):
        raise ValueError(f"{WHO} stands in for {' and '.join(REPLACEABLE)}; the spec has {name}, which computes something else")
    note(name)
    return DashCoreAttention


def _tensor_parallel_group(pg_collection: Any) -> Any:
    if pg_collection is not None:
        if not hasattr(pg_collection, "tp"):
            raise ValueError(f"{WHO} needs the tensor-parallel group (tp) in pg_collection; got one without")
        return pg_collection.tp
    from megatron.core.parallel_state import get_tensor_model_parallel_group

    return get_tensor_model_parallel_group()


def _window_of_layer(config: Any, layer_number: int) -> tuple[int, int] | None:
    if not config.window_size:
        return None
    from megatron.core.transformer.utils import is_layer_window_attention

    return tuple(config.window_size) if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number) else None


def _share(name: str, count: int, ranks: int) -> int:
    if count % ranks:
        raise ValueError(f"{WHO} needs {name} to be a multiple of the tensor-parallel ranks; got {count} heads on {ranks} ranks")
    return count // ranks


def _check_config(config: Any) -> None:
    """Raise for a configuration that cannot be honoured. Called when the layer is built."""
    for name, (allowed, hint) in ONLY.items():
        found = getattr(config, name, allowed[0])
        found = getattr(found, "name", found)
        if found not in allowed:
            raise ValueError(f"{WHO} takes {name}={' or '.join(map(str, allowed))}; the config has {found}: {hint}")


def _check_tensors(query: Tensor, key: Tensor, heads: tuple[int, int], packed: bool) -> None:
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


def _refuse_tensors(attention_mask: Tensor | None, attention_bias: Tensor | None, other: dict[str, Any]) -> None:
    if attention_mask is not None:
        raise ValueError(
            f"{WHO} does not take mask tensors; got an attention_mask of shape {tuple(attention_mask.shape)}. Pass None, and let"
            " attn_mask_type and packed_seq_params say what is attended (Megatron-LM: --no-create-attention-mask-in-dataloader)"
        )
    if attention_bias is not None:
        raise ValueError(f"{WHO} does not support attention_bias; got a tensor of shape {tuple(attention_bias.shape)}")
    refuse_unknown(WHO, other, (), "which the layer passed and whose meaning is not known here")


def _mask_of(kind: str, window: tuple[int, int] | None, lengths: tuple[int, int], offsets: SequenceOffsets | None) -> Mask:
    """The mask that an AttnMaskType and a window mean, for lengths of queries and keys."""
    if kind not in CAUSAL + FULL:
        raise ValueError(f"{WHO} takes the mask types {', '.join(CAUSAL + FULL)}; got {kind}")
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


def _offsets_of(packed: Any, tokens: tuple[int, int]) -> SequenceOffsets | None:
    """Where packed sequences begin and end. Raises for anything in PackedSeqParams that cannot be honoured."""
    if packed is None:
        return None
    if packed.qkv_format != "thd":
        raise ValueError(f"{WHO} takes packed_seq_params with qkv_format='thd'; got {packed.qkv_format!r}")
    given = {field.name: getattr(packed, field.name) for field in fields(packed)}
    for name, value in given.items():
        if value is None or value is False or name in USED + WITHOUT_EFFECT or (name == "local_cp_size" and value == 1):
            continue
        if name not in ONE_TENSOR:
            raise ValueError(f"{WHO} does not support {name} of packed_seq_params; got {value!r}")
        if value is not given[ONE_TENSOR[name]]:
            raise ValueError(
                f"{WHO} takes packed sequences that lie end to end: {name} must be None or the tensor {ONE_TENSOR[name]};"
                " got another tensor"
            )
    longest = [count if given is None else given for given, count in zip((packed.max_seqlen_q, packed.max_seqlen_kv), tokens, strict=True)]
    return SequenceOffsets(packed.cu_seqlens_q, packed.cu_seqlens_kv, *longest)
