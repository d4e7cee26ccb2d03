"""A progress bar on stderr, where somebody can see it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ..scheduling.engine import Progress

LONG_WORK = 200_000  # tasks: about a second


@contextmanager
def progress_bar(label: str, tasks: int) -> Iterator[Progress | None]:
    """A callable (done, total) that draws a bar while the block runs; None for short work, without a terminal or without rich."""
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
