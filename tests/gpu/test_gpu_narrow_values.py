"""The backward kernel of keys of 192 with values up to 128 (DeepSeek): accuracy, bits, masks, packed sequences, recordings."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from budget import assert_near
from dash_attn import Causal, Documents, Full, Mask, Prefix, Window
from dash_attn.call.call import Call, Grads
from dash_attn.call.options import AttentionOptions
from dense import assert_same_bits, run_ours
from gpu_helpers import DEVICE, REPEATS, assert_accurate, hopper, poisoned_memory, ragged_map
from inputs import Inputs, make_inputs
from packed_batches import run_packed

pytestmark = pytest.mark.gpu

DIMS = (192, 128)
BOTH = [Full(), Causal()]
LENGTHS = [(1, 1), (63, 63), (64, 128), (65, 65), (200, 200), (1, 129), (129, 1), (65, 500), (500, 65), (300, 1000), (1000, 1000)]
OTHER_MASKS = [Window(200, 0), Window(100, 50), Window(-1, 70), Documents((100, 500, 13, 387)), Prefix(333), ragged_map(1000, 1000)]


def inputs_of(
    lengths: tuple[int, int],
    dims: tuple[int, int] = DIMS,
    dtype: torch.dtype = torch.bfloat16,
    heads: tuple[int, int] = (4, 2),
    batch: int = 2,
) -> Inputs:
    return make_inputs(DEVICE, lengths, heads, dims, dtype, batch)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("mask", [*BOTH, Window(60, 20)], ids=str)
def test_lengths(mask: Mask, lengths: tuple[int, int]) -> None:
    assert_accurate(inputs_of(lengths, batch=16 if lengths[0] == 1 else 2), mask)


@pytest.mark.parametrize("mask", OTHER_MASKS, ids=str)
@pytest.mark.parametrize("softcap", [0.0, 15.0])
def test_masks_and_softcap(softcap: float, mask: Mask) -> None:
    q, k, v, dout = inputs_of((1000, 1000))
    q = q * 6 if softcap else q  # so that some scores reach the cap
    ours = run_ours((q, k, v, dout), mask, softcap=softcap)
    assert_near(ours, (q, k, v, dout), mask, softcap=softcap)


@pytest.mark.parametrize("dims", [(192, 64), (192, 96), (136, 128), (180, 100), (192, 1)], ids=str)
@pytest.mark.parametrize("mask", BOTH, ids=str)
def test_other_head_dims_on_this_kernel(mask: Mask, dims: tuple[int, int]) -> None:
    """Zeros fill what is missing."""
    assert hopper("tiles").backward_dims(*dims) == DIMS
    assert_accurate(inputs_of((500, 500), dims), mask)


@pytest.mark.parametrize("mask", [*BOTH, ragged_map(700, 700)], ids=str)
@pytest.mark.parametrize("softcap", [0.0, 15.0])
def test_float16(softcap: float, mask: Mask) -> None:
    inputs = inputs_of((700, 700), dtype=torch.float16)
    assert_near(run_ours(inputs, mask, softcap=softcap), inputs, mask, softcap=softcap)


@pytest.mark.parametrize("heads", [(8, 1), (16, 1), (6, 3)], ids=str)
def test_grouped_query_heads(heads: tuple[int, int]) -> None:
    assert_accurate(inputs_of((500, 500), heads=heads), Causal())


@pytest.mark.parametrize("mask", BOTH, ids=str)
def test_unordered_is_as_accurate(mask: Mask) -> None:
    assert_accurate(inputs_of((1000, 1000)), mask, accumulation="unordered")


@pytest.mark.parametrize("mask", [*BOTH, Window(300, 0)], ids=str)
def test_packed_sequences_have_the_bits_they_have_alone(mask: Mask) -> None:
    parts = [
        make_inputs(DEVICE, pair, (4, 2), DIMS, seed=i) for i, pair in enumerate([(1, 1), (63, 63), (777, 777), (64, 300), (129, 129)])
    ]
    for part, ours in zip(parts, run_packed(parts, mask), strict=True):
        assert_same_bits(ours, run_ours(part, mask), f"sequence of {part[0].shape[1]} queries and {part[1].shape[1]} keys")
        assert_near(ours, part, mask)


@pytest.mark.parametrize("mask", BOTH, ids=str)
def test_full_size_has_the_same_bits_in_every_run(mask: Mask) -> None:
    inputs = inputs_of((8192, 8192), heads=(16, 16))
    expected = run_ours(inputs, mask)
    for run in range(REPEATS // 10):
        with poisoned_memory():
            result = run_ours(inputs, mask)
        assert_same_bits(result, expected, f"run {run}")


def test_the_kernel_of_wide_values_agrees() -> None:
    """Values of 129 columns, of which the last is zero, run on the other kernel, whose P is exact: the bound is that of 16 bits."""
    q, k, v, dout = inputs_of((2000, 2000))
    padded = tuple(torch.nn.functional.pad(x, (0, 1)) for x in (v, dout))
    ours, other = run_ours((q, k, v, dout), Causal()), run_ours((q, k, *padded), Causal())
    for name in ("dq", "dk"):
        assert 0 < difference(getattr(ours, name), getattr(other, name)) < 0.01
    assert difference(ours.dv, other.dv[..., :128]) < 0.01


def difference(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def test_a_recording_notes_every_task() -> None:
    options = AttentionOptions(Causal(), 192**-0.5)
    *tensors, dout = inputs_of((2048, 2048), heads=(8, 8))
    call = Call(*tensors, options)
    spans = hopper("calls.recorder").record_backward(call, hopper("calls.forward").forward(call), Grads(dout))
    assert len(spans.q_tile) == 2 * 8 * sum(-(-2048 // 64) - 2 * i for i in range(16))
    assert (spans.compute_end <= spans.reduce_start).all()
