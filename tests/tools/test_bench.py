"""The benchmark without a GPU: shapes, interleaving, checks that refuse a figure, peers, host time."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from bench_stand_ins import SMALL, Clock, fake_times, math_attention, spoiled
from benchmarks.peers import peers
from benchmarks.suite import main
from benchmarks.suites import SUITES, choose
from dash_attn.masks import Causal
from dash_attn.tools.bench.candidates import Candidate, Runner, Tensors, make_tensors, ours
from dash_attn.tools.bench.checks import dense
from dash_attn.tools.bench.host import CALLS, measure_host, round_time
from dash_attn.tools.bench.measure import WARM_UP, interleaved, measure
from dash_attn.tools.bench.shape import Shape
from dash_attn.tools.machine import deterministic_algorithms, short_name

CPU = torch.device("cpu")


def test_paper_shapes() -> None:
    shapes = SUITES["paper"].shapes()
    assert len(shapes) == 24
    assert {shape.batch * shape.seqlen for shape in shapes} == {16384}
    assert {shape.q_heads * shape.head_dim for shape in shapes} == {2048}
    assert {(shape.q_heads, shape.kv_heads) for shape in SUITES["gqa"].shapes()} == {(32, 8)}


def test_operations() -> None:
    full, causal = (Shape(mask, 1024, 3, 8, 2, 128) for mask in ("full", "causal"))
    assert full.operations("forward") == 4 * 3 * 8 * 1024**2 * 128
    assert full.operations("backward") == 10 * 3 * 8 * 1024**2 * 128
    assert causal.operations("backward") == 5 * 3 * 8 * 1024**2 * 128


def test_choose_replaces_lists() -> None:
    shapes = choose("paper", seqlens=(256,), head_dims=(128,), masks=("full",))
    assert shapes == [Shape("full", 256, 64, 16, 16, 128)]
    for bad in ({"masks": ("window",)}, {"seqlens": (0,)}, {"head_dims": (96,)}):
        with pytest.raises(ValueError, match=r"mask|seqlen|head"):
            choose("paper", **bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown suite"):
        choose("fast")


def test_interleaving_rotates_and_tells_candidates_apart() -> None:
    calls: list[int] = []

    def call(i: int, took: float) -> Any:
        def work() -> None:
            calls.append(i)
            Clock.now += took

        return work

    spreads = interleaved([call(0, 1.0), call(1, 2.0), call(2, 5.0)], 4, fake_times)
    assert calls[3 * WARM_UP :] == [0, 1, 2, 1, 2, 0, 2, 0, 1, 0, 1, 2]
    assert [s.median for s in spreads] == [1.0, 2.0, 5.0]
    assert all(s.low == s.median == s.high for s in spreads)


def shaken(dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, ...]:
    return dq, dk, dv * (1 + 2**-7 * torch.randint(0, 2, dv.shape))


def refuses(shape: Shape, tensors: Tensors) -> Runner:
    raise NotImplementedError("not this shape\nand a long story")


def rows_of(candidates: list[Candidate], shape: Shape = SMALL) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["candidate"], row["pass"]): row for row in measure(shape, candidates, 3, fake_times, CPU)}


BAD = [
    (spoiled(lambda dq, dk, dv: (dq * 1.2, dk, dv)), False, "failed check", "dq is off by 0.2"),
    (spoiled(lambda dq, dk, dv: (dq, dk.roll(1, 1), dv)), False, "failed check", "dk is off"),
    (spoiled(lambda dq, dk, dv: (dq, dk, dv * torch.nan)), False, "failed check", "dv is off by nan"),
    (spoiled(shaken), True, "failed check", "dv changes from run to run"),
    (refuses, False, "unavailable", "NotImplementedError: not this shape"),
]


@pytest.mark.parametrize(("prepare", "claims", "status", "reason"), BAD, ids=[reason for *_, reason in BAD])
def test_no_speed_without_correctness(prepare: Any, claims: bool, status: str, reason: str) -> None:
    rows = rows_of([Candidate("cuDNN", math_attention), Candidate("bad", prepare, claims)])
    bad = rows["bad", "backward"]
    assert bad["status"] == status
    assert bad["reason"].startswith(reason)
    assert "median_ms" not in bad
    assert "tflops" not in bad
    assert rows["cuDNN", "backward"]["status"] == "ok"
    assert "median_ms" in rows["cuDNN", "backward"]


def test_what_claims_nothing_may_change() -> None:
    """The control: the shaken gradients are within the error budget, so only the claim was wrong."""
    assert rows_of([Candidate("shaken", spoiled(shaken))])["shaken", "backward"]["status"] == "ok"


def slow(ms: float) -> Any:
    def prepare(shape: Shape, tensors: Tensors) -> Runner:
        good = math_attention(shape, tensors)

        def backward() -> tuple[Tensor, ...]:
            Clock.now += ms
            return good.backward()

        return Runner(good.forward, backward, good.leaves)

    return prepare


def test_speeds_and_ratios() -> None:
    shape = Shape("full", 64, 1, 2, 2, 32)
    row = rows_of([Candidate("cuDNN", slow(3.0), passes=("backward",)), Candidate("ours", slow(2.0), passes=("backward",))], shape)[
        "ours", "backward"
    ]
    assert row["median_ms"] == pytest.approx(2.0)
    assert row["ratio_to_cudnn"] == pytest.approx(1.5)
    assert row["tflops"] == pytest.approx(10 * 2 * 64**2 * 32 / 2e-3 / 1e12)
    alone = rows_of([Candidate("ours", slow(2.0), passes=("backward",))], shape)["ours", "backward"]
    assert alone["ratio_to_cudnn"] is None


@pytest.mark.parametrize("shape", [SMALL, Shape("full", 130, 1, 2, 2, 64)], ids=str)
def test_real_candidates(shape: Shape) -> None:
    """Ours on the CPU and PyTorch's flash attention pass their checks; cuDNN has no CPU kernel and says so."""
    rows = rows_of([*ours(schedules=True), *peers()[0]], shape)
    for name, direction in (
        ("dash-attn", "forward"),
        ("dash-attn", "backward"),
        ("dash-attn unordered", "backward"),
        ("dash-attn: spt", "backward"),
    ):
        assert rows[name, direction]["status"] == "ok", rows[name, direction]["reason"]
    if shape.group == 1:
        assert rows["PyTorch flash", "backward"]["status"] == "ok", rows["PyTorch flash", "backward"]["reason"]
    assert rows["cuDNN", "backward"]["status"] == "unavailable"
    assert rows["cuDNN", "backward"]["reason"].startswith("RuntimeError: ")
    served = rows["dash-attn: shift", "backward"]
    assert served["status"] == ("unavailable" if shape.causal else "ok")
    assert ("dash-attn: spt", "forward") not in rows


def test_dense_reference_against_sdpa() -> None:
    q, k, v, dout = (x.double() for x in make_tensors(Shape("causal", 50, 1, 3, 1, 16), CPU)[:4])
    leaves = [x.transpose(1, 2).requires_grad_() for x in (q, k.expand(q.shape), v.expand(q.shape))]
    out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
    dq, dk, dv = torch.autograd.grad(out, leaves, dout.transpose(1, 2))
    found = dense(Tensors(q, k, v, dout), Causal())
    for name, expected in (("out", out), ("dq", dq), ("dk", dk.sum(1, keepdim=True)), ("dv", dv.sum(1, keepdim=True))):
        torch.testing.assert_close(found[name], expected.transpose(1, 2), msg=name)


def test_packages_are_candidates_or_missing_with_a_reason() -> None:
    candidates, missing = peers()
    names = {candidate.name for candidate in candidates}
    for package in ("FlashAttention-4", "FlashAttention-3", "FlashAttention-2"):
        assert (package in names) != (package in missing)
    assert all("Error" in reason for reason in missing.values())


def test_deterministic_switch_is_restored() -> None:
    settings = import_module("torch.utils.deterministic")
    assert (torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory) == (False, True)
    seen = []

    def fail() -> None:
        seen.append((torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory))
        raise ArithmeticError

    with pytest.raises(ArithmeticError), deterministic_algorithms():
        fail()
    assert seen == [(True, False)]
    assert (torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory) == (False, True)


@pytest.mark.parametrize(
    ("gpu", "short"), [("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA GH200 480GB", "gh200"), ("Odd One", "odd-one")]
)
def test_short_names(gpu: str, short: str) -> None:
    assert short_name(gpu) == short


def test_host_time_counts_calls_only() -> None:
    now = 0.0

    def step() -> None:
        nonlocal now
        now += 25e-6

    def synchronize() -> None:
        nonlocal now
        now += 1.0

    assert round_time(step, synchronize, CALLS, lambda: now) == pytest.approx(25.0)


def test_host_suite_runs_ours_and_flash() -> None:
    rows = {row["candidate"]: row for row in measure_host(CPU, lambda: None, calls=2)}
    for kind in ("dash-attn", "dash-attn, packed", "dash-attn, boolean tensor", "PyTorch flash"):
        for what in ("forward without gradients", "forward", "backward"):
            assert rows[f"{kind}, {what}"]["status"] == "ok", rows[f"{kind}, {what}"]
            assert rows[f"{kind}, {what}"]["median_us"] > 0
    assert rows["dash-attn, cache"]["status"] == "ok"
    assert rows["cuDNN, forward"]["status"] == rows["dash-attn, compiled, forward"]["status"] == "unavailable"


def test_without_leaves_a_peer_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper", "--list", "--without", "cuDNN"]) == 0
    listed = capsys.readouterr().out
    assert "not installed: cuDNN (--without)" in listed
    assert "run it: dash-attn, dash-attn unordered, cuDNN," not in listed
    assert main(["ranks", "--list", "--without", "FlexAttention"]) == 0  # not in this suite anyway
    capsys.readouterr()
    assert main(["--list", "--without", "cuBNN"]) == 2
    assert "no such kernel: cuBNN" in capsys.readouterr().err
