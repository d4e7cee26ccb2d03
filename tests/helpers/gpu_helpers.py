"""What the GPU tests share. Importing it needs no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from budget import assert_near
from dash_attn import Causal, Full, Mask, ScheduleError, TileMap, Window
from dash_attn.scheduling import GENERATORS, Problem, generate
from dense import Results, assert_same_bits, run_ours
from inputs import Inputs, make_inputs

DEVICE = torch.device("cuda")
REPEATS = int(os.environ.get("DASH_ATTN_REPEATS", "1000"))
times_the_gpu = pytest.mark.skipif(
    int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1, reason="times need a GPU that no other process uses: run pytest without -n"
)


def gpu_inputs(
    q_len: int,
    kv_len: int,
    heads: tuple[int, int] = (4, 2),
    dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    batch: int = 1,
    seed: int = 0,
) -> Inputs:
    """On the GPU; `heads` are (query heads, KV heads)."""
    return make_inputs(DEVICE, (q_len, kv_len), heads, (dim, 0), dtype, batch, seed)


def full_size(seqlen: int, heads: tuple[int, int] = (16, 16), dim: int = 128) -> Inputs:
    """16384 tokens in sequences of `seqlen`: every SM works, and chains of different heads meet."""
    return gpu_inputs(seqlen, seqlen, heads, dim, batch=16384 // seqlen)


def ragged_map(q_len: int, kv_len: int, block_q: int = 37, block_kv: int = 53) -> TileMap:
    """Random blocks that fit no tile of a kernel; some queries attend to nothing, some keys are never attended."""
    blocks = np.random.default_rng(0).random((-(-q_len // block_q), -(-kv_len // block_kv))) < 0.4
    blocks[3], blocks[:, 5] = False, False
    return TileMap(blocks, block_q, block_kv)


def assert_accurate(inputs: Inputs, mask: Mask, scale: float | None = None, **options: object) -> Results:
    """Ours against fp64, with at most twice the error that plain PyTorch makes in the same dtype; returns ours."""
    ours = run_ours(inputs, mask, softmax_scale=scale, **options)
    assert_near(ours, inputs, mask, scale)
    return ours


def assert_batch_changes_no_bit(together: Inputs, mask: Mask) -> None:
    """Every sequence has the bits it has alone; so it has in another batch of some of them, in another order."""
    expected = run_ours(together, mask)
    count = len(together[0])
    for position in range(count):
        alone = run_ours(tuple(x[position : position + 1] for x in together), mask)
        assert_same_bits(alone, Results(*(r[position : position + 1] for r in expected)), f"sequence {position}")
    moved = [count - 1, *range(1, count - 1, 2), 0]
    assert_same_bits(run_ours(tuple(x[moved] for x in together), mask), Results(*(r[moved] for r in expected)), "another batch")


def served() -> list[tuple[str, Mask]]:
    """Which schedules serve which masks is decided without a GPU."""
    pairs = []
    for mask in (Full(), Causal(), Window(200, 100)):
        for name in GENERATORS:
            try:
                generate(name, Problem(mask, 1000, 1000, 64, 128, heads=2, group=2), 132)
            except ScheduleError:
                continue
            pairs.append((name, mask))
    return pairs


@contextmanager
def poisoned_memory(warn_only: bool = False) -> Iterator[None]:
    """New memory is full of NaN (floating point) or ones (workspaces): what nobody stored to would show in the bits.

    It comes with PyTorch's deterministic setting, which refuses unordered sums. warn_only: it only warns of them.
    """
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def hopper(name: str) -> ModuleType:
    """A module of the backend, such as calls.backward."""
    return import_module(f"dash_attn.backends.hopper.{name}")


def forget_kernels_and_calls() -> None:
    for cached in (hopper("driver.compile").source_key, hopper("driver.launch").load_kernel, hopper("driver.launch").takes_shipped):
        cached.cache_clear()
    hopper("calls.backward_setup")._kept_setup.cache_clear()
    import_module("dash_attn.attention.known")._known.cache_clear()
    for name in ("calls.forward", "calls.backward", "calls.decode"):
        hopper(name)._calls.clear()


@contextmanager
def patched_backend(changes: dict[tuple[str, str], Any]) -> Iterator[None]:
    """Replace names, given as (module, name), of the backend; nothing prepared before or inside survives the border."""
    forget_kernels_and_calls()
    undo = [patch.object(hopper(module), name, value) for (module, name), value in changes.items()]
    for change in undo:
        change.start()
    try:
        yield
    finally:
        torch.cuda.synchronize()
        for change in undo:
            change.stop()
        forget_kernels_and_calls()


def run_script(script: str, *words: str, limit: float = 180, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a Python process of its own, which imports the helpers next to this file."""
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    chosen = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment}
    return subprocess.run([sys.executable, "-c", script, *words], env=chosen, capture_output=True, text=True, timeout=limit, check=False)
