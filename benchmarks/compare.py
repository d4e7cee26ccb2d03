"""Compares the backward of this tree with that of another checkout: python benchmarks/compare.py OTHER/src [rounds]

Every round runs each tree once in a process of its own, in turn, and prints their times relative to cuDNN's in the same process.
A change of a kernel is judged by this, not by figures of another day: clocks differ by 10 % between machines and minutes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import median

SHAPES = [(128, 1024, False), (128, 4096, False), (128, 4096, True), (128, 16384, True), (64, 4096, True), (64, 16384, False)]
HERE = Path(__file__).resolve().parent.parent / "src"
RUNS = 12

CHILD = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from dash_attn import flash_attn_func

def backward(out, inputs, dout):
    return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)

def milliseconds(call):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(2_000_000)  # the launches queue up behind this, so that host time does not count
    start.record(); call(); end.record()
    end.synchronize()
    return start.elapsed_time(end)

for dim, length, causal in json.loads(sys.argv[2]):
    shape = (16384 // length, length, 2048 // dim, dim)
    q, k, v = (torch.randn(shape, device="cuda").bfloat16().requires_grad_() for _ in range(3))
    dout = torch.randn(shape, device="cuda").bfloat16()
    ours = backward(flash_attn_func(q, k, v, causal=causal), (q, k, v), dout)
    turned = [x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        cudnn = backward(torch.nn.functional.scaled_dot_product_attention(*turned, is_causal=causal), turned, dout.transpose(1, 2))
    times = [(milliseconds(ours), milliseconds(cudnn)) for _ in range(int(sys.argv[3]))][3:]
    print(json.dumps([sorted(t[i] for t in times)[len(times) // 2] for i in (0, 1)]), flush=True)
"""


def measure(source: Path) -> list[float]:
    """Speed relative to cuDNN, shape by shape."""
    command = [sys.executable, "-c", CHILD, str(source), json.dumps(SHAPES), str(RUNS + 3)]
    lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    return [cudnn / ours for ours, cudnn in map(json.loads, lines)]


def main() -> None:
    other, rounds = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 3
    found: dict[Path, list[list[float]]] = {other: [], HERE: []}
    for _ in range(rounds):
        for source, rows in found.items():
            rows.append(measure(source))
    for number, (dim, length, causal) in enumerate(SHAPES):
        before, after = (median(row[number] for row in found[source]) for source in (other, HERE))
        print(f"head dim {dim}, {length}, {'causal' if causal else 'full'}: {before:.3f} -> {after:.3f} ({after / before - 1:+.1%})")


if __name__ == "__main__":
    main()
