"""Energy of a step, from the counter that the driver keeps per GPU (NVML). Where there is none, there is no figure."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

SECONDS = 0.3  # of repeated steps, at least
CHUNK = 0.01  # seconds of steps between two looks at the counter
PATIENCE = 10  # times SECONDS until a counter that stands still is given up
LIBRARY = "libnvidia-ml.so.1"
SM_CLOCK = 1  # NVML_CLOCK_SM


class NoCounter(RuntimeError):
    """This machine does not count energy, or not that of this GPU."""


@dataclass(frozen=True)
class Meter:
    """`joules` counts up; `synchronize` waits for all steps that were started."""

    joules: Callable[[], float]
    synchronize: Callable[[], None]
    clock: Callable[[], float] = field(default=time.perf_counter)

    def readings(self, step: Callable[[], Any], expected_ms: float) -> dict[str, Any]:
        """For a row of results: nothing where nothing was counted."""
        joules = self.per_step(step, expected_ms)
        return {} if joules is None else {"energy_j": joules}

    def per_step(self, step: Callable[[], Any], expected_ms: float) -> float | None:
        """Joules of one step; None if the counter stands still or fails.

        The counter moves some ten times a second, so both ends of the measurement are waited for: steps are counted from
        one of its moves to another.
        """
        try:
            return self._per_step(step, max(1, round(CHUNK * 1000 / expected_ms)))
        except NoCounter:
            return None

    def _per_step(self, step: Callable[[], Any], chunk: int) -> float | None:
        if self._run_until_it_moves(step, chunk) is None:
            return None
        begun, start, steps = self.joules(), self.clock(), 0
        while True:
            more = self._run_until_it_moves(step, chunk)
            if more is None:
                return None
            steps += more
            if self.clock() - start >= SECONDS:
                return (self.joules() - begun) / steps

    def _run_until_it_moves(self, step: Callable[[], Any], chunk: int) -> int | None:
        """How many steps that took."""
        before, start, steps = self.joules(), self.clock(), 0
        while self.clock() - start <= PATIENCE * SECONDS:
            for _ in range(chunk):
                step()
            self.synchronize()
            steps += chunk
            if self.joules() != before:
                return steps
        return None


def gpu_meter() -> Meter:
    """The counter of PyTorch's current GPU. Raises NoCounter."""
    import torch

    counter = nvml_of_this_gpu()
    counter.joules()
    return Meter(counter.joules, torch.cuda.synchronize)


def nvml_of_this_gpu() -> NvmlCounter:
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return NvmlCounter(_library(), f"GPU-{properties.uuid}")


def _library() -> Any:
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise NoCounter(f"there is no NVML here ({error})") from None


class NvmlCounter:
    """Total energy and clock of the GPU with this identifier: its index could be another one than PyTorch's."""

    def __init__(self, library: Any, uuid: str) -> None:
        self._library, self._handle = library, ctypes.c_void_p()
        self._call("nvmlInit_v2")
        self._call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(self._handle))

    def joules(self) -> float:
        millijoules = ctypes.c_ulonglong()
        self._call("nvmlDeviceGetTotalEnergyConsumption", self._handle, ctypes.byref(millijoules))
        return millijoules.value / 1000

    def sm_megahertz(self) -> float:
        megahertz = ctypes.c_uint()
        self._call("nvmlDeviceGetClockInfo", self._handle, SM_CLOCK, ctypes.byref(megahertz))
        return float(megahertz.value)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise NoCounter(f"NVML: {name} answered {status}")
