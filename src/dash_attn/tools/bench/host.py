"""What a call costs the host: microseconds of a warm forward and backward, the GPU left to follow."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ...attention.autograd import attention_backward, attention_forward
from ...call.call import Call, Grads
from ...call.options import AttentionOptions
from .candidates import CUDNN, OURS, Candidate, first_line, make_tensors, ours
from .measure import OK, UNAVAILABLE
from .pytorch_peers import FLASH, pytorch_peers
from .shape import Shape
from .timing import Spread, spread

SHAPE = Shape("causal", 128, 1, 2, 2, 64)
CALLS, ROUNDS = 200, 7
COMPARED = (OURS, CUDNN, FLASH)
ONE_THREAD = "{}, one thread"  # autograd runs the backward in the caller's thread, as torch.autograd.set_multithreading_enabled lets it
OURS_ALONE = f"{OURS}, without autograd"


def measure_host(device: torch.device, synchronize: Callable[[], None], calls: int = CALLS) -> list[dict[str, Any]]:
    steps: dict[str, Callable[[], Any]] = {
        candidate.name: partial(_training_step, candidate, device)
        for candidate in (*ours(schedules=False), *pytorch_peers())
        if candidate.name in COMPARED
    }
    steps |= {ONE_THREAD.format(name): partial(_in_one_thread, make) for name, make in steps.items()}
    steps[OURS_ALONE] = partial(_step_alone, device)
    return [_row(name, make, synchronize, calls) for name, make in steps.items()]


def _row(name: str, make: Callable[[], Callable[[], Any]], synchronize: Callable[[], None], calls: int) -> dict[str, Any]:
    row = {"candidate": name, "calls": calls, "rounds": ROUNDS}
    try:
        step = make()
        median, low, high = host_time(step, synchronize, calls)
    except Exception as error:
        return {**row, "status": UNAVAILABLE, "reason": first_line(error)}
    return {**row, "status": OK, "median_us": median, "p20_us": low, "p80_us": high}


def _training_step(candidate: Candidate, device: torch.device) -> Callable[[], Any]:
    """Forward and backward as a training loop calls them: a new graph every time."""
    tensors = make_tensors(SHAPE, device)
    runner = candidate.prepare(SHAPE, tensors)
    return lambda: torch.autograd.grad(runner.forward(), runner.leaves, tensors.dout)


def _in_one_thread(make: Callable[[], Callable[[], Any]]) -> Callable[[], Any]:
    step = make()

    def run() -> Any:
        with torch.autograd.set_multithreading_enabled(False):
            return step()

    return run


def _step_alone(device: torch.device) -> Callable[[], Any]:
    """What we do ourselves, without autograd: look-up, descriptors, allocations, launches."""
    tensors = make_tensors(SHAPE, device)
    q, k, v = (x.detach() for x in (tensors.q, tensors.k, tensors.v))
    call = Call(q, k, v, AttentionOptions(SHAPE.attended, SHAPE.head_dim**-0.5))

    def step() -> Any:
        return attention_backward(call, attention_forward(call), Grads(tensors.dout))

    return step


def host_time(
    step: Callable[[], Any], synchronize: Callable[[], None], calls: int, clock: Callable[[], float] = time.perf_counter
) -> Spread:
    """Microseconds per call, over rounds of `calls`; the GPU catches up between rounds."""
    return spread([_round(step, synchronize, calls, clock) for _ in range(ROUNDS + 1)][1:])  # the first round warms up


def _round(step: Callable[[], Any], synchronize: Callable[[], None], calls: int, clock: Callable[[], float]) -> float:
    synchronize()
    start = clock()
    for _ in range(calls):
        step()
    return (clock() - start) / calls * 1e6
