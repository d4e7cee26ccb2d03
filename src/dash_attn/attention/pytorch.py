"""What PyTorch is doing around a call: tracing, transforming, or asking for deterministic algorithms."""

import warnings

import torch
from torch import Tensor

PLAIN = (Tensor, torch.nn.Parameter)
UNORDERED = (
    "accumulation='unordered' adds gradients in order of arrival, so they are not reproducible, but torch.use_deterministic_algorithms"
    " is on. Use accumulation='ordered' (the default), or turn that setting off"
)


def is_traced(*tensors: Tensor | None) -> bool:
    """Whether a call goes through the operator: in a program that is traced, and for tensor subclasses, whose memory is not theirs."""
    if torch.compiler.is_compiling():
        return True
    return any(type(tensor) not in PLAIN and isinstance(tensor, Tensor) for tensor in tensors)


def _transforms_active() -> bool:
    return bool(torch._C._are_functorch_transforms_active())


# As torch.compiler.assume_constant_result does, but that imports the whole compiler. The transform stands in the traced program.
_transforms_active._dynamo_marked_constant = True  # type: ignore[attr-defined]


def refuse_transforms() -> None:
    """Programs a call cannot stand in: torch.func's transforms and torch.jit.trace. They raise here, because PyTorch's own answers are an
    error about our classes or, for the forward mode of a compiled call, a derivative of zero.
    """
    if _transforms_active():
        raise NotImplementedError(
            "dash_attn attention does not run under torch.func transforms (grad, vjp, jvp, vmap, ...);"
            " take gradients with loss.backward() or torch.autograd.grad, and batches as the first dimension"
        )
    if not torch.compiler.is_compiling() and torch._C._is_tracing():
        raise NotImplementedError("dash_attn attention does not run under torch.jit.trace; use torch.compile or torch.export")


def alert_if_unordered() -> None:
    """As PyTorch's own operations: raise, or warn with warn_only=True, where sums in order of arrival meet the setting."""
    if not torch.are_deterministic_algorithms_enabled():
        return
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        raise RuntimeError(UNORDERED)
    warnings.warn(UNORDERED, stacklevel=3)
