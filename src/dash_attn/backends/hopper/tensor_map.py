"""TMA descriptors of (batch, length, heads, head dim) tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .driver import check, cuda_driver


class TensorMap:
    """Describes boxes of `rows` x 64 elements of one head. Encoded once per layout; only the address changes from call to call."""

    def __init__(self, tensor: Tensor, rows: int) -> None:
        driver = cuda_driver()
        batch, length, heads, dim = tensor.shape
        item = tensor.element_size()
        strides = [_byte_stride(tensor, axis) for axis in (2, 1, 0)]
        is_bf16 = tensor.dtype == torch.bfloat16
        types = driver.CUtensorMapDataType
        self._map: Any = check(
            driver.cuTensorMapEncodeTiled(
                types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 if is_bf16 else types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                4,
                tensor.data_ptr(),
                [driver.cuuint64_t(n) for n in (dim, heads, length, batch)],
                [driver.cuuint64_t(n) for n in strides],
                [driver.cuuint32_t(n) for n in (128 // item, 1, rows, 1)],
                [driver.cuuint32_t(1)] * 4,
                driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
                driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
                driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        )
        self._pointer = tensor.data_ptr()

    @property
    def address(self) -> int:
        return int(self._map.getPtr())

    def point_to(self, tensor: Tensor) -> None:
        pointer = tensor.data_ptr()
        if pointer != self._pointer:
            check(cuda_driver().cuTensorMapReplaceAddress(self._map, pointer))
            self._pointer = pointer


def tma_ready(tensor: Tensor) -> Tensor:
    """The tensor itself if TMA can read it where it lies, else a contiguous copy."""
    aligned = tensor.data_ptr() % 16 == 0 and tensor.stride(-1) == 1
    outer = zip(tensor.shape[:3], tensor.stride()[:3], strict=True)
    regular = all(size == 1 or (stride > 0 and stride * tensor.element_size() % 16 == 0) for size, stride in outer)
    return tensor if aligned and regular else tensor.clone(memory_format=torch.contiguous_format)


def _byte_stride(tensor: Tensor, axis: int) -> int:
    """Stride of an axis; an axis of length 1 has whatever stride, so give it one TMA accepts."""
    if tensor.shape[axis] == 1:
        return max(16, tensor.shape[-1] * tensor.element_size())
    return tensor.stride(axis) * tensor.element_size()
