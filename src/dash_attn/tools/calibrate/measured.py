"""Devices to measure on (the CPU executor in real threads, where one thread is one worker, and a Hopper GPU), and what is measured there:
the tensors of a problem, one run of a schedule, the observations of a fit."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...call.call import Call, Grads, Modifiers
from ...call.options import AttentionOptions
from ...masks import BooleanMask, Causal, Full, Mask
from ...scheduling.generators import generate
from ...scheduling.problem import Problem, whole_number
from ...viewing.task_times import TaskTimes
from .fit import Fit, Observation, Run, estimate, fit

Progress = Callable[[int, int], None]
CPU_RUNS = 9
CPU_HEAD_DIMS = (64, 128)
GPU_RUNS, GPU_WARM_UP = 6, 2


class Device(NamedTuple):
    """A place where schedules can be run, with the two things we measure there."""

    name: str
    backend: str
    workers: int
    tiles: dict[int, tuple[int, int]]  # by head dim
    dtype: torch.dtype
    device: str
    record: Callable[[Call, Grads, Progress | None], TaskTimes]  # when every task ran
    time: Callable[[Call, Grads], float] | None = None  # microseconds of the kernel alone; None: as recorded
    free: tuple[str, ...] = ()  # constants that are fitted to the times; the others are read off the records


def cpu_device(workers: int | None = None) -> Device:
    """`workers` threads; as many as there are processors, unless told otherwise."""
    from ...backends.cpu.tiles import TILE_KV, TILE_Q

    count = max(2, os.cpu_count() or 2) if workers is None else whole_number("workers", workers)

    def record(call: Call, grads: Grads, progress: Progress | None) -> TaskTimes:
        from ...backends.cpu import forward
        from ...backends.cpu.recorder import record_backward

        saved = forward(call)
        runs = []
        for number in range(CPU_RUNS):
            if progress is not None:
                progress(number, CPU_RUNS)
            runs.append(record_backward(call, saved, grads, count))
        return min(runs, key=lambda spans: spans.makespan)  # whatever else runs here only adds time

    tiles = dict.fromkeys(CPU_HEAD_DIMS, (TILE_Q, TILE_KV))
    # Medians over tasks: a thread that is put aside now and then would lead a fit to whole times astray.
    return Device(platform.processor() or platform.machine(), "cpu", count, tiles, torch.float32, "cpu", record)


def hopper_device() -> Device:
    """Raises where there is no such GPU, naming what is needed."""
    if not torch.cuda.is_available():
        raise ValueError("measuring kernels needs a GPU of compute capability 9.0 (H100, H200, GH200); PyTorch finds none here")
    from ...backends.hopper.support import sm_count
    from ...backends.hopper.tiles import KERNEL_DIMS, backward_tiles

    index = torch.cuda.current_device()
    workers = sm_count(index)
    tiles = {dim: (backward_tiles(dim).q_rows, backward_tiles(dim).kv_rows) for dim in KERNEL_DIMS}
    # A reduce is hidden behind computes and hand-overs: no time depends on it apart from the start of a chain.
    free = ("compute", "latency", "startup")
    name = torch.cuda.get_device_name(index)
    return Device(name, "hopper", workers, tiles, torch.bfloat16, "cuda", _record, kernel_time, free)


def _record(call: Call, grads: Grads, progress: Progress | None) -> TaskTimes:
    from ...backends.hopper import forward
    from ...backends.hopper.calls.recorder import record_backward

    return record_backward(call, forward(call), grads)


def kernel_time(call: Call, grads: Grads) -> float:
    """Device microseconds of the attention kernel alone, mean of a few runs. (Some of it may be spent waiting for the end of the
    preprocess, which it overlaps unless it is launched cooperatively.)"""
    from torch.profiler import ProfilerActivity, profile

    from ...backends.hopper import backward, forward

    saved = forward(call)
    for _ in range(GPU_WARM_UP):
        backward(call, saved, grads)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(GPU_RUNS):
            backward(call, saved, grads)
        torch.cuda.synchronize()
    (event,) = (e for e in profiled.key_averages() if "attention_backward" in e.key)
    return float(event.device_time_total / event.count)


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
        call, grads = make_call(problem, head_dim, device, name)
        if device.time is None or name == RECORDED:
            runs.append((schedule, device.record(call, grads, None)))
        measured = runs[-1][1].makespan if device.time is None else device.time(call, grads)
        observations.append(Observation(schedule, measured))
    found, rows = fit(observations, estimate(runs), device.free), []
    for (schedule, measured), error in zip(observations, found.errors, strict=True):
        problem = schedule.problem
        row = {"head_dim": head_dim, "mask": str(problem.mask), "seqlen": problem.q_len, "batch": problem.batch, "schedule": schedule.name}
        times = {"measured_us": round(measured, 1), "predicted_us": round(measured * (1 + error), 1)}
        rows.append({**row, **times, "error": round(error, 4)})
    return found, rows


def make_call(problem: Problem, head_dim: int, device: Device, schedule: str, elements: BooleanMask | None = None) -> tuple[Call, Grads]:
    """A call and its gradient, with standard normal entries. elements: of the mask, if it is a matrix."""
    source = torch.Generator(device.device).manual_seed(0)
    q_heads = problem.heads * problem.group
    sizes = ((problem.q_len, q_heads), (problem.kv_len, problem.heads), (problem.kv_len, problem.heads), (problem.q_len, q_heads))
    rows = (torch.randn(problem.batch, *size, head_dim, generator=source, device=device.device) for size in sizes)
    q, k, v, dout = (x.to(device.dtype) for x in rows)
    modifiers = None if elements is None else Modifiers(elements=elements)
    return Call(q, k, v, AttentionOptions(problem.mask, head_dim**-0.5, 0.0, schedule), modifiers=modifiers), Grads(dout)
