"""What a command found, as a table or as JSON. Before that, how far it has come."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from shutil import get_terminal_size
from typing import Any, NamedTuple

from ..scheduling.engine import Progress

PIPE_WIDTH = 400  # a pipe or file has no width; nothing may be cut off there
BEST = "\033[1;32m{}\033[0m"  # bold and green
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
    print(report.header)
    in_colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    for lines in _blocks([tuple(report.columns), *report.rows]):
        print()
        for line, best in zip(lines, [False, *report.best], strict=True):
            print(BEST.format(line) if best and in_colour else line)
    for note in ("", *report.notes) if report.notes else ():
        print(note)


def _blocks(rows: Sequence[Sequence[str]]) -> Iterator[list[str]]:
    """Lines. On a narrow terminal the columns come in several blocks, each behind the first column: no number is cut off."""
    width = get_terminal_size().columns if sys.stdout.isatty() else PIPE_WIDTH
    first, *left = zip(*rows, strict=True)
    while left:
        count = next((n for n in range(len(left), 1, -1) if len(aligned([*zip(first, *left[:n], strict=True)])[0]) <= width), 1)
        yield aligned([*zip(first, *left[:count], strict=True)])
        del left[:count]


def aligned(rows: Sequence[Sequence[str]], flush_left: bool = False) -> list[str]:
    """Cells below each other: names flush left, and numbers right unless said otherwise."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.ljust, *[str.ljust if flush_left else str.rjust] * (len(widths) - 1)]
    return ["  ".join(side(cell, width) for side, cell, width in zip(sides, row, widths, strict=True)) for row in rows]


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
