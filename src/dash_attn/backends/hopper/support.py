"""What the Hopper kernels can do. Everything else raises: nothing falls back."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ...options import AttentionOptions
from ...planning import DEFAULT_WORKERS
from .driver import device_index

HEAD_DIMS = (64, 128)
DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16"}


class Unsupported(ValueError):
    """Asked for something the Hopper kernels cannot do deterministically."""


@cache
def check_device(index: int) -> int:
    """Number of SMs, if the device is a Hopper GPU."""
    properties = torch.cuda.get_device_properties(index)
    if (properties.major, properties.minor) != (9, 0):
        raise Unsupported(
            f"backend 'hopper' needs a GPU of compute capability 9.0 (H100, H200, GH200);"
            f" {properties.name} has {properties.major}.{properties.minor}. Other GPUs are not supported yet; CPU tensors are."
        )
    return int(properties.multi_processor_count)


def sm_count(device: torch.device) -> int:
    """SMs of a Hopper GPU; for tensors on the meta device, which only ask what would happen, those of an H200."""
    return DEFAULT_WORKERS if device.type == "meta" else check_device(device_index(device))


def check_call(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> None:
    if q.dtype not in DTYPES:
        raise Unsupported(f"backend 'hopper' takes bfloat16 and float16; got {q.dtype}")
    if q.shape[-1] not in HEAD_DIMS or v.shape[-1] != q.shape[-1]:
        dims = f"q/k {q.shape[-1]}, v {v.shape[-1]}"
        raise Unsupported(f"backend 'hopper' takes head dims {', '.join(map(str, HEAD_DIMS))}, the same for q, k and v; got {dims}")
    if options.scale < 0:
        raise Unsupported(f"backend 'hopper' takes softmax_scale > 0; got {options.scale}")
    if options.softcap:
        raise Unsupported(f"backend 'hopper' has no softcap yet; got softcap={options.softcap}. Tensors on the CPU support it.")
