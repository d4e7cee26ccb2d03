"""Energy of a step, from the counter that the driver keeps per GPU (NVML). Where there is none, there is no figure.

And a kernel run without a pause until the GPU sits at its power limit, as in training: time, watts, SM clock, joules per step.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, ClassVar, NamedTuple

import torch

SECONDS = 0.5  # of repeated steps: 0.3 from one move of the energy counter to another
SUSTAINED_SECONDS = 2.0
PATIENCE = 10  # times the seconds of a run, until a counter that stands still is given up
LIBRARY = "libnvidia-ml.so.1"
SM_CLOCK = 1  # NVML_CLOCK_SM
Counter = Callable[[], float]
Wait = Callable[[], Any]


class NoCounter(RuntimeError):
    """This machine does not count energy, or not that of this GPU."""


class Sample(NamedTuple):
    """What the counters showed when `steps` steps were done."""

    seconds: float
    steps: int
    joules: float
    megahertz: float


class Measured(NamedTuple):
    """Milliseconds and joules of a step, and the watts and the SM clock meanwhile."""

    ms: float
    watts: float
    megahertz: float
    joules: float


@dataclass(frozen=True)
class Meter:
    """`joules` counts up; `mark` notes what has been queued so far and returns the wait for it."""

    joules: Counter
    mark: Callable[[], Wait]
    megahertz: Counter = lambda: 0.0
    seconds: float = SECONDS
    clock: Counter = time.perf_counter
    warm_up: ClassVar[float] = 0.0
    chunk: ClassVar[float] = 0.01  # seconds of steps between two looks at the counters

    def readings(self, step: Callable[[], Any], expected_ms: float) -> dict[str, Any]:
        """For a row of results: nothing if the counter stands still or fails."""
        try:
            return {"energy_j": self.of(step, expected_ms).joules}
        except NoCounter:
            return {}

    def of(self, step: Callable[[], Any], expected_ms: float) -> Measured:
        """Run `step` again and again. The next steps are always queued before the last ones are waited for."""
        chunk = max(1, round(self.chunk * 1000 / expected_ms))

        def queue() -> Wait:
            for _ in range(chunk):
                step()
            return self.mark()

        begun, done, samples = self.clock() + self.warm_up, queue(), list[Sample]()
        while not samples or not self._enough(samples[-1].seconds - begun, samples):
            following = queue()
            done()
            done = following
            samples.append(Sample(self.clock(), chunk * (len(samples) + 1), self.joules(), self.megahertz()))
        done()
        return summed_up([sample for sample in samples if sample.seconds >= begun])

    def _enough(self, seconds: float, samples: Sequence[Sample]) -> bool:
        """A counter that seldom moves is waited for."""
        return seconds >= self.seconds and (len({sample.joules for sample in samples}) > 2 or seconds > PATIENCE * self.seconds)


class Endurance(Meter):
    """What a GPU does once power and clock have settled."""

    warm_up = 0.5
    chunk = 0.02

    def readings(self, step: Callable[[], Any], expected_ms: float) -> dict[str, Any]:
        """Raises NoCounter if the counters do not tell."""
        ms, watts, megahertz, joules = self.of(step, expected_ms)
        return {"sustained": {"seconds": self.seconds, "ms": ms, "watts": watts, "sm_mhz": megahertz, "joules": joules}}


def summed_up(samples: Sequence[Sample]) -> Measured:
    """From one move of the energy counter to another: it moves some ten times a second, in between it is old."""
    moves = [after for before, after in pairwise(samples) if after.joules != before.joules]
    if len(moves) < 2:
        raise NoCounter("the GPU's energy counter stood still during a run; a longer one may show it moving")
    first, last = moves[0], moves[-1]
    seconds, steps, joules = last.seconds - first.seconds, last.steps - first.steps, last.joules - first.joules
    return Measured(seconds / steps * 1000, joules / seconds, median(sample.megahertz for sample in samples), joules / steps)


# ---- the counters of a GPU


def gpu_meter(sustained: float | None = None) -> Meter:
    """Of PyTorch's current GPU. sustained: seconds of a run without a pause. Raises NoCounter."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    nvml = NvmlCounter(_library(), f"GPU-{properties.uuid}")
    nvml.joules()
    if sustained is None:
        return Meter(nvml.joules, _mark)
    nvml.sm_megahertz()
    return Endurance(nvml.joules, _mark, nvml.sm_megahertz, sustained)


def _mark() -> Wait:
    event = torch.cuda.Event()
    event.record()
    return event.synchronize


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
