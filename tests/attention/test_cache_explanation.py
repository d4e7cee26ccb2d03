"""explain tells what a call with a cache would do, without running it and without a GPU."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor

from dash_attn import explain, flash_attn_with_kvcache
from dash_attn.backends.hopper.calls import decode
from dash_attn.backends.hopper.tiles import decode_tiles
from dash_attn.errors import Unsupported
from dash_attn.scheduling.order import ALL_GUARANTEES

ROWS = ["call", "backend", "guarantees", "tiles", "units", "appended", "read", "kernels"]


def half(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, device="meta")


def whole(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.int32, device="meta")


def hopper(batch: int = 64, queries: int = 1, heads: tuple[int, int] = (32, 8), dim: int = 128, **options: Any) -> Any:
    caches = half(1000, 64, heads[1], dim), half(1000, 64, heads[1], dim)
    arguments = {"block_table": whole(batch, 20), "causal": True, "backend": "hopper", **options}
    return explain(flash_attn_with_kvcache, half(batch, queries, heads[0], dim), *caches, **arguments)


def test_it_takes_what_the_call_takes() -> None:
    """Each argument by its name, and nothing else."""
    names = inspect.signature(flash_attn_with_kvcache).parameters
    defaults = {name: one.default for name, one in names.items() if one.default is not inspect.Parameter.empty}
    given = {"q": half(2, 1, 4, 64), "k_cache": half(2, 9, 4, 64), "v_cache": half(2, 9, 4, 64)}
    assert set(names) == {*given, *defaults}
    assert explain(flash_attn_with_kvcache, **given, **{**defaults, "backend": "cpu"}).backend == "cpu"
    for wrong in ("cache_lengths", "mask", "schedule"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{wrong}'"):
            explain(flash_attn_with_kvcache, **given, backend="cpu", **{wrong: None})
    with pytest.raises(TypeError, match="missing a required argument: 'v_cache'"):
        explain(flash_attn_with_kvcache, half(2, 1, 4, 64), half(2, 9, 4, 64), backend="cpu")


def test_hopper_without_a_gpu() -> None:
    found = hopper()
    assert found.guarantees == (*ALL_GUARANTEES, "decode-equals-training")
    assert (found.backend, found.kv_rows, found.units, found.served_by) == ("hopper", 128, 64 * 8, "each by one CTA")
    assert found.read_bytes == 64 * 20 * 64 * 8 * 256 * 2
    assert (found.new_keys, found.kernels) == (0, {})
    assert found.call == "q (64, 1, 32, 128), k_cache (1000, 64, 8, 128), v_cache (1000, 64, 8, 128), pages of 64, bfloat16, causal"
    assert [line.split()[0] for line in str(found).splitlines()] == ROWS
    assert json.loads(json.dumps(asdict(found)))["units"] == 512


@pytest.mark.parametrize("dim", [64, 80, 96, 192, 256])
def test_tiles_are_those_of_the_kernel(dim: int) -> None:
    assert hopper(dim=dim).kv_rows == decode_tiles(next(d for d in (64, 96, 128, 192, 256) if d >= dim)).kv_rows


def test_queries_and_heads_make_units() -> None:
    assert hopper(2, queries=17, heads=(32, 8)).units == 2 * 8 * 2, "17 queries of 4 heads are 68 rows"
    assert hopper(2, heads=(8, 8)).units == 16


def test_clusters_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "CLUSTERS", ((128, 16, 15), (128, 32, 40)))
    assert hopper(1).served_by == "each by a cluster of 8 CTAs"
    assert hopper(2).served_by == "each by a cluster of 4 CTAs"
    assert hopper(64).served_by == "each by one CTA", "there are enough units"
    assert hopper(2, dim=256).served_by == "each by one CTA"


def test_what_is_read_at_most() -> None:
    row = 8 * 256 * 2
    assert hopper(2, window_size=(100, 0)).read_bytes == 2 * 101 * row
    assert hopper(2, queries=5, window_size=(100, 0)).read_bytes == 2 * 105 * row
    rows = {"block_table": None, "cache_seqlens": 30}
    assert hopper(2, **rows).read_bytes == 2 * 30 * row
    assert hopper(2, **rows, k=half(2, 3, 8, 128), v=half(2, 3, 8, 128)).read_bytes == 2 * 33 * row
    assert hopper(2, **{**rows, "cache_seqlens": whole(2)}).read_bytes == 2 * 64 * row


def test_cpu() -> None:
    q, cache = torch.zeros(2, 1, 4, 16), torch.full((2, 40, 2, 16), torch.nan)
    before = cache.clone()
    new = torch.zeros(2, 3, 2, 16)
    found = explain(flash_attn_with_kvcache, q, cache, cache, new, new, cache_seqlens=5, causal=True, softcap=2.0)
    assert (found.backend, found.kv_rows, found.new_keys, found.read_bytes) == ("cpu", 128, 3, 2 * 8 * 2 * 32 * 4)
    assert "rows, float32, causal, softcap 2" in found.call
    assert "appended      3 keys per sequence" in str(found)
    assert torch.equal(cache.isnan(), before.isnan()), "nothing is appended"


LOGGED = """
import torch
from dash_attn import flash_attn_with_kvcache
q, k, pages = torch.zeros(2, 1, 4, 16), torch.zeros(2, 1, 2, 16), torch.zeros(6, 16, 2, 16)
table = torch.arange(6, dtype=torch.int32).view(2, 3)
for length in (3, 4, 20):
    flash_attn_with_kvcache(q, pages, pages.clone(), k, k, cache_seqlens=length, block_table=table, causal=True)
flash_attn_with_kvcache(q, pages, pages, cache_seqlens=3)
"""


def test_the_log_has_one_line_for_every_kind_of_call() -> None:
    environment = {**os.environ, "DASH_ATTN_LOG": "1"}
    done = subprocess.run([sys.executable, "-c", LOGGED], capture_output=True, text=True, timeout=120, env=environment, check=True)
    shapes = "q (2, 1, 4, 16), k_cache (6, 16, 2, 16), v_cache (6, 16, 2, 16)"
    assert done.stderr.splitlines() == [
        f"dash-attn: {shapes}, pages of 16, float32, causal, 1 keys appended: cpu on cpu, decode-equals-training",
        f"dash-attn: {shapes}, rows, float32, full: cpu on cpu, decode-equals-training",
    ]


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"num_splits": 3}, ValueError, "num_splits must be 0 or 1"),
        ({"backend": "auto"}, ValueError, "say which one to explain"),
        ({"queries": 0}, ValueError, "nothing to explain: there is no query"),
        ({"block_table": whole(3, 20)}, ValueError, "block_table must be an int32 tensor of 64 x 20"),
        ({"dim": 20}, Unsupported, "multiples of 8"),
        ({"cache_leftpad": whole(64)}, Unsupported, "cache_leftpad without block_table"),
        ({"k": half(64, 1, 8, 128)}, ValueError, "k and v must be given together"),
    ],
    ids=str,
)
def test_what_the_call_refuses_raises(changes: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        hopper(**changes)
