"""Gantt charts: what is drawn is what was simulated."""

from __future__ import annotations

import random
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from dash_attn.scheduling import Problem, generate
from dash_attn.simulation import Machine, Timeline, simulate
from dash_attn.viewing.task_times import TaskTimes, task_table, times_of

pytest.importorskip("matplotlib")
from matplotlib.colors import to_rgb
from PIL import Image

from dash_attn.viewing import gantt as plot
from dash_attn.viewing.gantt import gantt, raster
from dash_attn.viewing.style import DPI, IDLE, STALL, q_tile_colours

SVG = "{http://www.w3.org/2000/svg}"


def small(schedule: str, mask: str = "causal", **machine: float) -> Timeline:
    problem = Problem.from_tiles(mask, 8, 8, heads=4)
    return simulate(generate(schedule, problem, 8), Machine(**{"compute": 3, "reduce": 1, **machine}))  # type: ignore[arg-type]


def random_timeline(seed: int) -> Timeline:
    rng = random.Random(seed)
    kept = np.random.default_rng(seed).random((rng.randint(2, 9), rng.randint(2, 9))) < 0.6
    kept[0, 0] = True
    problem = Problem.from_tiles(kept, *kept.shape, heads=rng.randint(1, 3), group=rng.randint(1, 2), batch=rng.randint(1, 2))
    machine = Machine(1, rng.choice([0, 0.3, 2]), rng.randint(0, 3), rng.choice([0, 0.7, 2]))
    return simulate(generate(rng.choice(["ascending", "descending", "weave"]), problem, rng.randint(1, 9)), machine)


def colours(picture: np.ndarray) -> int:
    """How many there are."""
    return len(np.unique(picture.astype(np.int64) @ [65536, 256, 1]))


def svg_texts(path: Path) -> list[str]:
    return ["".join(node.itertext()) for node in ET.parse(path).iter(f"{SVG}text")]


@pytest.mark.parametrize("seed", range(20))
def test_waits_are_the_stalls_of_the_timeline(seed: int) -> None:
    timeline = random_timeline(seed)
    spans = times_of(timeline)
    start, end = spans.waits
    assert (end >= start - 1e-9).all()
    assert (end - start).sum() == pytest.approx(timeline.stalled * timeline.makespan * timeline.schedule.workers)
    assert spans.makespan == pytest.approx(timeline.makespan)


@pytest.mark.parametrize("seed", range(5))
def test_task_table_agrees_with_the_timeline(seed: int) -> None:
    timeline = random_timeline(seed)
    table = task_table(timeline.schedule)
    for index in range(0, len(table.q_tile), 7):
        task = timeline.task(index)
        found = (table.head[index], table.q_tile[index], table.kv_tile[index], table.sequence[index])
        assert found == tuple(task)


@pytest.mark.parametrize("seed", range(20))
def test_image_shows_exactly_the_stalled_share(seed: int) -> None:
    """With black tasks, the mean colour of the image is a mix of stall and idle in their exact shares."""
    timeline = random_timeline(seed)
    spans = times_of(timeline)
    image = raster(spans, np.zeros((len(spans.q_tile), 4)), bins=97)
    lanes = len(image)
    stalled = timeline.stalled * timeline.schedule.workers / lanes
    busy = spans.compute_end - spans.compute_start
    if not spans.drains:
        busy = busy + spans.reduce_end - spans.reduce_start
    idle = 1 - stalled - busy.sum() / (lanes * spans.makespan)
    expected = stalled * np.array(to_rgb(STALL)) + idle * np.array(to_rgb(IDLE))
    assert image.mean((0, 1)) == pytest.approx(expected, abs=1e-6)


def test_png_has_size_and_content(tmp_path: Path) -> None:
    path = tmp_path / "chart.png"
    gantt([small("ascending"), small("symmetric_shift")], path)
    picture = np.asarray(Image.open(path).convert("RGB"))
    assert picture.shape[1] == plot.FIGURE_WIDTH * DPI
    assert picture.shape[0] > 600
    assert colours(picture) > 100
    assert tuple(picture[-1, 0]) == (255, 255, 255)
    mappable = q_tile_colours(8)
    for q_tile in range(8):
        colour = np.round(np.array(mappable.to_rgba(q_tile)[:3]) * 255)
        assert (np.abs(picture - colour).max(-1) <= 2).sum() > 1000, f"Q tile {q_tile} is not visible"


def test_svg_labels_every_task_and_both_schedules(tmp_path: Path) -> None:
    path = tmp_path / "chart.svg"
    gantt([small("ascending"), small("symmetric_shift")], path)
    texts = svg_texts(path)
    assert "ascending" in texts
    assert "symmetric_shift" in texts
    assert "1.88x as fast" in " ".join(texts)
    assert any("makespan 72" in text and "gap 0 %" in text for text in texts)
    assert {"compute", "reduce", "stall", "idle", "makespan", "lower bound", "Q tile"} <= set(texts)
    assert sum(text == "7" for text in texts) >= 2 * 4 * 8  # every chain of a causal head visits the last Q tile


def test_svg_is_reproducible(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        gantt([small("weave")], tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_panels_share_the_time_axis() -> None:
    panels = [times_of(small("ascending")), times_of(small("symmetric_shift"))]
    figure = plot._figure(panels, crisp=True, title="")
    first, second = figure.axes[:2]
    assert first.get_xlim() == second.get_xlim()
    assert first.get_xlim()[1] >= 135
    for axes, makespan in ((first, 135), (second, 72)):
        verticals = {float(line.get_xdata()[0]) for line in axes.lines}
        assert verticals == {makespan, 72.0}


def test_stalls_are_drawn_and_only_where_they_are() -> None:
    for schedule, expected in (("ascending", True), ("symmetric_shift", False)):
        spans = times_of(small(schedule))
        figure = plot._figure([spans], crisp=True, title="")
        hatched = [c for c in figure.axes[0].collections if c.get_hatch()]
        assert sum(len(c.get_paths()) for c in hatched) == (np.diff(spans.waits, axis=0) > 0).sum()
        assert bool(sum(len(c.get_paths()) for c in hatched)) == expected


@pytest.mark.parametrize(("overlap", "suffix"), [(0, "svg"), (2, "png")])
def test_large_run_is_a_small_image_soon(tmp_path: Path, overlap: int, suffix: str) -> None:
    problem = Problem.from_tiles("causal", 256, 128, heads=16)
    timeline = simulate(generate("alternating", problem, 132), Machine(1, 0.3, overlap, 2))
    begin = time.monotonic()
    gantt([timeline], tmp_path / f"chart.{suffix}")
    assert 20_000 < (tmp_path / f"chart.{suffix}").stat().st_size < 1_500_000
    assert time.monotonic() - begin < 15
    if suffix == "png":
        picture = np.asarray(Image.open(tmp_path / "chart.png").convert("RGB"))
        assert tuple(picture[0, 0]) == (255, 255, 255)
        assert colours(picture) > 50


@pytest.mark.parametrize("overlap", [0, 1, 3])
def test_any_mask_draws(tmp_path: Path, overlap: int) -> None:
    gantt([small("weave", "window:2,1", overlap=overlap, latency=5)], tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 20_000


def test_measured_times_draw_like_simulated_ones(tmp_path: Path) -> None:
    spans = TaskTimes(
        name="measured",
        workers=3,
        q_tiles=2,
        offsets=np.array([0, 2, 2, 3]),  # the second chain has no tasks
        worker=np.array([0, 1, 2]),
        q_tile=np.array([0, 1, 1]),
        compute_start=np.array([0.0, 1.5, 0.1]),
        compute_end=np.array([1.0, 2.5, 1.3]),
        reduce_start=np.array([1.0, 2.5, 2.9]),
        reduce_end=np.array([1.5, 2.8, 3.2]),
        time_label="microseconds",
    )
    gantt([spans], tmp_path / "chart.svg", title="one run")
    texts = svg_texts(tmp_path / "chart.svg")
    assert {"measured", "microseconds", "one run", "makespan 3.2"} <= set(texts)
    assert "lower bound" not in texts


def test_bad_requests_raise(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\.png or \.svg"):
        gantt([small("weave")], tmp_path / "chart.pdf")
    with pytest.raises(ValueError, match="at least one run"):
        gantt([], tmp_path / "chart.png")
