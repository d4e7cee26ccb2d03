"""A token's output and LSE are a function of its query, the keys it attends, their positions and its options: of nothing else.

`test_kv_cache.py` has the same through caches.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from dash_attn import Documents, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from dash_attn.backends.hopper.tiles import (
    CLUSTERS,
    CONSUMER_CHOICES,
    KERNEL_DIMS,
    cluster_tiles,
    decode_tiles,
    forward_dims,
    forward_tiles,
    kernel_dim,
)
from dense import same_bits

LENGTH = 300
OPTIONS: list[dict[str, Any]] = [{}, {"window_size": (70, 0)}, {"softcap": 3.0}, {"window_size": (130, 0), "softmax_scale": 0.3}]
ENDS = (1, 63, 64, 65, 128, 129, 200, 256, 300)
either = pytest.mark.parametrize("options", OPTIONS, ids=str)


class Sequence(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor

    def part(self, first: int, end: int) -> Sequence:
        """Queries from `first` on, with all keys up to `end`."""
        return Sequence(self.q[:, first:end], self.k[:, :end], self.v[:, :end])


class Rows(NamedTuple):
    out: Tensor
    lse: Tensor

    def of(self, first: int, end: int) -> Rows:
        return Rows(self.out[:, first:end], self.lse[:, :, first:end].contiguous())


def sequence(length: int = LENGTH, dim: int = 64, dtype: torch.dtype = torch.float32, seed: int = 0) -> Sequence:
    source = torch.Generator().manual_seed(seed)
    return Sequence(*(torch.randn(1, length, heads, dim, generator=source).to(dtype) for heads in (4, 2, 2)))


def attend(tensors: Sequence, causal: bool = True, **options: Any) -> Rows:
    return Rows(*flash_attn_func(*tensors, causal=causal, return_lse=True, **options))


def agree(one: Rows, other: Rows) -> bool:
    return all(same_bits(a, b) for a, b in zip(one, other, strict=True))


@either
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_what_comes_later_does_not_matter(options: dict[str, Any], dtype: torch.dtype) -> None:
    whole, given = attend(sequence(dtype=dtype), **options), sequence(dtype=dtype)
    for end in ENDS:
        assert agree(attend(given.part(0, end), **options), whole.of(0, end)), f"the first {end} tokens"


@either
@pytest.mark.parametrize("dim", [40, 64, 128])
def test_how_many_queries_came_with_it_does_not_matter(options: dict[str, Any], dim: int) -> None:
    given = sequence(dim=dim)
    whole = attend(given, **options)
    for end in ENDS:
        for count in {1, min(3, end), min(70, end)}:
            found = attend(given.part(end - count, end), **options)
            assert agree(found, whole.of(end - count, end)), f"{count} queries up to {end}"


def test_one_query_is_a_full_mask() -> None:
    given = sequence()
    whole = attend(given)
    for end in ENDS:
        assert agree(attend(given.part(end - 1, end), causal=False), whole.of(end - 1, end)), f"token {end}"


@either
def test_other_sequences_do_not_matter(options: dict[str, Any]) -> None:
    """In a batch, packed end to end with others, as a chunk among them, and as a document of a row."""
    given, mates = sequence(), [sequence(seed=1), sequence(77, seed=2)]
    whole = attend(given, **options)
    batch = attend(Sequence(*(torch.cat([m, x, m]) for m, x in zip(mates[0], given, strict=True))), **options)
    assert agree(Rows(batch.out[1:2], batch.lse[1:2]), whole)
    tokens = [torch.cat([m[0], x[0]]) for m, x in zip(mates[1], given, strict=True)]
    for first in (0, 250, LENGTH - 1):
        packed = tokens[0][: 77 + LENGTH - first].clone()
        packed[77:] = given.q[0, first:]
        ends = [torch.tensor([0, 77, 77 + n], dtype=torch.int32) for n in (LENGTH - first, LENGTH)]
        out, lse = flash_attn_varlen_func(packed, *tokens[1:], *ends, LENGTH, LENGTH, causal=True, return_lse=True, **options)
        assert agree(Rows(out[None, 77:], lse[None, :, 77:].contiguous()), whole.of(first, LENGTH)), f"packed from query {first} on"
    if "window_size" not in options:
        row = Sequence(*(x[None] for x in tokens))
        documents = attend(row, causal=False, mask=Documents((77, LENGTH)), **options)
        assert agree(documents.of(77, 77 + LENGTH), whole)


def test_gradients_do_not_matter() -> None:
    given = sequence()
    wanting = Sequence(*(x.clone().requires_grad_() for x in given))
    out, lse = attend(wanting)
    assert out.requires_grad
    assert agree(Rows(out.detach(), lse.detach()), attend(given))


def test_what_does_matter() -> None:
    """The controls: another query, another key that is attended, another option, and keys at other positions."""
    given = sequence()
    last = attend(given).of(LENGTH - 1, LENGTH)
    other_query = given._replace(q=given.q * 1.001)
    other_key = given._replace(k=torch.cat([given.k[:, :1] * 1.01, given.k[:, 1:]], 1))
    for changed in (attend(other_query), attend(other_key), attend(given, softcap=30.0)):
        assert not agree(changed.of(LENGTH - 1, LENGTH), last)
    moved = Sequence(*(torch.cat([torch.zeros_like(x[:, :37]), x], 1) for x in given))
    shifted = attend(moved, window_size=(LENGTH - 1, 0)).of(37 + LENGTH - 1, 37 + LENGTH)
    torch.testing.assert_close(shifted.out, last.out)
    assert not agree(shifted, last), "the same keys, cut into other tiles"


def test_two_halves_recombined_have_other_bits() -> None:
    """The control of `num_splits`: what kernels do that split the keys of a query, here in fp64 from the results of both halves."""
    given = sequence()
    last = attend(given).of(LENGTH - 1, LENGTH)
    halves = [attend(Sequence(given.q[:, -1:], given.k[:, part], given.v[:, part])) for part in (slice(0, 150), slice(150, LENGTH))]
    lse = torch.stack([half.lse.double() for half in halves])
    weights = (lse - lse.logsumexp(0)).exp().transpose(2, 3)[..., None]
    recombined = sum(weight * half.out.double() for weight, half in zip(weights, halves, strict=True))
    assert isinstance(recombined, Tensor)
    torch.testing.assert_close(recombined.float(), last.out)
    assert not same_bits(recombined.float(), last.out)


def test_a_key_of_weight_zero_is_not_nothing() -> None:
    """Why the promise is about finite keys and values: the forward multiplies what is masked inside a tile by 0, and 0 x NaN is NaN.
    Slots of a cache that are not in use are never multiplied."""
    given = sequence(100)
    later = given._replace(v=given.v.clone())
    later.v[:, 50:] = torch.nan
    assert attend(later).out[:, :50].isnan().all()
    cached = flash_attn_with_kvcache(given.q[:, 40:50], later.k, later.v, cache_seqlens=50, causal=True)
    assert same_bits(cached, attend(given).out[:, 40:50])


@pytest.mark.parametrize("dim", KERNEL_DIMS)
def test_on_hopper_tiles_of_keys_are_a_function_of_the_head_dim(dim: int) -> None:
    """Whatever the mask, the batch and the kernel: the tiles decide where sums are cut."""
    rows = {forward_tiles(dim, consumers).kv_rows for consumers in CONSUMER_CHOICES[dim]} | {decode_tiles(dim).kv_rows}
    rows |= {cluster_tiles(dim, columns).kv_rows for of_dim, columns, _ in CLUSTERS if of_dim == dim}
    served = [(q, v) for q in range(1, 257) for v in range(1, 257) if kernel_dim(q, v) == dim]
    rows |= {forward_tiles(forward_dims(q, v)[0], 2).kv_rows for q, v in served}
    assert len(rows) == 1
