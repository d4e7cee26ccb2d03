"""Dropout and ALiBi of the Hopper backend without a GPU: arithmetic compiled for the host gives the pairs and biases of call/dropout.py
and the CPU backend; calls name kernels that are tested; what has none is refused.
"""

from __future__ import annotations

import ctypes
import shutil
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dash_attn import Causal, Full
from dash_attn.backends.hopper.calls.backward_setup import backward_setup
from dash_attn.backends.hopper.calls.forward import forward_setup
from dash_attn.backends.hopper.calls.recorder import check_recordable
from dash_attn.backends.hopper.ranks import forward as forward_of_rank
from dash_attn.backends.hopper.support import refuse_modifiers
from dash_attn.call.call import Call
from dash_attn.call.dropout import Dropout, key_of, threshold_of
from dash_attn.call.offsets import SequenceOffsets
from dash_attn.call.options import AttentionOptions
from dash_attn.errors import Unsupported
from dash_attn.scheduling import Problem
from dash_attn.scheduling.ranks.sharding import Sharding
from dash_attn.scheduling.validate import TooFewWorkers
from host_kernels import ON_HOST, host_library, write_sources
from kernel_variants import BACKWARD_DIMS, VARIANTS

HEADERS = (
    "common/modifiers.cuh",
    "common/shared_with_python.cuh",
    "common/types.cuh",
)
SEEDS = (0, 1, -1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF)
RATE = 0.3
Floats = NDArray[np.float32]


def compiled(folder: Any, replaced: tuple[str, str] = ("", "")) -> ctypes.CDLL:
    write_sources(folder, HEADERS, replaced)
    shutil.copy(ON_HOST / "common/ptx.cuh", folder / "common/ptx.cuh")
    library = host_library(folder, "modifiers.cpp")
    library.key_of.restype, library.slope_at.restype = ctypes.c_uint64, ctypes.c_float
    return library


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compiled(tmp_path_factory.mktemp("modifiers"))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("first_head", "head"), [(0, 0), (0, 7), (24, 3), (2**33, 1)])
def test_keys(device: ctypes.CDLL, seed: int, first_head: int, head: int) -> None:
    assert device.key_of(ctypes.c_int64(seed), ctypes.c_int64(first_head), head) == key_of(seed, first_head + head)


def test_slopes(device: ctypes.CDLL) -> None:
    slopes = np.arange(1, 7, dtype=np.float32).reshape(2, 3)
    address = slopes.ctypes.data_as(ctypes.c_void_p)
    found = [[device.slope_at(address, stride, ctypes.c_float(2.0), sequence, 1) for sequence in range(2)] for stride in (0, 3)]
    assert found == [[4.0, 4.0], [4.0, 10.0]]


def forward_tile(library: ctypes.CDLL, key: int, slope: float, more: int, query: int, first_key: int) -> tuple[Floats, Floats]:
    kept, bias = np.zeros((64, 80), np.float32), np.zeros((64, 80), np.float32)
    threshold = threshold_of(RATE) << 16
    _call(library.forward_tile, key, slope, (more, query, first_key), threshold, kept, bias)
    return kept, bias


def backward_tile(library: ctypes.CDLL, key: int, slope: float, more: int, query: int, first_key: int) -> tuple[Floats, Floats]:
    """A weight that is dropped is negative."""
    kept, bias = np.zeros((128, 64), np.float32), np.zeros((128, 64), np.float32)
    threshold = threshold_of(RATE) << 16
    _call(library.backward_tile, key, slope, (more, query, first_key, first_key + 100), threshold, kept, bias)
    return kept, bias


def _call(function: Any, key: int, slope: float, numbers: tuple[int, ...], threshold: int, *results: Floats) -> None:
    addresses = [x.ctypes.data_as(ctypes.c_void_p) for x in results]
    function(ctypes.c_uint64(key), ctypes.c_float(slope), *map(ctypes.c_int, numbers), ctypes.c_uint32(threshold), *addresses)


def expected_pairs(seed: int, head: int, rows: range, columns: range) -> NDArray[np.bool_]:
    return Dropout(threshold_of(RATE), (seed,)).kept(0, head, rows, columns)


def biases(slope: float, more: int, rows: range, columns: range) -> Floats:
    distances = np.abs(np.array(rows)[:, None] + more - np.array(columns)).astype(np.float32)
    found: Floats = -np.float32(slope) * distances
    return found


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("query", "first_key", "more"), [(0, 0, 0), (192, 80, 0), (64, 160, -77), (128 * 99, 80 * 77, 500)])
def test_a_tile_of_the_forward(device: ctypes.CDLL, seed: int, query: int, first_key: int, more: int) -> None:
    kept, bias = forward_tile(device, key_of(seed, 5), 0.3, more, query, first_key)
    rows, columns = range(query, query + 64), range(first_key, first_key + 80)
    assert np.array_equal(kept == 1, expected_pairs(seed, 5, rows, columns))
    assert set(np.unique(kept)) == {0.0, 1.0}
    assert np.array_equal(bias, biases(0.3, more, rows, columns))
    assert not np.array_equal(kept == 1, expected_pairs(seed, 6, rows, columns)), "the control: another head"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("query", "first_key", "more"), [(0, 0, 0), (128, 128, 0), (64, 256, -77), (64 * 199, 128 * 77, 500)])
def test_a_tile_of_the_backward(device: ctypes.CDLL, seed: int, query: int, first_key: int, more: int) -> None:
    kept, bias = backward_tile(device, key_of(seed, 5), 0.3, more, query, first_key)
    rows, columns = range(query, query + 128), range(first_key + 64, first_key + 128)
    assert np.array_equal(kept == 1, expected_pairs(seed, 5, rows, columns))
    assert set(np.unique(kept)) == {-1.0, 1.0}
    assert np.array_equal(bias, biases(0.3, more, rows, columns))
    assert not np.array_equal(kept == 1, expected_pairs(seed + 1, 5, rows, columns)), "the control: another seed"


def test_another_generator_would_be_seen(tmp_path: Any) -> None:
    """The control: a round less, in the same kernels."""
    library = compiled(tmp_path, ("PHILOX_ROUNDS = 7", "PHILOX_ROUNDS = 6"))
    kept, _ = forward_tile(library, key_of(3, 0), 0.0, 0, 0, 0)
    assert not np.array_equal(kept == 1, expected_pairs(3, 0, range(64), range(80)))


MODIFIED_CALLS: list[dict[str, Any]] = [
    {"dropout_p": 0.1},
    {"alibi": True},
    {"dropout_p": 0.1, "alibi": True},
    {"dropout_p": 0.1, "softcap": 5.0},
    {"alibi": True, "softcap": 5.0},
]


@pytest.mark.parametrize("asked", MODIFIED_CALLS, ids=str)
@pytest.mark.parametrize("dims", BACKWARD_DIMS, ids=str)
def test_calls_name_kernels_that_are_tested(dims: tuple[int, int], asked: dict[str, Any]) -> None:
    """Dense and packed. The control: without modifiers, the plain ones."""
    plain = AttentionOptions(Causal(), 1.0)
    for options, word in ((replace(plain, **asked), "_modified<"), (plain, "attention_forward<")):
        q, v = (torch.empty(1, 256, 2, dim, device="meta", dtype=torch.bfloat16) for dim in dims)
        dense = Call(q, q, v, options)
        ends = torch.empty(2, device="meta", dtype=torch.int32)
        offsets, (flat_q, flat_v) = SequenceOffsets(ends, ends, 256, 256), (x[0] for x in (q, v))
        for call in (dense, Call(flat_q, flat_q, flat_v, options, offsets)):
            forward, kernels = forward_setup(call).kernel(), backward_setup(call).kernels()
            named = [forward, kernels.attention, *([] if kernels.modifier_notes is None else [kernels.modifier_notes])]
            assert {(kernel.header, kernel.name) for kernel in named} <= set(VARIANTS)
            assert word in forward.name
            assert (kernels.modifier_notes is not None) == ("_modified<" in kernels.attention.name) == (word == "_modified<")


def test_what_has_no_kernels_is_refused() -> None:
    """Each path that must not run without the modifiers it was given."""
    options, x = AttentionOptions(Causal(), 1.0, dropout_p=0.1, alibi=True), torch.empty(1, 256, 2, 64, device="meta", dtype=torch.bfloat16)
    with pytest.raises(Unsupported, match=r"no dropout and no ALiBi for recordings: .*; got dropout_p=0\.1 and alibi_slopes"):
        check_recordable(options)
    with pytest.raises(Unsupported, match="no dropout and no ALiBi for ranks that share a sequence"):
        forward_of_rank(Call(x, x, x, options), Problem(Causal(), 256, 256), Sharding.zigzag(256, 2), 0)
    refuse_modifiers(replace(options, dropout_p=0.0, alibi=False), "anything")


def test_a_slice_with_too_few_sms_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Legs have no dropout. The control: without it they run."""
    monkeypatch.setattr("dash_attn.backends.hopper.calls.backward_setup.sm_count", lambda index: 4)
    x, options = torch.empty(1, 4096, 2, 64, device="meta", dtype=torch.bfloat16), AttentionOptions(Full(), 1.0, schedule="shift_blocks")
    dense = backward_setup(Call(x, x, x, options))
    assert dense.legs is not None
    with pytest.raises(TooFewWorkers, match="shift_blocks"):
        backward_setup(Call(x, x, x, replace(options, dropout_p=0.1)))
