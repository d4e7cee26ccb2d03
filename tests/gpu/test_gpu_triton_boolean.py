"""Boolean masks on the Triton backend, on a GPU: any matrix, for all or per sequence and query head; and what it refuses by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from budget import assert_within_budget
from dash_attn import BooleanMask, flash_attn_func, flash_attn_with_kvcache
from dense import Results, assert_same_bits, run_dense, run_ours
from devices import disturbed
from gpu_helpers import DEVICE, REPEATS, gpu_inputs
from graphs import capture

pytestmark = pytest.mark.gpu

TRITON: dict[str, Any] = {"backend": "triton"}
Q_LEN, KV_LEN, BATCH, HEADS = 700, 900, 2, (4, 2)  # neither length fills its last block
LEADING = {"one for all": (), "per sequence": (BATCH, 1), "per query head": (1, HEADS[0]), "per sequence and head": (BATCH, HEADS[0])}


def matrix(leading: tuple[int, ...] = (), q_len: int = Q_LEN, kv_len: int = KV_LEN) -> Tensor:
    """Blocks of each kind; some queries attend to nothing, some keys are never attended."""
    source = torch.Generator().manual_seed(len(leading))
    kinds = torch.randint(3, (*leading, -(-q_len // 64), -(-kv_len // 64)), generator=source)
    kinds = kinds.repeat_interleave(64, -2).repeat_interleave(64, -1)[..., :q_len, :kv_len]
    kept = (kinds == 2) | ((kinds == 1) & (torch.rand(kinds.shape, generator=source) < 0.3))
    kept[..., 70:75, :], kept[..., :, 130:260] = False, False
    return kept.to(DEVICE)


def inputs(dim: int = 128, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    return gpu_inputs(Q_LEN, KV_LEN, HEADS, dim, dtype, BATCH)


@pytest.mark.parametrize("leading", LEADING.values(), ids=LEADING)
@pytest.mark.parametrize("dim", [64, 128])
def test_accuracy(dim: int, leading: tuple[int, ...]) -> None:
    tensors, mask = inputs(dim), matrix(leading)
    plain, truth = (run_dense(tensors, mask, dtype) for dtype in (torch.bfloat16, torch.float64))
    assert_within_budget(run_ours(tensors, mask, **TRITON), plain, truth)


@pytest.mark.parametrize(("dim", "dtype"), [(256, torch.bfloat16), (64, torch.float16), (64, torch.float32)], ids=str)
def test_other_tiles(dim: int, dtype: torch.dtype) -> None:
    tensors, mask = inputs(dim, dtype), matrix()
    plain, truth = (run_dense(tensors, mask, kind) for kind in (dtype, torch.float64))
    assert_within_budget(run_ours(tensors, mask, **TRITON), plain, truth)


def test_repeats_under_load() -> None:
    tensors, mask = inputs(), BooleanMask(matrix((BATCH, HEADS[0])))
    expected = run_ours(tensors, mask, **TRITON)
    for run in range(min(REPEATS, 200)):
        with disturbed("cuda", run):
            assert_same_bits(run_ours(tensors, mask, **TRITON), expected, f"run {run}")


def test_heads_and_sequences_have_the_bits_they_have_alone() -> None:
    (q, k, v, dout), mask = inputs(), matrix((BATCH, HEADS[0]))
    expected = run_ours((q, k, v, dout), mask, **TRITON)
    for sequence in range(BATCH):
        rows = slice(sequence, sequence + 1)
        for kv_head in range(HEADS[1]):
            queries, keys = slice(2 * kv_head, 2 * kv_head + 2), slice(kv_head, kv_head + 1)
            part = (q[rows, :, queries], k[rows, :, keys], v[rows, :, keys], dout[rows, :, queries])
            alone = run_ours(part, mask[rows, queries], head_offset=kv_head, **TRITON)
            whole = Results(*(x[rows] for x in expected.of_heads(queries, keys)))
            assert_same_bits(alone, whole, f"sequence {sequence}, KV head {kv_head}")


def test_a_graph_takes_a_mask_that_was_made_before() -> None:
    tensors, made = inputs(), BooleanMask(matrix())
    expected = run_ours(tensors, made, **TRITON)
    graph, captured = capture(lambda: run_ours(tensors, made, **TRITON), warm_ups=0)
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bits(captured, expected)


def test_what_it_lacks_raises_by_name() -> None:
    q, k, v, _ = inputs()
    with pytest.raises(ValueError, match="'triton' has no dropout yet"):
        flash_attn_func(q, k, v, dropout_p=0.5, **TRITON)
    with pytest.raises(ValueError, match="'triton' has no ALiBi yet"):
        flash_attn_func(q, k, v, alibi_slopes=torch.ones(HEADS[0], device=DEVICE), **TRITON)
    with pytest.raises(NotImplementedError, match=r"'triton' .* cannot attend to a cache"):
        flash_attn_with_kvcache(q[:, :1], k, v, cache_seqlens=5, **TRITON)
