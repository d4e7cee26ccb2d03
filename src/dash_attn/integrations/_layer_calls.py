"""What the layers of transformers' models pass to an attention function: what is used, what says nothing, and what is refused. And which
of the model's KV heads a layer has under tensor parallelism (tp_plan), so that a rank keeps the whole model's bits."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..masks import Causal, Mask
from ._documents import OFFSETS
from ._torch_context_parallel import has_placement

USED = ("position_ids", *OFFSETS)
# Known to say nothing about what is attended, or how; each with the reason.
WITHOUT_EFFECT = {
    "use_cache": "the layer has joined the cache's keys to its own before it calls",
    "cache_position": "the mask says where the queries are",
    "past_key_values": "as use_cache",
    "deterministic": "a switch of flash-attn; attention here is always deterministic",
    "output_hidden_states": "the model collects them",
    "output_router_logits": "for the experts' layers",
    "return_dict": "for the model's answer",
    "num_items_in_batch": "for the loss",
    "logits_to_keep": "for the last layer",
    "seq_idx": "for state-space layers; position_ids or cu_seq_lens_q come with it and tell the documents",
}
ONLY_FALSE = ("output_attentions",)  # the weights are never there to give
KEY_PROJECTIONS = ("k_proj", "kv_b_proj", "key", "qkv_proj", "query_key_value")  # of which the keys' heads are the rows, in order


def refuse_unknown(arguments: dict[str, Any], layer: str) -> None:
    """Raise for an argument that nothing here is known about: it may choose what is attended."""
    unknown = [name for name, value in arguments.items() if value is not None and not _is_known(name, value)]
    if unknown:
        named = ", ".join(_short(name, arguments[name]) for name in unknown)
        raise ValueError(f"dash_attn does not support {named}, which {layer} was given")


def _is_known(name: str, value: Any) -> bool:
    return name in USED or name in WITHOUT_EFFECT or (name in ONLY_FALSE and value is False)


def _short(name: str, value: Any) -> str:
    return f"{name}={value}" if isinstance(value, (bool, int, float, str)) else f"{name} (a {type(value).__name__})"


def refuse_dropout_with_cache(dropout: float, layer: str) -> None:
    if dropout:
        raise ValueError(
            f"dash_attn has no attention dropout for keys of a cache; {layer} asks for {dropout}. Call model.eval() to generate, or"
            " set it to 0 in the configuration (attention_dropout, attn_pdrop, attention_probs_dropout_prob)"
        )


def refuse_contradiction(mask: Mask, kv_len: int, is_causal: bool | None, sliding_window: int | None) -> None:
    """Eager attention goes by the mask alone, others by these arguments. Where they disagree nobody can be right."""
    if is_causal is False and isinstance(mask, Causal):
        raise ValueError(
            "dash_attn got is_causal=False with a causal mask. Set is_causal in the model's configuration, which makes the mask"
        )
    if sliding_window is not None and sliding_window < kv_len and isinstance(mask, Causal):
        raise ValueError(f"dash_attn got sliding_window={sliding_window} with a causal mask that has no window")


def first_kv_head(module: nn.Module, kv_heads: int) -> int:
    """The index, in the whole model, of the first KV head of a layer that has `kv_heads` of them here. 0 without a plan."""
    for name in KEY_PROJECTIONS:
        weight: Any = getattr(getattr(module, name, None), "weight", None)
        if weight is not None and has_placement(weight):
            return _first_row(weight) * kv_heads // int(weight.to_local().shape[0])
    return 0


def _first_row(weight: Any) -> int:
    """Of this rank's rows. Every rank has as many as the first, as far as there are some left."""
    first, rows = 0, weight.shape[0]
    for size, place, placement in zip(weight.device_mesh.shape, weight.device_mesh.get_coordinate(), weight.placements, strict=True):
        if placement.is_shard(0):
            rows = -(-rows // size)
            first += place * rows
    return first
