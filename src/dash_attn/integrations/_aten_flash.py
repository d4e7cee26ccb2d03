"""PyTorch's flash operators on dash-attn, with their own arguments (aten's schemas) and layouts.

They run below autograd: PyTorch calls the forward and, with what it has kept, the backward.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from ..attention.autograd import attention_backward, attention_forward
from ..call.call import Call, Grads, Saved
from ..call.offsets import SequenceOffsets
from ..call.options import AttentionOptions, Choices, is_zero, options_for
from ..call.tensor_checks import check_tensors


def sdpa_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """aten::_scaled_dot_product_flash_attention, layout (batch, heads, length, head dim)."""
    _check_square(query, key, is_causal)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out, lse, *rest = flash_forward(q, k, v, None, None, q.shape[1], k.shape[1], dropout_p, is_causal, return_debug_mask, scale=scale)
    return _laid_out_like(query, out.transpose(1, 2)), lse, None, None, q.shape[1], k.shape[1], *rest


def sdpa_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor | None,
    philox_offset: Tensor | None,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """aten::_scaled_dot_product_flash_attention_backward."""
    _check_square(query, key, is_causal)
    dout, q, k, v, o = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    unused = (max_q, max_k, dropout_p, is_causal, philox_seed, philox_offset)
    gradients = flash_backward(dout, q, k, v, o, logsumexp, None, None, *unused, scale=scale)
    return tuple(_laid_out_like(x, g.transpose(1, 2)) for x, g in zip((query, key, value), gradients, strict=True))


def flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **rest: Any,
) -> tuple[Any, ...]:
    """aten::_flash_attention_forward, layout (batch, length, heads, head dim), or (tokens, heads, head dim) with cum_seq."""
    if return_debug_mask:
        raise ValueError("dash_attn keeps no attention weights: return_debug_mask must be False")
    if rest.pop("num_splits", None) not in (None, 0, 1):
        raise ValueError("dash_attn never splits keys, so that bits depend on nothing else: num_splits must be None or 1")
    unsupported = [name for name, value in rest.items() if value is not None]
    if unsupported:
        raise ValueError(f"dash_attn does not support {', '.join(unsupported)} in PyTorch's flash attention")
    check_tensors(query, key, value, ndim=4 if cum_seq_q is None else 3)
    options = _options(query, value, dropout_p, is_causal, scale, (window_size_left, window_size_right))
    out, lse = attention_forward(Call(query, key, value, options, _offsets(cum_seq_q, cum_seq_k, max_q, max_k)))
    # The random state of dropout. There is no dropout, so nobody reads these.
    seed, offset = (torch.empty(shape, dtype=torch.uint64, device=query.device) for shape in ((2,), ()))
    return _laid_out_like(query, out), lse, seed, offset, query.new_empty(0)


def flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor | None,
    unused: Tensor | None,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    """aten::_flash_attention_backward."""
    options = _options(query, value, dropout_p, is_causal, scale, (window_size_left, window_size_right))
    offsets = _offsets(cum_seq_q, cum_seq_k, max_q, max_k)
    *gradients, _ = attention_backward(Call(query, key, value, options, offsets), Saved(out, logsumexp), Grads(grad_out))
    return tuple(_laid_out_like(x, gradient) for x, gradient in zip((query, key, value), gradients, strict=True))


def flash_forward_into(out: Tensor, *arguments: Any, **rest: Any) -> Tensor:
    """aten::_flash_attention_forward_no_dropout_inplace: stores the output, returns LSE."""
    result: Tensor
    lse: Tensor
    result, lse, *_ = flash_forward(*arguments, **rest)
    out.copy_(result)
    return lse


def refuse_quantized(*_: Any, **__: Any) -> NoReturn:
    raise ValueError("dash_attn does not support quantized (float8) attention")


OPERATORS = {
    "_scaled_dot_product_flash_attention": sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": sdpa_backward,
    "_flash_attention_forward": flash_forward,
    "_flash_attention_backward": flash_backward,
    "_flash_attention_forward_no_dropout_inplace": flash_forward_into,
    "_scaled_dot_product_flash_attention.quantized": refuse_quantized,
    "_flash_attention_forward.quantized": refuse_quantized,
}


def _options(
    query: Tensor, value: Tensor, dropout_p: float, is_causal: bool, scale: float | None, window: tuple[int | None, int | None]
) -> AttentionOptions:
    if not is_zero(dropout_p):
        raise ValueError(
            "dash_attn has no dropout in PyTorch's flash attention, whose operators have no place for our seeds (flash_attn_func has):"
            f" dropout_p must be 0; got {dropout_p!r}"
        )
    if value.shape[-1] != query.shape[-1]:
        raise ValueError(f"PyTorch's flash attention has one head dim; got {query.shape[-1]} and {value.shape[-1]}")
    left, right = (-1 if width is None else width for width in window)
    return options_for(Choices(causal=is_causal, window_size=(left, right), softmax_scale=scale), query.shape[-1])


def _offsets(cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int) -> SequenceOffsets | None:
    if cum_seq_q is None and cum_seq_k is None:
        return None
    if cum_seq_q is None or cum_seq_k is None:
        raise ValueError("packed sequences need cum_seq_q and cum_seq_k; got one of them")
    return SequenceOffsets(cum_seq_q, cum_seq_k, max_q, max_k)


def _check_square(query: Tensor, key: Tensor, is_causal: bool) -> None:
    """scaled_dot_product_attention aligns the first query with the first key, flash attention the last with the last."""
    if is_causal and query.shape[2] != key.shape[2]:
        raise ValueError(f"is_causal needs as many queries as keys; got {query.shape[2]} and {key.shape[2]}")


def _laid_out_like(like: Tensor, result: Tensor) -> Tensor:
    """The result in the memory layout that PyTorch expects when it compiles: that of the input."""
    if result.stride() == like.stride():
        return result
    expected = torch.empty_like(like)
    return result if result.stride() == expected.stride() else expected.copy_(result)
