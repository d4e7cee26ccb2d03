"""The CPU executor in real threads as a device to measure on: one thread is one worker."""

from __future__ import annotations

import os
import platform

import torch

from ...call.call import Call, Grads
from ...call.options import AttentionOptions
from ...viewing.task_times import TaskTimes
from .measured import Device, Tensors

RUNS = 9
HEAD_DIMS = (64, 128)


def cpu_device(workers: int | None = None) -> Device:
    """`workers` threads; as many as there are processors, unless told otherwise."""
    from ...backends.cpu.tiles import TILE_KV, TILE_Q

    count = max(2, os.cpu_count() or 2) if workers is None else workers
    if count < 1:
        raise ValueError(f"workers must be a whole number >= 1; got {count}")

    def record(tensors: Tensors, options: AttentionOptions) -> TaskTimes:
        from ...backends.cpu import forward
        from ...backends.cpu.recorder import record_backward

        q, k, v, dout = tensors
        call = Call(q, k, v, options)
        saved = forward(call)
        runs = (record_backward(call, saved, Grads(dout), count) for _ in range(RUNS))
        return min(runs, key=lambda spans: spans.makespan)  # whatever else runs here only adds time

    tiles = dict.fromkeys(HEAD_DIMS, (TILE_Q, TILE_KV))
    # Medians over tasks: a thread that is put aside now and then would lead a fit to whole times astray.
    return Device(platform.processor() or platform.machine(), "cpu", count, tiles, torch.float32, "cpu", record)
