"""The suites `llama` and `masks`: every kind of case at a small size on the CPU, and every peer's calls, answered by stand-ins."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bench_stand_ins import fake_times
from benchmarks import peers as all_peers
from benchmarks.peers import Package, package_peers, peers
from benchmarks.suite import main
from benchmarks.suites import SUITES, choose
from dash_attn import Window, flash_attn_func, flash_attn_varlen_func
from dash_attn.tools.bench import pytorch_peers
from dash_attn.tools.bench.candidates import Candidate, Tensors, make_tensors, ours, who_runs
from dash_attn.tools.bench.checks import Reference, dense, distance
from dash_attn.tools.bench.measure import measure
from dash_attn.tools.bench.shape import Shape
from dense import dense as whole_dense
from dense import element_mask

CPU = torch.device("cpu")
LENGTHS = (150, 7, 100, 43)
SMALL = {  # one of each kind in the suite
    "window": Shape("window:70,0", 300, 2, 4, 2, 32),
    "two-sided window": Shape("window:40,25", 300, 1, 2, 2, 32),
    "documents": Shape("documents:150,7,100,43", 300, 2, 2, 2, 32),
    "prefix": Shape("prefix:90", 300, 1, 2, 2, 32),
    "varlen": Shape("causal", 300, 1, 4, 2, 32, lengths=LENGTHS),
    "varlen full": Shape("full", 300, 1, 2, 2, 32, lengths=LENGTHS),
    "head dim 256": Shape("causal", 300, 1, 2, 2, 256),
    "softcap": Shape("causal", 300, 2, 4, 2, 32, softcap=1.5),
    "sinks": Shape("causal", 300, 1, 4, 2, 32, sinks=True),
}
each_kind = pytest.mark.parametrize("shape", SMALL.values(), ids=SMALL)


def test_llama_is_the_grouped_heads_of_the_known_sizes() -> None:
    shapes = SUITES["llama"].shapes()
    assert {(s.q_heads, s.kv_heads) for s in shapes} == {(32, 8), (64, 8), (128, 8)}
    assert {s.seqlen for s in shapes} == {4096, 8192, 16384}
    assert {(s.batch * s.seqlen, s.head_dim, s.causal) for s in shapes} == {(16384, 128, True)}


def test_masks_has_every_kind() -> None:
    shapes = SUITES["masks"].shapes()
    assert {s.mask.partition(":")[0] for s in shapes} == {
        *("window", "documents", "prefix", "causal", "full"),
        *("blocks", "elements", "tree"),
    }
    assert {s.batch * s.seqlen for s in shapes} == {16384}
    assert [s.mask for s in shapes if s.head_dim == 256] == ["causal", "full"]
    assert sum(bool(s.lengths) for s in shapes) == sum(bool(s.softcap) for s in shapes) == sum(s.sinks for s in shapes) == 1
    assert len({(s.kind, s.seqlen) for s in shapes}) == len(shapes), "every case has a place of its own in a table"
    assert len({str(s) for s in shapes}) == len(shapes)


def test_cases_are_filtered() -> None:
    assert {s.head_dim for s in choose("masks", head_dims=(256,))} == {256}
    assert [s.mask for s in choose("masks", masks=("prefix",))] == ["prefix:4096"]
    with pytest.raises(ValueError, match="no case of suite masks"):
        choose("masks", seqlens=(512,))


@each_kind
def test_shapes_survive_json(shape: Shape) -> None:
    assert Shape.from_json(json.loads(json.dumps(shape.to_json()))) == shape


def test_shapes_of_earlier_files_are_read() -> None:
    known = {"mask": "causal", "seqlen": 64, "batch": 1, "q_heads": 2, "kv_heads": 1, "head_dim": 32, "dtype": "bfloat16"}
    assert Shape.from_json(known).to_json() == known


@each_kind
def test_operations_count_the_pairs(shape: Shape) -> None:
    """Exactly for windows and prefixes; causal squares are counted as half, as papers do, which leaves the diagonal out."""
    pairs = int(element_mask(shape.attended, 300, 300).sum()) * shape.batch * shape.q_heads
    exact = shape.mask.startswith(("window", "prefix"))
    assert shape.operations("backward") / (10 * shape.head_dim) == pytest.approx(pairs, rel=0 if exact else 0.02)
    assert shape.operations("forward") * 5 == shape.operations("backward") * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask": "diagonal"}, "unknown mask"),
        ({"mask": "documents:3,4"}, "sum of the document lengths"),
        ({"lengths": (3, 4)}, "sum of the document lengths"),
        ({"lengths": (150, 150), "batch": 2}, "one row"),
        ({"sinks": True, "batch": 2}, "one row"),
        ({"q_heads": 3}, "multiple"),
        ({"seqlen": 0}, "seqlen"),
    ],
)
def test_shapes_that_make_no_sense(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Shape(**{"mask": "causal", "seqlen": 300, "batch": 1, "q_heads": 2, "kv_heads": 2, "head_dim": 32, **changes})


def fp64(shape: Shape) -> Tensors:
    return Tensors(*(None if x is None else x.double() for x in make_tensors(shape, CPU)))  # type: ignore[arg-type]


def whole(shape: Shape, tensors: Tensors) -> dict[str, Tensor]:
    """Attention and gradients by the tests' own definition. A sink is one key more that every query sees, of value zero."""
    leaves = [x.clone().requires_grad_() for x in tensors if x is not None]
    q, k, v = leaves[:3]
    out, lse = whole_dense(q, k, v, shape.attended, softcap=shape.softcap)
    names = ["dq", "dk", "dv"]
    del leaves[3]
    if tensors.sinks is not None:
        out = out * torch.sigmoid(lse - leaves[3][:, None]).transpose(1, 2)[..., None]
        names.append("dsinks")
    return {"out": out.detach(), **dict(zip(names, torch.autograd.grad(out, leaves, tensors.dout), strict=True))}


@each_kind
def test_the_reference_is_attention(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dash_attn.tools.bench.checks.BLOCK", 128)  # several blocks of rows, the last one short
    tensors = fp64(shape)
    expected = whole(shape, tensors)
    found = Reference(shape, tensors)
    last = [tensors[i][-1:, :, -heads:] for i, heads in ((0, shape.group), (1, 1), (2, 1), (3, shape.group))]
    exact = dense(Tensors(*last, tensors.sinks[-shape.group :] if shape.sinks else None), shape.attended, shape.softcap)  # type: ignore[index]
    for name, result in expected.items():
        assert distance(exact[name], found._part(name, result)) < 1e-12, name
    assert found.complaint("forward", (expected["out"],)) is None
    assert found.complaint("backward", tuple(expected[name] for name in list(expected)[1:])) is None


def test_the_reference_sees_a_wrong_sink() -> None:
    shape = SMALL["sinks"]
    tensors = fp64(shape)
    expected = whole(shape, tensors)
    found = Reference(shape, tensors)
    gradients = (expected["dq"], expected["dk"], expected["dv"], expected["dsinks"] * 1.1)
    assert str(found.complaint("backward", gradients)).startswith("dsinks is off by 0.1")
    without = whole(SMALL["sinks"], tensors._replace(sinks=torch.full_like(tensors.sinks, -1e9)))  # type: ignore[arg-type]
    assert str(found.complaint("forward", (without["out"],))).startswith("out is off")


@each_kind
def test_ours_runs_or_says_why_not(shape: Shape) -> None:
    rows = {row["candidate"]: row for row in measure(shape, ours(schedules=False), 2, fake_times, CPU) if row["pass"] == "backward"}
    row = rows["dash-attn"]
    takes_sinks = "sinks" in flash_attn_func.__kwdefaults__
    if shape.sinks and not takes_sinks:
        assert row["status"] == "unavailable"
        assert "sinks" in row["reason"]
        assert "median_ms" not in row
    else:
        assert row["status"] == "ok", row["reason"]


@each_kind
def test_flex_rules_are_the_masks(shape: Shape) -> None:
    rule = all_peers.mask_rule(shape.attended, CPU)
    q, kv = torch.arange(300)[:, None], torch.arange(300)
    kept = torch.ones(300, 300, dtype=torch.bool) if rule is None else rule(q, q, q, kv)
    assert torch.equal(kept, element_mask(shape.attended, 300, 300))


@pytest.mark.parametrize("kind", ["window", "documents", "softcap", "sinks", "varlen"])
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_computes_what_is_timed(kind: str) -> None:
    """Its forward, not compiled: on the CPU it has no backward."""
    from torch.nn.attention.flex_attention import flex_attention

    shape, tensors = SMALL[kind], make_tensors(SMALL[kind], CPU)
    inputs = [x.transpose(1, 2).float() for x in tensors[:3]]
    attention = all_peers.attention_of(shape, CPU, flex_attention)
    out = attention(*inputs, *([] if tensors.sinks is None else [tensors.sinks.float()])).transpose(1, 2)
    assert Reference(shape, tensors).complaint("forward", (out,)) is None


def test_flex_without_a_gpu_is_unavailable_and_says_why() -> None:
    row = next(row for row in measure(SMALL["window"], [all_peers.flex()], 2, fake_times, CPU) if row["pass"] == "backward")
    assert row["status"] == "unavailable"
    assert "CPU" in row["reason"]


class Calls(list):
    """Functions like those of a FlashAttention package, computed by ours on the CPU; remembers what they were given."""

    def rows(self, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
        self.append(given)
        window = tuple(-1 if side is None else side for side in given.get("window_size", (-1, -1)))
        return flash_attn_func(q, k, v, causal=given["causal"], window_size=window, softcap=given.get("softcap", 0.0))

    def tokens(self, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
        self.append(given)
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "causal")
        ends_q, ends_k, longest_q, longest_k, causal = (given[name] for name in names)
        return flash_attn_varlen_func(q, k, v, ends_q, ends_k, longest_q, longest_k, causal=causal)


def fa2(calls: Calls) -> Package:
    def flash_attn_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool = False,
        window_size: Any = (-1, -1),
        softcap: float = 0.0,
        deterministic: bool = False,
    ) -> Tensor:
        return calls.rows(q, k, v, causal=causal, window_size=window_size, softcap=softcap, deterministic=deterministic)

    def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, *, deterministic: bool = False, **given: Any) -> Tensor:
        return calls.tokens(q, k, v, deterministic=deterministic, **given)

    return Package(flash_attn_func, flash_attn_varlen_func)


def fa4(calls: Calls) -> Package:
    def flash_attn_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool = False,
        window_size: Any = (None, None),
        learnable_sink: Tensor | None = None,
        deterministic: bool = False,
    ) -> tuple[Tensor, None]:
        out = calls.rows(q, k, v, causal=causal, window_size=window_size, learnable_sink=learnable_sink)
        if learnable_sink is not None:
            _, lse = flash_attn_func_lse(q, k, v, causal)
            out = out * torch.sigmoid(lse - learnable_sink[:, None]).transpose(1, 2)[..., None].to(out.dtype)
        return out, None

    return Package(flash_attn_func, None)


def flash_attn_func_lse(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """With an LSE that can be differentiated, for the stand-in's sinks."""
    from dash_attn import Causal, Full

    return whole_dense(q.float(), k.float(), v.float(), Causal() if causal else Full())


def rows_of(package: Package, shape: Shape) -> dict[str, Any]:
    candidates = [package.candidate("package", False), package.candidate("package deterministic", True)]
    return {(row["candidate"], row["pass"]): row for row in measure(shape, candidates, 2, fake_times, CPU)}


@each_kind
def test_packages_get_what_they_need(shape: Shape) -> None:
    calls = Calls()
    package = fa2(calls)
    refusal = package.refuses(shape)
    assert refusal == {"prefix": "has no prefix mask", "sinks": "has no sinks"}.get(next(k for k, s in SMALL.items() if s is shape))
    if refusal is not None:
        assert rows_of(package, shape) == {}
        return
    rows = rows_of(package, shape)
    assert {row["status"] for row in rows.values()} == {"ok"}, [row["reason"] for row in rows.values()]
    assert ("package deterministic", "forward") not in rows
    assert {given["deterministic"] for given in calls} == {False, True}
    given = calls[0]
    if shape.sequences:
        lengths = [b - a for a, b in pairwise(given["cu_seqlens_q"].tolist())]
        assert lengths == [*LENGTHS] * shape.batch
        assert given["max_seqlen_k"] == 150
    else:
        assert given["softcap"] == shape.softcap
        assert given["window_size"] == ((shape.attended.left, shape.attended.right) if isinstance(shape.attended, Window) else (-1, -1))


def test_a_package_that_writes_none_for_no_limit_and_has_sinks() -> None:
    calls = Calls()
    package = fa4(calls)
    assert package.refuses(SMALL["varlen"]) == package.refuses(SMALL["documents"]) == "has no function for packed sequences"
    assert package.refuses(SMALL["softcap"]) == "has no softcap"
    one_sided = Shape("window:-1,20", 300, 1, 2, 2, 32)
    assert {row["status"] for row in rows_of(package, one_sided).values()} == {"ok"}
    assert calls[0]["window_size"] == (None, 20)
    sinks = rows_of(package, SMALL["sinks"])
    assert {row["status"] for row in sinks.values()} == {"ok"}, [row["reason"] for row in sinks.values()]


def test_a_package_that_drops_an_argument_gets_no_figure() -> None:
    def ignores_the_window(
        q: Tensor, k: Tensor, v: Tensor, causal: bool = False, window_size: Any = (-1, -1), deterministic: bool = False
    ) -> Tensor:
        return flash_attn_func(q, k, v, causal=True)

    rows = rows_of(Package(ignores_the_window, None), SMALL["window"])
    assert {row["status"] for row in rows.values()} == {"failed check"}
    assert all("median_ms" not in row and "tflops" not in row for row in rows.values())


def test_packages_are_found_by_importing_them(monkeypatch: pytest.MonkeyPatch) -> None:
    package = fa2(Calls())
    both = SimpleNamespace(flash_attn_func=package.of_rows, flash_attn_varlen_func=package.of_tokens)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", both)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    made, missing = package_peers()
    assert [candidate.name for candidate in made] == ["FlashAttention-3", "FlashAttention-3 deterministic"]
    assert set(missing) == {"FlashAttention-4", "FlashAttention-2"}
    assert all("Error" in why for why in missing.values())


def test_versions_are_those_of_the_packages_that_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [Package(fa2(Calls()).of_rows, None).candidate(name, False) for name in ("FlashAttention-3", "FlashAttention-2", "another")]
    monkeypatch.setattr(all_peers.metadata, "packages_distributions", lambda: {"flash_attn": ["torch"], "flash_attn_interface": []})
    assert all_peers.package_versions(made) == {"FlashAttention-3": "unknown", "FlashAttention-2": version("torch")}
    assert all_peers.package_versions(made[2:]) == {}


@pytest.mark.parametrize("kind", ["window", "documents", "prefix", "varlen"])
def test_a_mask_tensor_is_the_mask(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN itself needs a GPU; PyTorch's plain attention takes the same tensor."""
    sdpa = pytorch_peers.sdpa
    monkeypatch.setattr(pytorch_peers, "sdpa", lambda backend, shape, **mask: sdpa("MATH", shape, **mask))
    masked = next(c for c in all_peers.pytorch_peers() if c.name == all_peers.CUDNN_MASKED)
    rows = measure(SMALL[kind], [masked], 2, fake_times, CPU)
    assert [row["status"] for row in rows] == ["ok", "ok"], [row["reason"] for row in rows]


def new_varlen(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, n: int, m: int, *, window_size: Any = (-1, -1), enable_gqa: bool = False
) -> Tensor:
    assert enable_gqa == (q.shape[1] != k.shape[1])
    return flash_attn_varlen_func(q, k, v, a, b, n, m, window_size=window_size)


def old_varlen(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, n: int, m: int, is_causal: bool = False) -> Tensor:
    return flash_attn_varlen_func(q, k, v, a, b, n, m, causal=is_causal)


@pytest.mark.parametrize("function", [new_varlen, old_varlen])
@pytest.mark.parametrize("kind", ["documents", "varlen", "varlen full"])
def test_pytorch_varlen_of_any_version(function: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", SimpleNamespace(varlen_attn=function))
    flash = [c for c in all_peers.pytorch_peers() if c.name.startswith(pytorch_peers.FLASH)]
    rows = measure(SMALL[kind], flash, 2, fake_times, CPU)
    assert [row["status"] for row in rows] == ["ok"] * 3, [row["reason"] for row in rows]


def test_pytorch_flash_without_a_gpu_has_neither_windows_nor_packed_sequences() -> None:
    """The operators are called, and say themselves that they need a GPU."""
    for kind in ("window", "varlen"):
        flash = next(c for c in all_peers.pytorch_peers() if c.name == pytorch_peers.FLASH)
        row = measure(SMALL[kind], [flash], 2, fake_times, CPU)[0]
        assert row["status"] == "unavailable"
        assert "_flash_attention_forward" in row["reason"] or "varlen" in row["reason"] or "CUDA" in row["reason"], row["reason"]


def test_every_case_says_who_runs_it() -> None:
    candidates = [*ours(schedules=False), *peers(with_flex=True)[0]]
    names = {candidate.name for candidate in candidates}
    for shape in SUITES["masks"].shapes():
        said = who_runs(shape, candidates)
        assert {*said["runs"], *said["cannot"]} == names
        assert {"dash-attn", "FlexAttention"} <= set(said["runs"])
        assert ("cuDNN" in said["runs"]) == shape.plain
        assert all(said["cannot"].values())


def test_who_cannot_is_not_run() -> None:
    def never(shape: Shape, tensors: Tensors) -> Any:
        raise AssertionError("it was prepared")

    assert measure(SMALL["prefix"], [Candidate("x", never, refuses=lambda shape: "has no prefix")], 2, fake_times, CPU) == []


def test_the_list_needs_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["masks", "--masks", "prefix", "--list"]) == 0
    out = capsys.readouterr().out
    assert "prefix of 4096, head dim 128, 16 heads, 1 x 16384 tokens" in out
    assert "  cannot: PyTorch flash (has no prefix mask)" in out
    assert main(["llama", "--list", "--no-peers"]) == 0
    assert capsys.readouterr().out.count("can run it: dash-attn, dash-attn unordered\n") == 9
