"""Compares this tree with other checkouts, if there are any, and with cuDNN:
python -m benchmarks.compare OTHER/src [ANOTHER/src ...] [--suite paper] [--forward] [--graphs]

Every tree is run once in a process of its own, in turn, five times over. Speeds are relative to cuDNN's in the same process: clocks
differ by 10 % between machines and minutes, so a change of a kernel is judged by this, not by figures of another day.
Each row has medians, their spread, and a verdict: whether this tree is more than 1 % slower, and whether bits are others.
--graphs captures each call once as a CUDA graph and times replays: what the host does does not show. --launched times three calls at
once behind a short sleep of the GPU, which hides only some of the host's time. Suite host-limited has backwards that take the GPU less
time than the host: `--suite host-limited --launched`, and `--graphs`.

--memory: of a backward at 32k tokens. Each tree tells its workspace, which needs no GPU. On a Hopper GPU it also runs a backward and
reports by how much the memory in use rose above what was there before, the gradients themselves left out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from dash_attn.tools.bench.report import save
from dash_attn.tools.bench.shape import Shape
from dash_attn.tools.machine import package_commit

from .one_tree import HERE, gpu_and_torch, measured_in
from .suites import SUITES, Cases, Matrix

RUNS = 12
LIMIT = 0.01  # slower by more than this is told
LENGTHS = {  # by head dim and mask
    (128, "full"): (1024, 4096),
    (128, "causal"): (4096, 16384),
    (64, "causal"): (1024, 4096),
    (64, "full"): (16384,),
    (256, "causal"): (4096,),
}
SHORT = tuple(Shape(mask, n, 16384 // n, 2048 // dim, 2048 // dim, dim) for (dim, mask), lengths in LENGTHS.items() for n in lengths)
MEMORY_HEADS = [(8, 1), (71, 1), (64, 8)]  # query and KV heads
MEMORY_TOKENS, MEMORY_DIM = 32768, 128
HOST_LIMITED = (
    Shape("causal", 384, 8, 16, 16, 128),
    Shape("causal", 200, 32, 16, 16, 64),
    Shape("full", 1000, 4, 16, 16, 128),
    Shape("causal", 4096, 1, 8, 8, 128),
)
COMPARED = {"short": Cases(SHORT), "host-limited": Cases(HOST_LIMITED), **{name: SUITES[name] for name in ("paper", "ranks", "masks")}}
Found = dict[str, Any]


@contextmanager
def described(shapes: Sequence[Shape]) -> Iterator[list[dict[str, Any]]]:
    """As other trees read them. Matrices lie in files, so that no tree draws its own."""
    with TemporaryDirectory() as folder:
        made = [shape.to_json() for shape in shapes]
        for number, shape in enumerate(shapes):
            if isinstance(shape.attended, Matrix):
                made[number]["matrix"] = f"{folder}/{number}.npy"
                np.save(made[number]["matrix"], np.packbits(shape.attended.elements(shape.q_seqlen, shape.seqlen), axis=1))
        yield made


def row_of(shape: Shape, by_tree: Sequence[Sequence[Found]]) -> dict[str, Any]:
    """What all processes of each tree found of a shape; this tree is the last."""
    speeds = [[found["yardstick_ms"] / found["ms"] for found in tree] for tree in by_tree]
    times = [[found["ms"] for found in tree] for tree in by_tree]
    *others, here = map(median, speeds)
    bits = [{tuple(found["bits"]) for found in tree} for tree in by_tree]
    return {
        "shape": shape.to_json(),
        "here": speeds[-1],
        "others": speeds[:-1],
        "here_ms": times[-1],
        "others_ms": times[:-1],
        "change": [here / other - 1 for other in others],
        "slower": any(here < (1 - LIMIT) * other for other in others),
        "same_bits": len(set.union(*bits)) == 1,
    }


def in_words(shape: Shape, row: dict[str, Any]) -> str:
    others = ", ".join(f"{median(speeds):.3f} ({change:+.1%})" for speeds, change in zip(row["others"], row["change"], strict=True))
    said = f"{median(row['here']):.3f} ({min(row['here']):.3f} to {max(row['here']):.3f}), {median(row['here_ms']):.3f} ms"
    if not others:
        return f"{shape}: {said}"
    verdict = f"more than {LIMIT:.0%} SLOWER" if row["slower"] else "not slower"
    return f"{shape}: {said}, others {others}: {verdict}{'' if row['same_bits'] else ', OTHER BITS'}"


def compare_memory(trees: Sequence[Path], file: Path | None) -> int:
    """A row per case, with the bytes of each tree: this one, and the others."""
    cases = [Shape("causal", MEMORY_TOKENS, 1, *heads, MEMORY_DIM).to_json() for heads in MEMORY_HEADS]
    rows = []
    for case, *others, here in zip(cases, *(measured_in(tree, "memory", cases) for tree in trees), strict=True):
        rows.append({**case, "tokens": MEMORY_TOKENS, "here": here, "others": others})
        print(memory_in_words(rows[-1]))
    if file:
        save({"gpu": gpu_and_torch()[0], "others": [str(tree) for tree in trees[:-1]], "rows": rows}, file)
    return 0


def memory_in_words(row: dict[str, Any]) -> str:
    def of_tree(found: Found) -> str:
        measured = f", measured {found['measured_bytes'] / 2**20:.0f}" if "measured_bytes" in found else ""
        return f"{found['workspace_bytes'] / 2**20:.0f} MiB{measured}"

    others = "".join(f"; other {of_tree(found)}" for found in row["others"])
    return f"{row['q_heads']}/{row['kv_heads']} heads, {row['tokens']} tokens: {of_tree(row['here'])}{others}"


def main(words: list[str] | None = None) -> int:
    """1 if a row is slower."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("others", nargs="*", type=Path, metavar="OTHER/src")
    parser.add_argument("--memory", action="store_true", help="workspaces instead of times; also of this tree alone")
    parser.add_argument("--suite", choices=tuple(COMPARED), default="short", help="which shapes (default: short)")
    parser.add_argument("--forward", action="store_true", help="the forward instead of the backward")
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--graphs", dest="way", action="store_const", const="graphs", help="time replays of CUDA graphs")
    ways.add_argument("--launched", dest="way", action="store_const", const="launched", help="with some of the host's time")
    parser.set_defaults(way="queued")
    parser.add_argument("--processes", type=int, default=5, metavar="N", help="of each tree (default: 5)")
    parser.add_argument("--runs", type=int, default=RUNS, metavar="N", help=f"timed runs of a process (default: {RUNS})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
    arguments = parser.parse_args(words)
    trees, shapes = [*arguments.others, HERE], COMPARED[arguments.suite].shapes()
    if arguments.memory:
        return compare_memory(trees, arguments.json)
    processes = []
    with described(shapes) as asked:
        for number in range(arguments.processes):
            print(f"process {number + 1} of {arguments.processes} of each tree", file=sys.stderr, flush=True)
            turn = slice(None, None, -1 if number % 2 else 1)  # another one begins each time
            options = arguments.forward, arguments.way, arguments.runs
            processes.append([measured_in(tree, "measure", asked, *options) for tree in trees[turn]][turn])
    rows = []
    for number, shape in enumerate(shapes):
        rows.append(row_of(shape, [[found[number] for found in of_tree] for of_tree in zip(*processes, strict=True)]))
        print(in_words(shape, rows[-1]), flush=True)
    slower, others = sum(row["slower"] for row in rows), sum(not row["same_bits"] for row in rows)
    print(f"{slower} of {len(rows)} rows more than {LIMIT:.0%} slower, {others} with other bits")
    if arguments.json:
        gpu, version = gpu_and_torch()
        head = {"relative_to": "cuDNN", "suite": arguments.suite, "pass": "forward" if arguments.forward else "backward"}
        head |= {"way": arguments.way, "graphs": arguments.way == "graphs", "gpu": gpu, "torch": version, "commit": package_commit()}
        save({**head, "others": [str(tree) for tree in arguments.others], "rows": rows}, arguments.json)
    return int(slower > 0)


if __name__ == "__main__":
    sys.exit(main())
