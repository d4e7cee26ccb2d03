"""The suite `decode`: caches in rows and pages at a small size on the CPU, every peer's calls answered by stand-ins, bits against the
training forward, tables in TB/s."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from bench_results import made_up_results, made_up_row
from bench_stand_ins import fake_times
from benchmarks import cache_peers, decode
from benchmarks.result_files import print_report
from benchmarks.suite import main
from benchmarks.suites import SUITES, choose
from dash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from dash_attn.tools.bench.candidates import CUDNN, OURS, make_tensors
from dash_attn.tools.bench.checks import not_as_promised
from dash_attn.tools.bench.measure import measure
from dash_attn.tools.bench.pytorch_peers import FLASH
from dash_attn.tools.bench.report import save, table
from dash_attn.tools.bench.shape import Shape
from dense import same_bits

CPU = torch.device("cpu")
SMALL = {
    "rows": Shape("causal", 300, 2, 4, 2, 32, q_seqlen=1, cache="rows"),
    "pages": Shape("causal", 300, 2, 4, 2, 32, q_seqlen=1, cache="pages:16"),
    "speculation": Shape("causal", 300, 2, 4, 2, 32, q_seqlen=4, cache="pages:48"),
    "window": Shape("window:100,0", 300, 2, 4, 2, 32, q_seqlen=1, cache="pages:16"),
    "window in rows": Shape("window:100,0", 300, 2, 4, 2, 32, q_seqlen=1, cache="rows"),
}
each_kind = pytest.mark.parametrize("shape", SMALL.values(), ids=SMALL)


def test_the_suite_has_the_shapes_of_servers() -> None:
    shapes = SUITES["decode"].shapes()
    assert all(shape.cache for shape in shapes)
    assert {shape.page_size for shape in shapes} == {0, 16, 64}
    assert {shape.q_seqlen for shape in shapes} == {1, 4}
    assert {(64, 4096), (128, 8192), (1, 8192), (1, 32768), (4, 32768)} <= {(s.batch, s.seqlen) for s in shapes if s.q_heads == 32}
    assert len({str(shape) for shape in shapes}) == len(shapes) == 15
    assert [shape.q_heads for shape in choose("decode", seqlens=(2048,))] == [64]
    assert [shape.cache for shape in choose("decode", masks=("window",))] == ["pages:64"]
    assert not any(shape.cache for name in ("masks", "ranks", "paper") for shape in SUITES[name].shapes())


@each_kind
def test_shapes_survive_json(shape: Shape) -> None:
    assert Shape.from_json(json.loads(json.dumps(shape.to_json()))) == shape


def test_bytes_are_those_of_keys_that_somebody_attends() -> None:
    assert SMALL["rows"].cache_bytes == 2 * 300 * 2 * 64 * 2
    assert SMALL["window"].cache_bytes == 2 * 101 * 2 * 64 * 2
    assert Shape("causal", 300, 2, 4, 2, 48, v_head_dim=32, q_seqlen=1, cache="rows").cache_bytes == 2 * 300 * 2 * 80 * 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cache": "columns"}, "cache must be rows or pages:N, or nothing; got 'columns'"),
        ({"cache": "pages:0"}, "cache must be rows or pages:N"),
        ({"cache": "rows", "softcap": 5.0}, "a cache goes without lengths, softcap and sinks"),
    ],
)
def test_bad_shapes_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Shape("causal", 300, 1, 4, 2, 32, **changes)


@each_kind
def test_pages_hold_the_keys(shape: Shape) -> None:
    tensors = make_tensors(shape, CPU)
    (cache,) = cache_peers.caches(shape, tensors)
    if cache.table is None:
        assert same_bits(cache.k, tensors.k)
        assert cache.k.data_ptr() != tensors.k.data_ptr(), "every candidate has its own"
        return
    assert not torch.equal(cache.table.flatten(), torch.arange(cache.table.numel())), "pages do not lie in order"
    for stored, x in ((cache.k, tensors.k), (cache.v, tensors.v)):
        assert same_bits(stored[cache.table.long()].flatten(1, 2)[:, : shape.seqlen].contiguous(), x)


def test_copies_take_turns() -> None:
    run = cache_peers.in_turn(torch.tensor, range(3))  # type: ignore[arg-type]
    assert [int(run.forward()) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    with pytest.raises(NotImplementedError, match="no backward"):
        run.backward()


# Stand-ins, with the names of arguments that the packages have. What they compute is ours: they are about how they are called.


def with_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor | None, **options: Any) -> Tensor:
    out: Tensor = flash_attn_with_kvcache(q, k_cache, v_cache, block_table=table, **options)
    return out


def version_2(q: Any, k_cache: Any, v_cache: Any, *, cache_seqlens: Any, block_table: Any, causal: bool, window_size: Any) -> Tensor:
    return with_kvcache(q, k_cache, v_cache, block_table, cache_seqlens=cache_seqlens, causal=causal, window_size=window_size)


def version_3(q: Any, k_cache: Any, v_cache: Any, *, cache_seqlens: Any, page_table: Any, causal: bool, window_size: Any) -> Tensor:
    return with_kvcache(q, k_cache, v_cache, page_table, cache_seqlens=cache_seqlens, causal=causal, window_size=window_size)


def unlimited(window_size: Any) -> Any:
    return tuple(-1 if side is None else side for side in window_size)


def rows_of_version_4(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window_size: Any) -> Any:
    return flash_attn_func(q, k, v, causal=causal, window_size=unlimited(window_size)), None


def pages_of_version_4(
    q: Any, k: Any, v: Any, *, max_seqlen_q: int, max_seqlen_k: int, seqused_k: Any, page_table: Any, causal: bool, window_size: Any
) -> Any:
    assert (max_seqlen_q, max_seqlen_k) == (q.shape[1], 300)
    return with_kvcache(q, k, v, page_table, cache_seqlens=seqused_k, causal=causal, window_size=unlimited(window_size)), None


def vllm(
    q: Any, k: Any, v: Any, *, max_seqlen_q: Any, cu_seqlens_q: Any, max_seqlen_k: Any, seqused_k: Any, block_table: Any, causal: bool,
    window_size: Any, fa_version: int,
) -> Tensor:  # fmt: skip
    assert fa_version == 3
    ends = torch.cat([seqused_k.new_zeros(1), seqused_k.cumsum(0).int()])
    options = {"causal": causal, "window_size": tuple(window_size), "block_table": block_table}
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, ends, max_seqlen_q, max_seqlen_k, **options)


class Wrapper:
    """FlashInfer's, of one query per sequence."""

    def __init__(self, workspace: Tensor, layout: str, use_tensor_cores: bool) -> None:
        assert (workspace.dtype, layout, use_tensor_cores) == (torch.uint8, "NHD", True)

    def plan(self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, *sizes: int, window_left: int, **dtypes: torch.dtype) -> None:
        assert (sizes[:3], set(dtypes.values())) == ((4, 2, 32), {torch.bfloat16})
        columns = indptr.diff()
        self.lengths = ((columns - 1) * sizes[3] + last_page_len).int()
        self.table, self.window = indices.view(len(columns), -1), (window_left, 0 if window_left >= 0 else -1)

    def run(self, q: Tensor, pages: tuple[Tensor, Tensor]) -> Tensor:
        return with_kvcache(q[:, None], *pages, self.table, cache_seqlens=self.lengths, window_size=self.window)[:, 0]


MODULES: dict[str, dict[str, Any]] = {
    "flash_attn": {"flash_attn_with_kvcache": version_2},
    "flash_attn.cute": {"flash_attn_func": rows_of_version_4, "flash_attn_varlen_func": pages_of_version_4},
    "flash_attn_interface": {"flash_attn_with_kvcache": version_3},
    "flashinfer": {"BatchDecodeWithPagedKVCacheWrapper": Wrapper},
    "vllm": {},
    "vllm.vllm_flash_attn": {"flash_attn_varlen_func": vllm},
}
PACKAGED = ["FlashAttention-4", "FlashAttention-3", "FlashAttention-2", "FlashInfer", "vLLM FlashAttention"]


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, contents in MODULES.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)


def measured(shape: Shape) -> dict[str, dict[str, Any]]:
    found, missing = cache_peers.decode_candidates()
    assert missing == {}
    rows = measure(shape, found, 2, fake_times, CPU)
    assert {row["pass"] for row in rows} == {"forward"}
    return {row["candidate"]: row for row in rows}


@each_kind
@pytest.mark.usefixtures("packages")
def test_every_package_is_called_as_it_wants(shape: Shape) -> None:
    rows = measured(shape)
    reasons = {name: row["reason"] for name, row in rows.items() if row["status"] != "ok" and name not in (CUDNN, FLASH)}
    assert reasons == {}
    expected = {OURS, *PACKAGED[:3]}
    if shape.page_size:
        expected |= {"vLLM FlashAttention"} | ({"FlashInfer"} if shape.q_seqlen == 1 else set())
    elif shape.causal:
        expected |= {CUDNN, FLASH}
    assert set(rows) == expected
    assert (rows[OURS]["deterministic"], rows["FlashAttention-4"]["deterministic"]) == (True, False)


def test_packages_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, None)
    found, missing = cache_peers.decode_candidates()
    assert list(missing) == PACKAGED
    assert [candidate.name for candidate in found] == [OURS, CUDNN, FLASH]
    assert [candidate.name for candidate in cache_peers.decode_candidates(with_peers=False)[0]] == [OURS]


def test_pytorch_attends_rows() -> None:
    """Its kernels need a GPU; the one for every device stands in."""
    shape = SMALL["rows"]
    tensors = make_tensors(shape, CPU)
    out = cache_peers._sdpa("MATH", shape, tensors).forward()
    torch.testing.assert_close(out, cache_peers.training_forward(shape, tensors), atol=0.02, rtol=0.02)
    refused = {name: cache_peers._refused_by_sdpa(other) for name, other in SMALL.items()}
    assert [name for name, why in refused.items() if why is None] == ["rows"]


def test_other_bits_than_those_of_training_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of values would not: a last bit of one number is off."""

    def nearly(*tensors: Tensor, **options: Any) -> Tensor:
        out: Tensor = flash_attn_with_kvcache(*tensors, **options)
        out.view(torch.int16)[0, 0, 0, 5] ^= 1
        return out

    monkeypatch.setattr(cache_peers, "flash_attn_with_kvcache", nearly)
    found, _ = cache_peers.decode_candidates(with_peers=False)
    (row,) = measure(SMALL["pages"], found, 2, fake_times, CPU)
    assert (row["status"], row["reason"]) == ("failed check", "1 of 256 elements have other bits than the training forward")
    out = torch.ones(3)
    assert not_as_promised((out,), out.clone()) is None


def results() -> dict[str, Any]:
    shapes = [SUITES["decode"].shapes()[0], SUITES["decode"].shapes()[9]]
    rows = [made_up_row("forward", shape, name, ratio_to_fastest_peer=1.2) for shape in shapes for name in (OURS, CUDNN)]
    return {**made_up_results(), "suite": "decode", "rows": rows}


def test_tables_are_in_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    shape = SUITES["decode"].shapes()[0]
    rows = [{**made_up_results()["rows"][0], "pass": "forward", "shape": shape.to_json(), "median_ms": 0.5, "ratio_to_cudnn": 2.0}]
    header, cells = table(rows)
    assert header[1] == "64 x 1 on 4096"
    assert cells[0][1] == f"{64 * 4096 * 8 * 256 * 2 / 0.5e-3 / 1e12:.2f} (2.00)"
    print_report({**made_up_results(), "suite": "decode", "rows": rows})
    assert "TB/s of keys and values and (speed relative to cuDNN)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--schedules", "suite decode has a forward only: caches have no backward; got --schedules"),
        ("--passes backward", "suite decode has a forward only: caches have no backward; got --passes backward"),
        ("--seqlens 7", "no case of suite decode has these lengths"),
        ("", "bench needs a CUDA GPU"),
    ],
)
def test_what_does_not_fit_is_refused(words: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["decode", "--output", str(tmp_path), *words.split()]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.usefixtures("packages")
def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["decode", "--list", "--masks", "window"]) == 0
    out = capsys.readouterr().out
    assert "causal window of 1024, head dim 128, 32 query and 8 KV heads, pages of 64, 128 x 1 queries on 8192 keys" in out
    assert f"can run it: {OURS}, {', '.join(PACKAGED)}" in out
    assert "cannot: cuDNN (scaled_dot_product_attention has no pages)" in out
    assert main(["decode", "--list", "--no-peers"]) == 0
    assert "FlashInfer" not in capsys.readouterr().out


def test_a_picture_of_caches_is_of_the_forward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored, picture = tmp_path / "decode.json", tmp_path / "decode.svg"
    save(results(), stored)
    assert main(["--from", str(stored), "--plot", str(picture)]) == 0
    assert "on caches, forward on" in picture.read_text()
    assert "pages of 64" in capsys.readouterr().out


def test_benchmarks_decode_compares_bits(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A last bit that is off is seen; after some cases the rest is left out."""
    cases = [decode.SMALL[place] for place in (5, 10, 11, 13)]
    assert decode.check([*cases, decode.random_case(5)]) == 0

    def nearly(*tensors: Tensor, **options: Any) -> Any:
        found = flash_attn_with_kvcache(*tensors, **options)
        found[0].view(torch.int16)[0, -1, 0, 5] ^= 1
        return found

    monkeypatch.setattr("cached.flash_attn_with_kvcache", nearly)
    monkeypatch.setattr(decode, "MOST_WRONG", 2)
    assert decode.check(cases) == 3
    assert "out of sequence 0" in capsys.readouterr().out
