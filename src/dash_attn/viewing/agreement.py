"""A picture of pairs of runs: modules over steps, and where the two differ."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import style as plot_style
from .style import FIGURE_WIDTH, INK, STALL

AGREE, DIFFER, NOTHING = "#b9d9d2", STALL, "#ffffff"
STYLE: Any = {**plot_style.STYLE, "font.size": 10, "axes.spines.left": False, "axes.spines.bottom": False}


class Agreement(NamedTuple):
    """states: [module, 2 * step + direction], where direction 0 is forward and 1 backward: 0 nothing, 1 the same bits, 2 other bits.

    first: the module and the column where the runs part.
    """

    title: str
    verdict: str
    modules: Sequence[str]
    steps: Sequence[int]
    states: NDArray[np.int64]
    first: tuple[int, int] | None = None


def draw_agreement(panels: Sequence[Agreement], path: str | Path) -> None:
    """Draw pairs of runs side by side and write the picture to `path` (.png or .svg)."""
    plot_style.check_format(path, "a picture of runs")
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        rows = max(len(panel.modules) for panel in panels)
        figure = Figure(figsize=(FIGURE_WIDTH, 1.75 + 0.27 * rows), layout="constrained")
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            _draw(axes, panel)
        _explain(figure)
        plot_style.save(figure, path)


def _draw(axes: Any, panel: Agreement) -> None:
    from matplotlib.colors import ListedColormap

    grid = {"edgecolors": "white", "linewidth": 1.2}
    axes.pcolormesh(np.asarray(panel.states), cmap=ListedColormap([NOTHING, AGREE, DIFFER]), vmin=0, vmax=2, **grid)
    for step in range(1, len(panel.steps)):
        axes.axvline(2 * step, color=INK, lw=0.6)
    axes.set_ylim(len(panel.modules), 0)
    axes.set_yticks(np.arange(len(panel.modules)) + 0.5, panel.modules, family="monospace", fontsize=9)
    axes.set_xticks(2 * np.arange(len(panel.steps)) + 1, [str(step) for step in panel.steps])
    axes.set_xlabel("step (left half: forward, right half: backward)")
    axes.tick_params(length=0)
    axes.set_title(f"{panel.title}\n", loc="left", fontsize=12, fontweight="bold")
    axes.text(0, 1.015, panel.verdict, transform=axes.transAxes, fontsize=10, va="bottom")
    if panel.first is not None:
        from matplotlib.patches import Rectangle

        module, column = panel.first
        axes.add_patch(Rectangle((column, module), 1, 1, fill=False, edgecolor=INK, lw=2.2, zorder=5, clip_on=False))


def _explain(figure: Any) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(color=AGREE, label="the same bits in both runs"),
        Patch(color=DIFFER, label="other bits"),
        Patch(facecolor="none", edgecolor=INK, lw=2, label="the module that `dash-attn diff` names"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
