"""Speed relative to cuDNN over sequence length, one panel per head dim and mask, from a results file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..plot_style import DPI, INK
from .names import CUDNN, OURS, UNORDERED
from .results import Results, panel_title, shape_key, unique

FORMATS = (".png", ".svg")
HIGHLIGHT, PALE = "#0b57d0", "#7fa8e8"
PEERS = ("#e4572e", "#5b8c5a", "#8d6a9f", "#f2a33a", "#b56576")
GREYS = ("#555555", "#777777", "#999999", "#bbbbbb")
DASHED = (0, (4, 2))
STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 12,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "dash-attn",
}


def check_format(path: Path) -> None:
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"a picture is written as {' or '.join(FORMATS)}; got {str(path)!r}")


def draw(results: Results, path: Path, direction: str = "backward") -> None:
    """Draw one pass of a results file."""
    check_format(path)
    rows = [row for row in results["rows"] if row["pass"] == direction and row.get("ratio_to_cudnn")]
    if not rows:
        raise ValueError(f"these results hold no {direction} speeds next to {CUDNN}: nothing to draw")
    from matplotlib import rc_context

    with rc_context(STYLE):
        figure = _figure(results, rows, direction)
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
        figure.savefig(path, dpi=DPI, metadata=metadata)


def _figure(results: Results, rows: list[dict[str, Any]], direction: str) -> Any:
    from matplotlib.figure import Figure

    panels = unique(shape_key(row) for row in rows)
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(1.5 + 5.4 * columns, 1.9 + 3.3 * lines), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False, sharey=True)
    axes[0, 0].set_ylim(0, 1.06 * max(1.0, *(row["ratio_to_cudnn"] for row in rows)))
    styles = _styles(rows, direction)
    for place, key in zip(axes.flat, panels, strict=False):
        _panel(place, [row for row in rows if shape_key(row) == key], styles, panel_title(key))
    for place in axes.flat[len(panels) :]:
        place.set_visible(False)
    for place in axes[:, 0]:
        place.set_ylabel(f"speed relative to {CUDNN}")
    for place in axes[-1]:
        place.set_xlabel("sequence length")
    figure.suptitle(_title(results, direction), size=15 if columns > 1 else 9, weight="bold")
    handles, labels = _legend_entries(axes)
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), frameon=False)
    return figure


def _title(results: Results, direction: str) -> str:
    title = f"Attention {direction} on {results['environment']['gpu']}: bf16, 16384 tokens a batch"
    return title if direction == "forward" else f"{title}; dashed: not reproducible"


def _styles(rows: list[dict[str, Any]], direction: str) -> dict[str, dict[str, Any]]:
    """Ours in front and thick, our other schedules grey, each peer in one colour; in a backward, dashed is not reproducible."""
    colours: dict[str, str] = {}
    styles: dict[str, dict[str, Any]] = {}
    for name, deterministic in unique((row["candidate"], row["deterministic"]) for row in rows):
        style = {"linewidth": 1.7, "markersize": 5, "marker": "s", "zorder": 4}
        if name == OURS:
            style |= {"color": HIGHLIGHT, "linewidth": 3.4, "markersize": 8, "marker": "o", "zorder": 6}
        elif name == UNORDERED:
            style |= {"color": PALE, "marker": "o", "zorder": 5}
        elif name.startswith(OURS):
            style |= {"color": GREYS[len(styles) % len(GREYS)], "linewidth": 1.2, "markersize": 4, "marker": "^", "zorder": 3}
        elif name != CUDNN:
            style["color"] = colours.setdefault(name.removesuffix(" deterministic"), PEERS[len(colours) % len(PEERS)])
        else:
            continue
        styles[name] = {**style, "linestyle": "-" if deterministic or direction == "forward" else DASHED}
    return styles


def _panel(axes: Any, rows: list[dict[str, Any]], styles: dict[str, dict[str, Any]], title: str) -> None:
    seqlens = sorted(unique(row["shape"]["seqlen"] for row in rows))
    axes.axhline(1.0, color=INK, linewidth=1.4, zorder=2, label=f"{CUDNN} = 1")
    for name, style in styles.items():
        mine = sorted((seqlens.index(row["shape"]["seqlen"]), row["ratio_to_cudnn"]) for row in rows if row["candidate"] == name)
        if mine:
            axes.plot(*zip(*mine, strict=True), label=_label(name), **style)
    axes.set_xticks(range(len(seqlens)), [_thousands(n) for n in seqlens])
    axes.margins(x=0.06)
    axes.grid(axis="y", color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.set_title(title, size=13)


def _label(name: str) -> str:
    return f"{name} (bitwise reproducible)" if name == OURS else name


def _thousands(n: int) -> str:
    return f"{n // 1024}k" if n % 1024 == 0 else str(n)


def _legend_entries(axes: Any) -> tuple[list[Any], list[str]]:
    """Every label of any panel, ours first."""
    found: dict[str, Any] = {}
    for place in axes.flat:
        for handle, label in zip(*place.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    labels = sorted(found, key=lambda label: (not label.startswith(f"{OURS} (bitwise"), label.startswith("PyTorch"), label))
    return [found[label] for label in labels], labels
