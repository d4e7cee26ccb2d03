"""PyTorch's own plug for flash attention: scaled_dot_product_attention and varlen_attn on CUDA tensors, answered by dash-attn.

    from dash_attn.integrations import torch_flash
    torch_flash.enable()

What PyTorch asks for and dash-attn cannot honour raises. Once this is imported, torch.nn.attention lists dash_attn among its flash
implementations, without activating it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
import torch.nn.attention
from torch.library import Library

from ._aten_flash import OPERATORS
from ._door import Change, Door

NAME = "dash_attn"
OTHER_KERNELS = ("mem_efficient_sdp", "math_sdp", "cudnn_sdp")  # of scaled_dot_product_attention, beside flash
DOOR = Door("torch_flash")


def enable() -> AbstractContextManager[object]:
    """Answer PyTorch's flash operators on CUDA tensors: until `disable()`, or with this as a context manager inside its block.

    scaled_dot_product_attention's other kernels are switched off meanwhile (also for CPU tensors), because it would take
    them silently where flash does not serve a call: such a call raises instead. torch.nn.attention.sdpa_kernel still
    chooses others in a block of its own.
    """
    if not _is_listed():
        raise RuntimeError(
            f"PyTorch {torch.__version__} has no torch.nn.attention.register_flash_attention_impl; newer versions have it."
            " dash_attn.integrations.sdpa.enable serves this one"
        )
    return DOOR.open(Change(_Plug(), "implementation", NAME))


def disable() -> None:
    """What was active before the first `enable()`, as a rule PyTorch's own flash attention, and the kernels that were switched on then."""
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

    def remove(self) -> None:
        if self.library is not None:
            self.library._destroy()
            self.library = None
            for name, enabled in self.before.items():
                getattr(torch.backends.cuda, f"enable_{name}")(enabled)


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


_is_listed()
