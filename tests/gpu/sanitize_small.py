"""Small runs for NVIDIA's sanitizers, by hand:

    compute-sanitizer --tool memcheck --report-api-errors no python tests/gpu/sanitize_small.py
    compute-sanitizer --tool racecheck --racecheck-indirect-barrier-dependency python tests/gpu/sanitize_small.py 6

A number n runs every n-th only. memcheck is clean. racecheck does not follow mbarriers that are used through PTX; docs/log.md says
which reports come of that, and how to tell them from others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from dash_attn import Causal, Documents, Full, Window, flash_attn_func, flash_attn_varlen_func
from gpu_helpers import DEVICE, assert_accurate, gpu_inputs, ragged_map
from inputs import make_inputs

LENGTHS = [(200, 200), (129, 300), (300, 129)]


def main() -> None:
    every = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    chosen = [*accurate_runs(), *other_runs()][::every]
    for run in chosen:
        run()
    torch.cuda.synchronize()
    print(f"{len(chosen)} forward and backward runs")


def accurate_runs() -> Iterator[Callable[[], None]]:
    for dim in (64, 128):
        for lengths in LENGTHS:
            for mask in (Full(), Causal(), Window(70, 20)):
                for heads in ((2, 2), (4, 1)):
                    yield lambda d=dim, n=lengths, m=mask, h=heads: assert_accurate(gpu_inputs(*n, h, d, batch=2), m)
        yield lambda d=dim: assert_accurate(gpu_inputs(200, 200, (43, 1), d), Causal())  # three parts of a group
        yield lambda d=dim: assert_accurate(gpu_inputs(200, 200, (4, 2), d), Documents((50, 7, 143)))
        yield lambda d=dim: assert_accurate(gpu_inputs(200, 300, (4, 2), d), ragged_map(200, 300))
        yield lambda d=dim: assert_accurate(gpu_inputs(200, 200, dim=d), Causal(), accumulation="unordered")


def other_runs() -> Iterator[Callable[[], None]]:
    """Other head dims, softcap, sinks and packed sequences: for the sanitizer only, accuracy is tests/attention/test_grid_*.py's."""
    for dims in ((80, 0), (96, 0), (128, 0), (192, 0), (192, 128), (256, 0), (59, 0)):
        for options in ({}, {"softcap": 20.0}, {"sinks": torch.zeros(4, device=DEVICE)}):
            yield lambda d=dims, o=options: attend(flash_attn_func, make_inputs(DEVICE, (200, 200), dims=d, batch=2), **o)
            yield lambda d=dims, o=options: attend_packed(make_inputs(DEVICE, (200, 200), dims=d), **o)
        yield lambda d=dims: attend(flash_attn_func, make_inputs(DEVICE, (200, 200), (43, 1), dims=d))
        yield lambda d=dims: attend_packed(make_inputs(DEVICE, (200, 200), (43, 1), dims=d))


def attend_packed(inputs: tuple[torch.Tensor, ...], **options: Any) -> None:
    places = torch.tensor([0, 70, 70, 71, 200], dtype=torch.int32, device=DEVICE)
    attend(flash_attn_varlen_func, tuple(x[0] for x in inputs), places, places, 129, 129, **options)


def attend(function: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...], *places: Any, **options: Any) -> None:
    *leaves, dout = inputs
    leaves = [x.requires_grad_() for x in leaves]
    function(*leaves, *places, causal=True, **options).backward(dout)


if __name__ == "__main__":
    main()
