"""Which GPUs have which kernels, and what all of these know."""

import torch

HOPPER = (9, 0)  # the compute capability that the kernels of backend 'hopper' are compiled for, alone
OLDEST = (8, 0)  # the first that backend 'triton' runs on
FAR_AWAY = 2**29  # farther than any two tokens are apart


def is_hopper(device: torch.device | int | None = None) -> bool:
    """The current device, where none is given. PyTorch counts AMD's GPUs in the same numbers, and an MI200 is 9.0 there, too."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) == HOPPER
