"""Energy of a step, from the counter that the driver keeps per GPU (NVML). Where there is none, there is no figure.

And a kernel run without a pause until the GPU sits at its power limit, as in training: time, watts, SM clock, joules per step.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import torch

SECONDS = 0.3  # of repeated steps, at least
CHUNK = 0.01  # seconds of steps between two looks at the counter
SUSTAINED_SECONDS = 2.0
WARM_UP = 0.5  # seconds of a sustained run until power and clock have settled
SUSTAINED_CHUNK = 0.02  # seconds of steps between two looks at the counters
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
        chunk = max(1, round(CHUNK * 1000 / expected_ms))
        try:
            self._run_until_it_moves(step, chunk)
            begun, start, steps = self.joules(), self.clock(), 0
            while not steps or self.clock() - start < SECONDS:
                steps += self._run_until_it_moves(step, chunk)
            return (self.joules() - begun) / steps
        except NoCounter:
            return None

    def _run_until_it_moves(self, step: Callable[[], Any], chunk: int) -> int:
        """How many steps that took."""
        before, start, steps = self.joules(), self.clock(), 0
        while self.clock() - start <= PATIENCE * SECONDS:
            for _ in range(chunk):
                step()
            self.synchronize()
            steps += chunk
            if self.joules() != before:
                return steps
        raise NoCounter("the GPU's energy counter stands still")


def gpu_meter() -> Meter:
    """The counter of PyTorch's current GPU. Raises NoCounter."""
    nvml = nvml_of_this_gpu()
    nvml.joules()
    return Meter(nvml.joules, torch.cuda.synchronize)


def nvml_of_this_gpu() -> NvmlCounter:
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


class Sample(NamedTuple):
    """What the counters showed when `steps` steps were done."""

    seconds: float
    steps: int
    joules: float
    megahertz: float


class Sustained(NamedTuple):
    """Milliseconds and joules of a step, and the watts and the SM clock meanwhile."""

    ms: float
    watts: float
    megahertz: float
    joules: float


@dataclass(frozen=True)
class Endurance:
    """`mark` notes what has been queued so far and returns the wait for it."""

    joules: Callable[[], float]
    megahertz: Callable[[], float]
    mark: Callable[[], Callable[[], Any]]
    seconds: float = SUSTAINED_SECONDS
    clock: Callable[[], float] = field(default=time.perf_counter)

    def readings(self, step: Callable[[], Any], expected_ms: float) -> dict[str, Any]:
        """For a row of results. Raises NoCounter if the counters do not tell."""
        ms, watts, megahertz, joules = self.of(step, expected_ms)
        return {"sustained": {"seconds": self.seconds, "ms": ms, "watts": watts, "sm_mhz": megahertz, "joules": joules}}

    def of(self, step: Callable[[], Any], expected_ms: float) -> Sustained:
        """Run `step` again and again. The next steps are always queued before the last ones are waited for."""
        chunk = max(1, round(SUSTAINED_CHUNK * 1000 / expected_ms))

        def queue() -> Callable[[], Any]:
            for _ in range(chunk):
                step()
            return self.mark()

        begun, done, samples = self.clock(), queue(), list[Sample]()
        while not samples or samples[-1].seconds - begun < WARM_UP + self.seconds:
            following = queue()
            done()
            done = following
            samples.append(Sample(self.clock(), chunk * (len(samples) + 1), self.joules(), self.megahertz()))
        done()
        return summed_up([sample for sample in samples if sample.seconds - begun >= WARM_UP])


def summed_up(samples: Sequence[Sample]) -> Sustained:
    """From one move of the energy counter to another: it moves some ten times a second, in between it is old."""
    moves = [after for before, after in pairwise(samples) if after.joules != before.joules]
    if len(moves) < 2:
        raise NoCounter("the GPU's energy counter stood still during a sustained run; a longer one may show it moving")
    first, last = moves[0], moves[-1]
    seconds, steps, joules = last.seconds - first.seconds, last.steps - first.steps, last.joules - first.joules
    clocks = [sample.megahertz for sample in samples]
    return Sustained(seconds / steps * 1000, joules / seconds, median(clocks), joules / steps)


def gpu_endurance(seconds: float) -> Endurance:
    """The counters of PyTorch's current GPU. Raises NoCounter."""
    nvml = nvml_of_this_gpu()
    nvml.joules()
    nvml.sm_megahertz()

    def mark() -> Callable[[], Any]:
        event = torch.cuda.Event()
        event.record()
        return event.synchronize

    return Endurance(nvml.joules, nvml.sm_megahertz, mark, seconds)
