"""Compares this tree with other checkouts: python -m benchmarks.compare OTHER/src [ANOTHER/src ...] [--suite paper] [--forward] [--graphs]

Every tree is run once in a process of its own, in turn, five times over. Speeds are relative to cuDNN's in the same process: clocks
differ by 10 % between machines and minutes, so a change of a kernel is judged by this, not by figures of another day.
Each row has medians, their spread, and a verdict: whether this tree is more than 1 % slower, and whether bits are others.
--graphs captures each call once as a CUDA graph and times replays: what the host does does not show.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from dash_attn.tools.bench.shape import Shape

from .matrices import Matrix
from .suites import SUITES, Cases

ROOT = Path(__file__).resolve().parent.parent
HERE = ROOT / "src"
RUNS = 12
LIMIT = 0.01  # slower by more than this is told
SHORT = tuple(
    Shape("causal" if causal else "full", length, 16384 // length, 2048 // dim, 2048 // dim, dim)
    for dim, length, causal in (
        (128, 1024, False),
        (128, 4096, False),
        (128, 4096, True),
        (128, 16384, True),
        (64, 1024, True),
        (64, 4096, True),
        (64, 16384, False),
        (256, 4096, True),
    )
)
COMPARED = {"short": Cases(SHORT), **{name: SUITES[name] for name in ("paper", "ranks", "masks")}}
Found = dict[str, Any]


@contextmanager
def requested(shapes: Sequence[Shape], forward: bool, graphs: bool, runs: int) -> Iterator[Path]:
    """A file that says what to measure. Matrices lie beside it, so that no tree draws its own."""
    with TemporaryDirectory() as folder:
        described = [shape.to_json() for shape in shapes]
        for number, shape in enumerate(shapes):
            if isinstance(shape.attended, Matrix):
                described[number]["matrix"] = f"{folder}/{number}.npy"
                np.save(described[number]["matrix"], np.packbits(shape.attended.elements(shape.q_seqlen, shape.seqlen), axis=1))
        request = Path(folder, "request.json")
        request.write_text(json.dumps({"shapes": described, "forward": forward, "graphs": graphs, "runs": runs}), encoding="utf-8")
        yield request


def measure(tree: Path, request: Path) -> list[Found]:
    """What a fresh process finds, shape by shape."""
    command = [sys.executable, "-m", "benchmarks.one_tree", str(tree.resolve()), str(request)]
    lines = subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    return [json.loads(line) for line in lines]


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
    said = f"{median(row['here']):.3f} ({min(row['here']):.3f} to {max(row['here']):.3f}), {median(row['here_ms']):.3f} ms, others {others}"
    verdict = f"more than {LIMIT:.0%} SLOWER" if row["slower"] else "not slower"
    return f"{shape}: {said}: {verdict}{'' if row['same_bits'] else ', OTHER BITS'}"


def surroundings() -> dict[str, str]:
    """GPU, PyTorch and commit. A child asks PyTorch, so that this process holds no memory of the GPU."""
    asked = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else 'none'); print(torch.__version__)"
    gpu, version = subprocess.run([sys.executable, "-c", asked], check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, check=False, stdout=subprocess.PIPE, text=True)
    return {"gpu": gpu, "torch": version, "commit": commit.stdout.strip()}


def main(words: list[str] | None = None) -> int:
    """1 if a row is slower."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("others", nargs="+", type=Path, metavar="OTHER/src")
    parser.add_argument("--suite", choices=tuple(COMPARED), default="short", help="which shapes (default: short)")
    parser.add_argument("--forward", action="store_true", help="the forward instead of the backward")
    parser.add_argument("--graphs", action="store_true", help="time replays of CUDA graphs")
    parser.add_argument("--processes", type=int, default=5, metavar="N", help="of each tree (default: 5)")
    parser.add_argument("--runs", type=int, default=RUNS, metavar="N", help=f"timed runs of a process (default: {RUNS})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
    arguments = parser.parse_args(words)
    trees, shapes = [*arguments.others, HERE], COMPARED[arguments.suite].shapes()
    processes = []
    with requested(shapes, arguments.forward, arguments.graphs, arguments.runs) as request:
        for number in range(arguments.processes):
            print(f"process {number + 1} of {arguments.processes} of each tree", file=sys.stderr, flush=True)
            processes.append([measure(tree, request) for tree in trees])
    rows = []
    for number, shape in enumerate(shapes):
        rows.append(row_of(shape, [[found[number] for found in of_tree] for of_tree in zip(*processes, strict=True)]))
        print(in_words(shape, rows[-1]), flush=True)
    slower, others = sum(row["slower"] for row in rows), sum(not row["same_bits"] for row in rows)
    print(f"{slower} of {len(rows)} rows more than {LIMIT:.0%} slower, {others} with other bits")
    if arguments.json:
        direction = "forward" if arguments.forward else "backward"
        head = {"relative_to": "cuDNN", "pass": direction, "graphs": arguments.graphs, **surroundings()}
        head |= {"suite": arguments.suite, "others": [str(tree) for tree in arguments.others]}
        arguments.json.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return int(slower > 0)


if __name__ == "__main__":
    sys.exit(main())
