"""flash_attn_func: FlashAttention-2's arguments, plus a mask, a schedule and how gradients are accumulated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

from torch import Tensor

from ..call.boolean_masks import seen_mask
from ..call.call import Given, options_of, sequences_in, with_elements
from ..call.offsets import Packed
from ..call.options import Accumulation, BackendName, Choices, check_options
from ..call.tensor_checks import check_strided
from ..masks import BooleanMask, Mask
from ..scheduling.generators import ScheduleName
from ..scheduling.schedule import Schedule
from .autograd import Attention
from .known import KnownCall, known_of
from .pytorch import is_traced, refuse_transforms
from .signatures import AnyResults, Keywords, No, OutAndLse, OutLseNone, Yes
from .torch_ops import traced_attention

if TYPE_CHECKING:
    from typing_extensions import Unpack


@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, *positional: Any, return_lse: Yes, return_attn_probs: No = ..., **options: Unpack[Keywords]
) -> OutAndLse: ...
@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, *positional: Any, return_attn_probs: Yes, return_lse: bool = ..., **options: Unpack[Keywords]
) -> OutLseNone: ...
@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, *positional: Any, return_lse: No = ..., return_attn_probs: No = ..., **options: Unpack[Keywords]
) -> Tensor: ...
@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, *positional: Any, return_lse: bool = ..., return_attn_probs: bool = ..., **options: Unpack[Keywords]
) -> AnyResults: ...
def flash_attn_func(  # type: ignore[misc]  # positional choices are FlashAttention's
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    mask: Mask | BooleanMask | Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_seed: Tensor | None = None,
    schedule: ScheduleName | Schedule = "auto",
    accumulation: Accumulation = "ordered",
    backend: BackendName = "auto",
    return_lse: bool = False,
    head_offset: int = 0,
) -> AnyResults:
    """Attention whose gradients are bitwise reproducible.

    q is (batch, q_len, q_heads, dim), k and v are (batch, kv_len, kv_heads, dim); q_heads is a multiple of kv_heads.
    v may have a different head dim, which is then that of the output.
    The first eleven arguments are FlashAttention-2's.

    mask: any mask of dash_attn.masks, instead of `causal` and `window_size`. If the lengths differ, the last query
        is aligned with the last key. Or a boolean tensor, True where a query attends to a key, on the device of q: (q_len, kv_len), or
        what broadcasts to (batch, q_heads, q_len, kv_len). A BooleanMask made from it is planned only once (docs/masks.md).
    sinks: one learnable logit per query head, (q_heads,). Each row's softmax also sums exp(sink), neither scaled nor capped.
        The sink has no value, so it only takes weight from the keys.
    dropout_seed: one number per sequence, (batch,) of torch.int64 on the device of the tensors; which pairs dropout keeps depends on
        it, the query head in the unsharded model and the two positions alone. None: drawn from PyTorch's generator.
    alibi_slopes: (q_heads,) or (batch, q_heads); slope x distance is subtracted from each score, after scale and softcap. No gradient.
    schedule: the order in which dQ is summed: "auto", a name in dash_attn.scheduling.generators.GENERATORS, or a Schedule of your own
        (Schedule.from_json reads a saved one). Its mask, lengths and tile sizes must be those of the call (explain shows the tile
        sizes); batch, heads and workers may differ. A traced program cannot contain the object: there, give schedule.to_json().
    accumulation: "ordered", or "unordered" for sums in order of arrival. `deterministic=False` is still ordered.
    backend: "auto" (by the device of the tensors), "cpu", "hopper" or "triton". An explicit one never falls back.
    head_offset: index of the first KV head in the unsharded model, for tensor-parallel ranks.

    Returns out; (out, lse) with `return_lse`; (out, lse, None) with `return_attn_probs`, as FlashAttention-2 does
    without dropout. lse is (batch, q_heads, q_len), natural log, sink included; gradients go through it (for a z-loss).
    If a query attends to nothing, out is 0 and lse the sink, or -inf without one.
    """
    refuse_transforms()
    of_scores = mask, causal, window_size, softmax_scale, softcap
    choices = Choices(*of_scores, schedule, accumulation, backend, head_offset, dropout_p, alibi_slopes is not None)  # quicker by position
    plain = sinks is None and dropout_seed is None and alibi_slopes is None
    seen = None if mask is None or not plain else seen_mask(mask, q, k)
    known = known_of((q, k, v), choices, deterministic, return_attn_probs, return_lse, seen=seen) if plain else None
    if known is not None and known.options is not None:
        out, lse = known.attention(q, k, v, None, seen)
    else:
        check_options(choices, deterministic=deterministic, return_attn_probs=return_attn_probs, return_lse=return_lse)
        out, lse = new_attention(q, k, v, Given(sinks, dropout_seed, alibi_slopes), choices, known)
    if return_attn_probs:
        return out, lse, None
    return (out, lse) if return_lse else out


def new_attention(
    q: Tensor, k: Tensor, v: Tensor, given: Given, choices: Choices, known: KnownCall | None, packed: Packed | None = None
) -> tuple[Tensor, Tensor]:
    """Of a call that is looked at for the first time, or each time anew."""
    ends = () if packed is None else packed[:2]
    if is_traced(q, k, v, *given, *ends, choices.mask):
        check_strided(q=q, k=k, v=v)
        if packed is not None:
            check_strided(cu_seqlens_q=packed[0], cu_seqlens_k=packed[1])
        return traced_attention(q, k, v, given.drawn(q, sequences_in(q, packed), choices.dropout_p), packed, choices)
    options, offsets, elements = options_of(q, k, v, given.sinks, choices, packed)
    modifiers = given.drawn(q, sequences_in(q, packed), choices.dropout_p).modifiers
    if known is not None and modifiers is None:
        known.options = options
        return known.attention(q, k, v, offsets, elements)
    modifiers = with_elements(modifiers, elements)
    result: tuple[Tensor, Tensor] = Attention.apply(q, k, v, given.sinks, options, offsets, modifiers)  # type: ignore[no-untyped-call]
    return result
