"""Colours, sizes and files that all pictures share."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

INK = "#222222"
STALL = "#e4572e"  # vermilion: unlike every viridis colour also for colour-blind eyes
STALL_PALE = "#fbd9cf"
IDLE = "#f1f1f1"
BOUND = "#0b57d0"
REDUCE_SHADE = 0.62  # a reduce has its Q tile's colour, darker

STYLE: Any = {
    "font.family": "sans-serif",
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",  # text stays text: it can be searched and edited
    "svg.hashsalt": "dash-attn",  # the same run gives the same file
}
SMALL_STYLE: Any = {**STYLE, "font.size": 10, "hatch.linewidth": 0.8}
FIGURE_WIDTH = 12.0  # inches
LANE = 0.84  # of the distance between workers, or ranks
GLYPH = 0.64  # width of a digit, in font sizes
DPI = 150
FORMATS = (".png", ".svg")


def check_format(path: str | Path, what: str) -> None:
    """Raise unless `path` ends like a file we can write."""
    if Path(path).suffix.lower() not in FORMATS:
        raise ValueError(f"{what} is written as {' or '.join(FORMATS)}; got {str(path)!r}")


def check_chart(runs: Sequence[Any], path: str | Path) -> None:
    check_format(path, "a Gantt chart")
    if not runs:
        raise ValueError("a Gantt chart needs at least one run")


def panels(heights: Sequence[float], others: float, title: str) -> tuple[Any, Any]:
    """A figure, and its panels below each other on one axis of time. `others`: the inches that all else takes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(FIGURE_WIDTH, sum(heights) + others), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, color="#555555")
    return figure, figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]


def dress(axes: Any, lanes: tuple[int, str], titles: tuple[str, str], makespan: float) -> None:
    """How many lanes a panel has and what they are, its two titles, and the end of its run."""
    axes.set_ylim(lanes[0] - 0.5, -0.5)
    axes.set_ylabel(lanes[1])
    axes.tick_params(length=3)
    axes.set_title(titles[0], loc="left", fontsize=13, fontweight="bold")
    axes.set_title(titles[1], loc="right", fontsize=10)
    axes.axvline(makespan, color=INK, lw=1.8, zorder=5, clip_on=False)


def idle_and_end() -> list[Any]:
    """Entries of a legend."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    return [Patch(facecolor=IDLE, edgecolor="#bbbbbb", lw=0.6, label="idle"), Line2D([], [], color=INK, lw=1.8, label="makespan")]


def legend(figure: Any, handles: Sequence[Any], title: str | None = None) -> None:
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, handlelength=2.2, title=title)


def save(figure: Any, path: str | Path, exact: Sequence[str] | None = None) -> None:
    """Write a figure; the same one gives the same file. With `exact` a PNG has 256 colours, which takes less room: also those named."""
    if Path(path).suffix.lower() == ".svg":
        figure.savefig(path, metadata={"Date": None})
    elif exact is None:
        figure.savefig(path, dpi=DPI)
    else:
        _few_colours(figure, exact).save(path, optimize=True, dpi=(DPI, DPI))


def _few_colours(figure: Any, exact: Sequence[str]) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import to_rgb
    from PIL import Image

    figure.set_dpi(DPI)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    picture = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    if not exact:
        return picture.quantize(256, dither=Image.Dither.NONE)
    reserved = [tuple(round(255 * c) for c in to_rgb(name)) for name in exact]
    frequent = picture.quantize(256 - len(reserved)).getpalette() or []
    colours = [c for colour in reserved for c in colour] + frequent
    palette = Image.new("P", (1, 1))
    palette.putpalette(colours[:768])
    indices = np.array(picture.quantize(palette=palette, dither=Image.Dither.NONE))
    for index, colour in enumerate(reserved):  # Pillow's matching is coarse
        indices[(np.asarray(picture) == colour).all(-1)] = index
    small = Image.fromarray(indices)
    small.putpalette(colours[:768])
    return small


def q_tile_colours(q_tiles: int) -> Any:
    """A matplotlib mappable from Q tile to colour. The darkest end of viridis is left out: its reduces would be black."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm, ListedColormap, Normalize

    shares = np.linspace(0.1, 1.0, 256 if q_tiles > 24 else q_tiles, dtype=np.float64)
    cmap = ListedColormap(np.asarray(colormaps["viridis"](shares)))
    if q_tiles > 24:
        return ScalarMappable(Normalize(0, q_tiles - 1), cmap)
    return ScalarMappable(BoundaryNorm(np.arange(q_tiles + 1) - 0.5, cmap.N), cmap)


def text_colour(rgb: NDArray[np.float64]) -> str:
    """Dark or white, whichever reads better on a colour."""
    luminance = float(np.dot(rgb[:3] ** 2.2, (0.2126, 0.7152, 0.0722)))
    return INK if luminance > 0.24 else "white"
