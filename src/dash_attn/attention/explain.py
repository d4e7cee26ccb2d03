"""explain: what a call would do, and what decides its bits, without running it."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from types import FunctionType
from typing import Any

from ..backends import import_backend, import_cache, resolve_to_explain
from ..call.call import Call
from ..call.explain import CacheExplanation, Explanation
from ..call.kv_cache import CacheCall, check_cache
from ..call.options import Choices, check_determinism, check_dropout, options_for
from ..call.tensor_checks import check_flags, check_seeds, check_slopes
from .functions import flash_attn_func, options_of
from .kv_cache import flash_attn_with_kvcache, refuse_unsupported, with_lengths
from .side_by_side import flash_attn_kvpacked_func, flash_attn_qkvpacked_func, split
from .varlen import flash_attn_varlen_func, packed_options_of

Given = dict[str, Any]  # every argument of a call by its name, defaults included
Explainer = Callable[[Given, bool], Any]

_explainers: dict[Any, Explainer] = {}


def explain(function: Callable[..., Any], *args: Any, predict_time: bool = True, **kwargs: Any) -> Any:
    """What function(*args, **kwargs) would do, without running it: an Explanation, a CacheExplanation of flash_attn_with_kvcache, or a
    SharedExplanation of what ranks do together. What the call refuses whatever the values also raises here.

    Tensors are looked at for shape, dtype and device only, but for the lengths of packed sequences, which decide their orders. Sinks do not
    change the answer. Tensors on the meta device ask what a backend that is not here would do: backend="hopper" then needs no GPU, and
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


@explains(flash_attn_func)
def _dense(given: Given, predict_time: bool) -> Explanation:
    q, k, v = (given[name] for name in "qkv")
    choices = _choices(given)
    options, _ = options_of(q, k, v, given["sinks"], choices)
    check_seeds(given["dropout_seed"], q, q.shape[0])
    check_slopes(given["alibi_slopes"], q, q.shape[0])
    if 0 in (q.shape[0], q.shape[1], k.shape[1]):
        raise ValueError(f"nothing to explain: there is no query or no key; got q {tuple(q.shape)}, k {tuple(k.shape)}")
    return _ask(Call(q, k, v, options), predict_time)


@explains(flash_attn_varlen_func)
def _packed(given: Given, predict_time: bool) -> Explanation:
    q, k, v = (given[name] for name in "qkv")
    if given["block_table"] is not None:
        raise ValueError("keys in pages have no backward to explain: explain flash_attn_with_kvcache; got a block_table")
    packed = tuple(given[name] for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"))
    options, offsets = packed_options_of(q, k, v, given["sinks"], packed, _choices(given))
    sequences = len(offsets.cu_seqlens_q) - 1
    check_seeds(given["dropout_seed"], q, sequences)
    check_slopes(given["alibi_slopes"], q, sequences)
    if offsets.cu_seqlens_q.is_meta:
        raise ValueError("the lengths of packed sequences decide their orders: cu_seqlens must have values; got some on the meta device")
    if not any(rows.stop > rows.start and keys.stop > keys.start for rows, keys in offsets.sequences(len(q), len(k))):
        raise ValueError(f"nothing to explain: no sequence has both queries and keys; got q {tuple(q.shape)}, k {tuple(k.shape)}")
    return _ask(Call(q, k, v, options, offsets), predict_time)


@explains(flash_attn_qkvpacked_func)
def _qkv(given: Given, predict_time: bool) -> Any:
    return explain(flash_attn_func, *split("qkv", given.pop("qkv"), 3), predict_time=predict_time, **given.pop("options"), **given)


@explains(flash_attn_kvpacked_func)
def _kv(given: Given, predict_time: bool) -> Any:
    tensors = given.pop("q"), *split("kv", given.pop("kv"), 2)
    return explain(flash_attn_func, *tensors, predict_time=predict_time, **given.pop("options"), **given)


@explains(flash_attn_with_kvcache)
def _cache(given: Given, predict_time: bool) -> CacheExplanation:
    """Nothing is said about lengths and pages that do not fit, and nothing is appended."""
    check_flags(return_softmax_lse=given["return_softmax_lse"], rotary_interleaved=given["rotary_interleaved"])
    refuse_unsupported(given["alibi_slopes"], given["num_splits"])
    call = with_lengths(CacheCall(**{name: given[name] for name in CacheCall._fields if name in given}), given["cache_seqlens"])
    check_cache(call)
    call = call._replace(options=options_for(_chosen(given), call.q.shape[-1]))
    if 0 in call.q.shape[:2]:
        raise ValueError(f"nothing to explain: there is no query; got q {tuple(call.q.shape)}")
    return import_cache(resolve_to_explain(call.options.backend, call.q.device)).explain_cache(call)


def _ask(call: Call, predict_time: bool) -> Explanation:
    return import_backend(resolve_to_explain(call.options.backend, call.q.device)).explain(call, predict_time)


def _choices(given: Given) -> Choices:
    """Checked as the functions do."""
    check_flags(return_attn_probs=given["return_attn_probs"], return_lse=given["return_lse"])
    check_dropout(given["dropout_p"])
    check_determinism(given["deterministic"], given["accumulation"])
    return _chosen(given)._replace(alibi=given["alibi_slopes"] is not None)


def _chosen(given: Given) -> Choices:
    return Choices(**{name: given[name] for name in Choices._fields if name in given})
