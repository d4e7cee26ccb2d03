"""PyTorch's own plug for flash attention: scaled_dot_product_attention and varlen_attn on CUDA tensors, answered by dash-attn.

    from dash_attn.integrations import torch_flash
    torch_flash.enable()

What PyTorch asks for and dash-attn cannot honour raises. Once this is imported, torch.nn.attention lists dash_attn among its flash
implementations, without activating it.

The operators have their own arguments (aten's schemas) and layouts. They run below autograd: PyTorch calls the forward and, with what it
has kept, the backward.
"""

from contextlib import AbstractContextManager
from typing import Any, NoReturn, cast

import torch
import torch.nn.attention
from torch import Tensor
from torch.library import Library

from ..attention.autograd import attention_backward, attention_forward
from ..call.call import Call, Grads, Saved
from ..call.offsets import SequenceOffsets
from ..call.options import AttentionOptions, Choices, is_zero, options_for
from ..call.tensor_checks import check_tensors
from ..door import Change, Door, refuse_unknown
from ..libraries import LEAST_WITH_FLASH_PLUG, check_library
from .sdpa import WEIGHTS

NAME = "dash_attn"
OTHER_KERNELS = ("mem_efficient_sdp", "math_sdp", "cudnn_sdp")  # of scaled_dot_product_attention, beside flash
NAMED = ("scale", "window_size_left", "window_size_right")  # keyword arguments of the operators that are honoured
DOOR = Door("integrations.torch_flash")


def enable() -> AbstractContextManager[object]:
    """Answer PyTorch's flash operators on CUDA tensors: until `disable()`, or with this as a context manager inside its block.

    scaled_dot_product_attention's other kernels are switched off meanwhile (also for CPU tensors), because it would silently
    use them for calls that flash does not support: such a call raises instead. So are the fast paths of nn.MultiheadAttention and
    nn.Transformer's layers in evaluation, which call neither. A warning says where nn.MultiheadAttention computes weights.
    torch.nn.attention.sdpa_kernel still chooses others in its own block.
    """
    check_library("torch", f"dash_attn.{DOOR.module} (unlike integrations.sdpa)", LEAST_WITH_FLASH_PLUG)
    if not _is_listed():
        raise RuntimeError(
            f"PyTorch {torch.__version__} has no torch.nn.attention.register_flash_attention_impl; newer versions have it."
            " dash_attn.integrations.sdpa.enable serves this one"
        )
    return DOOR.open(Change(_Plug(), "implementation", NAME), WEIGHTS)


def disable() -> None:
    """Restores what was active before the first `enable()`: normally PyTorch's own flash attention, and the kernels switched on then."""
    DOOR.close()


class _Activated:
    """What PyTorch keeps while dash_attn is active; it calls `remove` to end that."""

    def __init__(self, dispatch_key: str = "CUDA") -> None:
        self.library: Library | None = Library("aten", "IMPL")
        for name, function in OPERATORS.items():
            if hasattr(torch.ops.aten, name.split(".")[0]):
                self.library.impl(name, function, dispatch_key)
        self.before = {name: getattr(torch.backends.cuda, f"{name}_enabled")() for name in ("flash_sdp", *OTHER_KERNELS)}
        for name in self.before:
            getattr(torch.backends.cuda, f"enable_{name}")(name == "flash_sdp")
        self.fast_path = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)

    def remove(self) -> None:
        if self.library is not None:
            self.library._destroy()
            self.library = None
            for name, enabled in self.before.items():
                getattr(torch.backends.cuda, f"enable_{name}")(enabled)
            torch.backends.mha.set_fastpath_enabled(self.fast_path)


class _Plug:
    """The implementation that PyTorch has activated, None for its own, as an attribute."""

    @property
    def implementation(self) -> str | None:
        return torch.nn.attention.current_flash_attention_impl()

    @implementation.setter
    def implementation(self, name: str | None) -> None:
        if name is not None:
            torch.nn.attention.activate_flash_attention_impl(name)
        elif self.implementation is not None:  # PyTorch warns of a second time
            torch.nn.attention.restore_flash_attention_impl()


def _is_listed() -> bool:
    plug = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if plug is not None:
        plug(NAME, register_fn=_Activated)
    return plug is not None


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
    lengths = q.shape[1], k.shape[1]
    out, lse, *rest = flash_forward(q, k, v, None, None, *lengths, dropout_p, is_causal, return_debug_mask, scale=scale)
    return _laid_out_like(query, out.transpose(1, 2)), lse, None, None, *lengths, *rest


def sdpa_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, *given: Any, scale: float | None = None
) -> tuple[Tensor, ...]:
    """aten::_scaled_dot_product_flash_attention_backward. given: as in flash_backward."""
    _check_square(query, key, is_causal=given[5])
    dout, q, k, v, o = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    gradients = flash_backward(dout, q, k, v, o, logsumexp, None, None, *given[2:], scale=scale)
    return tuple(_laid_out_like(x, g.transpose(1, 2)) for x, g in zip((query, key, value), gradients, strict=True))


def flash_forward(query: Tensor, key: Tensor, value: Tensor, *given: Any, **named: Any) -> tuple[Any, ...]:
    """aten::_flash_attention_forward, layout (batch, length, heads, head dim), or (tokens, heads, head dim) with cum_seq.

    given: cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask
    """
    *asked, return_debug_mask = given
    if return_debug_mask:
        raise ValueError("dash_attn keeps no attention weights: return_debug_mask must be False")
    if named.pop("num_splits", None) not in (None, 0, 1):
        raise ValueError("dash_attn never splits keys, so that bits depend on nothing else: num_splits must be None or 1")
    refuse_unknown("dash_attn", named, NAMED, "which PyTorch's flash attention was given")
    check_tensors(query, key, value, ndim=4 if asked[0] is None else 3)
    out, lse = attention_forward(Call(query, key, value, _options(query, value, *asked[4:], **named), _offsets(*asked[:4])))
    # The random state of dropout. There is no dropout, so nobody reads these.
    seed, offset = (torch.empty(shape, dtype=torch.uint64, device=query.device) for shape in ((2,), ()))
    return _laid_out_like(query, out), lse, seed, offset, query.new_empty(0)


def flash_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, *given: Any, **named: Any
) -> tuple[Tensor, ...]:
    """aten::_flash_attention_backward.

    given: cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, and what dropout would need
    """
    options, offsets = _options(query, value, *given[4:6], **named), _offsets(*given[:4])
    *gradients, _ = attention_backward(Call(query, key, value, options, offsets), Saved(out, logsumexp), Grads(grad_out))
    return tuple(_laid_out_like(x, gradient) for x, gradient in zip((query, key, value), gradients, strict=True))


def flash_forward_into(out: Tensor, *arguments: Any, **rest: Any) -> Tensor:
    """aten::_flash_attention_forward_no_dropout_inplace: stores the output, returns LSE."""
    result, lse = flash_forward(*arguments, **rest)[:2]
    out.copy_(result)
    return cast(Tensor, lse)


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


def _options(query: Tensor, value: Tensor, dropout_p: float, is_causal: bool, **named: Any) -> AttentionOptions:
    """named: those of NAMED that were given."""
    if not is_zero(dropout_p):
        raise ValueError(
            "dash_attn has no dropout in PyTorch's flash attention, whose operators have no place for our seeds (flash_attn_func has):"
            f" dropout_p must be 0; got {dropout_p!r}"
        )
    if value.shape[-1] != query.shape[-1]:
        raise ValueError(f"PyTorch's flash attention has one head dim; got {query.shape[-1]} and {value.shape[-1]}")
    scale, left, right = (named.get(name) for name in NAMED)
    window = -1 if left is None else left, -1 if right is None else right
    return options_for(Choices(causal=is_causal, window_size=window, softmax_scale=scale), query.shape[-1])


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


_is_listed()
