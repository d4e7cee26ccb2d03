"""Speed relative to cuDNN over sequence length, one panel per head dim and mask, from a results file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from ...viewing.style import INK
from .names import CUDNN, OURS, UNORDERED
from .picture_style import DASHED, HIGHLIGHT, check_format, finish, grid, label_outside, legend_below, write
from .results import Results, is_schedule, kind, unique

PALE = "#6f9fe8"
PEERS = ("#d55e00", "#009e73", "#882255", "#e69f00", "#cc79a7")
BASELINE = f"{CUDNN} = 1"

Row = dict[str, Any]


def draw(results: Results, path: Path, direction: str = "backward") -> None:
    """Draw one pass of a results file: ours and the peers, without the schedules compared among each other."""
    check_format(path)
    rows = [row for row in results["rows"] if row["pass"] == direction and row.get("ratio_to_cudnn") and not is_schedule(row["candidate"])]
    if not rows:
        raise ValueError(f"these results hold no {direction} speeds next to {CUDNN}: nothing to draw")
    write(path, lambda: _figure(results, rows, direction))


def _figure(results: Results, rows: list[Row], direction: str) -> Any:
    panels = unique(kind(row) for row in rows)
    styles = _styles(rows, direction)
    columns = 5 if len(panels) > 1 else 2
    labels = [*(name for name in (OURS, UNORDERED) if name in styles), BASELINE, *(n for n in styles if n not in (OURS, UNORDERED, CUDNN))]
    note = _note(rows, direction)
    figure, axes = grid(len(panels), _title(results, rows, direction), note, -(-len(labels) // columns), sharey="all")
    axes[0, 0].set_ylim(*_limits([row["ratio_to_cudnn"] for row in rows]))
    for place, key in zip(axes.flat, panels, strict=False):
        _panel(place, [row for row in rows if kind(row) == key], styles, key)
    label_outside(axes, f"speed relative to {CUDNN}")
    legend_below(figure, axes, labels, columns)
    return figure


def _limits(ratios: list[float]) -> tuple[float, float]:
    """Tight, but with room for the widest marker."""
    return max(0.0, math.floor(10 * min(*ratios, 1.0) - 0.3) / 10), max(*ratios, 1.0) + 0.05


def _title(results: Results, rows: list[Row], direction: str) -> str:
    gpu = results["environment"]["gpu"].removeprefix("NVIDIA ")
    ours = [row["ratio_to_cudnn"] for row in rows if row["candidate"] == OURS]
    if not ours:
        return f"Attention {direction} on {gpu}"
    kind = f"{OURS}, reproducible backward" if direction == "backward" else f"{OURS}, forward"
    return f"{kind} on {gpu}: {min(ours):.2f} to {max(ours):.2f} times the speed of {CUDNN}"


def _note(rows: list[Row], direction: str) -> str:
    tokens = unique(row["shape"]["batch"] * row["shape"]["seqlen"] for row in rows)
    note = ", ".join(["bf16", *(f"{n:,} tokens per batch" for n in tokens[:1] if len(tokens) == 1), "higher is faster"])
    return note if direction == "forward" else f"{note}. Solid: the same bits in every run. Dashed: not guaranteed"


def _styles(rows: list[Row], direction: str) -> dict[str, dict[str, Any]]:
    """Ours in front and thick, each peer in one colour; in a backward, dashed is not reproducible."""
    colours: dict[str, str] = {}
    styles: dict[str, dict[str, Any]] = {}
    for name, deterministic in unique((row["candidate"], row["deterministic"]) for row in rows):
        style: dict[str, Any] = {"linewidth": 2.0, "markersize": 6, "marker": "s", "zorder": 4}
        if name == OURS:
            style |= {"color": HIGHLIGHT, "linewidth": 3.6, "markersize": 9, "marker": "o", "zorder": 6}
        elif name == UNORDERED:
            style |= {"color": PALE, "marker": "o", "zorder": 5}
        elif name == CUDNN:
            style = {"color": INK, "linewidth": 1.6, "zorder": 2}
        else:
            style["color"] = colours.setdefault(name.removesuffix(" deterministic"), PEERS[len(colours) % len(PEERS)])
        styles[name] = {**style, "linestyle": "-" if deterministic or direction == "forward" else DASHED}
    return styles


def _panel(axes: Any, rows: list[Row], styles: dict[str, dict[str, Any]], title: str) -> None:
    seqlens = sorted(unique(row["shape"]["seqlen"] for row in rows))
    axes.axhline(1.0, label=BASELINE, **styles.get(CUDNN, {"color": INK}))
    for name, style in styles.items():
        mine = sorted((seqlens.index(row["shape"]["seqlen"]), row["ratio_to_cudnn"]) for row in rows if row["candidate"] == name)
        if mine and name != CUDNN:
            axes.plot(*zip(*mine, strict=True), label=name, **style)
    finish(axes, seqlens, title)
