"""flash_attn_func for tensors that hold K and V, or Q, K and V, side by side. Argument order is FlashAttention-2's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from torch import Tensor

from .functions import flash_attn_func
from .signatures import AnyResults, OutAndLse, OutLseNone, OwnKeywords

if TYPE_CHECKING:
    from typing_extensions import Unpack


@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    alibi_slopes: Tensor | None = ...,
    deterministic: bool = ...,
    return_attn_probs: Literal[False] = ...,
    *,
    return_lse: Literal[False] = ...,
    **own: Unpack[OwnKeywords],
) -> Tensor: ...
@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    alibi_slopes: Tensor | None = ...,
    deterministic: bool = ...,
    return_attn_probs: Literal[False] = ...,
    *,
    return_lse: Literal[True],
    **own: Unpack[OwnKeywords],
) -> OutAndLse: ...
@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    alibi_slopes: Tensor | None = ...,
    deterministic: bool = ...,
    *,
    return_attn_probs: Literal[True],
    return_lse: bool = ...,
    **own: Unpack[OwnKeywords],
) -> OutLseNone: ...
@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    alibi_slopes: Tensor | None = ...,
    deterministic: bool = ...,
    return_attn_probs: bool = ...,
    *,
    return_lse: bool = ...,
    **own: Unpack[OwnKeywords],
) -> AnyResults: ...
def flash_attn_qkvpacked_func(
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
    q, k, v = _unpack("qkv", qkv, 3)
    shared = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(q, k, v, *shared, **options)


@overload
def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    alibi_slopes: Tensor | None = ...,
    deterministic: bool = ...,
    return_attn_probs: Literal[False] = ...,
    *,
    return_lse: Literal[False] = ...,
    **own: Unpack[OwnKeywords],
) -> Tensor: ...
@overload
def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    alibi_slopes: Tensor | None = ...,
    deterministic: bool = ...,
    return_attn_probs: Literal[False] = ...,
    *,
    return_lse: Literal[True],
    **own: Unpack[OwnKeywords],
) -> OutAndLse: ...
@overload
def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    alibi_slopes: Tensor | None = ...,
    deterministic: bool = ...,
    *,
    return_attn_probs: Literal[True],
    return_lse: bool = ...,
    **own: Unpack[OwnKeywords],
) -> OutLseNone: ...
@overload
def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    alibi_slopes: Tensor | None = ...,
    deterministic: bool = ...,
    return_attn_probs: bool = ...,
    *,
    return_lse: bool = ...,
    **own: Unpack[OwnKeywords],
) -> AnyResults: ...
def flash_attn_kvpacked_func(
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
    k, v = _unpack("kv", kv, 2)
    shared = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(q, k, v, *shared, **options)


def _unpack(name: str, packed: Tensor, count: int) -> tuple[Tensor, ...]:
    if not isinstance(packed, Tensor):
        raise TypeError(f"{name} must be a tensor; got {type(packed).__name__}")
    if packed.is_nested:
        raise ValueError(f"{name} must be dense; got a nested tensor")
    if packed.ndim != 5 or packed.shape[2] != count:
        raise ValueError(f"{name} must be 5-d (batch, length, {count}, heads, head dim); got shape {tuple(packed.shape)}")
    return packed.unbind(2)
