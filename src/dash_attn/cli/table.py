"""Simulated schedules as a table: rich where it is installed, aligned text elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ..simulation.simulate import Timeline
from ..viewing.words import percent, plain_number

COLUMNS = ("schedule", "makespan", "lower bound", "gap", "utilised", "stalled", "slack", "gang")
PIPE_WIDTH = 400  # a pipe or file has no width; nothing may be cut off there
Named = tuple[str, Timeline]  # the name that was asked for, and its run


def print_table(header: str, runs: Sequence[Named], auto_order: str | None) -> None:
    """`auto_order` is the order that `auto` would pick; its row is marked."""
    rows = [_row(asked, timeline, auto_order) for asked, timeline in runs]
    fastest = min((timeline.makespan for _, timeline in runs), default=0.0)
    best = [timeline.makespan == fastest for _, timeline in runs]
    print_rows(header, COLUMNS, rows, best)


def print_rows(header: str, columns: Sequence[str], rows: Sequence[tuple[str, ...]], best: Sequence[bool]) -> None:
    """Any table. The best rows are in colour, the first column is flush left."""
    try:
        _print_rich(header, columns, rows, best)
    except ModuleNotFoundError:
        _print_plain(header, columns, rows)


def _row(asked: str, timeline: Timeline, auto_order: str | None) -> tuple[str, ...]:
    name = timeline.schedule.name
    label = f"auto: {name}" if asked == "auto" else f"{name} (auto)" if name == auto_order else name
    slack = timeline.schedule.slack
    return (
        label,
        plain_number(timeline.makespan),
        plain_number(timeline.lower_bound),
        percent(timeline.gap),
        percent(timeline.utilization),
        percent(timeline.stalled),
        "-" if slack is None else str(slack),
        str(timeline.schedule.gang),
    )


def _print_rich(header: str, columns: Sequence[str], rows: Sequence[tuple[str, ...]], best: Sequence[bool]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    console.print(Text(header))
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for place, column in enumerate(columns):
        justify: Literal["left", "right"] = "right" if place else "left"
        table.add_column(column.replace(" ", "\n"), justify=justify, no_wrap=True, vertical="bottom")
    for row, is_best in zip(rows, best, strict=True):
        table.add_row(*map(Text, row), style="bold green" if is_best else "")
    console.print(table)


def _print_plain(header: str, columns: Sequence[str], rows: Sequence[tuple[str, ...]]) -> None:
    print(header)
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    for row in (tuple(columns), *rows):
        first, *others = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join([first.strip().ljust(widths[0]), *others]))
