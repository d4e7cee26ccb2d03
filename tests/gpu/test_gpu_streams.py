"""How training programs call us: CUDA graphs, activation checkpointing, streams, threads; never waiting for the GPU."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dash_attn import Causal, Full, Mask, flash_attn_func
from dash_attn.attention.autograd import attention_backward, attention_forward
from dash_attn.call.call import Call, Grads, Saved
from dash_attn.call.options import AttentionOptions
from dense import Results, assert_same_bits, run_ours
from gpu_helpers import full_size, gpu_inputs, hopper, poisoned_memory
from graphs import capture

pytestmark = pytest.mark.gpu

BOTH = [Full(), Causal()]
LENGTH = 2300  # long enough for circles of chains
LONG_SLEEP = 1_000_000_000  # cycles: about half a second


@pytest.mark.parametrize("mask", BOTH, ids=str)
def test_cuda_graph(mask: Mask) -> None:
    static = gpu_inputs(LENGTH, LENGTH)
    graph, captured = capture(lambda: run_ours(static, mask), warm_ups=3)
    for replay in range(10):
        fresh = gpu_inputs(LENGTH, LENGTH, seed=replay)
        for old, new in zip(static, fresh, strict=True):
            old.copy_(new)
        for result in captured:
            result.fill_(torch.nan)
        graph.replay()
        assert_same_bits(captured, run_ours(fresh, mask), f"replay {replay}")


@pytest.mark.parametrize("mask", BOTH, ids=str)
def test_graphs_run_beside_each_other(mask: Mask) -> None:
    """Two graphs and eager calls of one prepared call, on three streams at once: nothing a kernel counts with is shared."""
    inputs = full_size(1024)
    expected = run_ours(inputs, mask)
    sides = [torch.cuda.Stream() for _ in range(2)]
    graphs, captured = zip(*(capture(lambda: run_ours(inputs, mask), warm_ups=0) for _ in sides), strict=True)
    for turn in range(10):
        for result in (x for results in captured for x in results):
            result.fill_(torch.nan)
        for side, graph in zip(sides, graphs, strict=True):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                graph.replay()
        with poisoned_memory():
            eager = run_ours(inputs, mask)
        for side in sides:
            torch.cuda.current_stream().wait_stream(side)
        for result in (eager, *captured):
            assert_same_bits(result, expected, f"turn {turn}")


def test_ticket_counters_are_left_at_zero() -> None:
    for length, heads in ((64, (1, 1)), (1000, (4, 2)), (3000, (40, 8))):
        for mask in BOTH:
            run_ours(gpu_inputs(length, length, heads), mask)
    counters = hopper("driver.stream_counters")._counters
    assert counters
    assert not any(of_device.any() for of_device in counters.values())


def test_a_shape_that_was_never_run_cannot_be_captured() -> None:
    inputs = gpu_inputs(977, 977)
    with pytest.raises(RuntimeError, match="run it once before the graph"):
        capture(lambda: run_ours(inputs, Causal()), warm_ups=0)
    torch.cuda.synchronize()
    run_ours(inputs, Causal())


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant: bool) -> None:
    q, k, v, dout = inputs = gpu_inputs(LENGTH, LENGTH)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]

    def layer(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return flash_attn_func(*tensors, causal=True, return_lse=True)

    out, lse = checkpoint(layer, *leaves, use_reentrant=reentrant)
    out.backward(dout)
    gradients = [leaf.grad for leaf in leaves]
    assert_same_bits(Results(out.detach(), lse.detach(), *gradients), run_ours(inputs, Causal()))


@pytest.mark.parametrize("mask", BOTH, ids=str)
def test_another_stream(mask: Mask) -> None:
    inputs = gpu_inputs(LENGTH, LENGTH)
    expected = run_ours(inputs, mask)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        result = run_ours(inputs, mask)
    torch.cuda.current_stream().wait_stream(side)
    assert_same_bits(result, expected)


@pytest.mark.parametrize("mask", BOTH, ids=str)
def test_backward_on_another_stream_than_forward(mask: Mask) -> None:
    q, k, v, dout = inputs = gpu_inputs(LENGTH, LENGTH)
    expected = run_ours(inputs, mask)
    options = AttentionOptions(mask, 128**-0.5)
    out, lse = attention_forward(Call(q, k, v, options))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        *gradients, _ = attention_backward(Call(q, k, v, options), Saved(out, lse), Grads(dout))
    torch.cuda.current_stream().wait_stream(side)
    assert_same_bits(Results(out, lse, *gradients), expected)


@pytest.mark.parametrize("mask", BOTH, ids=str)
def test_several_threads(mask: Mask) -> None:
    """Four threads share one prepared call, each with a stream and inputs of its own."""
    inputs = [gpu_inputs(LENGTH, LENGTH, seed=seed) for seed in range(4)]
    expected = [run_ours(x, mask) for x in inputs]
    torch.cuda.synchronize()
    results: dict[int, list[Results]] = {i: [] for i in range(4)}

    def work(i: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            results[i] += [run_ours(inputs[i], mask) for _ in range(10)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    for i in range(4):
        assert len(results[i]) == 10
        for result in results[i]:
            assert_same_bits(result, expected[i], f"thread {i}")


@pytest.mark.parametrize("mask", BOTH, ids=str)
def test_a_warm_call_never_waits_for_the_gpu(mask: Mask) -> None:
    inputs = gpu_inputs(LENGTH, LENGTH)
    for _ in range(3):
        run_ours(inputs, mask)
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    torch.cuda.set_sync_debug_mode("error")  # PyTorch's own waits raise; the sleep shows any other
    try:
        torch.cuda._sleep(LONG_SLEEP)
        result = run_ours(inputs, mask)
        done.record()
        waited = done.query()
        with pytest.raises(RuntimeError, match="synchroniz"):
            result.dq.sum().item()  # the control
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert not waited
