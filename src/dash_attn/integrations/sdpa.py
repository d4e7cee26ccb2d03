"""PyTorch's scaled_dot_product_attention, answered by dash-attn.

What dash-attn cannot do raises; no call goes back to PyTorch's kernels.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import get_overridable_functions

from ..attention.autocast import under_autocast
from ..attention.functions import flash_attn_func
from ..attention.kept_options import kept_options
from ..call.options import check_dropout, is_finite, is_zero
from ..call.tensor_checks import DTYPES, check_flags, check_strided, shape_problem
from ..door import Change, Door
from ..libraries import check_library
from ..masks import Causal, Full, Mask, Window
from ._torch_context_parallel import HERE, check_block, has_placement, placed_like, rows_of_torch

OF_GROUPS = ("context_parallel", "sharding", "ulysses")
OPTIONS = ("schedule", "accumulation", "backend", "head_offset", *OF_GROUPS)
DOOR = Door("integrations.sdpa")


def enable(**options: Any) -> AbstractContextManager[object]:
    """From now on torch.nn.functional.scaled_dot_product_attention is the function below: until `disable()`, or with this as a context
    manager inside its block.

    options: schedule, accumulation, backend or head_offset, as in flash_attn_func. With context_parallel=group (a ProcessGroup or a
    DeviceMesh of one dimension) each call is one of context_parallel_attention: query, key and value are this rank's rows of a
    sequence that the group shares, dealt by `sharding`, with the factor `ulysses`. With context_parallel="torch" the block is around
    PyTorch's own context_parallel (or Accelerate's), which then calls us: its mesh is the group, and it deals the rows. Calls
    outside its block are plain calls.

    nn.MultiheadAttention and nn.Transformer's layers call the function in evaluation, too: PyTorch's fast paths around it are switched off
    meanwhile. With need_weights=True multi_head_attention_forward, which they call, computes attention by itself; a warning says so.

    Code that imported the function by name before keeps PyTorch's. Blocks nest. The replacement holds for the whole process: other threads
    also see it, so enter and leave blocks on one thread. Gradients may be taken after the block.
    """
    check_library("torch", f"dash_attn.{DOOR.module}")
    _check_options(options)
    check_block(options.get("context_parallel"), options.get("sharding", "zigzag"))
    get_overridable_functions()  # PyTorch makes this list once: made from now on, it would have our function in it for good
    return DOOR.open(Change(functional, "scaled_dot_product_attention", _with(kept_options(options))), *MODULES)


def disable() -> None:
    """Restores PyTorch's own function, however often `enable()` was called."""
    DOOR.close()


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
    """PyTorch's arguments and layout (batch, heads, length, head dim), with our bits.

    As in PyTorch, `is_causal` aligns the first query with the first key, with `enable_gqa` there may be more query
    heads than KV heads, autocast casts the tensors, and the output of contiguous queries is contiguous. Tensors have at
    least two dimensions; key and value may have 1 where the query has more sequences or heads. attn_mask is boolean, or of
    0 and -inf, and broadcasts to (batch, heads, length, length of key), as in PyTorch, or it is one of
    torch.nn.attention.bias. A query that attends to nothing has output 0 (docs/masks.md). Other biases raise.
    As in PyTorch, dropout_p drops whenever it is not 0. Seeds come from PyTorch's generator; our rule picks the pairs (docs/dropout.md).
    """
    _check_options(options)
    _refuse(dropout_p, scale, is_causal=is_causal, enable_gqa=enable_gqa)
    placed = has_placement(query) or has_placement(key) or has_placement(value)
    if options.get("context_parallel") == HERE and not placed:  # outside PyTorch's block
        options = {name: value for name, value in options.items() if name not in OF_GROUPS}
    _check_mask(attn_mask, is_causal, options.get("context_parallel"))
    if placed:
        rows, of_ranks = rows_of_torch(options.get("context_parallel"), query=query, key=key, value=value)
        options |= of_ranks
        return placed_like(query, scaled_dot_product_attention(*rows, None, dropout_p, is_causal, scale, enable_gqa, **options))
    check_strided(query=query, key=key, value=value)
    if query.ndim == key.ndim == value.ndim == 3 and len(query) == 0:  # the first dimension counts sequences here: there may be none
        query, key, value = query[:, None], key[:, None], value[:, None]
        attn_mask = attn_mask if attn_mask is None or attn_mask.ndim < 3 else attn_mask[:, None]
        return scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, **options)[:, 0]
    batch, (q, k, v) = _heads_second(under_autocast(query, key, value), enable_gqa)
    _check_tensors(q, k, v, enable_gqa, given=(query, key, value))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    q_len, kv_len = q.shape[1], k.shape[1]
    if _is_first_aligned(attn_mask, q_len, kv_len):
        attn_mask, is_causal = None, True
    if is_causal and kv_len > q_len:  # no query attends to the keys after the last query
        k, v = k[:, :q_len], v[:, :q_len]
    mask = _mask(attn_mask, batch) if attn_mask is not None else _first_aligned(q_len, kv_len) if is_causal else Full()
    attend = flash_attn_func if options.get("context_parallel") is None else _attend_on_all_ranks
    if not is_zero(dropout_p):
        options["dropout_p"] = dropout_p
    out: Tensor = attend(q, k, v, softmax_scale=scale, mask=mask, **options).transpose(1, 2)
    if query.ndim != 4:
        out = out.reshape(*query.shape[:-1], out.shape[-1])
    return out.contiguous() if query.is_contiguous() else out


def _heads_second(tensors: Sequence[Tensor], enable_gqa: bool) -> tuple[tuple[int, ...], list[Tensor]]:
    """The dimensions of the query before the heads, and the tensors as (batch, heads, length, head dim). As in PyTorch, key and value may
    have 1 where the query has more. One KV head serves all query heads as it is.
    """
    if len({x.ndim for x in tensors}) > 1 or tensors[0].ndim < 2 + enable_gqa:
        raise ValueError(f"query, key and value must be (..., heads, length, head dim), or without heads; got {_shapes(tensors)}")
    query, *others = [x if x.ndim > 2 else x[None] for x in tensors]
    batch, heads = tuple(query.shape[:-3]), query.shape[-3]
    grouped = enable_gqa or all(x.shape[-3] == 1 for x in others)
    shapes = [(*batch, x.shape[-3] if grouped or x.shape[-3] > 1 else heads, *x.shape[-2:]) for x in others]
    if any(mine not in (1, size) for x, shape in zip(others, shapes, strict=True) for mine, size in zip(x.shape, shape, strict=True)):
        raise ValueError(f"query, key and value must have one batch size, or key and value 1; got {_shapes(tensors)}")
    others = [x if x.shape == shape else x.expand(shape) for x, shape in zip(others, shapes, strict=True)]
    return batch, [x if len(batch) == 1 else x.flatten(0, -4) if batch else x[None] for x in (query, *others)]


def _mask(attn_mask: Tensor, batch: tuple[int, ...]) -> Mask | Tensor:
    """As flash_attn_func takes it."""
    if _is_causal_bias(attn_mask):
        return Causal()
    if attn_mask.ndim > len(batch) + 3:
        raise ValueError(f"attn_mask must not have more dimensions than query, key and value; got shape {tuple(attn_mask.shape)}")
    if attn_mask.ndim > 3 and len(batch) > 1:
        if any(mine not in (1, size) for mine, size in zip(attn_mask.shape[-4::-1], batch[::-1], strict=False)):
            raise ValueError(f"attn_mask must broadcast to {(*batch, 'heads', 'queries', 'keys')}; got shape {tuple(attn_mask.shape)}")
        return attn_mask.expand(*batch, *attn_mask.shape[-3:]).flatten(0, -4)
    return attn_mask


def _is_causal_bias(mask: object) -> bool:
    """Of torch.nn.attention.bias, which takes seconds to import."""
    return type(mask).__name__ == "CausalBias"


def _is_first_aligned(bias: Any, q_len: int, kv_len: int) -> bool:
    """What `is_causal` says, too. The other variant aligns the last query with the last key, as our Causal does."""
    if not _is_causal_bias(bias):
        return False
    if (bias.seq_len_q, bias.seq_len_kv) != (q_len, kv_len):
        raise ValueError(f"attn_mask is for {bias.seq_len_q} queries and {bias.seq_len_kv} keys; got {q_len} and {kv_len}")
    return bool(bias.variant.name == "UPPER_LEFT")


def _attend_on_all_ranks(q: Tensor, k: Tensor, v: Tensor, context_parallel: Any, accumulation: str = "ordered", **rest: Any) -> Tensor:
    from ..distributed import context_parallel_attention  # few need torch.distributed

    if q.shape[1] != k.shape[1]:
        raise ValueError(
            f"ranks that share a sequence have as many queries as keys; got {q.shape[1]} and {k.shape[1]}: cross attention and caches"
            " need a block without context_parallel"
        )
    if "dropout_p" in rest:
        raise ValueError(
            "ranks that share a sequence must drop the same pairs, so they need a dropout_seed, for which this function has no place:"
            f" dropout_p must be 0, or call context_parallel_attention; got {rest['dropout_p']!r}"
        )
    if accumulation != "ordered":
        raise ValueError(f"ranks that share a sequence add in order: accumulation must be 'ordered'; got {accumulation!r}")
    out: Tensor = context_parallel_attention(q, k, v, context_parallel, **rest)
    return out


def _with(options: dict[str, Any]) -> Callable[..., Tensor]:
    """A function, not a partial: torch.compile asks whatever is in torch.nn.functional for its __name__."""

    @wraps(scaled_dot_product_attention)
    def replacement(*arguments: Any, **rest: Any) -> Tensor:
        with _others_hear(options.get("context_parallel"), *arguments):
            return scaled_dot_product_attention(*arguments, **{**options, **rest})

    return replacement


def _others_hear(context_parallel: Any, *arguments: Any) -> AbstractContextManager[None]:
    """Ranks that share a sequence wait for one that is refused here."""
    group = arguments[0].device_mesh if context_parallel == HERE and arguments and has_placement(arguments[0]) else context_parallel
    if group is None or isinstance(group, str) or torch.compiler.is_compiling():
        return nullcontext()
    from ..distributed.hosts import ATTENTION  # few need torch.distributed
    from ..distributed.peers import Peers

    return Peers.of(group).hosts.refusing(ATTENTION)


def _first_aligned(q_len: int, kv_len: int) -> Mask:
    """Query i attends to keys 0 to i. Our masks align the last query with the last key, which matters if there are more queries."""
    return Window(-1, q_len - kv_len) if q_len > kv_len else Causal()


def _check_options(options: dict[str, Any]) -> None:
    for name in options:
        if name not in OPTIONS:
            raise TypeError(f"got an unexpected keyword argument {name!r}; the options of sdpa.enable are {', '.join(OPTIONS)}")
    if alone := [name for name in ("sharding", "ulysses") if name in options and options.get("context_parallel") is None]:
        raise TypeError(f"{alone[0]} is for ranks that share a sequence: it needs context_parallel=group")
    if "sharding" in options and options["context_parallel"] == HERE:
        raise TypeError('sharding is for context_parallel=group: with context_parallel="torch" PyTorch deals the rows')


def _check_mask(attn_mask: Any, is_causal: bool, context_parallel: Any) -> None:
    """What is left to flash_attn_func: shape, device and numbers."""
    if attn_mask is None:
        return
    if not isinstance(attn_mask, Tensor):
        raise TypeError(f"attn_mask must be a boolean tensor or None; got {type(attn_mask).__name__}")
    if attn_mask.dtype not in (torch.bool, *DTYPES):
        raise ValueError(f"attn_mask must be boolean, True where a query attends to a key, or of 0 and -inf; got {attn_mask.dtype}")
    if is_causal:
        raise ValueError("give either attn_mask or is_causal=True, as PyTorch's documentation asks; got both")
    if context_parallel is not None:
        raise ValueError("ranks that share a sequence take no attn_mask: use is_causal, or context_parallel_attention with a mask by name")


def _refuse(dropout_p: Any, scale: Any, **flags: Any) -> None:
    """Arguments that PyTorch takes and we do not, or that neither takes."""
    check_dropout(dropout_p)
    check_flags(**flags)
    # While a program is traced the scale may be a symbol; then the operator looks at it.
    if scale is not None and not torch.compiler.is_compiling() and (not is_finite(scale) or scale == 0):
        raise ValueError(f"scale must be None or a finite number other than 0; got {scale!r}")


def _check_tensors(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool, given: Sequence[Tensor]) -> None:
    """What flash_attn_func would also refuse, with the names and the layout of this function, and the shapes of what was given."""
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"query, key and value must have one dtype; got {query.dtype}, {key.dtype}, {value.dtype}")
    if query.dtype not in DTYPES:
        raise ValueError(f"dtype of query, key and value must be one of {', '.join(map(str, DTYPES))}; got {query.dtype}")
    if not query.device == key.device == value.device:
        raise ValueError(f"query, key and value must have one device; got {query.device}, {key.device}, {value.device}")
    problem = shape_problem(*(tuple(x.transpose(1, 2).shape) for x in (query, key, value)))
    if not enable_gqa and key.shape[1] not in (1, query.shape[1]):
        problem = "query and key must have the same heads unless enable_gqa=True"
    if problem is not None:
        raise ValueError(f"{problem}; got {_shapes(given)}: (..., heads, length, head dim)")


def _shapes(tensors: Sequence[Tensor]) -> str:
    return ", ".join(f"{name} {tuple(x.shape)}" for name, x in zip(("query", "key", "value"), tensors, strict=True))


@wraps(functional.multi_head_attention_forward)
def _multihead_attention(*arguments: Any, **rest: Any) -> tuple[Tensor, Tensor | None]:
    """What nn.MultiheadAttention calls. It calls scaled_dot_product_attention, unless weights are asked for."""
    if arguments[NEED_WEIGHTS] if len(arguments) > NEED_WEIGHTS else rest.get("need_weights", True):
        _warn_of_weights()
    return PYTORCHS_MULTIHEAD(*arguments, **rest)


def _warn_of_weights() -> None:
    warnings.warn(
        "nn.MultiheadAttention and multi_head_attention_forward do not call scaled_dot_product_attention with need_weights=True, their"
        " default: this attention is PyTorch's, not dash_attn's. Pass need_weights=False",
        stacklevel=3,
    )


_warn_of_weights._dynamo_marked_constant = True  # type: ignore[attr-defined] # as in attention/pytorch.py
PYTORCHS_MULTIHEAD = functional.multi_head_attention_forward
NEED_WEIGHTS = list(signature(PYTORCHS_MULTIHEAD).parameters).index("need_weights")
# What is changed beside the function: where PyTorch's modules would go round it.
WEIGHTS = Change(functional, "multi_head_attention_forward", _multihead_attention)
MODULES = (WEIGHTS, Change(torch.backends.mha, "_is_fastpath_enabled", False))
