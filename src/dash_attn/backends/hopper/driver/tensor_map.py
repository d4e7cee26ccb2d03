"""TMA descriptors of (batch, length, heads, head dim) tensors, and of packed (tokens, heads, head dim) ones."""

from ctypes import c_uint64
from typing import Any

import torch
from torch import Tensor

from .launch import check, cuda_driver
from .parameters import RAGGED


class TensorMap:
    """Describes boxes of `rows` x 64 elements of one head (or x 16). Encoded once per layout; only the address changes from call to
    call.

    A packed tensor has two axes over its tokens, the first of which ends where a sequence does (kernels/common/sequence.cuh).
    """

    def __init__(self, tensor: Tensor, rows: int, columns: int = 64) -> None:
        driver = cuda_driver()
        *outer, heads, dim = tensor.shape
        if tensor.ndim == 4:
            sizes, strides = [dim, heads, outer[1], outer[0]], [_byte_stride(tensor, axis) for axis in (2, 1, 0)]
        else:
            row = _byte_stride(tensor, 0)
            sizes, strides = [dim, heads, RAGGED, outer[0] + 1, RAGGED + 1], [_byte_stride(tensor, 1), row, row, 2**34 - row]
        self._pointer = tensor.data_ptr()
        types = driver.CUtensorMapDataType
        is_bf16 = tensor.dtype == torch.bfloat16
        self._map: Any = check(
            driver.cuTensorMapEncodeTiled(
                types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 if is_bf16 else types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                len(sizes),
                self._pointer,
                [driver.cuuint64_t(n) for n in sizes],
                [driver.cuuint64_t(n) for n in strides],
                [driver.cuuint32_t(n) for n in (columns, 1, rows, 1, 1)[: len(sizes)]],
                [driver.cuuint32_t(1)] * len(sizes),
                driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
                getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{2 * columns}B"),
                driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        )

        self.address = int(self._map.getPtr())
        self._words = (c_uint64 * 16).from_address(self.address)
        self._begins_with_address = self._does_begin_with_address()

    def _does_begin_with_address(self) -> bool:
        """Descriptors are opaque. Whether this one is its address and others words, which do not depend on it."""
        first, other, here = list(self._words), self._pointer + 16, self._pointer
        check(cuda_driver().cuTensorMapReplaceAddress(self._map, other))
        moved = list(self._words)
        check(cuda_driver().cuTensorMapReplaceAddress(self._map, here))
        return first == [here, *moved[1:]] and moved[0] == other

    def point_to(self, pointer: int) -> None:
        """pointer: a multiple of 16."""
        if pointer != self._pointer:
            if self._begins_with_address:  # a tenth of what the driver takes
                self._words[0] = pointer
            else:
                check(cuda_driver().cuTensorMapReplaceAddress(self._map, pointer))
            self._pointer = pointer


def is_tma_ready(tensor: Tensor) -> bool:
    """Whether TMA can read the tensor where it lies."""
    return tensor.data_ptr() % 16 == 0 and has_tma_strides(tensor)


def has_tma_strides(tensor: Tensor) -> bool:
    """Last axis contiguous, other strides multiples of 16 bytes."""
    outer = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    regular = all(size == 1 or (stride > 0 and stride * tensor.element_size() % 16 == 0) for size, stride in outer)
    return tensor.stride(-1) == 1 and regular


def tma_ready(tensor: Tensor) -> Tensor:
    """The tensor itself if TMA can read it, else a copy; a head dim that is no multiple of 8 is padded with zeros."""
    missing = -tensor.shape[-1] % 8
    if missing:
        return torch.nn.functional.pad(tensor, (0, missing))
    return tensor if is_tma_ready(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def _byte_stride(tensor: Tensor, axis: int) -> int:
    """Stride of an axis; an axis of length 1 has whatever stride, so give it one TMA accepts."""
    if tensor.shape[axis] == 1:
        return max(16, tensor.shape[-1] * tensor.element_size())
    return tensor.stride(axis) * tensor.element_size()
