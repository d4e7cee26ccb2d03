"""On a GPU: few queries on many keys run in the kernel for caches, with the bits of the kernel for whole sequences."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from dash_attn import explain, flash_attn_func, flash_attn_varlen_func
from dense import same_bits
from gpu_helpers import patched_backend, poisoned_memory, run_script
from graphs import capture

pytestmark = pytest.mark.gpu

OPTIONS: list[dict[str, Any]] = [{}, {"causal": True}, {"window_size": (300, 20)}, {"softcap": 20.0, "causal": True}]
# sequences, keys, query heads, KV heads, head dims, queries
SHAPES = [
    (2, 700, 8, 2, 128, 128, 1),
    (3, 1033, 4, 4, 64, 64, 5),
    (2, 900, 16, 1, 96, 96, 4),
    (1, 2000, 8, 4, 192, 128, 3),
    (2, 777, 6, 2, 72, 40, 7),
]


def tensors(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    torch.manual_seed(0)
    batch, keys, heads, kv_heads, dim, v_dim, queries = shape
    sizes = ((batch, queries, heads, dim), (batch, keys, kv_heads, dim), (batch, keys, kv_heads, v_dim))
    return [torch.randn(size, device="cuda", dtype=dtype) for size in sizes]


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_are_those_of_the_other_kernel(shape: tuple[int, ...], options: dict[str, Any], sinks: bool) -> None:
    q, k, v = tensors(shape, torch.float16 if sinks else torch.bfloat16)
    given = {**options, "sinks": torch.randn(q.shape[2], device="cuda") if sinks else None, "return_lse": True}
    with poisoned_memory():
        first, second = (flash_attn_func(q, k, v, **given) for _ in range(2))
        with patched_backend({("calls.forward", "FEW"): 0}):
            expected = flash_attn_func(q, k, v, **given)
    for found in (first, second):
        assert all(same_bits(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_packed_sequences(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    _, keys, heads, kv_heads, dim, _, queries = shape
    lengths, rows = [keys, 0, keys // 3, 1], [queries, 1, 0, 1]
    ends = [torch.tensor([0, *accumulate(sizes)], dtype=torch.int32, device="cuda") for sizes in (rows, lengths)]
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(sum(n), h, dim, device="cuda", dtype=torch.bfloat16)
        for n, h in ((rows, heads), (lengths, kv_heads), (lengths, kv_heads))
    )
    longest = queries, keys
    with poisoned_memory():
        first, second = (flash_attn_varlen_func(q, k, v, *ends, *longest, return_lse=True, **options) for _ in range(2))
        with patched_backend({("calls.forward", "FEW"): 0}):
            expected = flash_attn_varlen_func(q, k, v, *ends, *longest, return_lse=True, **options)
    for found in (first, second):
        assert all(same_bits(one, other) for one, other in zip(found, expected, strict=True))


def test_gradients_and_graphs() -> None:
    q, k, v = tensors(SHAPES[0])
    leaves = [x.requires_grad_() for x in (q, k, v)]
    gradients = torch.autograd.grad(flash_attn_func(*leaves, causal=True).float().sum(), leaves)
    with patched_backend({("calls.forward", "FEW"): 0}):
        expected = torch.autograd.grad(flash_attn_func(*leaves, causal=True).float().sum(), leaves)
    assert all(same_bits(one, other) for one, other in zip(gradients, expected, strict=True))
    with torch.no_grad():
        whole = flash_attn_func(q, k, v, causal=True)
        graph, found = capture(lambda: flash_attn_func(q, k, v, causal=True))
        found.zero_()
        graph.replay()
    assert same_bits(found, whole)


def test_the_explanation_names_the_kernel_that_runs() -> None:
    q, k, v = tensors(SHAPES[0])
    few = explain(flash_attn_func, q, k, v, causal=True).kernels["forward"]
    with patched_backend({("calls.forward", "FEW"): 0}):
        assert explain(flash_attn_func, q, k, v, causal=True).kernels["forward"] != few


WRONG = """
import torch
from dash_attn import flash_attn_varlen_func
q, k = (torch.randn(n, 2, 64, device="cuda", dtype=torch.bfloat16) for n in (3, 2000))
ends = [torch.tensor(e, dtype=torch.int32, device="cuda") for e in ([0, 1, 2], [0, 1000, 2000])]
flash_attn_varlen_func(q, k, k, *ends, 2, 1000)
torch.cuda.synchronize()
"""


def test_rows_that_no_sequence_has_stop_the_program() -> None:
    done = run_script(WRONG)
    assert done.returncode != 0
    assert "cu_seqlens_q is wrong" in done.stdout + done.stderr
