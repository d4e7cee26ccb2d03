"""Where attention runs. A backend is a module with `forward` and `backward`; it is imported when first used.

Backends never import each other, and an explicit request never falls back to another one.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Protocol, cast

import torch

from ..explanation import Explanation
from ..options import AttentionOptions

DEVICE_OF = {"cpu": "cpu", "hopper": "cuda"}


class Backend(Protocol):
    """The tensors are laid out (batch, length, heads, head dim), LSE (batch, query heads, length); nothing is empty."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and LSE."""

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        options: AttentionOptions,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """dQ, dK and dV."""

    def explain(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions) -> Explanation:
        """What forward and backward of these tensors would do."""


def resolve(name: str, device: torch.device) -> str:
    """The backend for tensors on this device, or an error if the one asked for does not run there."""
    if name == "auto":
        for backend, device_type in DEVICE_OF.items():
            if device.type == device_type:
                return backend
        raise ValueError(f"no backend runs on {device}; tensors may be on {' or '.join(DEVICE_OF.values())}")
    if DEVICE_OF[name] != device.type:
        raise ValueError(f"backend {name!r} needs {DEVICE_OF[name]} tensors; got tensors on {device}")
    return name


def load(name: str) -> Backend:
    """The module of a backend."""
    module = f"{__name__}.{name}"
    if find_spec(module) is None:
        raise NotImplementedError(f"backend {name!r} ({DEVICE_OF[name]} tensors) is not part of this build of dash-attn")
    return cast(Backend, import_module(module))
