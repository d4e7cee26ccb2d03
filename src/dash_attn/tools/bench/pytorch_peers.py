"""The kernels that PyTorch brings, behind scaled_dot_product_attention: cuDNN's, FlashAttention-2's and its memory-efficient one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..machine import deterministic_algorithms
from .candidates import CUDNN, Candidate, Runner, Tensors, runner
from .shape import Shape

FLASH, EFFICIENT = "PyTorch flash", "PyTorch efficient"
Attention = Callable[..., Tensor]
Prepare = Callable[[Shape, Tensors], Runner]


def pytorch_peers() -> list[Candidate]:
    return [
        Candidate(CUDNN, by_sdpa("CUDNN_ATTENTION"), refuses=_refused_by_sdpa),
        Candidate(FLASH, plain_flash, refuses=_refused_by_flash),
        Candidate(f"{FLASH} deterministic", deterministic(plain_flash), True, ("backward",), refuses=_refused_by_flash),
        Candidate(EFFICIENT, by_sdpa("EFFICIENT_ATTENTION"), refuses=_refused_by_sdpa),
    ]


def lacks(shape: Shape) -> str | None:
    """Softcap and sinks are beyond PyTorch's fused kernels."""
    return "has no softcap" if shape.softcap else "has no sinks" if shape.sinks else None


def _refused_by_sdpa(shape: Shape) -> str | None:
    if shape.causal and shape.shift:
        return "scaled_dot_product_attention aligns the first query with the first key"
    return lacks(shape) or (None if shape.plain else "scaled_dot_product_attention has causal and full masks only")


def _refused_by_flash(shape: Shape) -> str | None:
    return "takes only values as wide as keys" if shape.v_head_dim != shape.head_dim else _refused_by_sdpa(shape)


def by_sdpa(backend: str) -> Prepare:
    return lambda shape, tensors: runner(sdpa(backend, shape, is_causal=shape.causal), tensors, heads_first=True)


plain_flash = by_sdpa("FLASH_ATTENTION")


def sdpa(backend: str, shape: Shape, **mask: Any) -> Attention:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return scaled_dot_product_attention(q, k, v, enable_gqa=shape.group > 1, **mask)

    return attention


def deterministic(prepare: Prepare) -> Prepare:
    """The same with its backward under PyTorch's switch."""

    def prepare_both(shape: Shape, tensors: Tensors) -> Runner:
        made = prepare(shape, tensors)

        def backward() -> tuple[Tensor, ...]:
            with deterministic_algorithms():  # without filling new memory, which would cost the kernel time that is not its own
                return made.backward()

        return Runner(made.forward, backward, made.leaves, made.folded)

    return prepare_both
