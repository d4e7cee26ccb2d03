"""What both devices share: the tensors of a problem, one measured run of a schedule, and the observations of a fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...call.options import AttentionOptions
from ...masks import Causal, Full, Mask
from ...scheduling.generators import generate
from ...scheduling.problem import Problem
from ...viewing.task_times import TaskTimes
from .fit import Fit, Observation, Run, estimate, fit

Tensors = tuple[Tensor, Tensor, Tensor, Tensor]
Progress = Callable[[int, int], None]


class Device(NamedTuple):
    """A place where schedules can be run, with the two things we measure there."""

    name: str
    backend: str
    workers: int
    tiles: dict[int, tuple[int, int]]  # by head dim
    dtype: torch.dtype
    device: str
    record: Callable[[Tensors, AttentionOptions], TaskTimes]  # when every task ran
    time: Callable[[Tensors, AttentionOptions], float] | None = None  # microseconds of the kernel alone; None: as recorded
    free: tuple[str, ...] = ()  # constants that are fitted to the times; the others are read off the records


@dataclass(frozen=True)
class Sweep:
    """Which problems are measured: (mask, its schedules), lengths, tokens per batch, KV heads."""

    schedules: tuple[tuple[Mask, tuple[str, ...]], ...]
    seqlens: tuple[int, ...]
    tokens: int
    heads: int

    def problems(self, tiles: tuple[int, int]) -> Iterator[tuple[Problem, str]]:
        for mask, names in self.schedules:
            for seqlen in self.seqlens:
                problem = Problem(mask, seqlen, seqlen, *tiles, self.heads, batch=max(1, self.tokens // seqlen))
                yield from ((problem, name) for name in names)


RECORDED = "ascending"  # where chains wait for each other, so that a hand-over can be seen
CAUSAL, FULL = ("ascending", "descending", "spt", "alternating"), ("ascending", "shift_blocks")
GPU_SWEEP = Sweep(((Causal(), CAUSAL), (Full(), FULL)), (1024, 2048, 4096), 8192, 16)
CPU_SWEEP = Sweep(((Causal(), CAUSAL), (Full(), ("ascending",))), (384, 768), 768, 2)


def calibrate(device: Device, head_dim: int, sweep: Sweep, progress: Progress | None = None) -> tuple[Fit, list[dict[str, Any]]]:
    """Constants of one head dim, and a row for every schedule that was measured."""
    chosen = list(sweep.problems(device.tiles[head_dim]))
    runs: list[Run] = []
    observations = []
    for number, (problem, name) in enumerate(chosen):
        if progress is not None:
            progress(number, len(chosen))
        schedule = generate(name, problem, device.workers)
        tensors, options = make_tensors(problem, head_dim, device), options_of(problem, head_dim, name)
        if device.time is None or name == RECORDED:
            runs.append((schedule, device.record(tensors, options)))
        measured = runs[-1][1].makespan if device.time is None else device.time(tensors, options)
        observations.append(Observation(schedule, measured))
    found = fit(observations, estimate(runs), device.free)
    return found, list(_rows(head_dim, observations, found))


def _rows(head_dim: int, observations: Sequence[Observation], found: Fit) -> Iterator[dict[str, Any]]:
    for (schedule, measured), error in zip(observations, found.errors, strict=True):
        problem = schedule.problem
        row = {"head_dim": head_dim, "mask": str(problem.mask), "seqlen": problem.q_len, "batch": problem.batch, "schedule": schedule.name}
        yield {**row, "measured_us": round(measured, 1), "predicted_us": round(measured * (1 + error), 1), "error": round(error, 4)}


def make_tensors(problem: Problem, head_dim: int, device: Device) -> Tensors:
    """q, k, v and dO with standard normal entries."""
    source = torch.Generator(device.device).manual_seed(0)
    q_heads = problem.heads * problem.group
    sizes = ((problem.q_len, q_heads), (problem.kv_len, problem.heads), (problem.kv_len, problem.heads), (problem.q_len, q_heads))
    rows = (torch.randn(problem.batch, *size, head_dim, generator=source, device=device.device) for size in sizes)
    q, k, v, dout = (x.to(device.dtype) for x in rows)
    return q, k, v, dout


def options_of(problem: Problem, head_dim: int, schedule: str) -> AttentionOptions:
    return AttentionOptions(problem.mask, head_dim**-0.5, 0.0, schedule)
