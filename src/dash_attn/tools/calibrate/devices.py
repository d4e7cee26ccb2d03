"""Devices to measure on: the CPU executor in real threads, where one thread is one worker, and a Hopper GPU."""

from __future__ import annotations

import os
import platform

import torch

from ...call.options import AttentionOptions
from ...scheduling.problem import whole_number
from ...viewing.task_times import TaskTimes
from .measured import Device, Tensors

CPU_RUNS = 9
CPU_HEAD_DIMS = (64, 128)
GPU_RUNS, GPU_WARM_UP = 6, 2


def cpu_device(workers: int | None = None) -> Device:
    """`workers` threads; as many as there are processors, unless told otherwise."""
    from ...backends.cpu.tiles import TILE_KV, TILE_Q

    count = max(2, os.cpu_count() or 2) if workers is None else whole_number("workers", workers)

    def record(tensors: Tensors, options: AttentionOptions) -> TaskTimes:
        from ...backends.cpu import forward
        from ...backends.cpu.recorder import record_backward

        q, k, v, dout = tensors
        out, lse = forward(q, k, v, options)
        runs = (record_backward(dout, q, k, v, out, lse, options, count) for _ in range(CPU_RUNS))
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


def _record(tensors: Tensors, options: AttentionOptions) -> TaskTimes:
    from ...backends.hopper import forward
    from ...backends.hopper.calls.recorder import record_backward

    q, k, v, dout = tensors
    return record_backward(dout, q, k, v, *forward(q, k, v, options), options)


def kernel_time(tensors: Tensors, options: AttentionOptions) -> float:
    """Device microseconds of the attention kernel alone, mean of a few runs. (Some of it may be spent waiting for the end of the
    preprocess, which it overlaps unless it is launched cooperatively.)"""
    from torch.profiler import ProfilerActivity, profile

    from ...backends.hopper import backward, forward

    q, k, v, dout = tensors
    out, lse = forward(q, k, v, options)
    for _ in range(GPU_WARM_UP):
        backward(dout, q, k, v, out, lse, options)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(GPU_RUNS):
            backward(dout, q, k, v, out, lse, options)
        torch.cuda.synchronize()
    (event,) = (e for e in profiled.key_averages() if "attention_backward" in e.key)
    return float(event.device_time_total / event.count)
