"""The kernels that PyTorch brings: cuDNN's and FlashAttention-2's, behind scaled_dot_product_attention or called by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ...masks import Prefix, Window
from .candidates import Candidate, Runner, Tensors, packed, runner
from .checks import dropped_keys
from .matrices import Matrix
from .names import CUDNN
from .shape import Shape

FLASH, CUDNN_MASKED = "PyTorch flash", f"{CUDNN} with a mask tensor"
Attention = Callable[..., Tensor]


def pytorch_peers() -> list[Candidate]:
    return [
        Candidate(CUDNN, _cudnn, refuses=_refused_by_cudnn),
        Candidate(CUDNN_MASKED, _cudnn_masked, refuses=_refused_by_cudnn_masked),
        Candidate(FLASH, _flash, refuses=_refused_by_flash),
        Candidate(f"{FLASH} deterministic", _deterministic(_flash), True, ("backward",), refuses=_refused_by_flash),
    ]


def lacks(shape: Shape) -> str | None:
    """Softcap and sinks are beyond PyTorch's fused kernels."""
    return "has no softcap" if shape.softcap else "has no sinks" if shape.sinks else None


def lacks_mask(shape: Shape) -> str | None:
    """What FlashAttention's kernels do not know."""
    if isinstance(shape.attended, Matrix):
        return "has no boolean matrices"
    return "has no prefix mask" if isinstance(shape.attended, Prefix) else None


def _refused_by_cudnn(shape: Shape) -> str | None:
    if shape.causal and shape.shift:
        return "scaled_dot_product_attention aligns the first query with the first key"
    return lacks(shape) or (None if shape.plain else "scaled_dot_product_attention has causal and full masks only")


def _refused_by_cudnn_masked(shape: Shape) -> str | None:
    return lacks(shape) or (f"the mask needs no tensor: see {CUDNN}" if shape.plain else None)


def _refused_by_flash(shape: Shape) -> str | None:
    if shape.v_head_dim != shape.head_dim:
        return "takes only values as wide as keys"
    return lacks(shape) or lacks_mask(shape)


def _cudnn(shape: Shape, tensors: Tensors) -> Runner:
    return runner(_sdpa("CUDNN_ATTENTION", shape, is_causal=shape.causal), tensors, heads_first=True)


def _cudnn_masked(shape: Shape, tensors: Tensors) -> Runner:
    """The whole mask as a boolean tensor: the one way to tell scaled_dot_product_attention of any other mask."""
    dropped = dropped_keys(shape.attended, slice(0, shape.q_seqlen), shape.q_seqlen, shape.seqlen, tensors.q.device)
    return runner(_sdpa("CUDNN_ATTENTION", shape, attn_mask=~dropped), tensors, heads_first=True)


def _flash(shape: Shape, tensors: Tensors) -> Runner:
    if shape.sequences:
        return runner(packed(_varlen(shape), shape, tensors.q.device), tensors)
    if isinstance(shape.attended, Window):
        return runner(_operator(shape, window_size_left=shape.attended.left, window_size_right=shape.attended.right), tensors)
    if shape.causal and shape.shift:
        return runner(_operator(shape, is_causal=True), tensors)
    return runner(_sdpa("FLASH_ATTENTION", shape, is_causal=shape.causal), tensors, heads_first=True)


def _sdpa(backend: str, shape: Shape, **mask: Any) -> Attention:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return scaled_dot_product_attention(q, k, v, enable_gqa=shape.group > 1, **mask)

    return attention


def _operator(shape: Shape, is_causal: bool = False, **window: Any) -> Attention:
    """The operator below scaled_dot_product_attention: it has windows, and aligns the last query with the last key."""
    lengths = shape.q_seqlen, shape.seqlen

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = torch.ops.aten._flash_attention_forward(q, k, v, None, None, *lengths, 0.0, is_causal, False, **window)[0]
        return out

    return attention


def _varlen(shape: Shape) -> Attention:
    """Packed sequences: PyTorch's function for them where it has one, else the operator below it."""
    causal = shape.sequences_causal
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:

        def operator(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int) -> Tensor:
            out: Tensor = torch.ops.aten._flash_attention_forward(q, k, v, ends, ends, longest, longest, 0.0, causal, False)[0]
            return out

        return operator
    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"is_causal": causal} if "is_causal" in known else {"window_size": (-1, 0 if causal else -1)}
    if "enable_gqa" in known:
        options["enable_gqa"] = shape.group > 1

    def attention(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int) -> Tensor:
        returned: Any = varlen_attn(q, k, v, ends, ends, longest, longest, **options)
        out: Tensor = returned[0] if isinstance(returned, tuple) else returned
        return out

    return attention


def _deterministic(prepare: Callable[[Shape, Tensors], Runner]) -> Callable[[Shape, Tensors], Runner]:
    """The same with its backward under PyTorch's switch."""

    def prepare_both(shape: Shape, tensors: Tensors) -> Runner:
        made = prepare(shape, tensors)

        def backward() -> tuple[Tensor, ...]:
            with deterministic_algorithms():
                return made.backward()

        return Runner(made.forward, backward, made.leaves, made.folded)

    return prepare_both


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """PyTorch's switch, without its filling of new memory, which would cost the kernel time that is not its own."""
    settings: Any = import_module("torch.utils.deterministic")
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filling = settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        settings.fill_uninitialized_memory = filling
