"""Sums over the bits of tensors on a Hopper GPU (ledgers/bit_sums.py defines them): many tensors per launch, and nothing waits."""

import ctypes
import warnings
from collections.abc import Sequence
from functools import cache
from itertools import accumulate

import torch
from torch import Tensor

from ...gpus import is_hopper
from ..driver.bit_sums_header import CHUNK_BYTES, CTAS_PER_SM, MOST_TENSORS, THREADS, BitSumsParams
from ..driver.launch import current_stream, on_device
from ..support import sm_count
from .kernel_names import KernelName

KERNEL = KernelName("ledger/bit_sums.cuh", "bit_sums", THREADS)


@cache
def has_kernel(index: int) -> bool:
    """Whether a device runs the kernel. It is loaded, and compiled where it did not come with the package."""
    if not is_hopper(index):
        return False
    try:
        KERNEL.load(index)
    except ImportError as error:
        warnings.warn(f"the ledger sums bits with PyTorch's operations, which takes longer: {error}", RuntimeWarning, stacklevel=2)
        return False
    return True


def bit_sums(tensors: Sequence[Tensor]) -> Tensor:
    """A sum per tensor, as int64. They are contiguous and on one device, which has the kernel."""
    sums = torch.zeros(len(tensors), dtype=torch.int64, device=tensors[0].device)
    index = sums.device.index
    with on_device(index):
        for first in range(0, len(tensors), MOST_TENSORS):
            params = parameters(tensors[first : first + MOST_TENSORS], sums.data_ptr() + 8 * first, CTAS_PER_SM * sm_count(index))
            if params.ctas:
                KERNEL.load(index).prepare(params.ctas, [ctypes.addressof(params)]).on(current_stream(index))
    return sums


def parameters(tensors: Sequence[Tensor], sums: int, most_ctas: int) -> BitSumsParams:
    """Of one launch. `sums`: an address."""
    count, sizes = len(tensors), [tensor.nbytes for tensor in tensors]
    params = BitSumsParams(sums=sums, count=count)
    params.tensors[:count] = [tensor.data_ptr() for tensor in tensors]
    params.sizes[:count] = sizes
    params.first_chunks[: count + 1] = chunks = list(accumulate((-(-size // CHUNK_BYTES) for size in sizes), initial=0))
    params.ctas = min(chunks[-1], most_ctas)
    return params
