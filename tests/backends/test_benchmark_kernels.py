"""The scripts under benchmarks/ that compile kernels ahead ask for kernels that exist; what one says of targets."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from bench_results import made_up_results, made_up_row
from benchmarks import ranks
from benchmarks.kernels import needed_by
from dash_attn.backends.hopper.calls.decode import APPEND
from dash_attn.backends.hopper.calls.kernel_names import Variant, backward_kernels, decode_kernel, forward_kernel, leg_kernels
from dash_attn.backends.hopper.support import DTYPES
from dash_attn.backends.hopper.tiles import (
    CLUSTERS,
    CONSUMER_CHOICES,
    FORWARD_DIMS,
    KERNEL_DIMS,
    backward_dims,
    forward_dims,
    kernel_dim,
)
from dash_attn.tools.bench.report import save
from dash_attn.tools.bench.shape import Shape
from kernel_variants import VARIANTS


def test_kernels_of_decode() -> None:
    needed = needed_by("decode")
    flags = [(dtype, softcap) for dtype in ("bf16", "f16") for softcap in (False, True)]
    asked = [APPEND, *(decode_kernel(dtype, dim, softcap) for dtype, softcap in flags for dim in KERNEL_DIMS)]
    asked += [decode_kernel(dtype, dim, softcap, columns) for dtype, softcap in flags for dim, columns, _ in CLUSTERS]
    for (dtype, softcap), (dim, v_dim) in product(flags, FORWARD_DIMS):
        variant = Variant(dtype, dim, softcap, "Band")
        asked += [forward_kernel(variant, consumers, v_dim) for consumers in CONSUMER_CHOICES[kernel_dim(dim)]]
    assert needed == {(kernel.header, kernel.name) for kernel in asked}
    assert ("forward/attention.cuh", "attention_forward<bf16, 192, 2, false, MaskKind::Band, 128>") in needed


def test_kernels_of_ranks() -> None:
    """All that the cases load, and hardly more."""
    loaded = set()
    for case in (*(case for case, _ in ranks.checked_cases()), *ranks.timed_cases()):
        (dim, v_dim), dtype = backward_dims(*case.dims), DTYPES[case.dtype]
        found = [leg_kernels(Variant(dtype, dim, False, "Band"), v_dim), backward_kernels(Variant(dtype, dim, False, "Band"), v_dim, True)]
        loaded |= {kernel for kernels in found for kernel in vars(kernels).values() if kernel is not None}
        dim, v_dim = forward_dims(*case.dims)
        loaded |= {forward_kernel(Variant(dtype, dim, False, "Band"), n, v_dim) for n in CONSUMER_CHOICES[kernel_dim(*case.dims)]}
    needed = needed_by("ranks")
    assert {(kernel.header, kernel.name) for kernel in loaded} <= needed <= set(VARIANTS)
    assert len(needed) <= len(loaded) + 10


def test_targets_beside_peers() -> None:
    """What is missed, and what has no figure, counts."""
    pytest.importorskip("triton")
    from benchmarks.triton_backend import beside_peers

    mine = {"candidate": "dash-attn", "median_ms": 2.0, "tflops": 300.0}
    rows = {"dash-attn": mine, "PyTorch flash deterministic": {"median_ms": 2.3}, "FlexAttention": {"median_ms": 1.9}}
    said, missed = beside_peers("backward", rows)
    assert said == "2.000 ms, 300 TFLOP/s, 1.15 x PyTorch flash deterministic, 0.95 x FlexAttention (MISSED: 1.0)"
    assert missed == 1
    assert beside_peers("forward", rows)[1] == 0
    without = {"dash-attn": mine, "FlexAttention": {"reason": "none"}}
    assert beside_peers("backward", without) == ("2.000 ms, 300 TFLOP/s, PyTorch flash deterministic: not there, FlexAttention: none", 2)
    assert beside_peers("forward", {"dash-attn": {"status": "failed check", "reason": "dq is off"}}) == ("failed check: dq is off", 1)


def test_results_of_a_suite_are_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both passes of each shape, by the file alone."""
    pytest.importorskip("triton")
    from benchmarks.triton_backend import judged

    shape, results = Shape("causal", 1024, 16, 16, 16, 128), made_up_results()
    rows = [made_up_row(direction, shape, "dash-attn", median_ms=1.0) for direction in ("forward", "backward")]
    for direction, name in (("backward", "PyTorch flash deterministic"), ("backward", "cuDNN"), ("forward", "cuDNN")):
        rows.append(made_up_row(direction, shape, name, median_ms=2.0))
    flex = [{**row, "candidate": "FlexAttention"} for row in rows if row["candidate"] == "cuDNN"]
    save({**results, "rows": [*rows, *flex]}, tmp_path / "good.json")
    assert judged(tmp_path / "good.json") == 0
    save({**results, "rows": [*rows, flex[0]]}, tmp_path / "bad.json")
    assert judged(tmp_path / "bad.json") == 1
    said = capsys.readouterr().out
    assert said.count("2.00 x FlexAttention") == 3
    assert "FlexAttention: not there" in said
    assert said.endswith("\n1 missed\n")
