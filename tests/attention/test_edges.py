"""The edges of what may be asked: no queries, no keys, one of them, nothing attended, unequal lengths, huge scores, NaN. Both devices."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from budget import assert_near
from dash_attn import Causal, Full, Mask, Prefix, TileMap, Window
from dense import Results, assert_same_bits, dense, run_dense, run_ours
from devices import dim_features, make_inputs, on_each_device, require

BANDS = [Full(), Causal(), Window(60, 20)]


@pytest.mark.parametrize(("batch", "q_len", "kv_len"), [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0)])
@pytest.mark.parametrize("mask", BANDS, ids=str)
@on_each_device
def test_no_sequence_no_query_no_key(device: str, mask: Mask, batch: int, q_len: int, kv_len: int) -> None:
    inputs = make_inputs(device, (q_len, kv_len), batch=batch)
    ours = run_ours(inputs, mask)
    assert ours.lse.shape == (batch, 4, q_len)
    assert (ours.lse == -torch.inf).all()
    for result, like in zip((ours.out, *ours[2:]), (inputs[0], *inputs[:3]), strict=True):
        assert (result.shape, result.dtype, result.device) == (like.shape, like.dtype, like.device)
        assert not result.any()


@pytest.mark.parametrize("lengths", [(1, 1), (1, 2), (2, 1), (1, 300), (300, 1)], ids=str)
@pytest.mark.parametrize("mask", BANDS, ids=str)
@pytest.mark.parametrize("dim", [64, 256, 111])
@on_each_device
def test_one_query_or_one_key(device: str, dim: int, mask: Mask, lengths: tuple[int, int]) -> None:
    require(device, *dim_features(dim))
    inputs = make_inputs(device, lengths, dims=(dim, 0), batch=16 if lengths[0] < 3 else 1)  # the largest error of few rows is luck
    assert_near(run_ours(inputs, mask), inputs, mask)


@on_each_device
def test_one_token_attends_itself(device: str) -> None:
    """Its output is its value, to the last bit, and its score cannot change anything."""
    q, k, v, dout = make_inputs(device, (1, 1), (2, 2), batch=3)
    ours = run_ours((q, k, v, dout), Causal())
    assert torch.equal(ours.out, v)
    assert torch.equal(ours.dv, dout)
    torch.testing.assert_close(ours.dq, torch.zeros_like(q), rtol=0, atol=1e-4)
    torch.testing.assert_close(ours.dk, torch.zeros_like(k), rtol=0, atol=1e-4)


NOTHING: dict[str, tuple[Mask, tuple[int, int], slice]] = {
    "first queries of a short causal": (Causal(), (500, 200), slice(0, 300)),
    "first queries of a short window": (Window(50, 0), (500, 200), slice(0, 300)),
    "a row of blocks": (TileMap(np.array([[1, 1], [0, 0], [1, 0]], dtype=bool), 100, 150), (300, 300), slice(100, 200)),
    "everything": (TileMap(np.zeros((3, 2), dtype=bool), 100, 150), (300, 300), slice(0, 300)),
}
WITH_DIMS = [(name, dim) for name in NOTHING for dim in (64, 128, 256) if dim == 128 or name.startswith("first")]


@pytest.mark.parametrize(("name", "dim"), WITH_DIMS)
@on_each_device
def test_queries_that_attend_nothing(device: str, name: str, dim: int) -> None:
    require(device, *dim_features(dim))
    mask, lengths, blind = NOTHING[name]
    inputs = make_inputs(device, lengths, dims=(dim, 0))
    ours = run_ours(inputs, mask)
    assert not any(x[:, blind].any() for x in (ours.out, ours.dq))
    assert (ours.lse[:, :, blind] == -torch.inf).all()
    seeing = torch.ones(lengths[0], dtype=torch.bool, device=device)
    seeing[blind] = False
    assert ours.lse[:, :, seeing].isfinite().all()
    if name == "everything":
        assert not any(x.any() for x in (ours.dk, ours.dv))
    else:
        assert all(x[:, seeing].any() for x in (ours.out, ours.dq)), "the control: the others do"
        assert_near(ours, inputs, mask)


@pytest.mark.parametrize("lengths", [(100, 300), (300, 100), (129, 128), (128, 129), (1, 300)], ids=str)
@on_each_device
def test_the_last_query_is_aligned_with_the_last_key(device: str, lengths: tuple[int, int]) -> None:
    """Seen without a reference: changing the keys after a query's own position leaves its output alone, changing its own does not."""
    q_len, kv_len = lengths
    q, k, v, dout = make_inputs(device, lengths, (2, 1))
    whole = run_ours((q, k, v, dout), Causal())
    for row in {0, q_len // 2, q_len - 1}:
        own = row + kv_len - q_len
        if own < 0:
            assert not whole.out[:, row].any()
            continue
        later, last = v.clone(), v.clone()
        later[:, own + 1 :] += 1
        last[:, own] += 1
        assert torch.equal(run_ours((q, k, later, dout), Causal()).out[:, row], whole.out[:, row])
        assert not torch.equal(run_ours((q, k, last, dout), Causal()).out[:, row], whole.out[:, row])


@pytest.mark.parametrize("mask", [Prefix(70), Prefix(0)], ids=str)
@pytest.mark.parametrize("lengths", [(100, 300), (300, 100)], ids=str)
@on_each_device
def test_prefixes_of_unequal_lengths(device: str, lengths: tuple[int, int], mask: Mask) -> None:
    inputs = make_inputs(device, lengths)
    assert_near(run_ours(inputs, mask), inputs, mask)


@pytest.mark.parametrize("mask", BANDS, ids=str)
@on_each_device
def test_scores_of_thousands(device: str, mask: Mask) -> None:
    """The softmax is one-hot: nothing overflows, and outputs are single values."""
    q, k, v, dout = make_inputs(device, (200, 300), (2, 1))
    inputs = (q * 32, k * 32, v, dout)
    ours = run_ours(inputs, mask)
    with q.device:
        truth = run_dense(inputs, mask, torch.float64)
    assert all(x.isfinite().all() for x in ours)
    assert truth.lse.abs().max() > 1000, "the control: scores are large"
    torch.testing.assert_close(ours.lse.double(), truth.lse, rtol=1e-5, atol=1e-2)
    torch.testing.assert_close(ours.out.double(), truth.out, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("mask", [Full(), Causal()], ids=str)
@on_each_device
def test_nan_is_not_hidden(device: str, mask: Mask) -> None:
    """A query that has become NaN has NaN as its output and LSE; nobody else's row is touched."""
    q, k, v, dout = make_inputs(device, (200, 200), (2, 1))
    clean = run_ours((q, k, v, dout), mask)
    broken = q.clone()
    broken[0, 150, 0, 3] = torch.nan
    ours = run_ours((broken, k, v, dout), mask)
    assert ours.out[0, 150, 0].isnan().all()
    assert ours.lse[0, 0, 150].isnan()
    assert ours.dq[0, 150, 0].isnan().all()
    assert ours.dv.isnan().any(), "keys that it attends see it too"
    rows = torch.arange(200, device=device) != 150
    assert torch.equal(ours.out[:, rows], clean.out[:, rows])
    assert torch.equal(ours.out[:, :, 1], clean.out[:, :, 1])


@on_each_device
def test_tiles_that_a_mask_drops_are_not_read(device: str) -> None:
    """Whole tiles only: in a partial one 0 times NaN is NaN, in PyTorch too."""
    q, k, v, dout = make_inputs(device, (100, 1000), (2, 1))
    mask = Window(60, 20)  # the first query stands at key 900
    broken_k, broken_v = k.clone(), v.clone()
    broken_k[:, :768], broken_v[:, :768] = torch.nan, torch.nan
    assert_same_bits(run_ours((q, broken_k, broken_v, dout), mask), run_ours((q, k, v, dout), mask))
    with q.device:
        assert dense(q, broken_k, broken_v, mask)[0].isnan().any(), "the control: dense attention does read them"


@on_each_device
def test_results_are_new_memory(device: str) -> None:
    """Results may be changed in place without changing inputs or later results."""
    inputs = make_inputs(device, (150, 150))
    before = [x.clone() for x in inputs]
    first = run_ours(inputs, Causal())
    kept = Results(*(x.clone() for x in first))
    for x in first:
        x.fill_(7)
    assert_same_bits(run_ours(inputs, Causal()), kept)
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))
