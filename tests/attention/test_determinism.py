"""The determinism contract on the CPU, each promise next to a control that breaks it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from dash_attn import Causal, Documents, Full, Mask, ScheduleError, Window
from dash_attn.execution.interleaving import interleaving
from dash_attn.scheduling import GENERATORS
from dense import Results, assert_same_bits, digest, random_inputs, repeated, run_ours, same_bits
from gpu_helpers import run_script

MASKS = [Full(), Causal(), Window(200, 100), Documents((300, 20, 320))]
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


@pytest.fixture(scope="module")
def inputs() -> Inputs:
    return random_inputs(640, 640, (4, 2), 32)  # five KV tiles: two partials sum to the same bits in either order


@pytest.fixture
def threads_restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_ordered_bits_survive_every_interleaving(inputs: Inputs, mask: Mask) -> None:
    expected, run = run_ours(inputs, mask), repeated(inputs, mask)
    for seed in range(20):
        with interleaving(seed):
            assert_same_bits(run(), expected, f"seed {seed}")
    for seed in range(3):
        with interleaving(seed, threads=True):
            assert_same_bits(run_ours(inputs, mask), expected, f"threads, seed {seed}")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_ordered_bits_in_other_dtypes(dtype: torch.dtype) -> None:
    inputs = random_inputs(640, 640, (2, 1), 32, dtype)
    expected = run_ours(inputs, Causal())
    for seed in range(5):
        with interleaving(seed, threads=seed == 4):
            assert_same_bits(run_ours(inputs, Causal()), expected, f"seed {seed}")


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_unordered_differs_between_interleavings(inputs: Inputs, mask: Mask) -> None:
    """The control: the same interleavings that leave ordered bits alone change unordered dQ, and nothing else."""
    runs = []
    for seed in (*range(5), 0):
        with interleaving(seed):
            runs.append(run_ours(inputs, mask, accumulation="unordered"))
    assert len({digest(r.dq) for r in runs[:5]}) > 1
    assert_same_bits(runs[5], runs[0], "the same seed again")
    for r in runs:
        assert same_bits(r.dk, runs[0].dk)
        assert same_bits(r.dv, runs[0].dv)
        torch.testing.assert_close(r.dq, runs[0].dq)


def test_unordered_is_honestly_not_reproducible(inputs: Inputs) -> None:
    runs = [run_ours(inputs, Full(), accumulation="unordered") for _ in range(4)]
    assert len({digest(r.dq) for r in runs}) > 1


def test_deterministic_false_is_still_ordered(inputs: Inputs) -> None:
    assert_same_bits(run_ours(inputs, Causal(), deterministic=False), run_ours(inputs, Causal(), deterministic=True))


@pytest.mark.parametrize("schedule", GENERATORS)
@pytest.mark.parametrize("mask", [Full(), Causal(), Window(200, 100)], ids=str)
def test_every_schedule_is_reproducible(inputs: Inputs, mask: Mask, schedule: str) -> None:
    try:
        run = repeated(inputs, mask, schedule=schedule)
        expected = run()
    except ScheduleError:
        pytest.skip(f"{schedule} does not serve {mask}")
    for seed in range(3):
        with interleaving(seed, threads=seed == 2):
            assert_same_bits(run(), expected, f"{schedule}, seed {seed}")


def test_the_order_decides_the_bits(inputs: Inputs) -> None:
    """The control of the test above: another order gives other bits."""
    up, down = (run_ours(inputs, Causal(), schedule=name) for name in ("ascending", "descending"))
    assert not same_bits(up.dk, down.dk)
    assert not same_bits(up.dq, run_ours(inputs, Causal(), schedule="spt").dq)


@pytest.mark.parametrize("mask", [Full(), Causal(), Documents((100, 200))], ids=str)
def test_batch_and_position_do_not_reach_the_bits(mask: Mask) -> None:
    together = random_inputs(300, 300, (4, 2), 40, batch=5)
    expected = run_ours(together, mask)
    for position in (0, 3, 4):
        alone = run_ours(tuple(x[position : position + 1] for x in together), mask)
        assert_same_bits(alone, Results(*(r[position : position + 1] for r in expected)), f"sequence {position}")
    moved = run_ours(tuple(x[[4, 1, 0]] for x in together), mask)
    assert_same_bits(moved, Results(*(r[[4, 1, 0]] for r in expected)), "permuted batch")


@pytest.mark.parametrize("mask", [Full(), Causal()], ids=str)
def test_a_tensor_parallel_rank_keeps_the_bits(mask: Mask) -> None:
    whole = random_inputs(400, 400, (6, 3), 24)
    expected = run_ours(whole, mask)
    q, k, v, dout = whole
    for first in range(3):
        queries, keys = slice(2 * first, 2 * first + 2), slice(first, first + 1)
        part = run_ours((q[:, :, queries], k[:, :, keys], v[:, :, keys], dout[:, :, queries]), mask, head_offset=first)
        assert_same_bits(part, expected.of_heads(queries, keys), f"KV head {first}")


def test_head_offset_matters() -> None:
    """The control: odd heads of the causal schedule walk the other way."""
    q, k, v, dout = random_inputs(400, 400, (1, 1), 24)
    even, odd = (run_ours((q, k, v, dout), Causal(), head_offset=offset) for offset in (0, 1))
    assert not same_bits(even.dk, odd.dk)


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_worker_count_does_not_reach_the_bits(inputs: Inputs, mask: Mask) -> None:
    expected, run = run_ours(inputs, mask), repeated(inputs, mask)
    for workers in (5, 8, 78, 114, 1000):
        with interleaving(workers, workers=workers):
            assert_same_bits(run(), expected, f"{workers} workers")


def test_shift_depends_on_the_worker_count(inputs: Inputs) -> None:
    """The control: the paper's shift cuts its blocks to the workers, and does not claim otherwise."""
    results = []
    for workers in (3, 132):
        with interleaving(None, workers=workers):
            results.append(run_ours(inputs, Full(), schedule="shift"))
    assert not same_bits(results[0].dq, results[1].dq)


@pytest.mark.parametrize("dim", [16, 40, 64, 128])
@pytest.mark.usefixtures("threads_restored")
def test_torch_threads_do_not_reach_the_bits(dim: int) -> None:
    inputs = random_inputs(300, 300, (2, 1), dim)
    results = []
    for count in (1, 2, 3, 8):
        torch.set_num_threads(count)
        results.append(run_ours(inputs, Causal()))
        assert torch.get_num_threads() == count, "the caller's thread count must come back"
    for count, result in zip((2, 3, 8), results[1:], strict=True):
        assert_same_bits(result, results[0], f"{count} threads")


@pytest.mark.usefixtures("threads_restored")
def test_thread_count_comes_back_after_an_error(inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        assert torch.get_num_threads() == 1
        raise ArithmeticError

    monkeypatch.setattr("dash_attn.backends.cpu.passes.run_plan", fail)
    torch.set_num_threads(3)
    with pytest.raises(ArithmeticError):
        run_ours(inputs, Causal())
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("threads_restored")
def test_calls_on_several_threads_at_once(inputs: Inputs) -> None:
    torch.set_num_threads(3)
    expected = run_ours(inputs, Causal())
    results: list[Results] = []
    workers = [threading.Thread(target=lambda: results.append(run_ours(inputs, Causal()))) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(results) == 4
    for result in results:
        assert_same_bits(result, expected)
    assert torch.get_num_threads() == 3


def test_alignment_does_not_reach_the_bits() -> None:
    inputs = random_inputs(200, 200, (2, 2), 40)
    expected = run_ours(inputs, Causal())
    for offset in (1, 3, 8):
        shifted = []
        for x in inputs:
            storage = torch.empty(x.numel() + offset)
            shifted.append(storage[offset:].view(x.shape).copy_(x))
        assert_same_bits(run_ours(tuple(shifted), Causal()), expected, f"offset {offset}")


def test_uninitialised_memory_is_never_read(inputs: Inputs) -> None:
    """PyTorch fills new memory with NaN in this mode, so a tile nobody stores to would show."""
    cases = [(mask, inputs) for mask in MASKS]
    cases.append((Causal(), random_inputs(300, 100)))  # Q tiles that attend to nothing
    cases.append((Window(10, 0), random_inputs(100, 300)))  # KV tiles that nobody attends
    expected = [run_ours(tensors, mask) for mask, tensors in cases]
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        for (mask, tensors), result in zip(cases, expected, strict=True):
            assert_same_bits(run_ours(tensors, mask), result, str(mask))
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_first_differing_element_is_named(inputs: Inputs) -> None:
    result = run_ours(inputs, Causal())
    changed = result.dq.clone()
    changed[0, 7, 2, 5] = -changed[0, 7, 2, 5]
    with pytest.raises(AssertionError, match=r"dq\[0, 7, 2, 5\].* 1 elements differ"):
        assert_same_bits(result._replace(dq=changed), result)


SCRIPT = """
from dash_attn import Causal
from dense import digest, random_inputs, run_ours
print(digest(*run_ours(random_inputs(640, 640, (4, 2), 40), Causal())))
"""


def test_another_process_gives_the_same_bits() -> None:
    done = run_script(SCRIPT, OMP_NUM_THREADS="4", PYTHONHASHSEED="7")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == digest(*run_ours(random_inputs(640, 640, (4, 2), 40), Causal()))
