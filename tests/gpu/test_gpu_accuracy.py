"""The Hopper kernels against dense fp64: sizes, dtypes, head groups, masks, layouts and schedules."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from budget import FLOOR, assert_near
from dash_attn import Causal, Documents, Full, Mask, Prefix, Window, flash_attn_func
from dense import Results, assert_same_bits, dense, largest_error, run_ours
from gpu_helpers import DEVICE, Inputs, assert_accurate, full_size, gpu_inputs, ragged_map, served

pytestmark = pytest.mark.gpu

BOTH = [Full(), Causal()]
LENGTHS = (1, 17, 63, 64, 65, 127, 129, 500, 1000)
UNEQUAL = [(1, 129), (129, 1), (65, 500), (500, 65), (300, 1000), (1000, 300)]
OTHER_MASKS = [
    Window(200, 0),
    Window(100, 50),
    Window(0, 0),
    Window(-1, 70),
    Documents((100, 500, 13, 387)),
    Documents((333, 667), causal=False),
    Prefix(333),
    ragged_map(1000, 1000),
]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("mask", BOTH, ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_lengths(dim: int, mask: Mask, length: int) -> None:
    assert_accurate(gpu_inputs(length, length, dim=dim, batch=2), mask)


@pytest.mark.parametrize("lengths", UNEQUAL, ids=str)
@pytest.mark.parametrize("mask", [*BOTH, Window(60, 20)], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_unequal_lengths(dim: int, mask: Mask, lengths: tuple[int, int]) -> None:
    assert_accurate(gpu_inputs(*lengths, dim=dim, batch=2), mask)


@pytest.mark.parametrize("length", [17, 129, 1000])
@pytest.mark.parametrize("mask", [*BOTH, Window(200, 0)], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_float16(dim: int, mask: Mask, length: int) -> None:
    assert_accurate(gpu_inputs(length, length, dim=dim, dtype=torch.float16), mask)


@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.parametrize("mask", BOTH, ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_grouped_query_heads(dim: int, mask: Mask, group: int) -> None:
    assert_accurate(gpu_inputs(700, 700, (8, 8 // group), dim, batch=2), mask)


@pytest.mark.parametrize("mask", OTHER_MASKS, ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_masks(dim: int, mask: Mask) -> None:
    assert_accurate(gpu_inputs(1000, 1000, dim=dim, batch=2), mask)


@pytest.mark.parametrize("mask", [Documents((100, 500, 13, 387)), ragged_map(1000, 1000)], ids=str)
def test_masks_in_float16(mask: Mask) -> None:
    assert_accurate(gpu_inputs(1000, 1000, dtype=torch.float16), mask)


@pytest.mark.parametrize("scale", [0.02, 0.5])
def test_softmax_scale(scale: float) -> None:
    """0.5 makes a softmax that is nearly one-hot."""
    assert_accurate(gpu_inputs(500, 500), Causal(), scale)


@pytest.mark.parametrize("dim", [64, 128])
def test_queries_that_attend_nothing(dim: int) -> None:
    q_len, kv_len = 1000, 300
    ours = assert_accurate(gpu_inputs(q_len, kv_len, dim=dim), Causal())
    blind = q_len - kv_len
    assert (ours.out[:, :blind] == 0).all()
    assert (ours.lse[:, :, :blind] == -torch.inf).all()
    assert (ours.dq[:, :blind] == 0).all()
    assert (ours.dq[:, blind + 1 :] != 0).any(), "the control: the others have gradients"


@pytest.mark.parametrize("mask", [*BOTH, Window(60, 20)], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_negative_scores(dim: int, mask: Mask) -> None:
    """Up to head dim 128 maxima are found by the bits of scores, whose order is the opposite where all of a row are negative."""
    drawn, k, v, dout = gpu_inputs(700, 700, dim=dim)
    q = drawn.abs()
    q[:, ::3] = drawn[:, ::3]
    q[:, 7::50] = 0
    assert_accurate((q, -k.abs(), v, dout), mask)


def test_keys_that_nobody_attends() -> None:
    ours = assert_accurate(gpu_inputs(100, 1000), Window(10, 0))
    assert (ours.dk[:, :880] == 0).all()
    assert (ours.dv[:, :880] == 0).all()
    assert (ours.dv[:, -100:] != 0).any()


@pytest.mark.parametrize(("mask", "dim"), [(Causal(), 128), (Full(), 128), (Causal(), 64), (Full(), 64)], ids=str)
def test_full_size(mask: Mask, dim: int) -> None:
    """Two heads of the last sequence, computed while all the others keep the GPU busy."""
    inputs = full_size(4096, (2048 // dim, 2048 // dim), dim)
    ours = run_ours(inputs, mask)
    part = Results(*(r[-1:, -2:] if name == "lse" else r[-1:, :, -2:] for name, r in ours._asdict().items()))
    assert_near(part, tuple(x[-1:, :, -2:] for x in inputs), mask)


@pytest.mark.parametrize(("schedule", "mask"), served(), ids=str)
def test_every_schedule(schedule: str, mask: Mask) -> None:
    inputs = gpu_inputs(1000, 1000)
    ours = assert_accurate(inputs, mask, schedule=schedule)
    assert_same_bits(run_ours(inputs, mask, schedule=schedule), ours, "again")


@pytest.mark.parametrize("mask", BOTH, ids=str)
def test_unordered(mask: Mask) -> None:
    assert_accurate(gpu_inputs(1000, 1000), mask, accumulation="unordered")


def packed(x: Tensor) -> Tensor:
    """The second of three tensors interleaved per token, as one projection makes q, k and v."""
    storage = torch.zeros(*x.shape[:2], 3, *x.shape[2:], dtype=x.dtype, device=x.device)
    storage[:, :, 1] = x
    return storage[:, :, 1]


def heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def misaligned(x: Tensor) -> Tensor:
    """Starts two bytes behind a 16-byte boundary."""
    return torch.zeros(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape).copy_(x)


def length_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def odd_rows(x: Tensor) -> Tensor:
    """Rows of an odd number of elements: no row but the first lies on a 16-byte boundary."""
    storage = torch.zeros(*x.shape[:3], x.shape[3] + 1, dtype=x.dtype, device=x.device)
    storage[..., :-1] = x
    return storage[..., :-1]


@pytest.mark.parametrize("layout", [packed, heads_first, misaligned, length_first, odd_rows])
def test_layouts_do_not_reach_the_bits(layout: object) -> None:
    assert callable(layout)
    inputs = gpu_inputs(300, 300, (4, 4), batch=2)
    moved: Inputs = tuple(layout(x) for x in inputs)  # type: ignore[assignment]
    assert all(torch.equal(a, b) for a, b in zip(moved, inputs, strict=True))
    assert_same_bits(run_ours(moved, Causal()), run_ours(inputs, Causal()))


def test_gradient_of_a_sum() -> None:
    """PyTorch hands such a backward one number, expanded to the shape of the output."""
    q, k, v, dout = gpu_inputs(300, 300)
    expanded = torch.ones((), dtype=q.dtype, device=DEVICE).expand(dout.shape)
    assert_same_bits(run_ours((q, k, v, expanded), Causal()), run_ours((q, k, v, torch.ones_like(dout)), Causal()))


@pytest.mark.parametrize("mask", BOTH, ids=str)
def test_one_tensor_as_q_k_and_v(mask: Mask) -> None:
    x, *_, dout = gpu_inputs(300, 300, (2, 2))

    def gradient(attention: object, dtype: torch.dtype) -> Tensor:
        assert callable(attention)
        leaf = x.to(dtype).requires_grad_()
        return torch.autograd.grad(attention(leaf), leaf, dout.to(dtype))[0]

    with DEVICE:
        exact = gradient(lambda leaf: dense(leaf, leaf, leaf, mask)[0], torch.float64)
        plain = gradient(lambda leaf: dense(leaf, leaf, leaf, mask)[0], x.dtype)
    ours = gradient(lambda leaf: flash_attn_func(leaf, leaf, leaf, mask=mask), x.dtype)
    assert largest_error(ours, exact) <= 2 * largest_error(plain, exact) + FLOOR * exact.abs().amax().item()
