"""Attention to a cache under torch.compile: one operator per call, which tells that it changes the cache."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from cached import CacheCase, Played
from dash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from dash_attn.attention.kv_cache import VERSION, CacheArguments
from dense import same_bits


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def step(q: Tensor, caches: list[Tensor], k: Tensor, v: Tensor, lengths: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = flash_attn_with_kvcache(q * 2, *caches, k, v, cache_seqlens=lengths, block_table=table, causal=True, return_softmax_lse=True)
    return out + 1, lse


def inputs(played: Played, start: int, chunk: int) -> list[Tensor]:
    return [torch.cat([of_one[which][:, start : start + chunk] for of_one in played.tensors]) for which in range(3)]


def test_arguments_are_those_of_the_schema() -> None:
    for operator, tensors in ((torch.ops.dash_attn.attention_of_cache, 3), (torch.ops.dash_attn.append_and_attend, 5)):
        names = [argument.name for argument in operator.default._schema.arguments]
        assert tuple(names[tensors:]) == CacheArguments._fields
    written = [a.name for a in torch.ops.dash_attn.append_and_attend.default._schema.arguments if a.alias_info and a.alias_info.is_write]
    assert written == ["k_cache", "v_cache"]
    assert not torch.ops.dash_attn.attention_of_cache.default._schema.is_mutable


def test_compiled_steps_have_the_bits_of_eager_ones() -> None:
    eager, other = (Played(CacheCase((90, 90), page_size=16)) for _ in range(2))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=True)
    done, compilations = 0, []
    for chunk in (30, 20, 5, 9):
        lengths = torch.full((2,), done, dtype=torch.int32)
        with torch.no_grad():
            expected = step(*_arguments(eager, done, chunk, lengths))
            got = compiled(*_arguments(other, done, chunk, lengths))
        assert all(same_bits(a, b) for a, b in zip(got, expected, strict=True))
        assert all(same_bits(a, b) for a, b in zip(other.caches, eager.caches, strict=True))
        done += chunk
        compilations.append(counter.frame_count)
    assert compilations[0] == compilations[-1], "other lengths compiled it again"


def _arguments(played: Played, done: int, chunk: int, lengths: Tensor) -> tuple[Tensor, list[Tensor], Tensor, Tensor, Tensor, Tensor]:
    q, k, v = inputs(played, done, chunk)
    return q, played.caches, k, v, lengths, played.table


def test_a_compiler_sees_one_operator() -> None:
    played = Played(CacheCase((40, 40), page_size=16))
    seen: list[str] = []

    def look(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        seen.extend(str(node.target) for node in graph.graph.nodes if "dash_attn" in str(node.target))
        return graph

    with torch.no_grad():
        torch.compile(step, backend=look, fullgraph=True)(*_arguments(played, 0, 8, torch.zeros(2, dtype=torch.int32)))
    assert [name.removesuffix(".default") for name in seen] == ["dash_attn.append_and_attend"]


def test_packed_queries_and_pages_compile() -> None:
    played = Played(CacheCase((70, 40), page_size=16, chunks=(70,)))
    played.run()
    q = torch.cat([played.tensors[0][0][0, -3:], played.tensors[1][0][0, -1:]])
    ends = (torch.tensor([0, 3, 4], dtype=torch.int32), torch.tensor([0, 70, 110], dtype=torch.int32))

    def attend(q: Tensor) -> Tensor:
        return flash_attn_varlen_func(q, *played.caches, *ends, 3, 70, causal=True, block_table=played.table)

    with torch.no_grad():
        assert same_bits(torch.compile(attend, backend="aot_eager", fullgraph=True)(q), attend(q))


def test_opcheck() -> None:
    played = Played(CacheCase((40, 40), page_size=16))
    q, k, v = inputs(played, 0, 8)
    rest = CacheArguments(
        sinks=torch.randn(4),
        cache_seqlens=torch.zeros(2, dtype=torch.int32),
        cache_length=0,
        cache_batch_idx=None,
        cache_leftpad=None,
        block_table=played.table,
        first_positions=None,
        first_position=0,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        max_seqlen_q=0,
        max_seqlen_k=0,
        mask="causal",
        mask_sizes=[],
        scale=None,
        softcap=0.0,
        backend="auto",
        version=VERSION,
    )
    caches = [torch.zeros_like(cache) for cache in played.caches]
    torch.library.opcheck(torch.ops.dash_attn.append_and_attend.default, (q, *caches, k, v, *rest))
    torch.library.opcheck(torch.ops.dash_attn.attention_of_cache.default, (q, *caches, *rest._replace(cache_seqlens=None, cache_length=5)))
    with pytest.raises(RuntimeError, match="version 0 of dash_attn's cache operators"):
        torch.ops.dash_attn.attention_of_cache(q, *caches, *rest._replace(version=0))
