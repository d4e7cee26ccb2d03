"""Attention as torch operators, for torch.compile: dash_attn::attention and dash_attn::attention_backward.

Every choice of a call is an argument of the operator. Calls that are not traced take the lighter way through
autograd.Attention; both ways run the same two functions. Of tensor subclasses, fake tensors get shapes, and those that
have no rule for the operator (DTensor) raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import SymFloat, SymInt, Tensor

from ..backends import resolve
from ..call.offsets import SequenceOffsets
from ..call.options import AttentionOptions
from ..call.tensor_checks import check_sinks, check_tensors
from ..masks import Mask
from .autograd import attention_backward, attention_forward
from .mask_arguments import decode_mask, encode_mask

PLAIN = (Tensor, torch.nn.Parameter)
PACKED = "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k"
CHOICES = "str mask, SymInt[] mask_sizes, float? scale, float softcap, str schedule, str accumulation, str backend, SymInt head_offset"
# Part of every traced program, so that one from a cache or a file whose operators meant something else is refused, not run.
# 2: the LSE has a gradient.
VERSION = 2
FORWARD = f"(Tensor q, Tensor k, Tensor v, Tensor? sinks, {PACKED}, {CHOICES}, int version) -> (Tensor, Tensor)"
BACKWARD = (
    f"(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, Tensor q, Tensor k, Tensor v, Tensor? sinks, {PACKED}, {CHOICES}, int version)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)


def is_traced(*tensors: Tensor | None) -> bool:
    """Whether a call goes through the operator: in a program that is traced, and for tensor subclasses, whose memory is not theirs."""
    if torch.compiler.is_compiling():
        return True
    return any(type(tensor) not in PLAIN and isinstance(tensor, Tensor) for tensor in tensors)


def traced_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, packed: tuple[Any, ...] | None, mask: Mask, *choices: Any
) -> tuple[Tensor, Tensor]:
    """The operator. packed: SequenceOffsets' fields; choices: AttentionOptions' after the mask, a scale of None for the usual one."""
    name, sizes = encode_mask(mask)
    out, lse = torch.ops.dash_attn.attention(q, k, v, sinks, *(packed or (None, None, 0, 0)), name, sizes, *choices, VERSION)
    return out, lse


@torch.library.custom_op("dash_attn::attention", mutates_args=(), schema=FORWARD)
def attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    offsets, options = _read(q, k, v, sinks, *rest)
    assert options is not None, "a program that runs has no symbols"
    return attention_forward(q, k, v, options, offsets, sinks)


@torch.library.custom_op("dash_attn::attention_backward", mutates_args=(), schema=BACKWARD)
def backward(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The last result is empty where there are no sinks: an operator returns tensors only."""
    offsets, options = _read(q, k, v, sinks, *rest)
    assert options is not None, "a program that runs has no symbols"
    dq, dk, dv, dsinks = attention_backward(dout, q, k, v, out, lse, options, offsets, sinks, dlse)
    return dq, dk, dv, q.new_empty(0) if dsinks is None else dsinks


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    _read(q, k, v, sinks, *rest)
    *batch, length, heads, _ = q.shape
    lse = q.new_empty((*batch, heads, length), dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    return q.new_empty((*batch, length, heads, v.shape[-1])), lse


@backward.register_fake
def _(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dsinks = q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def _read(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    mask: str,
    mask_sizes: Sequence[int],
    scale: float | None,
    *choices_and_version: Any,
) -> tuple[SequenceOffsets | None, AttentionOptions | None]:
    """The arguments, checked. While a program is traced a number may be a symbol; then options are read when it runs."""
    *choices, version = choices_and_version
    if version != VERSION:
        raise RuntimeError(
            f"this program was traced with version {version} of dash_attn's operators, and here they have version {VERSION}:"
            " compile or export it again"
        )
    check_tensors(q, k, v, ndim=4 if cu_seqlens_q is None else 3)
    check_sinks(sinks, q)
    offsets = None
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        longest = (0 if isinstance(length, SymInt) else length for length in (max_seqlen_q, max_seqlen_k))
        offsets = SequenceOffsets(cu_seqlens_q, cu_seqlens_k, *longest)
        offsets.check_device(q.device)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if any(isinstance(number, (SymInt, SymFloat)) for number in (*mask_sizes, scale, *choices)):
        return offsets, None
    options = _options(mask, tuple(mask_sizes), scale, *choices)
    resolve(options.backend, q.device)
    if offsets is None:
        options.mask.check(q.shape[1], k.shape[1])
    return offsets, options


@lru_cache(maxsize=1024, typed=True)
def _options(mask: str, mask_sizes: tuple[int, ...], *choices: Any) -> AttentionOptions:
    return AttentionOptions(decode_mask(mask, mask_sizes), *choices)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.choices = inputs[:6], inputs[6:]
    ctx.save_for_backward(*output, *tensors)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    unused = (None,) * (2 + len(ctx.choices))
    out, lse, q, k, v, sinks, cu_seqlens_q, cu_seqlens_k = ctx.saved_tensors
    if dout is None:
        if dlse is None:
            return (None,) * 4 + unused
        dout = torch.zeros_like(out)  # only the LSE was used
    ends = cu_seqlens_q, cu_seqlens_k
    dq, dk, dv, dsinks = torch.ops.dash_attn.attention_backward(dout, dlse, out, lse, q, k, v, sinks, *ends, *ctx.choices)
    return dq, dk, dv, None if sinks is None else dsinks, *unused


attention.register_autograd(_differentiate, setup_context=_keep_for_backward)
