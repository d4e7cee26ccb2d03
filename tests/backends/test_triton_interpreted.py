"""The Triton kernels in Triton's interpreter, forward and backward, against the CPU backend. No GPU is needed.

One process runs all cases, because the interpreter is turned on before Triton defines a kernel (tests/helpers/triton_interpreted.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from dash_attn.libraries import numbers
from needs_triton import HAS_TRITON, needs_triton

HELPER = Path(__file__).parents[1] / "helpers" / "triton_interpreted.py"
# float32 sums of a few dozen numbers, relative to the largest; float16 rounds each result and each weight.
BUDGET = {"float16": 2e-3}
ROUNDINGS = 2e-6
ANY_CALL = 2e-5  # gradients that cancel
QUICK = ("causal, more keys", "tile map", "gradient of the LSE", "packed window")
SLOWER = (
    *("window", "grouped heads", "sinks", "padded head dims", "padded rows", "boolean, per head"),
    *("full", "causal", "whole tiles", "prefix", "documents", "softcap", "float16", "packed", "boolean"),
    *("causal, more queries", "window without a right end", "window without a left end", "documents, not causal", "packed, full, sinks"),
    *("boolean, whole blocks per head", "boolean, large tiles"),
)
SEEDS = tuple(f"seed {number}" for number in range(150))
FAULTS = ("a key too many", "a tile too few", "the matrix of another head")

OLD = HAS_TRITON and numbers(version("triton")) < (3, 7) and numbers(version("numpy")) >= (2, 4)
pytestmark = [needs_triton, pytest.mark.skipif(OLD, reason="Triton's interpreter before 3.7 fails with NumPy 2.4")]


def found() -> dict[str, Any]:
    return said_of((*QUICK, *FAULTS, "alone", "together", "wrong offsets"))


@cache
def said_of(names: tuple[str, ...]) -> dict[str, Any]:
    """What the process says of every case."""
    command = [sys.executable, str(HELPER), *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    said: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        said |= json.loads(line)
    return said


@pytest.mark.parametrize("name", QUICK)
def test_results_are_those_of_the_cpu_backend(name: str) -> None:
    errors = found()[name]
    assert {"out", "lse", "dq", "dk", "dv"} <= set(errors)
    assert max(errors.values()) <= BUDGET.get(name, ROUNDINGS), errors


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SLOWER)
def test_more_results_are_those_of_the_cpu_backend(name: str) -> None:
    assert max(said_of(SLOWER)[name].values()) <= BUDGET.get(name, ROUNDINGS)


@pytest.mark.exhaustive
def test_a_matrix_per_sequence() -> None:
    assert max(said_of(("boolean, per sequence",))["boolean, per sequence"].values()) <= ROUNDINGS


@pytest.mark.exhaustive
def test_any_call_has_the_results_of_the_cpu_backend() -> None:
    wrong = {name: errors for name, errors in said_of(SEEDS).items() if max(errors.values()) > ANY_CALL}
    assert not wrong


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen(name: str) -> None:
    assert max(found()[name].values()) > 100 * ROUNDINGS


def test_sequences_have_the_bits_they_have_alone() -> None:
    assert found()["alone"] == {"packed": True, "moved": True, "control": True}


def test_one_launch_has_the_bits_of_two() -> None:
    assert found()["together"] == {"grouped": True, "packed": True, "control": True}


def test_wrong_offsets_are_named() -> None:
    said = found()["wrong offsets"]
    words = {"start": "must start at 0", "end": "must end at the number of tokens", "decrease": "must not decrease", "longer": "max_seqlen"}
    words |= {"mask": "attention_mask that keeps one stretch of each row"}
    for name, expected in words.items():
        assert expected in said[name], (name, said[name])
