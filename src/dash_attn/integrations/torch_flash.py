"""PyTorch's own plug for flash attention: scaled_dot_product_attention and varlen_attn on CUDA tensors, answered by dash-attn.

    from dash_attn.integrations import torch_flash
    torch_flash.activate()

What PyTorch asks for and dash-attn cannot honour raises.
"""

from __future__ import annotations

import torch
import torch.nn.attention
from torch.library import Library

from ._aten_flash import OPERATORS

NAME = "dash_attn"
OTHER_KERNELS = ("mem_efficient_sdp", "math_sdp", "cudnn_sdp")  # of scaled_dot_product_attention, beside flash


def register() -> None:
    """List dash_attn among torch.nn.attention's flash implementations, without activating it."""
    plug = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if plug is None:
        raise RuntimeError(
            f"PyTorch {torch.__version__} has no torch.nn.attention.register_flash_attention_impl; newer versions have it."
            " dash_attn.integrations.sdpa.replace_sdpa serves this one"
        )
    plug(NAME, register_fn=_Activated)


def activate() -> None:
    """Answer PyTorch's flash operators on CUDA tensors until `deactivate()`.

    scaled_dot_product_attention's other kernels are switched off meanwhile (also for CPU tensors), because it would take
    them silently where flash does not serve a call: such a call raises instead. torch.nn.attention.sdpa_kernel still
    chooses others in a block of its own.
    """
    register()
    torch.nn.attention.activate_flash_attention_impl(NAME)


def deactivate() -> None:
    """PyTorch's own flash attention again, and the kernels that were switched on before."""
    torch.nn.attention.restore_flash_attention_impl()


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

    def remove(self) -> None:
        if self.library is not None:
            self.library._destroy()
            self.library = None
            for name, enabled in self.before.items():
                getattr(torch.backends.cuda, f"enable_{name}")(enabled)
