"""What the benchmark pictures share: file formats, fonts, colours, and a grid of panels with title, note and legend."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

from ...viewing import style as plot_style

HIGHLIGHT = "#0b57d0"
GRID = "#dddddd"
DASHED = (0, (4, 2))
# Colours that colour-blind eyes tell apart (after Okabe and Ito, and Tol); every schedule also has a marker of its own.
SCHEDULE_LOOKS = {
    "ascending": ("#d55e00", "v"),
    "descending": ("#e69f00", "^"),
    "spt": ("#009e73", "D"),
    "shift": ("#56b4e9", ">"),
    "symmetric_shift": ("#cc79a7", "s"),
    "alternating": ("#222222", "o"),
    "weave": ("#882255", "X"),
    "arrival": ("#44aa99", "P"),
    "shift_blocks": ("#332288", "<"),
}
OTHER_LOOK = ("#888888", "*")
STYLE: Any = {**plot_style.STYLE, "font.size": 13, "axes.titlesize": 14, "legend.fontsize": 13}

# Inches. Margins are fixed, so that a title, a note and a legend have their room whatever the number of panels.
PANEL_WIDTH, PANEL_HEIGHT = 5.3, 3.1
LEFT, RIGHT, GAP, ROW_GAP = 0.85, 0.2, 0.85, 0.7
TITLE_LINE, NOTE_LINE, LEGEND_LINE = 0.31, 0.26, 0.3
TITLE_SIZE, TITLE_LETTER, NOTE_SIZE, NOTE_LETTER = 17, 0.155, 13, 0.108


def check_format(path: Path) -> None:
    plot_style.check_format(path, "a picture")


def write(path: Path, make: Callable[[], Any]) -> None:
    """Make a figure in our style and write it; the same figure gives the same file."""
    check_format(path)
    from matplotlib import rc_context

    with rc_context(STYLE):
        plot_style.save(make(), path, exact=())


def grid(panels: int, title: str, note: str, legend_lines: int, sharey: Literal["col", "all"]) -> tuple[Any, Any]:
    """A figure and its axes, two panels in a row, below a title and a note and above room for a legend."""
    from matplotlib.figure import Figure

    columns = min(2, panels)
    rows = -(-panels // columns)
    width = LEFT + columns * PANEL_WIDTH + (columns - 1) * GAP + RIGHT
    titles, notes = (textwrap.wrap(text, int((width - 0.2) / letter)) for text, letter in ((title, TITLE_LETTER), (note, NOTE_LETTER)))
    top = 0.12 + TITLE_LINE * len(titles) + NOTE_LINE * len(notes) + 0.5
    bottom = 0.8 + LEGEND_LINE * legend_lines
    height = top + rows * PANEL_HEIGHT + (rows - 1) * ROW_GAP + bottom
    figure = Figure(figsize=(width, height))
    axes = figure.subplots(rows, columns, squeeze=False, sharey=sharey)
    figure.subplots_adjust(LEFT / width, bottom / height, 1 - RIGHT / width, 1 - top / height, GAP / PANEL_WIDTH, ROW_GAP / PANEL_HEIGHT)
    left = 0.12 / width
    figure.text(left, 1 - 0.12 / height, "\n".join(titles), size=TITLE_SIZE, weight="bold", va="top", linespacing=1.2)
    below = 0.12 + TITLE_LINE * len(titles) + 0.03
    figure.text(left, 1 - below / height, "\n".join(notes), size=NOTE_SIZE, va="top", linespacing=1.2)
    for place in axes.flat[panels:]:
        place.set_visible(False)
    return figure, axes


def finish(axes: Any, seqlens: list[int], title: str) -> None:
    """Lengths below a panel, a quiet grid, and its title."""
    axes.set_xticks(range(len(seqlens)), [thousands(n) for n in seqlens])
    axes.margins(x=0.05)
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.set_title(title)


def label_outside(axes: Any, ylabel: str, every_column: bool = False) -> None:
    for place in axes.flat if every_column else axes[:, 0]:
        place.set_ylabel(ylabel)
    for place in axes[-1]:
        place.set_xlabel("sequence length")


def legend_below(figure: Any, axes: Any, labels: Iterable[str], columns: int) -> None:
    """One legend for all panels, in the order of `labels`."""
    found: dict[str, Any] = {}
    for place in axes.flat:
        for handle, label in zip(*place.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    shown = [label for label in labels if label in found]
    handles = [found[label] for label in shown]
    figure.legend(handles, shown, loc="lower center", ncols=columns, frameon=False, handlelength=2.4, columnspacing=1.6)


def in_known_order(schedules: Iterable[str]) -> list[str]:
    """Schedules as SCHEDULE_LOOKS lists them, unknown ones last."""
    known = list(SCHEDULE_LOOKS)
    return sorted(schedules, key=lambda name: known.index(name) if name in known else len(known))


def thousands(n: int) -> str:
    return f"{n // 1024}k" if n % 1024 == 0 else str(n)
