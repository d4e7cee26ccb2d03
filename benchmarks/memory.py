"""Memory of a backward at 32k tokens: python benchmarks/memory.py [OTHER/src ...] [--json FILE]

Each tree, this one last, tells its workspace in a process of its own, which needs no GPU. On a Hopper GPU that process also runs a
backward and reports by how much the memory in use rose above what was there before, the gradients themselves left out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

CASES = [(8, 1), (71, 1), (64, 8)]  # query and KV heads
TOKENS, HEAD_DIM = 32768, 128
HERE = Path(__file__).resolve().parent.parent / "src"

CHILD = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch
from dash_attn import explain, flash_attn_func

def tensors(q_heads, kv_heads, tokens, dim, device):
    return [torch.empty(1, tokens, heads, dim, device=device, dtype=torch.bfloat16).normal_() for heads in (q_heads, kv_heads, kv_heads)]

def risen(q, k, v):
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = flash_attn_func(*inputs, causal=True)
    dout = torch.randn_like(out)
    run = lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)
    run()  # compiles, and allocates what stays
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gradients = run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - sum(x.numel() * x.element_size() for x in gradients)

cases, tokens, dim = json.loads(sys.argv[2])
for q_heads, kv_heads in cases:
    told = explain(flash_attn_func, *tensors(q_heads, kv_heads, tokens, dim, "meta"), causal=True, backend="hopper", predict_time=False)
    found = {"workspace_bytes": told.workspace_bytes}
    if torch.cuda.is_available():
        found["measured_bytes"] = risen(*tensors(q_heads, kv_heads, tokens, dim, "cuda"))
        torch.cuda.empty_cache()
    print(json.dumps(found), flush=True)
"""
GPU = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else 'none')"


def measure(tree: Path, cases: list[tuple[int, int]], tokens: int) -> list[dict[str, int]]:
    """Bytes, case by case."""
    asked = json.dumps([cases, tokens, HEAD_DIM])
    return [json.loads(line) for line in _output([sys.executable, "-c", CHILD, str(tree), asked])]


def report(trees: list[Path], cases: list[tuple[int, int]] = CASES, tokens: int = TOKENS) -> list[dict[str, Any]]:
    """A row per case, with the bytes of each tree: this one, and the others."""
    *others, here = [measure(tree, cases, tokens) for tree in trees]
    rows = []
    for number, (q_heads, kv_heads) in enumerate(cases):
        shape = {"q_heads": q_heads, "kv_heads": kv_heads, "tokens": tokens, "head_dim": HEAD_DIM, "mask": "causal", "dtype": "bfloat16"}
        rows.append({**shape, "here": here[number], "others": [found[number] for found in others]})
    return rows


def in_words(row: dict[str, Any]) -> str:
    def of_tree(found: dict[str, int]) -> str:
        measured = f", measured {found['measured_bytes'] / 2**20:.0f}" if "measured_bytes" in found else ""
        return f"{found['workspace_bytes'] / 2**20:.0f} MiB{measured}"

    others = "".join(f"; other {of_tree(found)}" for found in row["others"])
    return f"{row['q_heads']}/{row['kv_heads']} heads, {row['tokens']} tokens: {of_tree(row['here'])}{others}"


def _output(command: list[str]) -> list[str]:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Memory of a backward beside its gradients, of this tree and of other checkouts.")
    parser.add_argument("others", nargs="*", type=Path, metavar="OTHER/src")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
    arguments = parser.parse_args(argv)
    rows = report([*arguments.others, HERE])
    for row in rows:
        print(in_words(row))
    if arguments.json:
        head = {"gpu": _output([sys.executable, "-c", GPU])[0], "others": [str(tree) for tree in arguments.others]}
        arguments.json.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
