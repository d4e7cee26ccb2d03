"""Memory of a backward at 32k tokens: python -m benchmarks.memory [OTHER/src ...] [--json FILE]

Each tree, this one last, tells its workspace in a process of its own, which needs no GPU. On a Hopper GPU that process also runs a
backward and reports by how much the memory in use rose above what was there before, the gradients themselves left out.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dash_attn.tools.bench.report import save

from .one_tree import HERE, gpu_and_torch, measured_in

CASES = [(8, 1), (71, 1), (64, 8)]  # query and KV heads
TOKENS, HEAD_DIM = 32768, 128


def report(trees: list[Path], cases: list[tuple[int, int]] = CASES, tokens: int = TOKENS) -> list[dict[str, Any]]:
    """A row per case, with the bytes of each tree: this one, and the others."""
    common = {"mask": "causal", "seqlen": tokens, "batch": 1, "head_dim": HEAD_DIM}
    shapes = [{**common, "q_heads": q_heads, "kv_heads": kv_heads} for q_heads, kv_heads in cases]
    *others, here = [measured_in(tree, "memory", shapes) for tree in trees]
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


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Memory of a backward beside its gradients, of this tree and of other checkouts.")
    parser.add_argument("others", nargs="*", type=Path, metavar="OTHER/src")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
    arguments = parser.parse_args(argv)
    rows = report([*arguments.others, HERE])
    for row in rows:
        print(in_words(row))
    if arguments.json:
        save({"gpu": gpu_and_torch()[0], "others": [str(tree) for tree in arguments.others], "rows": rows}, arguments.json)


if __name__ == "__main__":
    main()
