"""Small runs for NVIDIA's sanitizers, by hand: compute-sanitizer --tool memcheck python tests/sanitize_small.py (or --tool racecheck)."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from dash_attn import Causal, Documents, Full, Window
from gpu_helpers import assert_accurate, gpu_inputs, ragged_map

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
    torch.cuda.synchronize()
    print(f"{runs} forward and backward runs, all accurate")


if __name__ == "__main__":
    main()
