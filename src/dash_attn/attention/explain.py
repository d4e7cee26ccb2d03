"""explain: what a call would do, and what decides its bits, without running it."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from types import FunctionType
from typing import Any

from ..backends import import_backend, import_cache, resolve_to_explain
from ..call.call import Call, Given, no_pairs, options_of, sequences_in
from ..call.explain import CacheExplanation, Explanation
from ..call.kv_cache import CacheCall, check_cache
from ..call.options import Choices, check_options, options_for
from ..call.parts import each_planned_alone
from ..call.tensor_checks import check_flags
from .functions import flash_attn_func
from .kv_cache import flash_attn_with_kvcache, refuse_unsupported, with_lengths
from .side_by_side import flash_attn_kvpacked_func, flash_attn_qkvpacked_func, split
from .varlen import flash_attn_varlen_func

Arguments = dict[str, Any]  # of a call by their names, defaults included
Explainer = Callable[[Arguments, bool], Any]
PACKED = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")

_explainers: dict[Any, Explainer] = {}


def explain(function: Callable[..., Any], *args: Any, predict_time: bool = True, **kwargs: Any) -> Any:
    """What function(*args, **kwargs) would do, without running it: an Explanation, a CacheExplanation of flash_attn_with_kvcache, or a
    SharedExplanation of what ranks do together. What the call would refuse whatever the values raises here, too.

    Only shape, dtype and device of tensors matter, except for the lengths of packed sequences, which decide their orders. Sinks do not
    change the answer. With tensors on the meta device, a backend that is not here can be asked: backend="hopper" then needs no GPU, and
    leaves out the hashes of kernels.
    predict_time: simulate the backward for predicted_backward_us, about a second for a million tile pairs.
    """
    check_flags(predict_time=predict_time)
    explainer = _explainers.get(function) if isinstance(function, FunctionType) else None
    if explainer is None:
        names = ", ".join(known.__name__ for known in _explainers)
        got = repr(function) if callable(function) else type(function).__name__  # a tensor, say, would print all its numbers
        raise ValueError(f"explain takes a function of dash_attn and its arguments: {names}; got {got}")
    bound = signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return explainer(bound.arguments, predict_time)


def explains(function: Any) -> Callable[[Explainer], Explainer]:
    """Registers what explains a function."""

    def register(explainer: Explainer) -> Explainer:
        _explainers[function] = explainer
        return explainer

    return register


@explains(flash_attn_varlen_func)
@explains(flash_attn_func)
def _attention(given: Arguments, predict_time: bool) -> Explanation:
    q, k, v = (given[name] for name in "qkv")
    if given.get("block_table") is not None:
        raise ValueError("keys in pages have no backward to explain: explain flash_attn_with_kvcache; got a block_table")
    choices = _chosen(given)._replace(alibi=given["alibi_slopes"] is not None)
    check_options(choices, **{name: given[name] for name in ("deterministic", "return_attn_probs", "return_lse")})
    packed = tuple(given[name] for name in PACKED) if PACKED[0] in given else None
    options, offsets, _ = options_of(q, k, v, given["sinks"], choices, packed)
    Given(None, given["dropout_seed"], given["alibi_slopes"]).check(q, sequences_in(q, packed))
    if offsets is not None and offsets.cu_seqlens_q.is_meta:
        raise ValueError("the lengths of packed sequences decide their orders: cu_seqlens must have values; got some on the meta device")
    asked = Call(q, k, v, options, offsets)
    if all(map(no_pairs, each_planned_alone(asked))):
        none = "there is no query or no key" if offsets is None else "no sequence has both queries and keys"
        raise ValueError(f"nothing to explain: {none}; got q {tuple(q.shape)}, k {tuple(k.shape)}")
    return import_backend(resolve_to_explain(options.backend, q.device)).explain(asked, predict_time)


@explains(flash_attn_kvpacked_func)
@explains(flash_attn_qkvpacked_func)
def _side_by_side(given: Arguments, predict_time: bool) -> Any:
    tensors = split("qkv", given.pop("qkv"), 3) if "qkv" in given else (given.pop("q"), *split("kv", given.pop("kv"), 2))
    return explain(flash_attn_func, *tensors, predict_time=predict_time, **given.pop("options"), **given)


@explains(flash_attn_with_kvcache)
def _cache(given: Arguments, predict_time: bool) -> CacheExplanation:
    """Nothing is said about lengths and pages that do not fit, and nothing is appended."""
    check_flags(return_softmax_lse=given["return_softmax_lse"], rotary_interleaved=given["rotary_interleaved"])
    refuse_unsupported(given["alibi_slopes"], given["num_splits"])
    call = with_lengths(CacheCall(**{name: given[name] for name in CacheCall._fields if name in given}))
    check_cache(call)
    call = call._replace(options=options_for(_chosen(given), call.q.shape[-1]))
    if 0 in call.q.shape[:2]:
        raise ValueError(f"nothing to explain: there is no query; got q {tuple(call.q.shape)}")
    return import_cache(resolve_to_explain(call.options.backend, call.q.device)).explain_cache(call)


def _chosen(given: Arguments) -> Choices:
    return Choices(**{name: given[name] for name in Choices._fields if name in given})
