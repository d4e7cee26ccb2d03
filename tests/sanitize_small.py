"""Small runs for NVIDIA's sanitizers, by hand: compute-sanitizer --tool memcheck python tests/sanitize_small.py (or --tool racecheck)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from dash_attn import Causal, Documents, Full, Window, flash_attn_func, flash_attn_varlen_func
from gpu_helpers import DEVICE, assert_accurate, gpu_inputs, ragged_map

LENGTHS = [(200, 200), (129, 300), (300, 129)]


def main() -> None:
    runs = 0
    for dim in (64, 128):
        for lengths in LENGTHS:
            for mask in (Full(), Causal(), Window(70, 20)):
                for heads in ((2, 2), (4, 1)):
                    assert_accurate(gpu_inputs(*lengths, heads, dim, batch=2), mask)
                    runs += 1
        for mask in (Documents((50, 7, 143)), ragged_map(200, 300)):
            assert_accurate(gpu_inputs(200, 200 if isinstance(mask, Documents) else 300, (4, 2), dim), mask)
            runs += 1
        assert_accurate(gpu_inputs(200, 200, dim=dim), Causal(), accumulation="unordered")
        runs += 1
    runs += run_the_rest()
    torch.cuda.synchronize()
    print(f"{runs} forward and backward runs")


def run_the_rest() -> int:
    """Other head dims, softcap, sinks and packed sequences: for the sanitizer only, accuracy is tests/test_grid_*.py's."""
    runs = 0
    for dim in (96, 128, 192, 256, 59):
        for options in ({}, {"softcap": 20.0}, {"sinks": torch.zeros(4, device=DEVICE)}):
            attend(flash_attn_func, gpu_inputs(200, 200, dim=dim, batch=2), **options)
            places = torch.tensor([0, 70, 70, 71, 200], dtype=torch.int32, device=DEVICE)
            flat = tuple(x[0] for x in gpu_inputs(200, 200, dim=dim))
            attend(flash_attn_varlen_func, flat, places, places, 129, 129, **options)
            runs += 2
    return runs


def attend(function: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...], *places: Any, **options: Any) -> None:
    *leaves, dout = inputs
    leaves = [x.requires_grad_() for x in leaves]
    function(*leaves, *places, causal=True, **options).backward(dout)


if __name__ == "__main__":
    main()
