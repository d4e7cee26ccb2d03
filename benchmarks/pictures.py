"""Pictures of results over sequence length, one panel per head dim and mask: relative to cuDNN, and our schedules among each other.

Of cases that form no grid: one row per case, one dot per kernel. Speeds relative to others, or what a sustained run shows.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from dash_attn.tools.bench.candidates import CUDNN, EQUAL_HEADS, OURS, UNORDERED, is_ours
from dash_attn.tools.bench.report import Results, Row, relative_rows, shape_of, unique
from dash_attn.tools.calibrate.pictures import OTHER_LOOK, SCHEDULE_LOOKS, in_known_order, thousands, write
from dash_attn.viewing.style import INK

from .result_files import case_names, is_schedule, schedule_name

HIGHLIGHT, PALE, BAND = "#0b57d0", "#6f9fe8", "#9dbff2"
PEERS = ("#d55e00", "#009e73", "#882255", "#e69f00", "#cc79a7")
DASHED = (0, (4, 2))
BASELINE, AUTO, UNORDERED_BASELINE = f"{CUDNN} = 1", f"auto ({OURS}'s choice)", f"{UNORDERED} = 1"
COLUMNS = 5  # of a legend
SCHEDULES_NOTE = "Backward, bf16, higher is faster. 1.0: determinism for free. Every schedule gives the same bits in every run"
DODGE = 0.045  # of the way to the next length: schedules of equal speed stand side by side

# Inches. Margins are fixed, so that a title, a note and a legend have their room whatever the number of panels.
PANEL_WIDTH, PANEL_HEIGHT = 5.3, 3.1
LEFT, RIGHT, GAP, ROW_GAP = 0.85, 0.2, 0.85, 0.7
TITLE_LINE, NOTE_LINE, LEGEND_LINE = 0.31, 0.26, 0.3
TITLE_SIZE, TITLE_LETTER, NOTE_SIZE, NOTE_LETTER = 17, 0.155, 13, 0.108


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


Style = dict[str, Any]


class Lines(NamedTuple):
    """Speeds over sequence length: `value` of the rows of each candidate in `styles`, beside a line at 1."""

    rows: list[Row]
    value: str
    styles: dict[str, Style]  # with labels
    baseline: Style
    dodged: tuple[str, ...] = ()  # candidates that stand side by side
    columns: int = COLUMNS  # of the legend

    def drawn(self, texts: tuple[str, str], labels: list[str], sharey: Literal["col", "all"]) -> tuple[Any, Any, list[str]]:
        """The figure, its axes and what each panel is called. texts: title and note. labels: the order of the one legend."""
        panels = unique(shape_of(row).kind for row in self.rows)
        columns = self.columns if len(panels) > 1 else 2
        figure, axes = grid(len(panels), *texts, -(-len(labels) // columns), sharey)
        found: dict[str, Any] = {}
        for place, key in zip(axes.flat, panels, strict=False):
            self.draw_panel(place, [row for row in self.rows if shape_of(row).kind == key])
            place.set_title(key)
            found = dict(zip(*reversed(place.get_legend_handles_labels()), strict=True)) | found
        for place in axes[-1]:
            place.set_xlabel("sequence length")
        shown = [label for label in labels if label in found]
        handles = [found[label] for label in shown]
        figure.legend(handles, shown, loc="lower center", ncols=columns, frameon=False, handlelength=2.4, columnspacing=1.6)
        return figure, axes, panels

    def draw_panel(self, axes: Any, rows: list[Row]) -> None:
        """Lengths below it, and a quiet grid."""
        seqlens = sorted(unique(row["shape"]["seqlen"] for row in rows))
        axes.axhline(1.0, **self.baseline)
        dodged = [name for name in self.dodged if any(row["candidate"] == name for row in rows)]
        for name, style in self.styles.items():
            shift = DODGE * (dodged.index(name) - (len(dodged) - 1) / 2) if name in dodged else 0.0
            mine = [row for row in rows if row["candidate"] == name]
            points = sorted((seqlens.index(row["shape"]["seqlen"]) + shift, row[self.value]) for row in mine)
            if points:
                axes.plot(*zip(*points, strict=True), **style)
        axes.set_xticks(range(len(seqlens)), [thousands(n) for n in seqlens])
        axes.margins(x=0.05)
        axes.grid(axis="y")


# ---- ours and the peers, relative to cuDNN


def _figure(results: Results, rows: list[Row], direction: str) -> Any:
    styles = _styles(rows, direction)
    labels = [*(name for name in (OURS, UNORDERED) if name in styles), BASELINE, *(n for n in styles if n not in (OURS, UNORDERED, CUDNN))]
    baseline = {**styles.pop(CUDNN, {"color": INK}), "label": BASELINE}
    texts = _title(results, rows, direction), _note(rows, direction)
    figure, axes, _ = Lines(rows, "ratio_to_cudnn", styles, baseline).drawn(texts, labels, sharey="all")
    axes[0, 0].set_ylim(*_limits([row["ratio_to_cudnn"] for row in rows]))
    for place in axes[:, 0]:
        place.set_ylabel(f"speed relative to {CUDNN}")
    return figure


def _gpu(results: Results) -> str:
    return str(results["environment"]["gpu"].removeprefix("NVIDIA "))


def _limits(ratios: list[float]) -> tuple[float, float]:
    """Tight, but with room for the widest marker."""
    return max(0.0, math.floor(10 * min(*ratios, 1.0) - 0.3) / 10), max(*ratios, 1.0) + 0.05


def _title(results: Results, rows: list[Row], direction: str) -> str:
    ours = [row["ratio_to_cudnn"] for row in rows if row["candidate"] == OURS]
    if not ours:
        return f"Attention {direction} on {_gpu(results)}"
    kind = f"{OURS}, reproducible backward" if direction == "backward" else f"{OURS}, forward"
    return f"{kind} on {_gpu(results)}: {min(ours):.2f} to {max(ours):.2f} times the speed of {CUDNN}"


def _note(rows: list[Row], direction: str) -> str:
    tokens = unique(row["shape"]["batch"] * row["shape"]["seqlen"] for row in rows)
    note = ", ".join(["bf16", *(f"{n:,} tokens per batch" for n in tokens[:1] if len(tokens) == 1), "higher is faster"])
    return note if direction == "forward" else f"{note}. Solid: the same bits in every run. Dashed: not guaranteed"


def _styles(rows: list[Row], direction: str) -> dict[str, Style]:
    """Ours in front and thick, each peer in one colour; in a backward, dashed is not reproducible."""
    colours: dict[str, str] = {}
    styles: dict[str, Style] = {}
    for name, deterministic in unique((row["candidate"], row["deterministic"]) for row in rows):
        style: Style = {"linewidth": 2.0, "markersize": 6, "marker": "s", "zorder": 4}
        if name == OURS:
            style |= {"color": HIGHLIGHT, "linewidth": 3.6, "markersize": 9, "marker": "o", "zorder": 6}
        elif name == UNORDERED:
            style |= {"color": PALE, "marker": "o", "zorder": 5}
        elif name == CUDNN:
            style = {"color": INK, "linewidth": 1.6, "zorder": 2}
        else:
            style["color"] = colours.setdefault(name.removesuffix(" deterministic"), PEERS[len(colours) % len(PEERS)])
        styles[name] = {**style, "label": name, "linestyle": "-" if deterministic or direction == "forward" else DASHED}
    return styles


# ---- schedules, relative to our own unordered kernel


def draw_schedules(results: Results, path: Path) -> None:
    """Draw every schedule that was timed; one that does not serve a mask is left out of its panels."""
    rows = relative_rows(results["rows"])
    if not any(is_schedule(row["candidate"]) for row in rows):
        raise ValueError(f"these results hold no schedules next to {UNORDERED!r} (--schedules times them): nothing to draw")
    write(path, lambda: _schedules_figure(results, rows))


def _schedules_figure(results: Results, rows: list[Row]) -> Any:
    names = in_known_order({schedule_name(row["candidate"]) for row in rows if row["candidate"] != OURS})
    timed = tuple(f"{OURS}: {name}" for name in names)
    styles = {candidate: _schedules_style(candidate) for candidate in (OURS, *timed)}
    baseline = {"color": INK, "linewidth": 1.8, "linestyle": DASHED, "zorder": 3, "label": UNORDERED_BASELINE}
    lines = Lines(rows, "relative", styles, baseline, timed)
    texts = _schedules_title(results, rows), SCHEDULES_NOTE
    figure, axes, panels = lines.drawn(texts, [AUTO, UNORDERED_BASELINE, *names], sharey="col")
    for column, place in enumerate(axes[0]):
        keys = panels[column :: axes.shape[1]]
        place.set_ylim(*_schedules_limits([row["relative"] for row in rows if shape_of(row).kind in keys]))
    for place in axes.flat:
        place.set_ylabel("speed relative to unordered")
    return figure


def _schedules_limits(values: list[float]) -> tuple[float, float]:
    low, high = min(*values, 1.0), max(*values, 1.0)
    margin = 0.06 * (high - low) + 0.01
    return low - margin, high + margin


def _schedules_title(results: Results, rows: list[Row]) -> str:
    auto = [row["relative"] for row in rows if row["candidate"] == OURS]
    worst = min((row for row in rows if row["candidate"] != OURS), key=lambda row: float(row["relative"]))
    seen = f"{schedule_name(worst['candidate'])} falls to {worst['relative']:.2f}"
    if auto:
        seen = f"auto runs at {min(auto):.2f} to {max(auto):.2f} times the speed of unordered, {seen}"
    return f"The schedule decides what determinism costs on {_gpu(results)}: {seen}"


def _schedules_style(candidate: str) -> Style:
    """Auto is a broad band behind: the schedule that it chose stays visible on it."""
    name = schedule_name(candidate)
    if name == OURS:
        ring = {"marker": "o", "markersize": 15, "markeredgecolor": HIGHLIGHT, "markeredgewidth": 2.2}
        return {"label": AUTO, "color": BAND, "linewidth": 9, "zorder": 2, **ring}
    colour, marker = SCHEDULE_LOOKS.get(name, OTHER_LOOK)
    drawn = {"linewidth": 1.8, "markersize": 7, "markeredgecolor": "white", "markeredgewidth": 0.7, "zorder": 4}
    return {"label": name, "color": colour, "marker": marker, **drawn}


# ---- cases that form no grid

ROW, TOP, BOTTOM = 0.52, 1.05, 0.75  # inches
TITLES = {"masks": " under masks", "ranks": " at shapes of ranks", "decode": " on caches"}
CASE_COLUMNS = 3
LETTERS = 46  # of a line of the names of cases
RELATIVE: dict[str, Callable[[Row], float]] = {"speed relative to the fastest other kernel": lambda row: row["ratio_to_fastest_peer"]}
SUSTAINED: dict[str, Callable[[Row], float]] = {
    "TFLOP/s": lambda row: row["sustained"]["tflops"],
    "GFLOP per joule": lambda row: 1000 * row["sustained"]["tflops"] / row["sustained"]["watts"],
}


def cases_figure(results: Results, rows: list[Row], direction: str) -> Any:
    """Relative to the fastest kernel that is not ours."""
    ours = [row["ratio_to_fastest_peer"] for row in rows if row["candidate"] == OURS]
    seen = f": {min(ours):.2f} to {max(ours):.2f} times the fastest other kernel" if ours else ""
    title = f"{OURS}{TITLES.get(results['suite'], '')}, {direction} on {_gpu(results)}{seen}"
    note = "Circles: ours. Every kernel passed its check on the case; one that cannot run a case is not in its row"
    figure = _dots(rows, RELATIVE, (12.4, 0.36), (title, note))
    figure.axes[0].axvline(1.0, color=INK, linewidth=1.6, linestyle=DASHED, zorder=2)
    return figure


def sustained_figure(results: Results, rows: list[Row], direction: str) -> Any:
    """Speed on the left, work per joule on the right."""
    watts = [row["sustained"]["watts"] for row in rows]
    seconds = max(row["sustained"]["seconds"] for row in rows)
    title = f"{OURS}, {direction} for {seconds:g} s on {_gpu(results)}, at {min(watts):.0f} to {max(watts):.0f} W"
    return _dots(rows, SUSTAINED, (14.0, 0.324), (title, "Every kernel by itself, without a pause. Circles: ours"))


def _dots(rows: list[Row], measures: dict[str, Callable[[Row], float]], size: tuple[float, float], texts: tuple[str, str]) -> Any:
    """Axes side by side, one per measure. size: the width in inches, and the share of it that names of cases get."""
    from matplotlib.figure import Figure

    cases, names = case_names(rows), unique(row["candidate"] for row in rows)
    (width, left), bottom = size, BOTTOM + LEGEND_LINE * -(-len(names) // CASE_COLUMNS)
    height = TOP + ROW * len(cases) + bottom
    figure = Figure(figsize=(width, height))
    side_by_side = figure.subplots(1, len(measures), sharey=True, squeeze=False)[0]
    figure.subplots_adjust(left, bottom / height, 0.985, 1 - TOP / height, 0.08)
    side_by_side[0].set_yticks(range(len(cases)), [wrapped(name) for name in cases.values()], size=11.5, linespacing=1.05)
    side_by_side[0].set_ylim(len(cases) - 0.5, -0.5)
    for number, (axes, (label, value)) in enumerate(zip(side_by_side, measures.items(), strict=True)):
        for name in names:
            mine = [row for row in rows if row["candidate"] == name]
            heights = [list(cases).index(shape_of(row)) for row in mine]
            axes.scatter([value(row) for row in mine], heights, label=None if number else name, **dot_style(name, names))
        axes.set_xlim(0, 1.05 * axes.dataLim.x1)  # room for half a dot
        axes.tick_params(axis="y", length=0)
        axes.grid()
        axes.set_xlabel(label)
    figure.text(0.012, 1 - 0.12 / height, texts[0], size=16, weight="bold", va="top")
    figure.text(0.012, 1 - 0.55 / height, texts[1], size=12, va="top")
    figure.legend(loc="lower center", ncols=CASE_COLUMNS, frameon=False, columnspacing=1.6)
    return figure


def wrapped(case: str) -> str:
    """No line ends inside `2 x 8192`."""
    lines = textwrap.wrap(case.replace(" x ", "\N{NO-BREAK SPACE}x\N{NO-BREAK SPACE}"), LETTERS)
    return "\n".join(lines).replace("\N{NO-BREAK SPACE}", " ")


def dot_style(name: str, names: list[str]) -> dict[str, Any]:
    """Ours in front and round; a kernel and its deterministic mode share a colour, filled is deterministic."""
    if name == EQUAL_HEADS:
        return {"s": 110, "marker": "o", "facecolor": "none", "edgecolor": HIGHLIGHT, "linewidth": 1.6, "zorder": 5}
    if name in (OURS, UNORDERED):
        colour = HIGHLIGHT if name == OURS else PALE
        return {"s": 150 if name == OURS else 70, "marker": "o", "color": colour, "edgecolor": "white", "zorder": 6 if name == OURS else 5}
    family = unique(other.removesuffix(" deterministic") for other in names if not is_ours(other))
    colour = PEERS[family.index(name.removesuffix(" deterministic")) % len(PEERS)]
    filled = colour if name.endswith(" deterministic") else "none"
    return {"s": 60, "marker": "s", "facecolor": filled, "edgecolor": colour, "linewidth": 1.8, "zorder": 4}


# ---- one pass of a results file, by the field of its rows that is drawn: what it is called, and the figure

DRAWN: dict[str, tuple[str, Callable[[Results, list[Row], str], Any]]] = {
    "ratio_to_cudnn": (f"{{}} speeds next to {CUDNN}", _figure),
    "ratio_to_fastest_peer": ("{} speeds of ours next to another kernel", cases_figure),
    "sustained": ("sustained {}", sustained_figure),
}


def draw(results: Results, path: Path, direction: str = "backward", field: str = "ratio_to_cudnn") -> None:
    """Ours and the peers, without the schedules compared among each other."""
    what, figure = DRAWN[field]
    rows = [row for row in results["rows"] if row["pass"] == direction and row.get(field) and not is_schedule(row["candidate"])]
    if not rows:
        raise ValueError(f"these results hold no {what.format(direction)}: nothing to draw")
    write(path, lambda: figure(results, rows, direction))
