"""Compiles kernels of the Triton backend in processes side by side, into Triton's cache on disk. Part of triton_backend.py (--warm)."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from dash_attn import Causal, Documents, Mask, Prefix
from dash_attn.backends.triton import passes
from dash_attn.backends.triton.explain import _as_run, _launches
from dash_attn.backends.triton.launch import Launch
from dash_attn.call.call import Call
from dash_attn.call.options import AttentionOptions
from dash_attn.masks import TilePattern

BF16, FP32 = torch.bfloat16, torch.float32
BITS = TilePattern(np.arange(64, dtype=np.uint8).reshape(8, 8) % 3)


def compile_one(launch: Launch) -> str | None:
    """Why it cannot be."""
    try:
        launch.machine_code()
    except Exception as error:
        return f"{launch.kernel} {launch.tile}: {type(error).__name__}: {str(error)[:200]}"
    return None


def compile_all(launches: list[Launch], processes: int) -> list[str | None]:
    """By the current GPU, of which each process makes a context."""
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        return list(pool.map(compile_one, map(without_memory, launches), chunksize=1))


def without_memory(launch: Launch) -> Launch:
    """The dtype of each tensor in its place: all that a compiler looks at."""
    numbers = {name: value.dtype if isinstance(value, Tensor) else value for name, value in launch.numbers.items()}
    return replace(launch, numbers=numbers)


def launches_to_warm(architecture: str) -> list[Launch]:
    """Each kernel once, those that take longest to compile first."""
    found: dict[Any, Launch] = {}
    with patch.object(passes, "architecture_of", return_value=architecture):
        for call in calls():
            for launch in launches_of(call):
                numbers = without_memory(launch).numbers.values()
                dtypes = tuple(str(value) for value in numbers if value is None or isinstance(value, torch.dtype))
                found.setdefault((launch.kernel, str(launch.constants), launch.tile, dtypes), launch)
    return sorted(found.values(), key=lambda launch: -launch.constants.get("BLOCK_DIM", 0))


def launches_of(call: passes.Passes) -> Iterator[Launch]:
    yield from _launches(call).values()
    if call.offsets is not None:
        yield passes.offsets_launch(call)
    out, lse = (torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in ((call.q.shape, call.q.dtype), (call.lse_shape, FP32)))
    rows, sinks = passes.RowValues.empty(call), torch.empty(call.heads[0], device="meta")
    yield passes.sink_launch(call, rows, sinks, sinks)
    if call.q.dtype == BF16 and call.q.shape[-1] in (64, 128):
        yield passes.forward_launch(call, out, lse, sinks)
        yield passes.statistics_launch(call, out, out, lse, lse, rows)


def calls() -> Iterator[passes.Passes]:
    """Of the grid of the tests, and of every kind of mask at the head dims that most tests have."""
    from grid import dim_cases, length_cases, softcap_cases

    for case in (*length_cases(), *dim_cases(), *softcap_cases()):
        yield call_of(case.mask, case.heads, (case.dim, case.v_dim or case.dim), case.dtype, case.softcap)
    for dim in (64, 128):
        for group in (1, 2):
            for mask in (Prefix(100), Documents((200, 312)), blocks(), BITS):
                yield call_of(mask, (2 * group, 2), (dim, dim))
    for dim in (64, 128, 256):
        yield call_of(Causal(), (4, 2), (dim, dim), FP32)


def blocks() -> Mask:
    from gpu_helpers import ragged_map

    return ragged_map(512, 512)


def call_of(mask: Mask, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype = BF16, softcap: float = 0.0) -> passes.Passes:
    """Lengths decide no kernel."""
    shapes = (heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1])
    q, k, v = (torch.empty(1, 512, *shape, dtype=dtype, device="meta") for shape in shapes)
    return passes.Passes(_as_run(Call(q, k, v, AttentionOptions(mask, 0.1, softcap))))
