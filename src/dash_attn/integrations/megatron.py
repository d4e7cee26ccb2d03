"""Megatron-Core: `DashCoreAttention` stands where a layer's spec names its core attention; `enable(spec)` puts it there.

Megatron is imported inside functions, so this module can be imported without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.functions import flash_attn_func
from ..attention.varlen import flash_attn_varlen_func
from ._megatron_checks import WHO, check_config, check_tensors, mask_of, offsets_of, refuse_tensors

__all__ = ["DashCoreAttention", "enable"]
REPLACEABLE = ("DotProductAttention", "TEDotProductAttention")


class DashCoreAttention(nn.Module):
    """Attention between the projections of a Megatron-Core layer, with Megatron's arguments.

    Every tensor-parallel rank computes the bits that its heads have in the unsharded model: `head_offset` comes from the rank.
    What Megatron asks for and cannot be honoured raises, configurations when the layer is built.
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
        check_config(config, attention_dropout)
        self.config, self.layer_number = config, layer_number
        self.attn_mask_type, self.attention_type = attn_mask_type, attention_type
        self.softmax_scale = softmax_scale
        self.window = _window_of_layer(config, layer_number)
        self.tp_group = _tensor_parallel_group(pg_collection)
        rank, ranks = (0, 1) if self.tp_group is None else (self.tp_group.rank(), self.tp_group.size())
        self.heads = _share("num_attention_heads", config.num_attention_heads, ranks), _share("num_query_groups", _groups(config), ranks)
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
        refuse_tensors(attention_mask, attention_bias, other)
        check_tensors(query, key, self.heads, packed_seq_params is not None)
        lengths = query.shape[0], key.shape[0]
        offsets = offsets_of(packed_seq_params, lengths)
        kind = (self.attn_mask_type if attn_mask_type is None else attn_mask_type).name
        options: dict[str, Any] = {
            "mask": mask_of(kind, self.window, lengths, offsets),
            "softmax_scale": self.softmax_scale,
            "sinks": self._sinks(query),
            "head_offset": self.head_offset,
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

    def _sinks(self, query: Tensor) -> Tensor | None:
        if self.config.softmax_type == "off-by-one":
            return query.new_zeros(self.heads[0])  # a logit of 0 adds the one
        return self.softmax_offset

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


def _groups(config: Any) -> int:
    return int(config.num_attention_heads if config.num_query_groups is None else config.num_query_groups)


def _share(name: str, count: int, ranks: int) -> int:
    if count % ranks:
        raise ValueError(f"{WHO} needs {name} to be a multiple of the tensor-parallel ranks; got {count} heads on {ranks} ranks")
    return count // ranks
