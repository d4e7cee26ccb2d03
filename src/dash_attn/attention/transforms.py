"""Programs a call cannot stand in: torch.func's transforms and torch.jit.trace. They raise here, because PyTorch's own answers
are an error about our classes or, for the forward mode of a compiled call, a derivative of zero.
"""

from __future__ import annotations

import torch


def _transforms_active() -> bool:
    return bool(torch._C._are_functorch_transforms_active())


# As torch.compiler.assume_constant_result does, but that imports the whole compiler. The transform stands in the traced program.
_transforms_active._dynamo_marked_constant = True  # type: ignore[attr-defined]


def refuse_transforms() -> None:
    if _transforms_active():
        raise NotImplementedError(
            "dash_attn attention does not run under torch.func transforms (grad, vjp, jvp, vmap, ...);"
            " take gradients with loss.backward() or torch.autograd.grad, and batches as the first dimension"
        )
    if not torch.compiler.is_compiling() and torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        raise NotImplementedError("dash_attn attention does not run under torch.jit.trace; use torch.compile or torch.export")
