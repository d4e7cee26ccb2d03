"""Results as tables: one per pass and kind of shape, candidates below each other, sequence lengths side by side."""

from __future__ import annotations

from typing import Any

from .names import CUDNN, OURS
from .results import Results, kind, unique

PIPE_WIDTH = 200  # a pipe or file has no width; nothing may be cut off there
Cells = list[list[str]]


def print_report(results: Results) -> None:
    environment = results["environment"]
    print(f"{environment.get('gpu')}, driver {environment.get('driver_version', 'unknown')}, torch {environment.get('torch')}", end=", ")
    print(f"cuDNN {environment.get('cudnn')}: TFLOP/s and (speed relative to {CUDNN}), medians of {results['repeats']}")
    if any(_baseline(row) == "*" for row in results["rows"]):
        print(f"* {CUDNN} cannot run this: speed relative to the fastest kernel that is not ours")
    rows = results["rows"]
    for direction in unique(row["pass"] for row in rows):
        for key in unique(kind(row) for row in rows):
            header, cells = table([row for row in rows if row["pass"] == direction and kind(row) == key])
            print_cells(f"{direction}: {key}", header, cells)
    if results.get("host"):
        print_cells(
            "host time of a warm forward and backward", ["", "us per call", "20-80 %"], [host_cells(row) for row in results["host"]]
        )
    print_reasons(results)


def table(rows: list[dict[str, Any]]) -> tuple[list[str], Cells]:
    seqlens = unique(row["shape"]["seqlen"] for row in rows)
    found = {(row["candidate"], row["shape"]["seqlen"]): row for row in rows}
    names = unique(row["candidate"] for row in rows)
    cells = [[name, *(cell(found.get((name, seqlen))) for seqlen in seqlens)] for name in names]
    weighed = [seqlen for seqlen in seqlens if any("energy_j" in row for row in rows if row["shape"]["seqlen"] == seqlen)]
    for line, name in zip(cells, names, strict=True):
        line += [energy_cell(found.get((name, seqlen))) for seqlen in weighed]
    return ["", *map(str, seqlens), *(f"J at {seqlen}" for seqlen in weighed)], cells


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
    return f"{row['tflops']:.0f}" + (f" ({ratio:.2f}{_baseline(row)})" if ratio is not None else "")


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
        made.add_column(name, justify="right" if i else "left", no_wrap=True)
    for row in cells:
        made.add_row(*map(Text, row), style="bold green" if row[0] == OURS else "")
    console.print(made)


def _print_plain(title: str, header: list[str], cells: Cells) -> None:
    print(f"\n{title}")
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    for row in (header, *cells):
        print("  ".join(text.rjust(width) if i else text.ljust(width) for i, (text, width) in enumerate(zip(row, widths, strict=True))))
