"""PyTorch's scaled_dot_product_attention, answered by dash-attn.

What dash-attn cannot do raises; no call goes back to PyTorch's kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import functional

from ..api import flash_attn_func
from ..masks import Causal, Full, Mask, Window


@contextmanager
def replace_sdpa(**options: Any) -> Iterator[None]:
    """Inside the block, torch.nn.functional.scaled_dot_product_attention is the function below.

    options: schedule, accumulation, backend or head_offset, as in flash_attn_func.

    Code that imported the function by name before the block keeps PyTorch's. Blocks nest. The name is one for the
    whole process: other threads see the replacement too, so enter and leave blocks on one thread. Gradients may be
    taken after the block.
    """
    before = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = partial(scaled_dot_product_attention, **options)
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = before


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **options: Any,
) -> Tensor:
    """PyTorch's arguments and layout (batch, heads, length, head dim), our bits.

    As in PyTorch, `is_causal` aligns the first query with the first key, and with `enable_gqa` there may be more query
    heads than KV heads. attn_mask and dropout are not supported and raise.
    """
    if attn_mask is not None:
        raise ValueError("attn_mask must be None: use is_causal, or call dash_attn.flash_attn_func with a mask of dash_attn.masks")
    _check(query, key, value, enable_gqa)
    q_len, kv_len = query.shape[2], key.shape[2]
    if is_causal and kv_len > q_len:  # no query attends the keys after the last query
        key, value = key[:, :, :q_len], value[:, :, :q_len]
    mask = _first_aligned(q_len, kv_len) if is_causal else Full()
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return flash_attn_func(q, k, v, dropout_p, scale, mask=mask, **options).transpose(1, 2)


def _first_aligned(q_len: int, kv_len: int) -> Mask:
    """Query i attends keys 0 to i. Our masks align the last query with the last key, which matters if there are more queries."""
    return Window(-1, q_len - kv_len) if q_len > kv_len else Causal()


def _check(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.ndim != 4:
            raise ValueError(f"{name} must be 4-d (batch, heads, length, head dim); got shape {tuple(tensor.shape)}")
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(f"query and key must have the same heads unless enable_gqa=True; got {query.shape[1]} and {key.shape[1]}")
