"""The Gantt chart of ranks: every unit is there once, where and when it runs, and its texts can be read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from clusters import shared
from dash_attn.simulation.cluster import EXECUTIONS, Cluster, RankTimeline, simulate_ranks
from picture_texts import overlaps

pytest.importorskip("matplotlib")
from dash_attn.viewing import gantt_ranks


def runs_of(mask: str = "causal", sharding: str = "zigzag", heads: int = 2) -> list[RankTimeline]:
    found = shared(mask, 8192, 4, heads, sharding)
    return [simulate_ranks(found, Cluster(), execution) for execution in EXECUTIONS]


def test_a_bar_per_leg() -> None:
    for run in runs_of():
        bars = gantt_ranks._bars(run)
        legs = [unit.number for unit in run.shared.units if unit.leg is not None]
        assert sorted(bar.unit.number for bar in bars) == legs
        for bar in bars:
            assert (bar.start, bar.end) == (run.start[bar.unit.number], run.end[bar.unit.number])
        for one in bars:
            beside = [bar for bar in bars if bar.unit.rank == one.unit.rank and bar.lane == one.lane and bar is not one]
            assert all(bar.end <= one.start or bar.start >= one.end for bar in beside)
    assert max(bar.lane for bar in gantt_ranks._bars(runs_of()[0])) == 0  # launched units follow each other


def test_kinds_and_heads_have_colours_of_their_own() -> None:
    (run, _) = runs_of(heads=4)
    colours = gantt_ranks._colours(run)
    assert len(colours) == 4
    assert len({tuple(np.round(colour, 3)) for colour in colours.values()}) == 4
    blue = {key: colour[2] > colour[0] for key, colour in colours.items()}
    assert {kind for (kind, _), is_blue in blue.items() if is_blue} == {0}
    assert {kind for (kind, _), is_blue in blue.items() if not is_blue} == {1}


@pytest.mark.parametrize(("mask", "sharding", "heads"), [("causal", "zigzag", 2), ("causal", "contiguous", 1), ("full", "contiguous", 4)])
def test_texts_can_be_read(mask: str, sharding: str, heads: int) -> None:
    figure = gantt_ranks._figure(runs_of(mask, sharding, heads), "a title\nof two lines")
    panels = figure.axes
    assert [axes.get_ylabel() for axes in panels] == ["rank", "rank"]
    labels = {text.get_text() for text in panels[0].texts}
    assert labels == set("01234567" if sharding == "zigzag" else "0123")
    assert overlaps(figure) == []


def test_hops_are_drawn_where_they_are_few() -> None:
    few, many = runs_of(heads=1)[0], runs_of(heads=8)[0]
    between_legs = [unit for unit in few.shared.units if few.shared.hops(unit) and few.shared.units[unit.after or 0].leg is not None]
    assert len(gantt_ranks._hops(few)) == len(between_legs) > 0
    assert gantt_ranks._hops(many) == []


def test_pictures_repeat_and_wrong_names_are_refused(tmp_path: Path) -> None:
    runs = runs_of(heads=1)
    for name in ("a.svg", "b.svg"):
        gantt_ranks.gantt_of_ranks(runs, tmp_path / name, "title")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    with pytest.raises(ValueError, match=r"\.png or \.svg"):
        gantt_ranks.gantt_of_ranks(runs, tmp_path / "a.pdf", "title")
    with pytest.raises(ValueError, match="at least one run"):
        gantt_ranks.gantt_of_ranks([], tmp_path / "a.svg", "title")
