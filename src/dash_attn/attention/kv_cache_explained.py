"""explain_with_kvcache: what flash_attn_with_kvcache would do, without running it."""

from __future__ import annotations

from torch import Tensor

from ..backends import import_cache, resolve_to_explain
from ..call.cache_explanation import CacheExplanation
from ..call.kv_cache import CacheTensors, check_cache
from ..call.options import Choices, options_for
from ..call.tensor_checks import check_flags, check_sinks
from .kv_cache import places_of, refuse_unsupported


def explain_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    sinks: Tensor | None = None,
    first_position: int | Tensor = 0,
    backend: str = "auto",
) -> CacheExplanation:
    """What flash_attn_with_kvcache would do with these arguments, without running it. What it refuses by shape also raises here.

    Tensors are looked at for shape, dtype and device only, so nothing is said about lengths and pages that do not fit. Nothing is
    appended. Tensors on the meta device ask what a backend that is not here would do: backend="hopper" then needs no GPU, and
    leaves out the hashes of kernels.
    """
    check_flags(return_softmax_lse=return_softmax_lse, rotary_interleaved=rotary_interleaved)
    refuse_unsupported(rotary_cos, rotary_sin, alibi_slopes, num_splits)
    tensors = CacheTensors(q, k_cache, v_cache, k, v, sinks)
    places = places_of(tensors, cache_seqlens, cache_batch_idx, cache_leftpad, block_table, first_position)
    check_cache(tensors, places, None)
    check_sinks(sinks, q)
    choices = Choices(causal=causal, window_size=window_size, softmax_scale=softmax_scale, softcap=softcap, backend=backend)
    options = options_for(choices, q.shape[-1])
    if 0 in q.shape[:2]:
        raise ValueError(f"nothing to explain: there is no query; got q {tuple(q.shape)}")
    return import_cache(resolve_to_explain(options.backend, q.device)).explain_cache(tensors, places, options)
