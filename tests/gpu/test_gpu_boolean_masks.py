"""Boolean masks on a GPU: any matrix, one for all, per sequence or per head. Results, bits, what they depend on, and what raises."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from boolean_masks import a_tree, draw, scattered
from budget import assert_in_budget, assert_near
from dash_attn import BooleanMask, Causal, TileMap, Window, explain, flash_attn_func
from dash_attn.backends.hopper.calls.mask_bits import _bits
from dash_attn.integrations import sdpa
from dash_attn.masks import PatternPerHead, TilePattern
from dense import Results, assert_same_bits, largest_error, run_dense, run_dense_with_sinks, run_ours, run_ours_with_sinks
from gpu_helpers import DEVICE, REPEATS, gpu_inputs
from graphs import capture
from inputs import make_inputs

pytestmark = pytest.mark.gpu

Q_LEN, KV_LEN = 1000, 1300  # neither fills its last block
BLOCKS = torch.rand(16, 21, generator=torch.Generator().manual_seed(0)) < 0.5
DIMS = [(64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128)]  # of q and k, and of v


def source(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def elements() -> Tensor:
    return BLOCKS.repeat_interleave(64, 0).repeat_interleave(64, 1)[:Q_LEN, :KV_LEN].contiguous()


def holes(seed: int = 0) -> Tensor:
    """Empty, full and partial tiles of every kernel."""
    mask = elements()
    mask[:, 300:700] &= torch.rand(Q_LEN, 400, generator=source(seed)) < 0.8
    mask[512:640] = torch.rand(128, KV_LEN, generator=source(seed + 1)) < 0.02
    return mask.to(DEVICE)


def inputs(dims: tuple[int, int] = (128, 128), heads: tuple[int, int] = (4, 2), batch: int = 2, dtype: torch.dtype = torch.bfloat16) -> Any:
    return make_inputs(DEVICE, (Q_LEN, KV_LEN), heads, dims, dtype, batch, 0)


def assert_near_on_average(ours: Results, tensors: Any, mask: Tensor) -> None:
    """Small matrices have few elements, of which the largest error is luck: so errors are compared on average, with twice those of
    plain PyTorch. Where a query attends one key its dQ is 0 but for roundings: gradients share a slack."""
    truth, plain = (run_dense(tensors, mask, dtype) for dtype in (torch.float64, tensors[0].dtype))
    size = max(rms(x) for x in truth[2:])
    for name, mine, theirs, exact in zip(Results._fields, ours, plain, truth, strict=True):
        finite = exact.isfinite()
        assert torch.equal(mine.isfinite(), finite), name
        error, allowed = (rms((x.double() - exact)[finite]) for x in (mine, theirs))
        assert error <= 2 * allowed + 1e-3 * (size if name.startswith("d") else 1.0), f"{name} is off by {error:.3g}, plain {allowed:.3g}"


def rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt()) if x.numel() else 0.0


@pytest.mark.parametrize("number", range(200))
def test_random_matrices(number: int) -> None:
    drawn = draw(number)
    dims = DIMS[number % len(DIMS)]
    dtype = torch.float16 if number % 7 == 3 else torch.bfloat16
    tensors, mask = make_inputs(DEVICE, drawn.lengths, drawn.heads, dims, dtype, drawn.batch, number), drawn.mask.to(DEVICE)
    ours = run_ours(tensors, mask)
    assert_near_on_average(ours, tensors, mask)
    assert_same_bits(run_ours(tensors, BooleanMask(drawn.mask)), ours, str(drawn))


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("heads", [(4, 2), (2, 2)], ids=str)
def test_larger_matrices(dims: tuple[int, int], heads: tuple[int, int]) -> None:
    tensors, mask = inputs(dims, heads), holes()
    assert isinstance(BooleanMask(mask).pattern, TilePattern)
    assert_near(run_ours(tensors, mask), tensors, mask)


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_softcap(dims: tuple[int, int]) -> None:
    q, k, v, dout = inputs(dims)
    tensors, mask = (6 * q, k, v, dout), holes()
    assert_near(run_ours(tensors, mask, softcap=20.0), tensors, mask, softcap=20.0)


@pytest.mark.parametrize("per_head", [False, True])
def test_sinks(per_head: bool) -> None:
    tensors, sinks = inputs(), torch.randn(4, device=DEVICE)
    mask = torch.stack([holes(seed) if seed < 3 else elements().to(DEVICE) for seed in range(4)]) if per_head else holes()
    ours = run_ours_with_sinks(tensors, sinks, mask=mask)
    plain, truth = (run_dense_with_sinks(tensors, sinks, mask, dtype) for dtype in (tensors[0].dtype, torch.float64))
    assert_in_budget(*(Results(*some[:5]) for some in (ours, plain, truth)))
    assert largest_error(ours.dsinks, truth.dsinks) < 0.02 * truth.dsinks.abs().max()  # a few sums of many that nearly cancel


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_repeats(dims: tuple[int, int]) -> None:
    tensors, mask = inputs(dims, batch=3), BooleanMask(holes())
    expected = run_ours(tensors, mask)
    for _ in range(max(1, REPEATS // 20)):
        assert_same_bits(run_ours(tensors, mask), expected)


def test_the_unordered_control_differs() -> None:
    tensors, mask = inputs(heads=(8, 8)), BooleanMask(holes())
    runs = [run_ours(tensors, mask, accumulation="unordered") for _ in range(30)]
    assert_near(runs[0], tensors, holes())
    assert any(not torch.equal(one.dq, runs[0].dq) for one in runs), "sums in order of arrival ended alike thirty times"


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_a_matrix_has_the_bits_of_the_mask_that_it_is(dims: tuple[int, int]) -> None:
    q, k, v, dout = inputs(dims)
    tensors = (q, k[:, :Q_LEN], v[:, :Q_LEN], dout)
    query, key = torch.arange(Q_LEN, device=DEVICE)[:, None], torch.arange(Q_LEN, device=DEVICE)
    assert_same_bits(run_ours(tensors, key <= query), run_ours(tensors, Causal()))
    by_name, window = Window(200, 0), (key <= query) & (key >= query - 200)
    orders = [explain(flash_attn_func, *tensors[:3], mask=mask).order_hash for mask in (window, by_name)]
    ordered_alike = orders[0] == orders[1]
    ours, theirs = run_ours(tensors, window), run_ours(tensors, by_name)
    assert_same_bits(Results(*ours[:2], *ours[2:] if ordered_alike else theirs[2:]), theirs)
    with pytest.raises(AssertionError, match="elements differ"):  # the control
        assert_same_bits(run_ours(tensors, key < query), run_ours(tensors, Causal()))


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_matrix_of_whole_blocks_has_the_bits_of_a_tile_map(dim: int) -> None:
    tensors = inputs((dim, dim))
    expected = run_ours(tensors, TileMap(BLOCKS.numpy(), 64, 64))
    for mask in (elements().to(DEVICE), elements().to(DEVICE).expand(2, 4, Q_LEN, KV_LEN), BooleanMask(elements())):
        assert_same_bits(run_ours(tensors, mask), expected)


def test_a_partial_tile_more_changes_no_other_bit() -> None:
    """A tile map, and the same with one element less: the order is one, and so are the bits of all rows but those that see it."""
    tensors = inputs()
    less = elements()
    row, column = (int(x[0]) for x in np.nonzero(less.numpy()))
    less[row, column] = False
    whole, ours = run_ours(tensors, elements().to(DEVICE)), run_ours(tensors, less.to(DEVICE))
    others = torch.arange(Q_LEN) != row
    assert torch.equal(ours.out[:, others], whole.out[:, others])
    assert torch.equal(ours.dq[:, others], whole.dq[:, others])
    assert not torch.equal(ours.out[:, row], whole.out[:, row])


def test_each_sequence_has_the_bits_it_has_alone() -> None:
    tensors = inputs(batch=3)
    masks = torch.stack([holes(0), elements().to(DEVICE), holes(5)])[:, None]
    together = run_ours(tensors, masks)
    for i in range(3):
        alone = run_ours(tuple(x[i : i + 1] for x in tensors), masks[i, 0])
        assert_same_bits(alone, Results(*(x[i : i + 1] for x in together)), f"sequence {i}")


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=str)
def test_each_group_has_the_bits_it_has_alone(heads: tuple[int, int]) -> None:
    """With its own masks, as on a tensor-parallel rank. Groups of one pattern; of elements of their own; of several patterns."""
    tensors, group = inputs(heads=heads), heads[0] // heads[1]
    made = [scattered((Q_LEN, KV_LEN), source(1)), scattered((Q_LEN, KV_LEN), source(2)), elements(), a_tree((Q_LEN, KV_LEN), source(3))]
    masks = torch.stack(made)[None].to(DEVICE)
    assert isinstance(BooleanMask(masks).pattern, PatternPerHead)
    together = run_ours(tensors, masks)
    assert_near(together, tensors, masks)
    q, k, v, dout = tensors
    for i in range(heads[1]):
        some, one = slice(i * group, (i + 1) * group), slice(i, i + 1)
        alone = run_ours((q[:, :, some], k[:, :, one], v[:, :, one], dout[:, :, some]), masks[:, some], head_offset=i)
        own = (together.out[:, :, some], together.lse[:, some], together.dq[:, :, some], together.dk[:, :, one], together.dv[:, :, one])
        assert_same_bits(alone, Results(*own), f"group {i}")


def test_heads_of_one_pattern_run_together() -> None:
    """With elements of their own, per sequence and head."""
    masks = torch.rand(2, 4, Q_LEN, KV_LEN, generator=source()) < 0.5
    tensors = inputs()
    mask = BooleanMask(masks)
    assert isinstance(mask.pattern, TilePattern)
    assert len(mask.matrices) == 8
    assert_near(run_ours(tensors, mask), tensors, masks.to(DEVICE))


def test_a_mask_may_change_in_every_call() -> None:
    """Elements are data: calls that were prepared for a pattern read those of the call, also where the next one comes at once."""
    tensors, masks = inputs(), [torch.rand(Q_LEN, KV_LEN, generator=source(i)) < 0.5 for i in range(8)]
    expected = [run_ours(tensors, BooleanMask(mask)) for mask in masks]
    again = [run_ours(tensors, mask.to(DEVICE)) for mask in masks for _ in range(2)]
    for i, one in enumerate(again):
        assert_same_bits(one, expected[i // 2], f"mask {i // 2}")


@pytest.mark.parametrize("keys", [KV_LEN, 1280])  # whole blocks may be copied byte by byte
def test_any_byte_but_zero_attends(keys: int) -> None:
    mask = holes()[:, :keys].contiguous()
    twos = (mask.to(torch.uint8) * 2).view(torch.bool)
    assert BooleanMask(twos).matrices[0].digest == BooleanMask(mask).matrices[0].digest == BooleanMask(mask.cpu()).matrices[0].digest


def test_other_streams() -> None:
    tensors, mask = inputs(), holes()
    expected = run_ours(tensors, mask)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    for _ in range(5):
        made, found = BooleanMask(mask), []
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                found.append(run_ours(tensors, made))
        del made  # its memory is not used again before all streams are through with it
        torch.full((2**20,), -1, dtype=torch.int32, device=DEVICE)
        torch.cuda.synchronize()
        for one in found:
            assert_same_bits(one, expected)


def test_bits_go_with_their_mask() -> None:
    tensors, mask = inputs(), BooleanMask(holes())
    gc.collect()
    before = len(_bits)
    run_ours(tensors, mask)
    assert len(_bits) == before + 1
    del mask
    gc.collect()
    assert len(_bits) == before


def test_sdpa_takes_it() -> None:
    tensors = [x.transpose(1, 2) for x in inputs()[:3]]
    for mask in (elements().to(DEVICE), holes(), torch.stack([holes(0), holes(4)])[:, None]):
        attends = mask.any(-1).expand(2, 4, Q_LEN)
        truth = functional.scaled_dot_product_attention(*(x.float() for x in tensors), attn_mask=mask, enable_gqa=True)
        with sdpa.enable():
            ours = functional.scaled_dot_product_attention(*tensors, attn_mask=mask, enable_gqa=True)
        assert largest_error(ours[attends], truth[attends]) < 0.02
        assert not ours[~attends].any()


def test_numbers_are_the_boolean_mask_that_they_are() -> None:
    """0 and -inf, of any dtype. Another number raises, also one that is written into a mask that was seen before."""
    tensors, mask = [x.transpose(1, 2) for x in inputs()[:3]], holes()
    numbers = torch.zeros(Q_LEN, KV_LEN, device=DEVICE, dtype=torch.bfloat16).masked_fill(~mask, -torch.inf)
    with sdpa.enable():
        expected = functional.scaled_dot_product_attention(*tensors, attn_mask=mask, enable_gqa=True)
        for same in (numbers, numbers.float(), numbers):
            assert torch.equal(functional.scaled_dot_product_attention(*tensors, attn_mask=same, enable_gqa=True), expected)
        numbers[3, 5] = -1e9
        with pytest.raises(ValueError, match="must have 0 where a query attends to a key, and -inf elsewhere; got -"):
            functional.scaled_dot_product_attention(*tensors, attn_mask=numbers, enable_gqa=True)


def test_compiled() -> None:
    q, k, v, _ = inputs()
    compiled = torch.compile(lambda mask: flash_attn_func(q, k, v, mask=mask), fullgraph=True)
    for mask in (holes(0), holes(9)):
        assert torch.equal(compiled(mask), flash_attn_func(q, k, v, mask=mask))


def test_what_explain_says() -> None:
    q, k, v, _ = inputs()
    said = explain(flash_attn_func, q, k, v, mask=holes())
    assert set(said.kernels) == {"forward", "preprocess", "backward", "postprocess"}
    assert said == explain(flash_attn_func, q, k, v, mask=BooleanMask(holes()))
    several = explain(flash_attn_func, q, k, v, mask=torch.stack([elements().to(DEVICE), holes(0), elements().to(DEVICE), holes(1)]))
    assert several.kernels == said.kernels  # all have partial tiles


def test_a_mask_elsewhere_raises() -> None:
    with pytest.raises(ValueError, match=r"a mask tensor must be on the device of q, k and v \(cuda:0\); got cpu"):
        run_ours(inputs(), elements())


@pytest.mark.parametrize("mask", [elements, holes])
def test_a_graph_takes_a_mask_that_was_made_before(mask: Any) -> None:
    tensors, made = inputs(), BooleanMask(mask())
    expected = run_ours(tensors, made)
    graph, captured = capture(lambda: run_ours(tensors, made), warm_ups=0)
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bits(captured, expected)


def test_a_graph_takes_no_other() -> None:
    tensors = inputs()[:3]
    several = BooleanMask(torch.stack([holes(0), holes(3)])[:, None])
    whole, new = elements().to(DEVICE), BooleanMask(holes(77))
    flash_attn_func(*tensors, mask=several)
    torch.cuda.synchronize()
    for mask, message in (
        (whole, "make a BooleanMask of it before the capture"),
        (several, "differ between sequences or heads cannot"),
        (new, "the first call with a new"),
    ):
        with pytest.raises(RuntimeError, match=message):
            capture(partial(flash_attn_func, *tensors, mask=mask), warm_ups=0)


def test_head_dims_in_between() -> None:
    mask = holes()
    for dim in (40, 72, 160, 200):
        tensors = gpu_inputs(Q_LEN, KV_LEN, dim=dim)
        assert_near(run_ours(tensors, mask), tensors, mask)
