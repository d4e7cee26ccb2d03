"""A kernel run without a pause until the GPU sits at its power limit, as in training: time, watts, SM clock, joules per step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from .energy import NoCounter, nvml_of_this_gpu

SECONDS = 2.0
WARM_UP = 0.5  # seconds until power and clock have settled
CHUNK = 0.02  # seconds of steps between two looks at the counters


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
    seconds: float = SECONDS
    clock: Callable[[], float] = field(default=time.perf_counter)

    def readings(self, step: Callable[[], Any], expected_ms: float) -> dict[str, Any]:
        """For a row of results. Raises NoCounter if the counters do not tell."""
        ms, watts, megahertz, joules = self.of(step, expected_ms)
        return {"sustained": {"seconds": self.seconds, "ms": ms, "watts": watts, "sm_mhz": megahertz, "joules": joules}}

    def of(self, step: Callable[[], Any], expected_ms: float) -> Sustained:
        """Run `step` again and again. The next steps are always queued before the last ones are waited for."""
        chunk = max(1, round(CHUNK * 1000 / expected_ms))

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


def check_seconds(seconds: float) -> None:
    if not 0 < seconds < math.inf:
        raise ValueError(f"--sustained must be a number of seconds > 0; got {seconds}")


def gpu_endurance(seconds: float) -> Endurance:
    """The counters of PyTorch's current GPU. Raises NoCounter."""
    import torch

    nvml = nvml_of_this_gpu()
    nvml.joules()
    nvml.sm_megahertz()

    def mark() -> Callable[[], Any]:
        event = torch.cuda.Event()
        event.record()
        return event.synchronize

    return Endurance(nvml.joules, nvml.sm_megahertz, mark, seconds)
