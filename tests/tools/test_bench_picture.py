"""The pictures of benchmarks and of `dash-attn calibrate`, from made-up results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench_results import failed, made_up_results, made_up_row
from benchmarks import pictures, suite
from benchmarks.suites import SUITES
from dash_attn.cli.main import main
from dash_attn.scheduling.generators import GENERATORS
from dash_attn.tools.bench.candidates import COMPARED_SCHEDULES
from dash_attn.tools.bench.report import relative_rows, save
from dash_attn.tools.calibrate import pictures as prediction_pictures
from dash_attn.tools.calibrate.pictures import OTHER_LOOK, SCHEDULE_LOOKS
from picture_texts import overlaps

pytest.importorskip("matplotlib")

SLOWNESS = {"spt": 1.0, "ascending": 4.0, "shift": 2.0, "homemade": 1.25}  # time relative to the unordered kernel


def results_with_schedules() -> dict[str, Any]:
    """Every schedule of SLOWNESS on every shape, except that `shift` does not serve a causal mask."""
    results = made_up_results()
    for row in [row for row in results["rows"] if row["pass"] == "backward" and row["candidate"] == "dash-attn unordered"]:
        for name, slowness in SLOWNESS.items():
            speeds = {"median_ms": row["median_ms"] * slowness, "ratio_to_cudnn": row["ratio_to_cudnn"] / slowness}
            timed = {**row, **speeds, "candidate": f"dash-attn: {name}", "deterministic": True}
            serves = name != "shift" or row["shape"]["mask"] == "full"
            results["rows"].append(timed if serves else failed(timed, "unavailable", "ScheduleError: shift needs a full mask"))
    return results


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    path = tmp_path / "results.json"
    save(results_with_schedules(), path)
    return path


def lines_of(axes: Any) -> dict[str, Any]:
    return {line.get_label(): line for line in axes.get_lines()}


def test_picture_from_a_file(stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.png", "b.svg"):
        assert suite.main(["--from", str(stored), "--plot", str(tmp_path / name)]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    svg = (tmp_path / "b.svg").read_text()
    for text in ("causal, head dim 64", "full, head dim 128", "reproducible backward on Nonesuch: 1.10 to 1.10 times", "cuDNN = 1", "16k"):
        assert text in svg
    assert str(tmp_path / "b.svg") in capsys.readouterr().out
    for name in SLOWNESS:
        assert name not in svg, "schedules have a picture of their own"


def test_picture_draws_the_ratios() -> None:
    results = made_up_results()
    rows = [row for row in results["rows"] if row["pass"] == "backward"]
    rows = [row for row in rows if not (row["candidate"] == "PyTorch flash" and row["shape"]["seqlen"] == 1024)]
    figure = pictures._figure(results, rows, "backward")
    assert len(figure.axes) == 4
    for axes in figure.axes:
        lines = lines_of(axes)
        assert list(lines["dash-attn"].get_ydata()) == [1.1] * 6
        assert list(lines["PyTorch flash"].get_xdata()) == [0, 2, 3, 4, 5], "a missing length leaves its place free"
        assert set(lines["cuDNN = 1"].get_ydata()) == {1.0}
        widths = {label: line.get_linewidth() for label, line in lines.items()}
        assert max(widths, key=widths.__getitem__) == "dash-attn"
        assert [name for name, line in lines.items() if line.is_dashed()] == ["cuDNN = 1", "dash-attn unordered", "PyTorch flash"]
        assert axes.get_ylim() == pytest.approx((0.3, 1.3))


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("panels", [1, 3, 4])
def test_nothing_overlaps(direction: str, panels: int) -> None:
    from matplotlib import rc_context

    from dash_attn.tools.calibrate.pictures import STYLE

    results = results_with_schedules()
    kinds = [(64, "causal"), (64, "full"), (128, "causal"), (128, "full")][:panels]
    rows = [row for row in results["rows"] if (row["shape"]["head_dim"], row["shape"]["mask"]) in kinds]
    main_rows = [row for row in rows if row["pass"] == direction and ":" not in row["candidate"]]
    with rc_context(STYLE):
        assert overlaps(pictures._figure(results, main_rows, direction)) == []
        assert overlaps(pictures._schedules_figure(results, relative_rows(rows))) == []


def results_of_masks() -> dict[str, Any]:
    """Cases of which cuDNN runs some, and one kernel that runs none."""
    results = made_up_results()
    rows = []
    for shape in SUITES["masks"].shapes():
        for name in ("dash-attn", "dash-attn unordered", "PyTorch flash", "PyTorch flash deterministic"):
            row = made_up_row("backward", shape, name)
            rows.append({**row, "ratio_to_cudnn": None, "ratio_to_fastest_peer": row["ratio_to_cudnn"] / 0.6})
    return {**results, "suite": "masks", "rows": rows}


def test_cases_are_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = results_of_masks()
    source, path = tmp_path / "masks.json", tmp_path / "masks.svg"
    save(results, source)
    assert suite.main(["--from", str(source), "--plot", str(path)]) == 0
    assert "(1.83*)" in capsys.readouterr().out
    svg = path.read_text()
    for text in (
        "causal window of 4096, head dim 128",
        "prefix of 4096, head dim 128",
        "1.83 to 1.83 times the fastest other",
    ):
        assert text in svg
    figure = pictures.cases_figure(results, results["rows"], "backward")
    (axes,) = figure.axes
    drawn = {points.get_label(): points.get_offsets() for points in axes.collections}
    assert list(drawn) == ["dash-attn", "dash-attn unordered", "PyTorch flash", "PyTorch flash deterministic"]
    assert drawn["dash-attn"][:, 0].tolist() == pytest.approx([1.1 / 0.6] * 15)
    assert drawn["dash-attn"][:, 1].tolist() == list(range(15))
    assert overlaps(figure) == []
    assert min(label.get_window_extent().x0 for label in axes.get_yticklabels()) >= 0, "names of cases are whole"


def test_limits_hold_every_value() -> None:
    assert pictures._limits([0.265, 1.446]) == pytest.approx((0.2, 1.496))
    assert pictures._limits([0.02]) == pytest.approx((0.0, 1.05))
    low, high = pictures._schedules_limits([0.27, 0.9])
    assert low < 0.27
    assert high > 1.0


def test_nothing_to_draw(tmp_path: Path) -> None:
    results = made_up_results()
    with pytest.raises(ValueError, match="no schedules"):
        pictures.draw_schedules(results, tmp_path / "a.png")
    results["rows"] = [failed(row, "unavailable", "none") for row in results["rows"]]
    with pytest.raises(ValueError, match="nothing to draw"):
        pictures.draw(results, tmp_path / "a.png")
    assert not list(tmp_path.iterdir())


def test_schedules_from_a_file(stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.png", "b.svg"):
        assert suite.main(["--from", str(stored), "--plot-schedules", str(tmp_path / name)]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    svg = (tmp_path / "b.svg").read_text()
    for text in ("causal, head dim 64", "auto (dash-attn's choice)", "dash-attn unordered = 1", "homemade", "ascending falls to 0.25"):
        assert text in svg
    assert "PyTorch" not in svg
    assert str(tmp_path / "b.svg") in capsys.readouterr().out


def test_both_pictures_in_one_command(stored: Path, tmp_path: Path) -> None:
    assert suite.main(["--from", str(stored), "--plot", str(tmp_path / "a.png"), "--plot-schedules", str(tmp_path / "b.png")]) == 0
    assert (tmp_path / "a.png").read_bytes() != (tmp_path / "b.png").read_bytes()


def test_a_wrong_format_is_refused_before_anything_is_drawn(stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert suite.main(["--from", str(stored), "--plot", str(tmp_path / "a.png"), "--plot-schedules", "b.gif"]) == 2
    assert "b.gif" in capsys.readouterr().err
    assert not (tmp_path / "a.png").exists()


def test_schedules_are_relative_to_unordered() -> None:
    results = results_with_schedules()
    figure = pictures._schedules_figure(results, relative_rows(results["rows"]))
    assert len(figure.axes) == 4
    for axes in figure.axes:
        lines = lines_of(axes)
        causal = axes.get_title().startswith("causal")
        for name, slowness in SLOWNESS.items():
            if name == "shift" and causal:
                assert name not in lines
            else:
                assert list(lines[name].get_ydata()) == pytest.approx([1 / slowness] * 6)
        auto = lines["auto (dash-attn's choice)"]
        assert list(auto.get_ydata()) == pytest.approx([1.1 / 1.25] * 6)
        assert auto.get_linewidth() == max(line.get_linewidth() for line in lines.values())
        assert [name for name, line in lines.items() if line.is_dashed()] == ["dash-attn unordered = 1"]
        assert len({(line.get_color(), line.get_marker()) for line in lines.values()}) == len(lines)
        assert all(
            abs(x - round(x)) < 0.3 for line in lines.values() if line is not lines["dash-attn unordered = 1"] for x in line.get_xdata()
        )


def test_shapes_without_an_unordered_time_are_left_out() -> None:
    rows = results_with_schedules()["rows"]
    kept = [row for row in rows if not (row["candidate"] == "dash-attn unordered" and row["shape"]["seqlen"] == 512)]
    assert 512 in {row["shape"]["seqlen"] for row in relative_rows(rows)}
    assert 512 not in {row["shape"]["seqlen"] for row in relative_rows(kept)}


def test_every_schedule_has_its_own_look() -> None:
    assert set(SCHEDULE_LOOKS) == set(GENERATORS) >= set(COMPARED_SCHEDULES)
    looks = [*SCHEDULE_LOOKS.values(), OTHER_LOOK]
    assert len({colour for colour, _ in looks}) == len({marker for _, marker in looks}) == len(looks)


def made_up_prediction() -> dict[str, Any]:
    rows = []
    for name, error in (("spt", 0.05), ("ascending", -0.4), ("homemade", 0.3)):
        for seqlen in (1024, 16384):
            shape = {"head_dim": 64, "mask": "causal", "seqlen": seqlen, "schedule": name}
            rows.append({**shape, "measured_us": seqlen / 2, "predicted_us": seqlen / 2 * (1 + error), "error": error})
    return {"gpu": "NVIDIA Nonesuch", "rows": rows}


def test_prediction_labels_outliers() -> None:
    figure = prediction_pictures.prediction_figure(made_up_prediction())
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.texts] == [
        "causal 1k, d64: \N{MINUS SIGN}40 %",
        "causal 16k, d64: \N{MINUS SIGN}40 %",
        "causal 1k, d64: +30 %",
        "causal 16k, d64: +30 %",
    ]
    assert figure.texts[0].get_text() == "The fitted simulator gives 2 of 6 kernel times on Nonesuch within 10 %"
    drawn = {points.get_label(): points.get_offsets().tolist() for points in axes.collections if not points.get_label().startswith("_")}
    assert list(drawn) == ["ascending", "spt", "homemade"]
    assert drawn["ascending"] == [pytest.approx([0.6 * 0.512, 0.512]), pytest.approx([0.6 * 8.192, 8.192])]


def test_errors_by_schedule() -> None:
    figure = prediction_pictures.errors_figure(made_up_prediction())
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["ascending", "spt", "homemade"]
    minus = "\N{MINUS SIGN}"
    said = [f"median {minus}40.0 %, worst {minus}40 %", "median +5.0 %, worst +5 %", "median +30.0 %, worst +30 %"]
    assert [text.get_text() for text in axes.texts] == said
    assert figure.texts[0].get_text() == "The simulator on Nonesuch: off by 30.0 % in the median of 6 runs, 29.0 % rms"
    assert [points.get_offsets()[:, 0].tolist() for points in axes.collections] == [[-40.0] * 2, [5.0] * 2, [30.0] * 2]


@pytest.mark.parametrize("kind", ["predict.py", "calibrate"])
def test_predictions_from_a_file(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, pictures = tmp_path / "prediction.json", [tmp_path / "a.png", tmp_path / "b.svg"]
    made = made_up_prediction()
    gpu, rows = made["gpu"], made["rows"]
    source.write_text(json.dumps({"environment": {"gpu": gpu}, "rows": rows} if kind == "predict.py" else {"name": gpu, "measured": rows}))
    assert main(["calibrate", "--from", str(source), "--plot", str(pictures[0]), "--plot-schedules", str(pictures[1])]) == 0
    assert pictures[0].read_bytes().startswith(b"\x89PNG")
    assert "The simulator on Nonesuch" in pictures[1].read_text()
    assert str(pictures[1]) in capsys.readouterr().err


@pytest.mark.parametrize("text", ["no JSON", "[]", "{}", '{"name": "x", "measured": []}', '{"name": "x", "measured": [{"error": 1}]}'])
def test_no_prediction_no_picture(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "other.json"
    source.write_text(text)
    assert main(["calibrate", "--from", str(source), "--plot", str(tmp_path / "a.png")]) == 2
    err = capsys.readouterr().err
    assert (f"{source} is not a file of predictions: it is not JSON" if text == "no JSON" else f"{source} holds no predictions") in err
    assert not (tmp_path / "a.png").exists()


def test_from_needs_something_to_draw(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--from", "x.json"]) == 2
    assert "--from goes with --plot" in capsys.readouterr().err
    assert main(["calibrate", "--plot", "x.gif"]) == 2
    assert "x.gif" in capsys.readouterr().err


def test_the_documents_tell_the_committed_errors() -> None:
    root = Path(__file__).parents[2]
    found = prediction_pictures.read(root / "benchmarks/results/h200-prediction.json")
    title = prediction_pictures._errors_title(found)
    numbers = re.search(r"off by ([\d.]+ %) in the median of (\d+) runs, ([\d.]+ %) rms", title)
    assert numbers is not None
    page = (root / "docs/simulator.md").read_text()
    assert f"{numbers[1]} in the median of {numbers[2]} runs ({numbers[3]} rms" in page
