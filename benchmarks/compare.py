"""Compares this tree with other checkouts: python benchmarks/compare.py OTHER/src [ANOTHER/src ...] [--forward] [--rounds 5]

Every round runs each tree once in a process of its own, in turn, and prints their speed relative to cuDNN's in the same process.
A change of a kernel is judged by this, not by figures of another day: clocks differ by 10 % between machines and minutes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median

SHAPES = [
    (128, 1024, False),
    (128, 4096, False),
    (128, 4096, True),
    (128, 16384, True),
    (64, 1024, True),
    (64, 4096, True),
    (64, 16384, False),
    (256, 4096, True),
]
HERE = Path(__file__).resolve().parent.parent / "src"
RUNS = 12

CHILD = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from dash_attn import flash_attn_func

def milliseconds(call):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(2_000_000)  # the launches queue up behind this, so that host time does not count
    start.record(); call(); end.record()
    end.synchronize()
    return start.elapsed_time(end)

shapes, runs, forward = json.loads(sys.argv[2])
for dim, length, causal in shapes:
    shape = (16384 // length, length, 2048 // dim, dim)
    q, k, v = (torch.randn(shape, device="cuda").bfloat16().requires_grad_() for _ in range(3))
    turned = [x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    dout = torch.randn(shape, device="cuda").bfloat16()
    def ours():
        return flash_attn_func(q, k, v, causal=causal)
    def cudnn():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(*turned, is_causal=causal)
    def backward(out, inputs, dout):
        return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)
    calls = (ours, cudnn) if forward else (backward(ours(), (q, k, v), dout), backward(cudnn(), turned, dout.transpose(1, 2)))
    times = [[milliseconds(call) for call in calls] for _ in range(runs + 3)][3:]
    print(json.dumps([sorted(t[i] for t in times)[len(times) // 2] for i in (0, 1)]), flush=True)
"""


def measure(source: Path, forward: bool) -> list[float]:
    """Speed relative to cuDNN, shape by shape."""
    command = [sys.executable, "-c", CHILD, str(source), json.dumps([SHAPES, RUNS, forward])]
    lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    return [cudnn / ours for ours, cudnn in map(json.loads, lines)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Compares this tree with other checkouts, relative to cuDNN in the same process.")
    parser.add_argument("others", nargs="+", type=Path, metavar="OTHER/src")
    parser.add_argument("--forward", action="store_true", help="the forward instead of the backward")
    parser.add_argument("--rounds", type=int, default=5, help="processes per tree; the table has their median and spread")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
    arguments = parser.parse_args()
    trees = [*arguments.others, HERE]
    rounds = [[measure(tree, arguments.forward) for tree in trees] for _ in range(arguments.rounds)]
    rows = []
    for number, (dim, length, causal) in enumerate(SHAPES):
        found = [[of_tree[number] for of_tree in column] for column in zip(*rounds, strict=True)]
        *others, here = map(median, found)
        shown = ", ".join(f"{other:.3f} ({here / other - 1:+.1%})" for other in others)
        spread = f"{min(found[-1]):.3f} to {max(found[-1]):.3f}"
        print(f"head dim {dim}, {length}, {'causal' if causal else 'full'}: {here:.3f} ({spread}), others {shown}")
        rows.append({"head_dim": dim, "seqlen": length, "causal": causal, "here": found[-1], "others": found[:-1]})
    if arguments.json:
        direction = "forward" if arguments.forward else "backward"
        head = {"relative_to": "cuDNN", "pass": direction, **surroundings(), "others": [str(tree) for tree in arguments.others]}
        arguments.json.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")


def surroundings() -> dict[str, str]:
    """GPU, PyTorch and commit. A child asks PyTorch, so that this process holds no memory of the GPU."""
    asked = "import torch; print(torch.cuda.get_device_name()); print(torch.__version__)"
    gpu, version = subprocess.run([sys.executable, "-c", asked], check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=HERE, check=False, stdout=subprocess.PIPE, text=True
    ).stdout.strip()
    return {"gpu": gpu, "torch": version, "commit": commit}


if __name__ == "__main__":
    main()
