"""What a command found as a table, rich where it is installed, aligned text elsewhere; or as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

PIPE_WIDTH = 400  # a pipe or file has no width; nothing may be cut off there
Refusals = list[tuple[str, str]]  # who cannot serve a problem, and why


class Report(NamedTuple):
    """For people: a table whose best rows are in colour, and lines below it. For programs: a value."""

    header: str
    columns: Sequence[str]
    rows: list[tuple[str, ...]]
    best: list[bool]
    notes: Sequence[str] = ()
    value: Any = None
    refused: Sequence[tuple[str, str]] = ()  # beside the value, on stderr


def print_report(report: Report, as_json: bool = False) -> None:
    if as_json:
        for name, why in report.refused:
            print(f"dash-attn: {name} cannot serve this problem: {why}", file=sys.stderr)
        print(json.dumps(report.value, indent=2))
        return
    try:
        _print_rich(report)
    except ModuleNotFoundError:
        _print_plain(report)
    for note in report.notes:
        print(note)


def _print_rich(report: Report) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    console.print(Text(report.header))
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for place, column in enumerate(report.columns):
        justify: Literal["left", "right"] = "right" if place else "left"
        table.add_column(column.replace(" ", "\n"), justify=justify, no_wrap=True, vertical="bottom")
    for row, is_best in zip(report.rows, report.best, strict=True):
        table.add_row(*map(Text, row), style="bold green" if is_best else "")
    console.print(table)


def _print_plain(report: Report) -> None:
    print(report.header)
    widths = [max(map(len, column)) for column in zip(report.columns, *report.rows, strict=True)]
    for row in (tuple(report.columns), *report.rows):
        first, *others = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join([first.strip().ljust(widths[0]), *others]))
