"""The picture of docs/how-a-call-runs.md: one GPU call and one command on their way through the rooms."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from dash_attn.tools.calibrate.pictures import write
from dash_attn.viewing.style import BOUND, INK, STALL

SIZE = (12.0, 9.0)  # inches
HEIGHT, CORNER = 0.82, 0.1  # of a box; the radius of its corners
LEFT, MIDDLE, RIGHT = 0.2, 4.25, 8.3  # where the columns begin
WIDTH = 3.5
COLOURS = {  # by room: a pale fill
    "attention": "#dbe9ff",
    "call": "#e6f4ea",
    "masks": "#f3e8fd",
    "scheduling": "#fff3cd",
    "backends": "#fde0dc",
    "simulation": "#d9f2f2",
    "viewing": "#eeeeee",
    "cli": "#e8eaf6",
}


class Box(NamedTuple):
    x: float
    y: float
    place: str  # room/file
    does: str
    width: float = WIDTH


KERNELS = "preprocess.cuh  ->  attention.cuh (planner, loader, consumer, drain: the hand-over between SMs)  ->  postprocess.cuh"
BOXES = {
    "functions": Box(LEFT, 7.6, "attention/functions.py", "flash_attn_func"),
    "options": Box(LEFT, 6.5, "call/options.py, tensor_checks.py", "arguments -> AttentionOptions"),
    "autograd": Box(LEFT, 5.4, "attention/autograd.py", "one Call: forward now, backward later"),
    "calls": Box(LEFT, 4.3, "backends/run.py", "hopper/calls/: forward(call), backward(...)"),
    "tables": Box(LEFT, 2.6, "backends/hopper/calls/tables.py", "uploaded and kept, once per shape"),
    "driver": Box(LEFT, 1.5, "backends/hopper/driver/launch.py", "kernels compiled, loaded, launched"),
    "masks": Box(MIDDLE, 7.6, "masks/rules.py", "tile_map: empty, partial or full tiles"),
    "problem": Box(MIDDLE, 6.35, "scheduling/problem.py", "mask + shape -> Problem"),
    "generators": Box(MIDDLE, 5.1, "scheduling/generators/, order.py", "walks and turns: the order of every sum"),
    "schedule": Box(MIDDLE, 3.85, "scheduling/schedule.py, validate.py", "order + placement, proven"),
    "plan": Box(MIDDLE, 2.6, "scheduling/plan.py", "lower: int32 tables"),
    "command": Box(RIGHT, 7.6, "cli/main.py, plan.py", "dash-attn plan"),
    "arguments": Box(RIGHT, 6.35, "cli/arguments.py", "--mask, --seqlen, ... -> Problem"),
    "simulate": Box(RIGHT, 3.85, "simulation/simulate.py", "when every task runs, and what waits"),
    "views": Box(RIGHT, 2.6, "cli/table.py, viewing/gantt.py", "a table, a Gantt chart, a trace"),
    "kernels": Box(LEFT, 0.3, "backends/hopper/kernels/backward/", KERNELS, RIGHT + WIDTH - LEFT),
}
DOWN = {  # straight down, in one column, from each box to the next
    BOUND: ("functions options autograd calls", "tables driver kernels"),
    INK: ("masks problem generators schedule plan",),
    STALL: ("command arguments", "simulate views"),
}
ACROSS = [("arguments", "problem", STALL), ("schedule", "simulate", STALL), ("plan", "tables", BOUND)]


def draw(path: Path) -> None:
    write(path, _figure)


def _figure() -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, SIZE[0]), ylim=(0, SIZE[1]))
    axes.axis("off")
    for x, title, colour in ((LEFT, "One call on a GPU", BOUND), (MIDDLE, "What both share", INK), (RIGHT, "One command", STALL)):
        axes.text(x, 8.68, title, fontsize=16, weight="bold", color=colour)
    for box in BOXES.values():
        _box(axes, box)
    for colour, ways in DOWN.items():
        for above, below in (pair for way in ways for pair in pairwise(way.split())):
            x = BOXES[above].x + WIDTH / 2
            _arrow(axes, (x, BOXES[above].y), (x, BOXES[below].y + HEIGHT), colour)
    for one, other, colour in ACROSS:
        start, end = BOXES[one], BOXES[other]
        shifts, y = (start.width, 0) if start.x < end.x else (0, end.width), start.y + HEIGHT / 2
        _arrow(axes, (start.x + shifts[0], y), (end.x + shifts[1], y), colour)
    _to_the_plan(axes)
    return figure


def _box(axes: Any, box: Box) -> None:
    from matplotlib.patches import FancyBboxPatch

    room = box.place.split("/")[0].removesuffix(".py")
    style = f"round,pad=0,rounding_size={CORNER}"
    axes.add_patch(FancyBboxPatch((box.x, box.y), box.width, HEIGHT, boxstyle=style, facecolor=COLOURS[room], edgecolor=INK, linewidth=0.8))
    axes.text(box.x + 0.12, box.y + 0.52, box.place, fontsize=11.5, weight="bold", va="center")
    axes.text(box.x + 0.12, box.y + 0.22, box.does, fontsize=11, va="center")


def _arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": colour, "linewidth": 1.8, "shrinkA": 0, "shrinkB": 0})


def _to_the_plan(axes: Any) -> None:
    """From the prepared call up to the problem; the plan comes back to it further down."""
    calls, problem = BOXES["calls"], BOXES["problem"]
    x = (calls.x + WIDTH + problem.x) / 2
    axes.plot([calls.x + WIDTH, x, x], [calls.y + HEIGHT / 2, calls.y + HEIGHT / 2, problem.y + HEIGHT / 2], color=BOUND, linewidth=1.8)
    _arrow(axes, (x, problem.y + HEIGHT / 2), (problem.x, problem.y + HEIGHT / 2), BOUND)
    axes.text(x - 0.1, calls.y - 0.36, "call/planning.py\nasks for a plan", fontsize=11, color=BOUND, ha="right", va="center")
