"""FlashAttention's test grid on dense batches, each result and gradient within the error budget."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from budget import assert_case, assert_in_budget, assert_near
from dash_attn import Causal, Full, Mask, TileMap, Window
from dense import run_dense, run_ours
from devices import Case, on_devices
from grid import DTYPES, dim_cases, length_cases, softcap_cases, some_for_the_cpu

CPU_LENGTHS = some_for_the_cpu(length_cases(), 3)
CPU_DIMS = some_for_the_cpu(dim_cases(), 2)
CPU_SOFTCAPS = some_for_the_cpu(softcap_cases(), 1)


@pytest.mark.parametrize(("device", "case"), on_devices(CPU_LENGTHS, length_cases()))
def test_lengths(device: str, case: Case) -> None:
    assert_case(device, case)


@pytest.mark.parametrize(("device", "case"), on_devices(CPU_DIMS, dim_cases()))
def test_head_dims(device: str, case: Case) -> None:
    assert_case(device, case)


@pytest.mark.parametrize(("device", "case"), on_devices(CPU_SOFTCAPS, softcap_cases()))
def test_softcaps(device: str, case: Case) -> None:
    assert_case(device, case)


def test_the_choices_for_the_cpu_leave_nothing_out() -> None:
    """Every mask with every head group, every head dim, both dtypes."""
    chosen = [*CPU_LENGTHS, *CPU_DIMS, *CPU_SOFTCAPS]
    everything = [*length_cases(), *dim_cases(), *softcap_cases()]
    for features in (
        lambda case: (type(case.mask), case.heads),
        lambda case: (case.dim, case.v_dim),
        lambda case: (type(case.mask), case.dtype),
        lambda case: case.softcap,
    ):
        assert {features(case) for case in chosen} == {features(case) for case in everything}


CASE = Case((113, 203), Causal(), (4, 2), 64)
ALL_PAIRS = np.ones(CASE.lengths, dtype=bool)
FAULTS: dict[str, tuple[Mask, dict[str, float]]] = {
    "aligned top-left": (TileMap(np.tril(ALL_PAIRS), 1, 1), {}),
    "one key too few": (TileMap(np.tril(ALL_PAIRS, 203 - 113 - 1), 1, 1), {}),
    "one key too many": (Window(-1, 1), {}),
    "not causal": (Full(), {}),
    "scale off by 2 %": (Causal(), {"softmax_scale": 1.02 / 8}),
    "a softcap": (Causal(), {"softcap": 5.0}),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_budget_sees_faults(fault: str, dtype: torch.dtype) -> None:
    """The control."""
    inputs = replace(CASE, dtype=dtype).inputs("cpu")
    mask, options = FAULTS[fault]
    wrong = run_ours(inputs, mask, **options)
    with pytest.raises(AssertionError, match="the budget is"):
        assert_near(wrong, inputs, Causal())


@pytest.mark.parametrize("place", ["out", "dq", "dk", "dv"])
def test_the_budget_sees_one_wrong_element(place: str) -> None:
    inputs = CASE.inputs("cpu")
    ours, plain, truth = run_ours(inputs, Causal()), run_dense(inputs, Causal(), torch.bfloat16), run_dense(inputs, Causal(), torch.float64)
    assert_in_budget(ours, plain, truth)
    wrong = getattr(ours, place).clone()
    wrong[1, 100, 1, 7] += 0.1
    with pytest.raises(AssertionError, match=f"{place} is off by"):
        assert_in_budget(ours._replace(**{place: wrong}), plain, truth)
