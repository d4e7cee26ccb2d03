"""Results as tables: one per pass and kind of shape, candidates below each other, sequence lengths side by side."""

from __future__ import annotations

from typing import Any

from .matrix_tables import planning_costs, tile_rates
from .names import CUDNN, OURS
from .relative import relative_table
from .results import Results, kind, shape_of, unique
from .shape import Shape

PIPE_WIDTH = 400  # a pipe or file has no width; nothing may be cut off there
Cells = list[list[str]]


def print_report(results: Results) -> None:
    environment = results["environment"]
    print(f"{environment.get('gpu')}, driver {environment.get('driver_version', 'unknown')}, torch {environment.get('torch')}", end=", ")
    often = f"{results['repeats']}" + (f" in {results['processes']} processes" if "processes" in results else "")
    unit = "TB/s of keys and values" if any(shape_of(row).cache for row in results["rows"]) else "TFLOP/s"
    print(f"cuDNN {environment.get('cudnn')}: {unit} and (speed relative to {CUDNN}), medians of {often}")
    if any(_baseline(row) == "*" for row in results["rows"]):
        print(f"* {CUDNN} cannot run this: speed relative to the fastest kernel that is not ours")
    rows = results["rows"]
    for direction in unique(row["pass"] for row in rows):
        for key in unique(kind(row) for row in rows):
            header, cells = table([row for row in rows if row["pass"] == direction and kind(row) == key])
            print_cells(f"{direction}: {key}", header, cells)
        if "processes" in results:
            title = f"{direction}: {OURS} relative to each, median (lowest-highest) of {results['processes']} processes"
            print_cells(title, *relative_table(results, direction))
        _print_sustained(direction, [row for row in rows if row["pass"] == direction and "sustained" in row])
    for title, (header, cells) in {
        "boolean matrices: TFLOP/s of their tiles relative to those of a full mask": tile_rates(results),
        "a new boolean mask, once: ms of the host beyond those of one that is known": planning_costs(results),
    }.items():
        if cells:
            print_cells(title, header, cells)
    if results.get("host"):
        print_cells(
            "host time of a warm forward and backward", ["", "us per call", "20-80 %"], [host_cells(row) for row in results["host"]]
        )
    print_reasons(results)


def table(rows: list[dict[str, Any]]) -> tuple[list[str], Cells]:
    shapes: list[Shape] = unique(shape_of(row) for row in rows)
    found = {(row["candidate"], shape_of(row)): row for row in rows}
    names = unique(row["candidate"] for row in rows)
    cells = [[name, *(cell(found.get((name, shape))) for shape in shapes)] for name in names]
    weighed = [shape for shape in shapes if any("energy_j" in row for row in rows if shape_of(row) == shape)]
    for line, name in zip(cells, names, strict=True):
        line += [energy_cell(found.get((name, shape))) for shape in weighed]
    labels = _labels(shapes)
    return ["", *labels.values(), *(f"J at {labels[shape]}" for shape in weighed)], cells


def _labels(shapes: list[Shape]) -> dict[Shape, str]:
    """Lengths, and the batch where one length occurs with several."""
    lengths = [shape.length for shape in shapes]
    return {shape: shape.length if lengths.count(shape.length) == 1 else f"{shape.batch} x {shape.length}" for shape in shapes}


def _print_sustained(direction: str, rows: list[dict[str, Any]]) -> None:
    for shape in unique(shape_of(row) for row in rows):
        mine = [row for row in rows if shape_of(row) == shape]
        title = f"{direction}, sustained for {mine[0]['sustained']['seconds']:g} s: {shape}"
        print_cells(title, ["", "TFLOP/s", "W", "SM MHz", "J per step"], [sustained_cells(row) for row in mine])


def sustained_cells(row: dict[str, Any]) -> list[str]:
    run = row["sustained"]
    return [row["candidate"], f"{run['tflops']:.0f}", f"{run['watts']:.0f}", f"{run['sm_mhz']:.0f}", f"{run['joules']:.3g}"]


def energy_cell(row: dict[str, Any] | None) -> str:
    """Joules of a step. What was not measured is not zero."""
    return f"{row['energy_j']:.3g}" if row is not None and "energy_j" in row else "-"


def cell(row: dict[str, Any] | None) -> str:
    """A speed, or why there is none."""
    if row is None:
        return "-"
    if "median_ms" not in row:
        return str(row["status"])
    ratio = row["ratio_to_cudnn"] or row.get("ratio_to_fastest_peer")
    return _speed(row) + (f" ({ratio:.2f}{_baseline(row)})" if ratio is not None else "")


def _speed(row: dict[str, Any]) -> str:
    """Attention to a cache is bound by what it reads."""
    shape = shape_of(row)
    return f"{shape.cache_bytes / row['median_ms'] / 1e9:.2f}" if shape.cache else f"{row['tflops']:.0f}"


def _baseline(row: dict[str, Any]) -> str:
    """A star where cuDNN is not what a speed is relative to."""
    return "*" if row.get("ratio_to_cudnn") is None and row.get("ratio_to_fastest_peer") else ""


def host_cells(row: dict[str, Any]) -> list[str]:
    if row["status"] != "ok":
        return [row["candidate"], row["status"], "-"]
    return [row["candidate"], f"{row['median_us']:.1f}", f"{row['p20_us']:.1f} - {row['p80_us']:.1f}"]


def print_reasons(results: Results) -> None:
    """Nothing is dropped silently: who is missing, who failed, and why."""
    reasons = [f"{name}: not installed ({why})" for name, why in results.get("missing", {}).items()]
    if results.get("energy", {}).get("missing"):
        reasons.append(f"energy: not measured ({results['energy']['missing']})")
    for case in results.get("cases", []):
        reasons += [f"{name}, {case['case']}: cannot ({why})" for name, why in case["cannot"].items()]
    for row in [*results["rows"], *results.get("host", [])]:
        if row["status"] != "ok":
            what = f" {row['pass']}, {kind(row)}" if "shape" in row else ""
            reasons.append(f"{row['candidate']}{what}: {row['status']} ({row['reason']})")
    for reason in unique(reasons):
        print(f"  {reason}")


def print_cells(title: str, header: list[str], cells: Cells) -> None:
    try:
        _print_rich(title, header, cells)
    except ModuleNotFoundError:
        _print_plain(title, header, cells)


def _print_rich(title: str, header: list[str], cells: Cells) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    made = Table(title=Text(title, style="bold"), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for i, name in enumerate(header):
        made.add_column(name, justify="right" if i else "left", no_wrap=bool(i))
    for row in cells:
        made.add_row(*map(Text, row), style="bold green" if row[0] == OURS else "")
    console.print(made)


def _print_plain(title: str, header: list[str], cells: Cells) -> None:
    print(f"\n{title}")
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    for row in (header, *cells):
        print("  ".join(text.rjust(width) if i else text.ljust(width) for i, (text, width) in enumerate(zip(row, widths, strict=True))))
