"""The decode kernels run on the host, fiber by fiber, beside the forward kernel: pages, barriers, messages between CTAs and the order of
every sum, without a GPU. Products are the host's, so what is left for a GPU to show is that theirs do not depend on their shape either.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from dash_attn import Causal, Mask, Window, flash_attn_func
from dash_attn.backends.hopper.calls import forward as forward_calls
from dash_attn.backends.hopper.driver import parameters
from dash_attn.backends.hopper.tiles import kernel_dim
from dash_attn.call.call import Call
from dash_attn.call.kv_cache import CacheCall
from dash_attn.call.offsets import SequenceOffsets
from dash_attn.call.options import AttentionOptions
from decode_on_host import Machine, Stopped, build, hopper_on_host
from dense import same_bits

NAN = float("nan")
CAUSAL = Causal()
CLUSTERS = {"one CTA per unit": 0, "clusters, 16 columns": 16, "clusters, 32 columns": 32, "clusters, 64 columns": 64}


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return build(tmp_path_factory.mktemp("decode"))


@dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...]
    chunk: int = 1
    heads: tuple[int, int] = (2, 1)
    dims: tuple[int, int] = (64, 64)
    page_size: int = 0
    most_padding: int = 0
    mask: Mask = CAUSAL
    softcap: float = 0.0
    sinks: bool = False
    appended: bool = True
    dropped: int = 0  # keys that the cache has no more, of each sequence
    negative: bool = False  # all scores
    seed: int = 0


class Problem:
    """Whole sequences, and a cache of all but what is new; other slots are NaN, other entries of the table no pages."""

    def __init__(self, case: Case) -> None:
        self.case, self.random = case, random.Random(case.seed)
        torch.manual_seed(case.seed)
        (q_heads, kv_heads), (dim, v_dim) = case.heads, case.dims
        shapes = (q_heads, dim), (kv_heads, dim), (kv_heads, v_dim)
        self.whole = [[torch.randn(1, n, *shape).bfloat16() for shape in shapes] for n in case.lengths]
        if case.negative:
            self.whole = [[q.abs(), -k.abs(), v] for q, k, v in self.whole]
        self.sinks = torch.randn(q_heads) if case.sinks else None
        self.options = AttentionOptions(case.mask, dim**-0.5, case.softcap)
        self.padding = [self.random.randint(0, case.most_padding) for _ in case.lengths]
        self._fill()

    def _fill(self) -> None:
        case, count = self.case, len(self.case.lengths)
        slots = max(n + p for n, p in zip(case.lengths, self.padding, strict=True)) + self.random.randint(0, 40)
        columns, size = (-(-slots // case.page_size), case.page_size) if case.page_size else (1, slots)
        rows = columns * count + 2
        dealt = torch.tensor(self.random.sample(range(rows), columns * count)).view(count, columns)
        k_cache, v_cache = (torch.full((rows, size, case.heads[1], dim), NAN).bfloat16() for dim in case.dims)
        self.caches = k_cache, v_cache
        kept = [n - case.dropped - (case.chunk if case.appended else 0) for n in case.lengths]
        for i, (length, pad) in enumerate(zip(kept, self.padding, strict=True)):
            at = torch.arange(pad, pad + length)
            for cache, x in zip(self.caches, self.whole[i][1:], strict=True):
                cache[dealt[i][at // size], at % size] = x[0, case.dropped : case.dropped + length]
            if case.page_size:
                dealt[i, -(-case.lengths[i] // size) :] = -9
        lengths = torch.tensor([n + p for n, p in zip(kept, self.padding, strict=True)], dtype=torch.int32)
        self.places: dict[str, Any] = {
            "cache_seqlens": lengths,
            "cache_batch_idx": None if case.page_size else dealt[:, 0].int(),
            "cache_leftpad": torch.tensor(self.padding, dtype=torch.int32) if case.most_padding else None,
            "block_table": dealt.int() if case.page_size else None,
            "first_position": case.dropped,
        }

    def call(self) -> CacheCall:
        q, k, v = (torch.cat([tensors[which][:, -self.case.chunk :] for tensors in self.whole]) for which in range(3))
        new = (k, v) if self.case.appended else (None, None)
        return CacheCall(q, *self.caches, self.options, *new, sinks=self.sinks, **self.places)

    def expected(self, forward: Any) -> tuple[Tensor, Tensor]:
        """Rows of the whole forward."""
        results = [forward.forward(Call(*tensors, self.options, sinks=self.sinks)) for tensors in self.whole]
        chunk = self.case.chunk
        return torch.cat([out[:, -chunk:] for out, _ in results]), torch.cat([lse[:, :, -chunk:] for _, lse in results])


def assert_bits(machine: Machine, case: Case, columns: int) -> None:
    problem = Problem(case)
    with hopper_on_host(machine, columns) as (forward, decode):
        expected = problem.expected(forward)
        got = decode.attention_with_cache(problem.call())
    for name, a, b in zip(("out", "LSE"), got, expected, strict=True):
        assert same_bits(a.contiguous(), b.contiguous()), name


CASES = {
    "a tile and a bit": Case((130,)),
    "pages": Case((300, 5), page_size=16, heads=(4, 2), sinks=True),
    "odd pages, several queries": Case((150, 200), 3, page_size=48, heads=(6, 2)),
    "padding": Case((260, 20), most_padding=50),
    "a window": Case((300, 270), 2, page_size=16, mask=Window(40, 0)),
    "softcap": Case((140, 7), softcap=2.0, appended=False),
    "dropped keys": Case((300, 270), 2, most_padding=20, mask=Window(40, 0), dropped=150),
    "many rows": Case((90,), 40, heads=(3, 1)),
    "negative scores": Case((300,), 40, negative=True),
}


KINDS = list(CLUSTERS)[:3]  # at head dim 64


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", [KINDS[0], pytest.param(KINDS[1], marks=pytest.mark.exhaustive), KINDS[2]])
def test_bits_are_those_of_the_forward_kernel(machine: Machine, kind: str, name: str) -> None:
    assert_bits(machine, CASES[name], CLUSTERS[kind])


@pytest.mark.parametrize("dims", [(72, 80), (96, 96), (128, 128), (128, 72), (192, 128), (160, 192), (256, 256)], ids=str)
def test_dims(machine: Machine, dims: tuple[int, int]) -> None:
    assert_bits(machine, Case((140, 30), dims=dims, page_size=16), 0)


@pytest.mark.parametrize("dims", [(80, 72), (192, 128), (136, 40)], ids=str)
def test_a_narrow_forward_has_the_bits_of_a_wide_one(machine: Machine, dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    problem, results = Problem(Case((300, 40), dims=dims)), []
    for _ in range(2):
        with hopper_on_host(machine, 0) as (forward, _):
            results.append(problem.expected(forward))
        monkeypatch.setattr(forward_calls, "forward_dims", lambda *dims: (kernel_dim(*dims),) * 2)
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("columns", [16, 32, 64])
def test_columns_that_are_not_there(machine: Machine, columns: int) -> None:
    assert_bits(machine, Case((140, 30), dims=(128, 72), page_size=16), columns)


@pytest.mark.parametrize(("dim", "length"), [(64, 3300), (128, 2300)])
def test_many_rounds_of_a_cluster(machine: Machine, dim: int, length: int) -> None:
    """Three to thirteen rounds, the last of them not full; beside one CTA, which others compare with the forward."""
    problem, results = Problem(Case((length,), dims=(dim, dim), page_size=64, heads=(4, 1), appended=False)), []
    for columns in CLUSTERS.values():
        with hopper_on_host(machine, columns) as (_, decode):
            results.append(decode.attention_with_cache(problem.call()))
    assert all(same_bits(a, b) for others in results[1:] for a, b in zip(results[0], others, strict=True))


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(40))
def test_any_case(machine: Machine, seed: int) -> None:
    source = random.Random(seed)
    page_size, chunk = source.choice((0, 16, 48, 64, 256)), source.choice((1, 1, 2, 30))
    case = Case(
        tuple(source.randint(chunk, source.choice((200, 1500))) for _ in range(source.choice((1, 2)))),
        chunk,
        source.choice(((1, 1), (4, 2), (7, 1), (12, 1))),
        source.choice(((64, 64), (128, 128), (40, 64), (128, 104))),
        page_size,
        0 if page_size else source.choice((0, 90)),
        source.choice((Causal(), Window(70, 0))),
        0.0,
        source.random() < 0.5,
        source.random() < 0.5,
        seed=seed,
    )
    assert_bits(machine, case, source.choice(tuple(CLUSTERS.values())))


def test_near_attention_in_full(machine: Machine) -> None:
    """The control of the others: what the kernels have in common is attention."""
    problem = Problem(Case((300, 120), 3, heads=(4, 2)))
    with hopper_on_host(machine) as (_, decode):
        out, lse = decode.attention_with_cache(problem.call())
    for i, tensors in enumerate(problem.whole):
        expected, expected_lse = flash_attn_func(*(x.float() for x in tensors), causal=True, return_lse=True)
        torch.testing.assert_close(out[i].float(), expected[0, -3:], atol=0.02, rtol=0.02)
        torch.testing.assert_close(lse[i], expected_lse[0, :, -3:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", CLUSTERS)
def test_packed_queries(machine: Machine, kind: str) -> None:
    problem = Problem(Case((140, 50, 30), 20, page_size=16, appended=False))
    last = (20, 1, 0)
    q = torch.cat([tensors[0][0, len(tensors[0][0]) - n :] for tensors, n in zip(problem.whole, last, strict=True)])
    ends = torch.tensor([0, 20, 21, 21], dtype=torch.int32)
    offsets = SequenceOffsets(ends, torch.tensor([0, 140, 190, 220], dtype=torch.int32), 20, 140)
    with hopper_on_host(machine, CLUSTERS[kind]) as (forward, decode):
        out, lse = decode.attention_with_cache(CacheCall(q, *problem.caches, problem.options, offsets=offsets, **problem.places))
        expected, expected_lse = problem.expected(forward)
    assert same_bits(out[:20], expected[0])
    assert same_bits(out[20], expected[1, -1])
    assert same_bits(lse[:, :20].contiguous(), expected_lse[0])
    assert same_bits(lse[:, 20].contiguous(), expected_lse[1, :, -1].contiguous())


def test_nothing_to_attend(machine: Machine) -> None:
    q, cache, sinks = torch.ones(2, 1, 2, 64).bfloat16(), torch.full((2, 20, 1, 64), NAN).bfloat16(), torch.randn(2)
    for columns in CLUSTERS.values():
        with hopper_on_host(machine, columns) as (_, decode):
            out, lse = decode.attention_with_cache(CacheCall(q, cache, cache, AttentionOptions(CAUSAL, 0.125), sinks=sinks))
        assert not out.any()
        assert torch.equal(lse, sinks[None, :, None].expand(2, 2, 1))


def numbers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


TABLE = torch.tensor([[5, 6, -1], [2, 3, 4]], dtype=torch.int32)
GOOD: dict[str, Any] = {"cache_seqlens": numbers(20, 33), "block_table": TABLE}
BAD: dict[str, tuple[dict[str, Any], tuple[int, int, int]]] = {
    "too long": ({**GOOD, "cache_seqlens": numbers(20, 46)}, (parameters.Trouble.CacheLength, 1, 46)),
    "negative": ({**GOOD, "cache_seqlens": numbers(-1, 33)}, (parameters.Trouble.CacheLength, 0, -1)),
    "no page": ({**GOOD, "cache_seqlens": numbers(31, 33)}, (parameters.Trouble.CachePage, 0, 2)),
    "two owners": ({**GOOD, "block_table": torch.tensor([[5, 6, -1], [2, 3, 6]]).int()}, (parameters.Trouble.CacheShared, 1, 6)),
    "no row": ({"cache_seqlens": 9, "cache_batch_idx": numbers(1, 8)}, (parameters.Trouble.CacheRow, 1, 8)),
    "the same row": ({"cache_seqlens": 9, "cache_batch_idx": numbers(1, 1)}, (parameters.Trouble.CacheShared, 1, 1)),
    "dropped too much": ({"cache_seqlens": 9, "first_position": numbers(0, 2)}, (parameters.Trouble.CachePosition, 1, 2)),
    "too much padding": ({"cache_seqlens": 9, "cache_leftpad": numbers(0, 10)}, (parameters.Trouble.CachePadding, 1, 10)),
}


@pytest.mark.parametrize("name", BAD)
def test_trouble_is_reported(machine: Machine, name: str) -> None:
    places, report = BAD[name]
    caches = torch.zeros(8, 16, 2, 64).bfloat16(), torch.zeros(8, 16, 2, 64).bfloat16()
    new = torch.ones(2, 3, 2, 64).bfloat16()
    call = CacheCall(torch.zeros(2, 3, 4, 64).bfloat16(), *caches, AttentionOptions(CAUSAL, 0.125), new, new)
    with hopper_on_host(machine) as (_, decode):
        decode.attention_with_cache(call._replace(**GOOD))
        with pytest.raises(Stopped) as stopped:
            decode.attention_with_cache(call._replace(**places))
    assert stopped.value.args == report
