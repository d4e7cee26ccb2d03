"""flash_attn_func against dense attention in fp64: values, gradients, and how little memory it takes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from budget import assert_within_budget
from dash_attn import Causal, Documents, Full, Mask, Prefix, ScheduleError, TileMap, Window, flash_attn_func
from dash_attn.execution.interleaving import interleaving
from dash_attn.scheduling import GENERATORS
from dense import Results, assert_same_bits, dense, random_inputs, run_dense, run_ours

BLOCKS = np.random.default_rng(3).random((6, 5)) < 0.5
BLOCKS[2] = False  # a row of blocks that attends to nothing

CASES = [
    (Full(), 200, 200),
    (Full(), 64, 128),
    (Full(), 1, 1),
    (Full(), 1, 300),
    (Full(), 300, 1),
    (Causal(), 257, 257),
    (Causal(), 100, 300),
    (Causal(), 300, 100),  # the first 200 queries attend to nothing
    (Window(30, 0), 300, 300),
    (Window(17, 40), 190, 310),
    (Window(0, 0), 130, 130),
    (Documents((5, 100, 1, 130, 77)), 313, 313),
    (Documents((150, 9, 141), causal=False), 300, 300),
    (Prefix(70), 260, 260),
    (Prefix(150), 90, 200),
    (TileMap(BLOCKS, 50, 70), 300, 310),
]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((1, 1, 64), (4, 2, 40), (4, 1, 16), (2, 2, 128))  # query heads, KV heads, head dim


def name_of(case: tuple[Mask, int, int]) -> str:
    return f"{case[0]}-{case[1]}x{case[2]}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda i: name_of(CASES[i]))
def test_error_is_at_most_twice_plain_pytorch(number: int, dtype: torch.dtype) -> None:
    mask, q_len, kv_len = CASES[number]
    q_heads, kv_heads, dim = SHAPES[(number + DTYPES.index(dtype)) % len(SHAPES)]
    inputs = random_inputs(q_len, kv_len, (q_heads, kv_heads), dim, dtype, batch=2, seed=number)
    ours = run_ours(inputs, mask)
    assert ours.lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_within_budget(ours, run_dense(inputs, mask, dtype), run_dense(inputs, mask, torch.float64))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("softcap", [0.5, 20.0])
@pytest.mark.parametrize("mask", [Full(), Causal(), Window(40, 10)], ids=str)
def test_softcap_and_scale(mask: Mask, softcap: float, dtype: torch.dtype) -> None:
    inputs = random_inputs(150, 290, (4, 2), 32, dtype, seed=5)
    choices = {"scale": -0.7, "softcap": softcap}
    ours = run_ours(inputs, mask, softmax_scale=-0.7, softcap=softcap)
    assert_within_budget(ours, run_dense(inputs, mask, dtype, **choices), run_dense(inputs, mask, torch.float64, **choices))


@pytest.mark.parametrize("schedule", GENERATORS)
@pytest.mark.parametrize("mask", [Full(), Causal(), Documents((200, 312)), Window(150, 60)], ids=str)
def test_every_schedule_that_serves_the_mask(mask: Mask, schedule: str) -> None:
    inputs = random_inputs(512, 512, (2, 2), 16, torch.float64)
    only = {"shift": (Full(),), "shift_blocks": (Full(),), "symmetric_shift": (Full(), Causal())}
    if mask not in only.get(schedule, (mask,)):
        with pytest.raises(ScheduleError, match=f"{schedule} serves"):
            run_ours(inputs, mask, schedule=schedule)
        return
    ours = run_ours(inputs, mask, schedule=schedule)
    truth = run_dense(inputs, mask, torch.float64)
    assert_within_budget(ours, truth, truth)


def test_large_scores_do_not_overflow() -> None:
    q, k, v, dout = random_inputs(130, 260, dim=16, dtype=torch.float64)
    inputs = (q * 300, k * 300, v, dout)
    ours, truth = run_ours(inputs, Causal()), run_dense(inputs, Causal(), torch.float64)
    for mine, exact in zip(ours, truth, strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("mask", "q_len", "kv_len"), CASES, ids=map(name_of, CASES))
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_gradcheck_across_tiles(mask: Mask, q_len: int, kv_len: int, softcap: float) -> None:
    q, k, v, _ = random_inputs(q_len, kv_len, (2, 1), 4, torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(lambda *x: flash_attn_func(*x, mask=mask, softcap=softcap), leaves, fast_mode=True)


@pytest.mark.parametrize("mask", [Full(), Causal(), Window(2, 1), Documents((2, 3)), Prefix(2)], ids=str)
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_gradcheck_of_every_element(mask: Mask, softcap: float) -> None:
    q, k, v, _ = random_inputs(5, 5, (4, 2), 2, torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(lambda *x: flash_attn_func(*x, mask=mask, softcap=softcap), leaves)


@st.composite
def masks_and_lengths(draw: st.DrawFn) -> tuple[Mask, int, int]:
    q_len, kv_len = draw(st.integers(1, 270)), draw(st.integers(1, 520))
    kind = draw(st.sampled_from(["full", "causal", "window", "documents", "prefix", "tiles"]))
    if kind == "window":
        return Window(draw(st.integers(-1, 300)), draw(st.integers(-1, 300))), q_len, kv_len
    if kind == "documents":
        lengths = draw(st.lists(st.integers(1, 150), min_size=1, max_size=5))
        return Documents(tuple(lengths), draw(st.booleans())), sum(lengths), sum(lengths)
    if kind == "prefix":
        return Prefix(draw(st.integers(0, kv_len))), q_len, kv_len
    if kind == "tiles":
        block_q, block_kv = draw(st.integers(20, 200)), draw(st.integers(20, 200))
        shape = (-(-q_len // block_q), -(-kv_len // block_kv))
        kept = draw(st.lists(st.booleans(), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]))
        return TileMap(np.array(kept).reshape(shape), block_q, block_kv), q_len, kv_len
    return (Full() if kind == "full" else Causal()), q_len, kv_len


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    masks_and_lengths(),
    st.sampled_from([(1, 1), (2, 2), (2, 1), (3, 3), (6, 2)]),
    st.sampled_from(["auto", "ascending", "descending", "spt", "alternating", "arrival", "weave"]),
    st.integers(1, 3),
    st.integers(8, 40),
    st.integers(0, 2**32),
)
def test_any_mask_shape_schedule_and_interleaving(
    case: tuple[Mask, int, int], heads: tuple[int, int], schedule: str, batch: int, workers: int, seed: int
) -> None:
    mask, q_len, kv_len = case
    inputs = random_inputs(q_len, kv_len, heads, 8, torch.float64, batch, seed % 1000)
    calm = run_ours(inputs, mask, schedule=schedule)
    truth = run_dense(inputs, mask, torch.float64)
    assert_within_budget(calm, truth, truth)
    with interleaving(seed, workers=workers):
        assert_same_bits(run_ours(inputs, mask, schedule=schedule), calm, f"seed {seed}, {workers} workers")


def test_flash_attention_arguments_and_masks_agree() -> None:
    q, k, v, _ = random_inputs(150, 200)
    pairs = [
        ({"causal": True}, Causal()),
        ({"window_size": (-1, 0)}, Causal()),
        ({"window_size": (20, 30)}, Window(20, 30)),
        ({"causal": True, "window_size": (20, 30)}, Window(20, 0)),
        ({"causal": True, "window_size": (-1, 30)}, Causal()),
        ({}, Full()),
    ]
    for arguments, mask in pairs:
        assert torch.equal(flash_attn_func(q, k, v, **arguments), flash_attn_func(q, k, v, mask=mask)), arguments


def test_positional_order_is_flash_attentions() -> None:
    q, k, v, _ = random_inputs(100, 100)
    positional = flash_attn_func(q, k, v, 0.0, 0.3, True, (40, 40), 5.0, None, True, True)
    named = flash_attn_func(q, k, v, softmax_scale=0.3, mask=Window(40, 0), softcap=5.0, return_lse=True)
    assert torch.equal(positional[0], named[0])
    assert torch.equal(positional[1], named[1])
    assert positional[2] is None


def test_every_subset_of_gradients() -> None:
    q, k, v, dout = random_inputs(100, 140)
    full = run_ours((q, k, v, dout), Causal())
    for wanted in range(8):
        leaves = [x.detach().requires_grad_(bool(wanted >> i & 1)) for i, x in enumerate((q, k, v))]
        out = flash_attn_func(*leaves, causal=True)
        assert out.requires_grad == (wanted > 0)
        if wanted:
            out.backward(dout)
        for leaf, gradient in zip(leaves, full[2:], strict=True):
            assert (leaf.grad is not None) == leaf.requires_grad
            assert leaf.grad is None or torch.equal(leaf.grad, gradient)


def test_q_k_and_v_may_be_one_tensor() -> None:
    x, _, _, dout = random_inputs(150, 150)
    separate = run_ours((x, x, x, dout), Causal())
    shared = x.clone().requires_grad_()
    flash_attn_func(shared, shared, shared, causal=True).backward(dout)
    torch.testing.assert_close(shared.grad, separate.dq + separate.dk + separate.dv)


def test_strides_do_not_matter() -> None:
    inputs = random_inputs(150, 200, (4, 4), 24, batch=2)
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    padded = [torch.nn.functional.pad(x, (3, 2))[..., 3:-2] for x in inputs]
    reversed_twice = [x.flip(3).contiguous().flip(3) for x in inputs]
    expected = run_ours(inputs, Causal())
    for views in (heads_first, padded, reversed_twice):
        assert_same_bits(run_ours(tuple(views), Causal()), expected)


def test_expanded_views_and_expanded_output_gradients() -> None:
    q, k, v, _ = random_inputs(100, 150, (2, 1), 16)
    wide_k, wide_v = k.expand(-1, -1, 2, -1), v.expand(-1, -1, 2, -1)
    assert torch.equal(flash_attn_func(q, wide_k, wide_v), flash_attn_func(q, wide_k.contiguous(), wide_v.contiguous()))
    leaf = q.clone().requires_grad_()
    flash_attn_func(leaf, k, v).sum().backward()
    ones = run_ours((q, k, v, torch.ones_like(q)), Full())
    assert torch.equal(leaf.grad, ones.dq)


@pytest.mark.parametrize(("batch", "q_len", "kv_len"), [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0)])
def test_nothing_to_attend(batch: int, q_len: int, kv_len: int) -> None:
    inputs = random_inputs(q_len, kv_len, (4, 2), 16, batch=batch)
    ours = run_ours(inputs, Causal())
    assert ours.out.shape == inputs[0].shape
    assert ours.lse.shape == (batch, 4, q_len)
    assert (ours.lse == -torch.inf).all()
    for result, like in zip((ours.out, *ours[2:]), (inputs[0], *inputs[:3]), strict=True):
        assert result.shape == like.shape
        assert not result.any()


def test_queries_that_attend_nothing_get_zeros() -> None:
    inputs = random_inputs(300, 100, (2, 1), 16)
    ours = run_ours(inputs, Causal())
    assert not ours.out[:, :200].any()
    assert (ours.lse[:, :, :200] == -torch.inf).all()
    assert not ours.dq[:, :200].any()
    assert ours.lse[:, :, 200:].isfinite().all()
    assert ours.dq[:, 201:].any()


def test_a_mask_that_keeps_nothing() -> None:
    ours = run_ours(random_inputs(130, 200), TileMap(np.zeros((1, 1), dtype=bool), 130, 200))
    assert not any(result.any() for result in (ours.out, *ours[2:]))
    assert (ours.lse == -torch.inf).all()


def test_nan_is_not_hidden() -> None:
    q, k, v, _ = random_inputs(130, 130)
    q[0, 100, 0, 0] = torch.nan
    out, lse = flash_attn_func(q, k, v, causal=True, return_lse=True)
    assert out[0, 100, 0].isnan().all()
    assert lse[0, 0, 100].isnan()
    assert not out[0, :100].isnan().any()
    assert not out[0, 100, 1].isnan().any()


def test_double_backward_is_refused() -> None:
    q, k, v, _ = random_inputs(10, 10)
    q.requires_grad_()
    (dq,) = torch.autograd.grad(flash_attn_func(q, k, v).square().sum(), q, create_graph=True)
    assert torch.equal(dq, torch.autograd.grad(flash_attn_func(q, k, v).square().sum(), q)[0])  # the first are as always
    with pytest.raises(RuntimeError, match="first gradients only"):
        dq.sum().backward()


def test_autocast_leaves_the_arithmetic_alone() -> None:
    inputs = random_inputs(100, 150)
    expected = run_ours(inputs, Causal())
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_bits(run_ours(inputs, Causal()), expected)


def test_no_grad_and_inference_mode() -> None:
    q, k, v, _ = random_inputs(100, 100)
    expected = flash_attn_func(q, k, v)
    with torch.inference_mode():
        assert torch.equal(flash_attn_func(q, k, v), expected)
    with torch.no_grad():
        assert not flash_attn_func(q.requires_grad_(), k, v).requires_grad


class LargestTensor(TorchDispatchMode):
    """Watches every tensor that any operation makes."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(made, torch.Tensor):
                self.numel = max(self.numel, made.numel())
        return result


@pytest.mark.parametrize("mask", [Causal(), Window(300, 0)], ids=str)
def test_memory_is_linear_in_the_length(mask: Mask) -> None:
    length, dim = 4096, 16
    inputs = random_inputs(length, length, (1, 1), dim)
    with LargestTensor() as seen:
        results = run_ours(inputs, mask)
    assert seen.numel == length * dim
    assert isinstance(results, Results)


def test_watching_tensors_sees_a_full_matrix() -> None:
    """The control of the test above."""
    q, k, v, _ = random_inputs(600, 600, (1, 1), 16)
    with LargestTensor() as seen:
        dense(q, k, v, Full())
    assert seen.numel >= 600 * 600
