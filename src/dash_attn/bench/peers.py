"""Other attention kernels: cuDNN and FlashAttention-2 as PyTorch brings them, and FlashAttention packages where installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from .candidates import Candidate, Runner, Tensors, runner
from .names import CUDNN
from .suites import PASSES, Shape

PACKAGES = {  # (module, name) of functions that take (batch, length, heads, head dim) tensors, causal= and deterministic=
    "FlashAttention-4": ("flash_attn.cute", "flash_attn_func"),
    "FlashAttention-3": ("flash_attn_interface", "flash_attn_func"),
    "FlashAttention-2": ("flash_attn", "flash_attn_func"),
}


def peers() -> tuple[list[Candidate], dict[str, str]]:
    """Candidates, and why the others are missing."""
    made = [_pytorch(CUDNN, "CUDNN_ATTENTION"), _pytorch("PyTorch flash", "FLASH_ATTENTION")]
    made.append(_pytorch("PyTorch flash deterministic", "FLASH_ATTENTION", deterministic=True))
    missing = {}
    for name, (module, function) in PACKAGES.items():
        try:
            attention = getattr(import_module(module), function)
        except Exception as error:  # a package built for another PyTorch fails in many ways
            missing[name] = first_line(error)
        else:
            made += [_package(name, attention, False), _package(f"{name} deterministic", attention, True)]
    return made, missing


def first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


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


def _pytorch(name: str, backend: str, deterministic: bool = False) -> Candidate:
    def prepare(shape: Shape, tensors: Tensors) -> Runner:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(getattr(SDPBackend, backend)):
                return scaled_dot_product_attention(q, k, v, is_causal=shape.causal, enable_gqa=shape.group > 1)

        made = runner(attention, tensors, heads_first=True)
        surroundings = deterministic_algorithms if deterministic else nullcontext

        def backward() -> tuple[Tensor, ...]:
            with surroundings():
                return made.backward()

        return Runner(made.forward, backward, made.leaves)

    return Candidate(name, prepare, deterministic, ("backward",) if deterministic else PASSES)


def _package(name: str, function: Callable[..., Tensor | tuple[Tensor, ...]], deterministic: bool) -> Candidate:
    def prepare(shape: Shape, tensors: Tensors) -> Runner:
        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = function(q, k, v, causal=shape.causal, deterministic=deterministic)
            return out[0] if isinstance(out, tuple) else out

        return runner(attention, tensors)

    return Candidate(name, prepare, deterministic, ("backward",) if deterministic else PASSES)
