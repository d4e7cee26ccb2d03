"""A Hopper GPU as a device to measure on."""

from __future__ import annotations

import torch

from ...call.call import Call, Grads
from ...call.options import AttentionOptions
from ...viewing.task_times import TaskTimes
from .measured import Device, Tensors

RUNS, WARM_UP = 6, 2


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
    return Device(name, "hopper", workers, tiles, torch.bfloat16, "cuda", record, kernel_time, free)


def record(tensors: Tensors, options: AttentionOptions) -> TaskTimes:
    from ...backends.hopper import forward
    from ...backends.hopper.calls.recorder import record_backward

    q, k, v, dout = tensors
    call = Call(q, k, v, options)
    return record_backward(call, forward(call), Grads(dout))


def kernel_time(tensors: Tensors, options: AttentionOptions) -> float:
    """Device microseconds of the attention kernel alone, mean of a few runs. (Some of it may be spent waiting for the end of the
    preprocess, which it overlaps unless it is launched cooperatively.)"""
    from torch.profiler import ProfilerActivity, profile

    from ...backends.hopper import backward, forward

    q, k, v, dout = tensors
    call = Call(q, k, v, options)
    saved = forward(call)
    for _ in range(WARM_UP):
        backward(call, saved, Grads(dout))
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(RUNS):
            backward(call, saved, Grads(dout))
        torch.cuda.synchronize()
    (event,) = (e for e in profiled.key_averages() if "attention_backward" in e.key)
    return float(event.device_time_total / event.count)
