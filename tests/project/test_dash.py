"""docs/dash.md: its verdicts hold for the committed files, and a new file of the suite is all that it takes to change it."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import dash_page
from benchmarks import paper, suite
from benchmarks.paper import BASE, FA3, Figure, Grid, Run, load, panel, panels
from dash_attn import flash_attn_func
from dash_attn.cli.main import _parser, main
from dash_attn.scheduling.generators import choice_of_auto
from dash_attn.tools.bench.candidates import CUDNN, OURS, UNORDERED
from dash_attn.tools.bench.shape import Shape
from doc_pages import DOCS, blocks, rows

ROOT = DOCS.parent
PAGE = (DOCS / "dash.md").read_text(encoding="utf-8")
SUITE = "python -m benchmarks.suite"
LOSS, GAIN = 37.9, 1.28  # of the abstract


@pytest.fixture(scope="module")
def grid() -> Grid:
    return load()


def test_every_claim_is_there_once_with_its_source() -> None:
    claims = [(claim, source) for claim, source, seen, _ in rows(PAGE, 4) if source in ("abstract", "figures") and seen]
    assert len(claims) == 8
    assert [source for _, source in claims] == ["abstract"] * 6 + ["figures"] * 2
    of_abstract = (f"{LOSS} %", "Scheduling is why", "DAG", "Descending", "Shift scheduling", f"{GAIN} times")
    for (claim, _), words in zip(claims, (*of_abstract, "head dim, mask", "0.97 to 1.08"), strict=True):
        assert words in claim


def test_the_authors_figures_have_the_claims_of_the_abstract(grid: Grid) -> None:
    published = dash_page.Best.of(grid.figures, dash_page.schedules(grid.figures), grid.figures.times)
    assert f"{published.ratio:.2f}" == f"{GAIN}"
    assert published.where == "descending: causal, head dim 128, 16k"
    assert len(grid.figures.times) == 24
    assert {len(times) for times in grid.figures.times.values()} == {5}


def test_verdicts_about_gains_hold(grid: Grid) -> None:
    """What the page says in words."""
    figures, code = grid.figures, grid.code
    names = dash_page.schedules(code)
    on_full = [shape for shape in code.times if shape.mask == "full" and 1024 <= shape.seqlen <= 4096]
    assert all(max(code.ratio(shape, name) or 0 for name in names) > 1.1 for shape in on_full), "full masks gain"
    causal = [ratio for name in names for ratio in code.ratios(name, mask="causal") if ratio]
    late = [shape for shape in code.times if shape.mask == "causal" and shape.seqlen >= 2048]
    assert all(max(code.ratio(shape, name) or 0 for name in names) < 1 for shape in late), "causal ones gain nothing today"
    assert max(causal) < 1.03
    best = dash_page.Best.of(figures, names, figures.times)
    over_ascending = code.ratio(best.shape, best.kernel, "ascending")
    assert over_ascending is not None
    assert over_ascending >= GAIN, "and did over ascending"
    assert min(code.ratios("descending", "ascending", mask="causal", head_dim=128)) > 1
    assert min(dash_page.long_ratios(grid.direct_runs[0])) > 0.995, "our default is never slower"


def test_verdicts_about_losses_hold(grid: Grid) -> None:
    assert max(dash_page.losses_today(grid)) < LOSS
    assert 100 * (1 - min(grid.code.ratios("ascending", FA3))) > LOSS
    checks, same = grid.code.about["checks"], grid.code.about["same_bits_in_20_runs_at_4096"]
    assert {name for name, check in checks.items() if check["passed"] < check["cases"]} == {"as published"}
    assert {name for name, found in same.items() if not found["dq"]} == {FA3, CUDNN, "PyTorch flash"}
    wrong = [grid.code.ratio(shape, "as published", "shift, persistent") for shape in panel("causal", 64)]
    assert all(0.98 < ratio < 1.02 for ratio in wrong if ratio), "the mask takes the same time"


def test_verdicts_about_the_model_hold() -> None:
    """The simulator's rows, computed again."""
    causal, full = ({name: dash_page.simulated(mask, name) for name in names} for mask, names in dash_page.MAKESPANS.items())
    for run in (full["shift"], causal["symmetric_shift"]):
        assert run.gap == 0
        assert dash_page.turns(run) == 0
    assert 0 < causal["descending"].stalled < 0.05 < causal["ascending"].stalled
    assert dash_page.turns(causal["ascending"]) == dash_page.TILES - 1, "one for every further KV tile"
    for mask in dash_page.MAKESPANS:
        (shape,) = (shape for shape in panel(mask, 64) if shape.seqlen == dash_page.SEQLEN)
        found = dash_page.on_h200(shape)
        assert found[paper.SHIFTS[mask][0]].makespan > found[dash_page.TODAY[mask]].makespan, "at head dim 64 a hand-over takes too long"


def test_the_default_is_what_the_page_says() -> None:
    for mask, head_dim in panels():
        for shape in panel(mask, head_dim):
            alternates = mask == "causal" or (head_dim == 64 and shape.seqlen <= 1024)
            assert choice_of_auto(dash_page.problem_of(shape)).__name__ == ("alternating" if alternates else "shift_blocks")


@pytest.mark.parametrize("command", [line for block in blocks(PAGE, "sh") for line in block.splitlines() if line.startswith("dash-attn")])
def test_commands_of_the_simulator_give_its_rows(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*shlex.split(command)[1:], "--json"]) == 0
    found = {row["schedule"]: row for row in json.loads(capsys.readouterr().out)}
    asked = _parser().parse_args(shlex.split(command)[1:])
    if asked.machine is None:
        expected = {name: dash_page.simulated(asked.mask, name) for name in dash_page.MAKESPANS[asked.mask]}
    else:
        (shape,) = (shape for shape in panel(asked.mask, asked.head_dim) if (shape.seqlen, shape.batch) == (asked.seqlen, asked.batch))
        assert shape.q_heads == asked.heads
        expected = dash_page.on_h200(shape)
    assert {name: row["makespan"] for name, row in found.items()} == {name: run.makespan for name, run in expected.items()}


# ---- figures through cuDNN, and a file without any


def with_times(times: dict[str, float], shape: Shape, name: str = "made-up.json", **about: Any) -> Run:
    return Run(Path(name), about, {shape: {kernel: [ms] for kernel, ms in times.items()}}, {})


def test_a_figure_says_how_it_was_found() -> None:
    shape, schedule = panel("causal", 128)[0], f"{OURS}: ascending"
    suite_run = with_times({OURS: 2.0, schedule: 4.0, CUDNN: 3.0}, shape)
    beside = with_times({OURS: 2.5, BASE: 5.0, CUDNN: 4.0}, shape, host_bound_seqlens=[512])
    nothing = with_times({}, shape)
    grid = Grid(nothing, nothing, [suite_run, beside])
    assert grid.of_schedule("ascending", shape) == Figure(3 / 4 * 5 / 4, "~")
    assert grid.direct(OURS, shape) == Figure(2.0, " h")
    assert grid.direct(CUDNN, shape) == Figure(1.25)
    assert [str(Figure(1.5, mark)) for mark in ("", "~", " h")] == ["1.50", "~1.50", "1.50 h"]
    one = with_times({OURS: 2.0, schedule: 4.0, CUDNN: 3.0, BASE: 3.0}, shape)
    assert Grid(nothing, nothing, [one, suite_run, beside]).of_schedule("ascending", shape) == Figure(0.75)


@pytest.fixture
def dropped(tmp_path: Path) -> Path:
    """The committed files, and that of a run of all kernels in one process: FlashAttention-3 is as fast as cuDNN."""
    for folder in ("results", "comparisons"):
        shutil.copytree(ROOT / "benchmarks" / folder, tmp_path / folder)
    path = tmp_path / "results/h200-paper.json"
    results = json.loads(path.read_text())
    others = {CUDNN: (FA3, BASE), f"{OURS}: spt": (f"{OURS}: shift_blocks",)}
    copies = [{**row, "candidate": name} for row in results["rows"] for name in others.get(row["candidate"], ())]
    results["rows"] += copies
    results["environment"] |= {"date": "2999-01-01", "packages": {FA3: "3.9"}}
    path.write_text(json.dumps(results))
    return tmp_path


def test_a_run_of_everything_is_all_that_the_page_needs(dropped: Path) -> None:
    grid = load(dropped)
    page = dash_page.page(grid)
    assert page != PAGE
    assert "~" not in page
    assert "| H200, our kernel | default, like these |" not in page
    assert "cuDNN 91900, FlashAttention-3 3.9, ours at 5030843" in page
    table = page.split("### Causal, head dim 128")[1].split("### ")[0]
    times = grid.ours[0].times
    for name, kernel in (("`symmetric_shift`", f"{OURS}: symmetric_shift"), ("default", OURS), ("unordered", UNORDERED)):
        (cells,) = [row[2:] for row in rows(table, 8) if row[1] == name]
        assert cells == [f"{times[shape][BASE][0] / times[shape][kernel][0]:.2f}" for shape in panel("causal", 128)]
    ours = [row for row in rows(page, 8) if row[0] == "H200, our kernel" and "default, in" not in row[1]]
    assert len(ours) == 2 * 6 + 2 * 7
    assert all(len(cell) == 4 for row in ours for cell in row[2:]), "one figure each, without a mark"


def test_the_suite_times_what_the_page_needs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Where FlashAttention-3 is installed; without a GPU it lists the cases."""

    def attention(q: Any, k: Any, v: Any, causal: bool = False, deterministic: bool = False) -> Any:
        return flash_attn_func(q, k, v, causal=causal)

    monkeypatch.setitem(sys.modules, "flash_attn_interface", SimpleNamespace(flash_attn_func=attention))
    (command,) = [line for block in blocks(PAGE, "sh") for line in block.splitlines() if line.startswith(SUITE)]
    assert suite.main([*shlex.split(command)[3:], "--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    lines = [line.partition(": ")[2].split(", ") for line in listed if line.startswith("  can run it: ")]
    schedules = {"ascending", "descending", "spt"}.union(*paper.SHIFTS.values())
    assert len(lines) == 24
    assert all({OURS, UNORDERED, CUDNN, FA3, BASE, *(f"{OURS}: {name}" for name in schedules)} <= set(line) for line in lines)


def test_the_command_prints_the_tables_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert paper.main([]) == 0
    printed = {" ".join(line.split()) for line in capsys.readouterr().out.splitlines()}
    shown = [" ".join(" ".join(cells).split()) for cells in rows(PAGE, 8) if cells[0].startswith("H")]
    assert len(shown) > 50
    assert set(shown) <= printed


def test_the_picture_says_what_is_left_out(grid: Grid, dropped: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib import rc_context

    from dash_attn.tools.calibrate.pictures import STYLE
    from picture_texts import overlaps

    with rc_context(STYLE):
        figure, full = paper.picture(grid), paper.picture(load(dropped))
        assert overlaps(figure) == []
    assert [paper.LEFT_OUT in " ".join(text.get_text() for text in one.texts).replace("\n", " ") for one in (figure, full)] == [True, False]
    (line,) = (line for line in figure.axes[0].lines if line.get_label() == paper.DEFAULT)
    assert list(line.get_xdata()) == [2, 3, 4, 5], "512 and 1k were bound by the host"
    (line,) = (line for line in full.axes[0].lines if line.get_label() == paper.DEFAULT)
    assert list(line.get_xdata()) == [0, 1, 2, 3, 4, 5]
