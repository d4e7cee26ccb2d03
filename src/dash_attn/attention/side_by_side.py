"""flash_attn_func for tensors that hold K and V, or Q, K and V, side by side. Argument order is FlashAttention-2's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

from torch import Tensor

from .functions import flash_attn_func
from .signatures import AnyResults, Keywords, No, OutAndLse, OutLseNone, Yes

if TYPE_CHECKING:
    from typing_extensions import Unpack


@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor, *positional: Any, return_lse: Yes, return_attn_probs: No = ..., **options: Unpack[Keywords]
) -> OutAndLse: ...
@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor, *positional: Any, return_attn_probs: Yes, return_lse: bool = ..., **options: Unpack[Keywords]
) -> OutLseNone: ...
@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor, *positional: Any, return_lse: No = ..., return_attn_probs: No = ..., **options: Unpack[Keywords]
) -> Tensor: ...
@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor, *positional: Any, return_lse: bool = ..., return_attn_probs: bool = ..., **options: Unpack[Keywords]
) -> AnyResults: ...
def flash_attn_qkvpacked_func(  # type: ignore[misc]  # positional choices are FlashAttention's
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **options: Any,
) -> AnyResults:
    """Self-attention of qkv (batch, length, 3, heads, dim); its gradient has the same layout.

    options: the keyword-only arguments of flash_attn_func (mask, schedule, ...). Results are those of flash_attn_func.
    """
    q, k, v = split("qkv", qkv, 3)
    shared = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    results: AnyResults = flash_attn_func(q, k, v, *shared, **options)
    return results


@overload
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, *positional: Any, return_lse: Yes, return_attn_probs: No = ..., **options: Unpack[Keywords]
) -> OutAndLse: ...
@overload
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, *positional: Any, return_attn_probs: Yes, return_lse: bool = ..., **options: Unpack[Keywords]
) -> OutLseNone: ...
@overload
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, *positional: Any, return_lse: No = ..., return_attn_probs: No = ..., **options: Unpack[Keywords]
) -> Tensor: ...
@overload
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, *positional: Any, return_lse: bool = ..., return_attn_probs: bool = ..., **options: Unpack[Keywords]
) -> AnyResults: ...
def flash_attn_kvpacked_func(  # type: ignore[misc]  # positional choices are FlashAttention's
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **options: Any,
) -> AnyResults:
    """Attention of q (batch, q_len, q_heads, dim) to kv (batch, kv_len, 2, kv_heads, dim).

    options: the keyword-only arguments of flash_attn_func (mask, schedule, ...). Results are those of flash_attn_func.
    """
    k, v = split("kv", kv, 2)
    shared = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    results: AnyResults = flash_attn_func(q, k, v, *shared, **options)
    return results


def split(name: str, whole: Tensor, count: int) -> tuple[Tensor, ...]:
    if not isinstance(whole, Tensor):
        raise TypeError(f"{name} must be a tensor; got {type(whole).__name__}")
    if whole.is_nested:
        raise ValueError(f"{name} must be dense; got a nested tensor")
    if whole.ndim != 5 or whole.shape[2] != count:
        raise ValueError(f"{name} must be 5-d (batch, length, {count}, heads, head dim); got shape {tuple(whole.shape)}")
    return whole.unbind(2)
