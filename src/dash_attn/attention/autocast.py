"""What PyTorch's autocast does to the arguments of scaled_dot_product_attention, for functions that stand in its place."""

import torch
from torch import Tensor

# Asked once: a program that is traced may not ask (PyTorch 2.11).
HAVE_AUTOCAST = tuple(kind for kind in ("cpu", "cuda", "xpu", "hpu", "mps") if torch.amp.is_autocast_available(kind))


def under_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors, each in autocast's dtype where autocast is on for its device. Gradients come back in the dtypes given.

    As in PyTorch, autocast also casts 16-bit tensors of the other 16-bit dtype, and leaves float64 alone.
    """
    return tuple(_cast(tensor) for tensor in tensors)


def _cast(tensor: Tensor) -> Tensor:
    device = tensor.device.type
    if not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    if device not in HAVE_AUTOCAST or not torch.is_autocast_enabled(device):
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))
