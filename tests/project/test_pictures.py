"""Every committed picture shows what its command draws now (tools/pictures.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from dash_attn.scheduling import Problem, generate
from dash_attn.simulation import Machine, simulate
from dash_attn.viewing.gantt import gantt
from pictures import DOCS, DRAWINGS, drawn, file_hash, recorded, shown, watched

# The first trains four times, and where the runs differ is up to the processor's rounding. The second simulates many devices.
SLOW = {"images/runs-part.png", "images/gantt-ranks-32k.png"}


@pytest.mark.parametrize("drawing", [pytest.param(name, marks=pytest.mark.exhaustive if name in SLOW else ()) for name in DRAWINGS])
def test_it_shows_what_is_drawn_now(drawing: str, tmp_path: Path) -> None:
    known = recorded()
    for name, what in drawn(drawing, tmp_path).items():
        assert known[name][0] == what, f"docs/{name} shows something else: run `make pages`, and look at it"


def test_every_picture_is_held() -> None:
    files = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.png")}
    assert len(files) == 22
    assert {name: file_hash(name) for name in files} == {name: file for name, (_, file) in recorded().items()}


def figure_with(change: str) -> Any:
    """One of everything; one part is another."""
    from matplotlib.figure import Figure

    def one_of(part: str, usual: Any, other: Any) -> Any:
        return other if part == change else usual

    figure = Figure()
    axes = figure.subplots()
    axes.plot([0, 1], [2, one_of("line", 3, 4)], label=one_of("legend", "a", "b"))
    axes.bar([0], [one_of("bar", 3, 4)])
    axes.scatter([one_of("dot", 3, 4)], [1])
    axes.set_yticks([0, one_of("tick", 2, 3)], ["zero", one_of("label of a tick", "two", "three")])
    axes.set_xlabel(one_of("label of an axis", "x", "y"))
    axes.set_title(one_of("title", "x", "y"), loc="right")
    axes.annotate(one_of("note", "x", "y"), (one_of("arrow", 1, 2), 2), (2, 2))
    axes.imshow([[1, one_of("image", 2, 3)]])
    figure.legend()
    figure.suptitle(one_of("title of all", "x", "y"))
    return figure


@pytest.mark.parametrize(
    "change",
    ["line", "legend", "bar", "dot", "tick", "label of a tick", "label of an axis", "title", "note", "arrow", "image", "title of all"],
)
def test_everything_that_a_figure_shows_counts(change: str) -> None:
    assert shown(figure_with("nothing")) == shown(figure_with("nothing"))
    assert shown(figure_with(change)) != shown(figure_with("nothing"))


def shown_of(heads: int, path: Path, schedule: str = "alternating", compute: int = 3, title: str = "a title") -> str:
    schedule_of = generate(schedule, Problem.from_tiles("causal", 4, 4, heads=heads), 4)
    with watched() as found:
        gantt([simulate(schedule_of, Machine(compute=compute, reduce=1))], path / "small.png", title)
    return found["small.png"]


@pytest.mark.parametrize("heads", [2, 400], ids=["bars", "image"])
def test_another_picture_is_told_apart(heads: int, tmp_path: Path) -> None:
    """The control: the same figure again, then another schedule, other costs, another text."""
    assert shown_of(heads, tmp_path) == shown_of(heads, tmp_path)
    others = ({"schedule": "ascending"}, {"compute": 4}, {"title": "another title"})
    assert len({shown_of(heads, tmp_path), *(shown_of(heads, tmp_path, **change) for change in others)}) == 4
