"""What a command found as a table, rich where it is installed, aligned text elsewhere; or as JSON. Before that, how far it has come."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple

from ..scheduling.engine import Progress

PIPE_WIDTH = 400  # a pipe or file has no width; nothing may be cut off there
LONG_WORK = 200_000  # tasks: about a second
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


_watch: ContextVar[Callable[[str], Progress] | None] = ContextVar("_watch", default=None)


@contextmanager
def watched_by(watch: Callable[[str], Progress] | None) -> Iterator[None]:
    """What the block does is told to `watch`, in place of a bar."""
    token = _watch.set(watch)
    try:
        yield
    finally:
        _watch.reset(token)


@contextmanager
def progress_bar(label: str, tasks: int) -> Iterator[Progress | None]:
    """A callable (done, total) that draws a bar while the block runs; None for short work, without a terminal or without rich."""
    if (watch := _watch.get()) is not None:
        yield watch(label)
        return
    if tasks < LONG_WORK or not sys.stderr.isatty():
        yield None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars
    except ModuleNotFoundError:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task(label, total=None)
        yield lambda done, total: bars.update(bar, completed=done, total=total)
