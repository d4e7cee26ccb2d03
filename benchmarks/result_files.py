"""Files of results: read and checked; several processes merged into one; our speed relative to every other kernel, case by case.

And tables beyond those of `dash-attn bench`: relative speeds over processes, sustained runs, boolean matrices.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from dash_attn.cli import bench
from dash_attn.formats import RESULTS
from dash_attn.scheduling.json_fields import as_list, as_number, as_object, as_text, as_whole, read_fields, read_json_file, shortened
from dash_attn.tools.bench.candidates import OURS
from dash_attn.tools.bench.report import Cells, Results, Row, Table, shape_of, tables, unique
from dash_attn.tools.bench.shape import PASSES, Shape

from .suites import Matrix  # and masks that files name

# None, or not there: nobody to compare with.
RATIOS = ("ratio_to_cudnn", "ratio_to_fastest_peer", "ratio_to_unordered", "ratio_to_equal_heads")
SUSTAINED = ("seconds", "ms", "watts", "sm_mhz", "joules", "tflops")
MEASURED, HOST_MEASURED = ("median_ms", "tflops", "ratio_to_cudnn"), ("median_us", "p20_us", "p80_us")
COSTS = {"mask": "BooleanMask", "forward": "first forward", "backward": "first backward", "elements": "elements alone"}
UNEVEN = "ok in some processes only"
OURS_FAILED = 1  # the exit code of a measurement whose results tell that a kernel of ours failed its check
Child = Callable[[list[str]], int]


def read(path: Path) -> Results:
    results: Results = read_json_file(path, "file of benchmark results")
    RESULTS.check(results, str(path))
    try:
        _check(results)
    except ValueError as error:
        raise ValueError(f"{path} holds damaged benchmark results: {error}") from None
    return results


def _check(results: Results) -> None:
    """What reports and pictures look at."""
    read_fields(results, "the file", ("format", "suite", "repeats", "environment", "rows"), tuple(results))
    as_text(results["suite"], "suite")
    as_whole(results["repeats"], "repeats", least=1)
    as_whole(results.get("processes", 1), "processes", least=1)
    as_text(as_object(results["environment"], "environment").get("gpu"), "environment.gpu")
    for part in ("missing", "energy"):
        as_object(results.get(part, {}), part)
    for row in as_list(results["rows"], "rows"):
        _check_row(row, ("shape", "candidate", "pass", "status"), MEASURED)
        Shape.from_json(row["shape"])
        if row["pass"] not in PASSES:
            raise ValueError(f"pass must be {' or '.join(PASSES)}; got {shortened(row['pass'])}")
    for row in as_list(results.get("host", []), "host"):
        _check_row(row, ("candidate", "status"), HOST_MEASURED)


def _check_row(row: Any, names: tuple[str, ...], measured: tuple[str, ...]) -> None:
    as_object(row, "a row")
    needed = measured if row.get("status") == "ok" else ("reason",)
    read_fields(row, "a row", (*names, *needed), tuple(row))
    for name in ("candidate", "status"):
        as_text(row[name], name)
    for name, value in _numbers(row):
        if as_number(value, name) <= 0:
            raise ValueError(f"{name} must be a number > 0; got {value}")
    planning = as_object(row.get("identity", {}), "identity").get("planning_ms")
    for name, value in ({} if planning is None else read_fields(planning, "planning_ms", tuple(COSTS))).items():
        as_number(value, f"planning_ms.{name}")  # beyond that of another call, so it may be below 0
    missing = [name for name in needed if name not in RATIOS and row["status"] == "ok" and row[name] is None]
    if missing:
        raise ValueError(f"a row of status ok lacks {missing[0]}")


def _numbers(row: Row) -> Iterator[tuple[str, Any]]:
    """What must be above 0, by name."""
    yield from ((name, row[name]) for name in (*MEASURED, *HOST_MEASURED, *RATIOS, "energy_j") if row.get(name) is not None)
    if "sustained" in row:
        yield from ((f"sustained.{name}", as_object(row["sustained"], "sustained").get(name)) for name in SUSTAINED)
    yield from (("process_ms", value) for value in as_list(row.get("process_ms", []), "process_ms"))
    for name, ends in as_object(row.get("spread", {}), "spread").items():
        if len(as_list(ends, f"spread.{name}")) != 2:
            raise ValueError(f"spread.{name} must have a lowest and a highest; got {shortened(ends)}")
        yield from ((f"spread.{name}", value) for value in ends)


def case_names(rows: list[Row]) -> dict[Shape, str]:
    """A name for each shape: its kind; everything, where another one is of that kind or queries are fewer than keys."""
    shapes = unique(shape_of(row) for row in rows)
    kinds = [shape.kind for shape in shapes]
    return {shape: str(shape) if kinds.count(kind) > 1 or shape.shift else kind for shape, kind in zip(shapes, kinds, strict=True)}


def is_schedule(candidate: str) -> bool:
    """Whether a candidate is one of the schedules that `--schedules` times."""
    return candidate.startswith(f"{OURS}: ")


def schedule_name(candidate: str) -> str:
    return candidate.removeprefix(f"{OURS}: ")


# ---- processes


def measured_anew(words: Sequence[str], count: int, run: Child | None = None) -> Iterator[tuple[str, Results]]:
    """The name of the results file and what is known after each process."""
    runs = []
    for number in range(1, count + 1):
        print(f"process {number} of {count}", file=sys.stderr, flush=True)
        with TemporaryDirectory() as folder:
            status = (run or _run)([*words, "--output", folder])
            written = list(Path(folder).glob("*.json"))
            if status not in (0, OURS_FAILED) or len(written) != 1:
                raise ValueError(f"a process of this benchmark ended with exit code {status} and {len(written)} files of results, not one")
            runs.append(read(written[0]))
        yield written[0].name, merged(runs)


def _run(words: list[str]) -> int:
    """Its tables are not shown: the parent shows the medians."""
    return subprocess.run([sys.executable, "-m", "benchmarks.suite", *words], stdout=subprocess.DEVNULL).returncode


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


# ---- relative speeds


class Ratio(NamedTuple):
    """Of speeds: above 1, ours is faster."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, ours: list[float], theirs: list[float]) -> Ratio:
        """A ratio is taken inside each process."""
        ratios = [other / mine for mine, other in zip(ours, theirs, strict=True)]
        return cls(median(ratios), min(ratios), max(ratios))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


def ours_over(results: Results, direction: str) -> dict[Shape, dict[str, Ratio]]:
    """By shape, and by the name of the other kernel."""
    times: dict[Shape, dict[str, list[float]]] = {}
    for row in results["rows"]:
        if row["pass"] == direction and "median_ms" in row and not is_schedule(row["candidate"]):
            times.setdefault(shape_of(row), {})[row["candidate"]] = row.get("process_ms") or [row["median_ms"]]
    with_ours = {shape: (by_name.pop(OURS), by_name) for shape, by_name in times.items() if OURS in by_name}
    return {shape: {name: Ratio.of(ours, theirs) for name, theirs in others.items()} for shape, (ours, others) in with_ours.items()}


def relative_table(results: Results, direction: str) -> tuple[list[str], list[list[str]]]:
    """Header and lines: cases below each other, kernels side by side."""
    found = ours_over(results, direction)
    names = unique(name for ratios in found.values() for name in ratios)
    lines = [[str(shape), *(str(ratios.get(name, "-")) for name in names)] for shape, ratios in found.items()]
    return ["", *names], lines


# ---- tables


def print_report(results: Results) -> None:
    bench.show(results, (*tables(results), *more_tables(results)))


def more_tables(results: Results) -> Iterator[Table]:
    rows = results["rows"]
    for direction in unique(row["pass"] for row in rows):
        if "processes" in results:
            title = f"{direction}: {OURS} relative to each, median (lowest-highest) of {results['processes']} processes"
            yield title, *relative_table(results, direction)
        sustained = [row for row in rows if row["pass"] == direction and "sustained" in row]
        for shape in unique(shape_of(row) for row in sustained):
            mine = [row for row in sustained if shape_of(row) == shape]
            title = f"{direction}, sustained for {mine[0]['sustained']['seconds']:g} s: {shape}"
            yield title, ["", "TFLOP/s", "W", "SM MHz", "J per step"], [sustained_cells(row) for row in mine]
    for title, (header, cells) in {
        "boolean matrices: TFLOP/s of their tiles relative to those of a full mask": tile_rates(results),
        "a new boolean mask, once: ms of the host beyond those of one that is known": planning_costs(results),
    }.items():
        if cells:
            yield title, header, cells


def sustained_cells(row: Row) -> list[str]:
    run = row["sustained"]
    return [row["candidate"], f"{run['tflops']:.0f}", f"{run['watts']:.0f}", f"{run['sm_mhz']:.0f}", f"{run['joules']:.3g}"]


def tile_rates(results: Results) -> tuple[list[str], Cells]:
    """TFLOP/s of kept tiles over those of all tiles, by pass."""
    speeds = {(shape_of(row), row["pass"]): row["tflops"] for row in _ours(results) if row["status"] == "ok"}
    rates: dict[Shape, dict[str, str]] = {}
    for (shape, direction), speed in speeds.items():
        full = speeds.get((replace(shape, mask="full"), direction))
        if isinstance(shape.attended, Matrix) and full:
            rates.setdefault(shape, {})[direction] = f"{speed / full:.2f}"
    return ["", *PASSES], [[str(shape), *(of.get(name, "-") for name in PASSES)] for shape, of in rates.items()]


def planning_costs(results: Results) -> tuple[list[str], Cells]:
    """Milliseconds."""
    found = {str(shape_of(row)): row["identity"]["planning_ms"] for row in _ours(results) if "planning_ms" in row.get("identity", {})}
    return ["", *COSTS.values()], [[name, *(f"{costs[key]:.1f}" for key in COSTS)] for name, costs in found.items()]


def _ours(results: Results) -> list[Row]:
    return [row for row in results["rows"] if row["candidate"] == OURS]
