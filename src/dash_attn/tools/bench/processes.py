"""One measurement repeated in fresh processes: medians over them, and how far they lie apart."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from .results import RATIOS, SUSTAINED, Results, read, shape_of

UNEVEN = "ok in some processes only"
OURS_FAILED = 1  # the exit code of a measurement whose results tell that a kernel of ours failed its check
Row = dict[str, Any]
Child = Callable[[list[str]], int]


def measured_anew(words: Sequence[str], count: int, run: Child | None = None) -> Iterator[tuple[str, Results]]:
    """The name of the results file and what is known after each process."""
    runs = []
    for number in range(1, count + 1):
        print(f"process {number} of {count}", file=sys.stderr, flush=True)
        with TemporaryDirectory() as folder:
            path = _run_one([*words, "--output", folder], Path(folder), run or _run)
            runs.append(read(path))
        yield path.name, merged(runs)


def _run_one(words: list[str], folder: Path, run: Child) -> Path:
    status = run(words)
    written = sorted(folder.glob("*.json"))
    if status not in (0, OURS_FAILED) or len(written) != 1:
        raise ValueError(f"a process of this benchmark ended with exit code {status} and {len(written)} files of results, not one")
    return written[0]


def _run(words: list[str]) -> int:
    """Its tables are not shown: the parent shows the medians."""
    return subprocess.run([sys.executable, "-m", "dash_attn.cli.main", "bench", *words], stdout=subprocess.DEVNULL).returncode


def merged(runs: Sequence[Results]) -> Results:
    """The first of the runs, with medians over all of them instead of its figures."""
    rows: dict[tuple[Any, ...], list[Row]] = {}
    for results in runs:
        for row in results["rows"]:
            rows.setdefault((row["pass"], shape_of(row), row["candidate"]), []).append(row)
    return {**runs[0], "processes": len(runs), "rows": [_merged_row(found, len(runs)) for found in rows.values()]}


def _merged_row(rows: list[Row], count: int) -> Row:
    bad = [row for row in rows if row["status"] != "ok"]
    if bad:
        return bad[0]  # no speed of what failed in any process
    if len(rows) != count:
        kept = {name: rows[0][name] for name in ("pass", "shape", "candidate", "deterministic")}
        return {**kept, "status": UNEVEN, "reason": f"{len(rows)} of {count} processes have it"}
    made = {**rows[0], **_medians(rows, ("median_ms", "p20_ms", "p80_ms", "energy_j", *RATIOS))}
    made["tflops"] = shape_of(made).tflops(made["pass"], made["median_ms"])
    if "sustained" in made:
        made["sustained"] = _medians([row["sustained"] for row in rows], SUSTAINED)
    made["process_ms"] = [row["median_ms"] for row in rows]
    found = {name: _known(rows, name) for name in RATIOS}
    made["spread"] = {name: [min(values), max(values)] for name, values in found.items() if values}
    return made


def _medians(rows: list[Row], names: Sequence[str]) -> dict[str, float]:
    return {name: median(values) for name in names if (values := _known(rows, name))}


def _known(rows: list[Row], name: str) -> list[float]:
    return [row[name] for row in rows if row.get(name) is not None]
