"""On a GPU: tokens that attend to a cache have the bits of the training forward; what is wrong with a cache stops with a message."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from cached import CacheCase, Played, play
from dash_attn import explain, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from dash_attn.backends.hopper.tiles import CLUSTERS
from dense import same_bits
from gpu_helpers import patched_backend, poisoned_memory, run_script
from graphs import capture

pytestmark = pytest.mark.gpu

OPTIONS: list[dict[str, Any]] = [{}, {"window_size": (200, 0)}, {"softcap": 3.0}]
CHUNKS = (1, 1, 2, 64, 300)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("page_size", "most_padding"), [(0, 0), (0, 70), (16, 0), (48, 0), (256, 0)])
def test_bits_are_those_of_the_whole_forward(page_size: int, most_padding: int, options: dict[str, Any]) -> None:
    case = CacheCase((700, 300, 129, 1), (8, 2), (128, 128), page_size=page_size, most_padding=most_padding, options=options, chunks=CHUNKS)
    with poisoned_memory():
        assert play(replace(case, device="cuda", sinks=page_size == 16)) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (96, 96), (192, 128), (256, 256), (40, 104)], ids=str)
@pytest.mark.parametrize("heads", [(1, 1), (8, 1), (6, 2), (70, 1)], ids=str)
def test_dims_and_groups(heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype) -> None:
    assert play(CacheCase((500, 150), heads, dims, dtype, page_size=32, seed=1, chunks=CHUNKS, device="cuda")) == []


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("dim", "columns"), [cluster[:2] for cluster in CLUSTERS])
@pytest.mark.parametrize(("page_size", "most_padding"), [(0, 70), (16, 0), (256, 0)])
def test_clusters_change_no_bit(page_size: int, most_padding: int, dim: int, columns: int, options: dict[str, Any]) -> None:
    case = CacheCase(
        (3000, 300, 129, 1), (8, 2), (dim, dim), page_size=page_size, most_padding=most_padding, options=options, chunks=CHUNKS
    )
    with patched_backend({("calls.decode", "CLUSTERS"): ((dim, columns, 10**6),)}), poisoned_memory():
        assert play(replace(case, device="cuda", sinks=page_size == 16)) == []


@pytest.mark.parametrize("dim", [64, 128])
def test_negative_scores_have_the_bits_of_the_whole_forward(dim: int) -> None:
    """Up to head dim 128 the forward finds maxima by the bits of scores; the kernels of caches find them by their values."""
    q, k, v = (torch.randn(1, 700, 4, dim, device="cuda").bfloat16() for _ in range(3))
    q, k = q.abs(), -k.abs()
    out, lse = flash_attn_func(q, k, v, causal=True, return_lse=True)
    for i in (0, 130, 699):
        length = torch.tensor([i + 1], dtype=torch.int32, device="cuda")
        got, its_lse = flash_attn_with_kvcache(q[:, i : i + 1], k, v, cache_seqlens=length, causal=True, return_softmax_lse=True)
        assert same_bits(got, out[:, i : i + 1]), i
        assert same_bits(its_lse, lse[..., i : i + 1]), i


def test_packed_queries_and_pages() -> None:
    case = CacheCase((140, 200, 77, 30), (8, 2), page_size=32, chunks=(300,), device="cuda")
    played = Played(case)
    played.run()
    last = (140, 33, 1, 0)
    q = torch.cat([played.tensors[i][0][0, length - n :] for i, (length, n) in enumerate(zip(case.lengths, last, strict=True))])
    ends = [torch.tensor([0, *torch.tensor(x).cumsum(0).tolist()], dtype=torch.int32, device="cuda") for x in (last, case.lengths)]
    out = flash_attn_varlen_func(q, *played.caches, *ends, 140, 200, causal=True, block_table=played.table)
    start = 0
    for i, n in enumerate(last):
        assert same_bits(out[start : start + n], played.whole(i)[0][0, case.lengths[i] - n :]), f"sequence {i}"
        start += n


def test_a_graph_follows_lengths_on_the_device() -> None:
    """Sixteen steps by one graph: lengths grow on the device, pages are dealt before, and once more midway."""
    case = CacheCase((200, 150), (8, 2), page_size=16, chunks=(100,), device="cuda")
    played = Played(case)
    wholes = [played.whole(i) for i in range(2)]
    done = [184, 134]
    for i in range(2):
        played.call([i], [0, 0], done[i])
    q, k, v = (torch.empty_like(torch.cat([t[which][:, :1] for t in played.tensors])) for which in range(3))
    lengths = torch.tensor(done, dtype=torch.int32, device="cuda")

    def step() -> torch.Tensor:
        return flash_attn_with_kvcache(q, *played.caches, k, v, cache_seqlens=lengths, block_table=played.table, causal=True)

    def step_and_count() -> torch.Tensor:
        out = step()
        lengths.add_(1)
        return out

    before = [cache.clone() for cache in played.caches]
    step()  # prepares the call
    for cache, old in zip(played.caches, before, strict=True):
        cache.copy_(old)
    graph, out = capture(step_and_count, warm_ups=0)
    for number in range(16):
        for which, memory in enumerate((q, k, v)):
            memory.copy_(torch.cat([t[which][:, d + number : d + number + 1] for t, d in zip(played.tensors, done, strict=True)]))
        if number == 8:
            dealt = torch.randperm(len(played.caches[0]), device="cuda")
            for cache in played.caches:
                cache[dealt] = cache.clone()
            played.table.copy_(torch.where(played.table < 0, played.table, dealt[played.table.long()].int()))
        graph.replay()
        for i in range(2):
            assert same_bits(out[i : i + 1], wholes[i][0][:, done[i] + number : done[i] + number + 1]), f"step {number}, sequence {i}"


def test_the_machine_code_is_named() -> None:
    q, new, cache = (torch.zeros(2, n, heads, 64, dtype=torch.bfloat16, device="cuda") for n, heads in ((1, 4), (1, 2), (40, 2)))
    read = explain(flash_attn_with_kvcache, q, cache, cache, causal=True)
    appended = explain(flash_attn_with_kvcache, q, cache, cache, new, new, cache_seqlens=3, causal=True)
    assert set(read.kernels) == {"decode"}
    assert set(appended.kernels) == {"decode", "append"}
    assert read.kernels["decode"] == appended.kernels["decode"]
    assert not cache.any(), "nothing is appended"


TROUBLE = """
import sys, torch
from dash_attn import flash_attn_with_kvcache
ROWS = {"block_table": None, "cache_seqlens": 3}
change = eval(sys.argv[1])
numbers = lambda *x: torch.tensor(x, dtype=torch.int32, device="cuda")
half = lambda *shape: torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
table = torch.tensor([[5, 6, -1], [2, 3, 4]], dtype=torch.int32, device="cuda")
call = dict(q=half(2, 3, 4, 64), k_cache=half(8, 16, 2, 64), v_cache=half(8, 16, 2, 64), k=half(2, 3, 2, 64), v=half(2, 3, 2, 64),
            cache_seqlens=numbers(20, 33), block_table=table)
call.update({name: value(numbers) if callable(value) else value for name, value in change.items()})
flash_attn_with_kvcache(**call)
torch.cuda.synchronize()
print("served")
"""
BAD = {
    "{}": "served",
    "{'cache_seqlens': lambda n: n(20, 47)}": "cache_seqlens is 47 for sequence 1",
    "{'cache_seqlens': lambda n: n(-1, 33)}": "cache_seqlens is -1 for sequence 0",
    "{'cache_seqlens': lambda n: n(31, 33)}": "entry 2 of sequence 0 in block_table is not a page",
    "{'block_table': lambda n: torch.stack([n(5, 8, -1), n(2, 3, 4)])}": "entry 1 of sequence 0 in block_table is not a page",
    "{'block_table': lambda n: torch.stack([n(5, 6, -1), n(2, 3, 6)])}": "page or row 6 of the cache is appended to by sequence",
    "{**ROWS, 'cache_batch_idx': lambda n: n(1, 9)}": "cache_batch_idx is 9 for sequence 1",
    "{**ROWS, 'cache_batch_idx': lambda n: n(1, 1)}": "page or row 1 of the cache is appended to by sequence",
    "{**ROWS, 'first_position': 2}": "first_position is 2 for sequence",
    "{**ROWS, 'cache_leftpad': lambda n: n(1, 4)}": "cache_leftpad is 4 for sequence 1",
}


@pytest.mark.parametrize("change", BAD)
def test_what_is_wrong_with_a_cache_is_named(change: str) -> None:
    """Each in a process of its own: a trap ends the CUDA context."""
    done = run_script(TROUBLE, change)
    said = done.stdout + done.stderr
    assert BAD[change] in said, said[-2000:]
    assert (done.returncode == 0) == (change == "{}")
