"""A CUDA driver that loads kernels and launches none, so that a test sees where they come from."""

from __future__ import annotations

from typing import Any


class Status:
    def __init__(self, name: str) -> None:
        self.name = name

    def __bool__(self) -> bool:
        return self.name != "CUDA_SUCCESS"


class LoadingDriver:
    """Loads everything, except that it answers `loading` for shipped kernels of tests, whose binary begins with that word."""

    class CUfunction_attribute:
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 0

    def __init__(self) -> None:
        self.loading = Status("CUDA_SUCCESS")
        self.asked: list[bytes] = []

    def cuModuleLoadData(self, cubin: bytes) -> tuple[Any, ...]:
        self.asked.append(cubin)
        return self.loading if cubin.startswith(b"shipped") else Status("CUDA_SUCCESS"), 1

    def cuModuleUnload(self, module: int) -> tuple[Any, ...]:
        return (Status("CUDA_SUCCESS"),)

    def cuModuleGetFunction(self, module: int, symbol: bytes) -> tuple[Any, ...]:
        return Status("CUDA_SUCCESS"), 2

    def cuFuncSetAttribute(self, *_: Any) -> tuple[Any, ...]:
        return (Status("CUDA_SUCCESS"),)

    def cuGetErrorString(self, status: Status) -> tuple[int, bytes]:
        return 0, b"what the driver says"
