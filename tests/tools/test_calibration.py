"""Constants from times: the fit recovers those that made-up times were simulated with; machine files; `dash-attn calibrate`."""

from __future__ import annotations

import json
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dash_attn import Causal, Full
from dash_attn.cli.main import main
from dash_attn.scheduling import Problem, Schedule, generate
from dash_attn.simulation import Machine, simulate
from dash_attn.simulation.machines import H200, SHIPPED, Calibrated, load_machine
from dash_attn.tools.calibrate import measured, pictures
from dash_attn.tools.calibrate.fit import CONSTANTS, Observation, estimate, fit, path_counts
from dash_attn.tools.calibrate.measured import Device, Sweep, calibrate, hopper_device
from dash_attn.viewing.task_times import times_of

STORED = Path(__file__).parents[2] / "benchmarks" / "results" / "h200-prediction.json"
WORKERS = 12
NAMES = ((Causal(), ("ascending", "descending", "spt", "alternating")), (Full(), ("ascending", "shift_blocks")))


@cache
def schedules() -> list[Schedule]:
    problems = [(Problem(mask, n, n, 64, 128, 3), names) for mask, names in NAMES for n in (512, 1536)]
    return [generate(name, problem, WORKERS) for problem, names in problems for name in names]


def observe(truth: Machine, noise: float = 0.0) -> list[Observation]:
    rng = np.random.default_rng(0)
    return [Observation(s, simulate(s, truth).makespan * (1 + noise * rng.standard_normal())) for s in schedules()]


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_counts_along_the_critical_path_make_the_makespan(overlap: int) -> None:
    for machine in (Machine(2.0, 0.5, overlap, 3.0, 1.25), Machine(1.0, 1.5, overlap, 0.5, 0.0), Machine(1.0, 0.3, overlap)):
        costs = [getattr(machine, name) for name in CONSTANTS]
        for schedule in schedules():
            timeline = simulate(schedule, machine)
            assert np.dot(path_counts(timeline), costs) == pytest.approx(timeline.makespan)


@pytest.mark.parametrize(
    ("truth", "start"),
    [
        (H200[128], Machine(1.4, 0.58, 2, 1.0, 1.0)),
        (H200[64], Machine(3.0, 0.65, 2, 5.0, 6.0)),
        (Machine(1.0, 0.3, 2, 1.0, 0.5), Machine(1.2, 0.3, 2, 0.0, 0.0)),
    ],
)
def test_the_gpu_constants_are_recovered(truth: Machine, start: Machine) -> None:
    """A reduce hides behind other work, so it is not fitted but measured by itself."""
    found = fit(observe(truth), start, ("compute", "latency", "startup"))
    for name in CONSTANTS:
        assert getattr(found.machine, name) == pytest.approx(getattr(truth, name), rel=0.01), name
    assert max(map(abs, found.errors)) < 0.01


def test_compute_and_reduce_are_told_apart_where_the_worker_itself_reduces() -> None:
    truth = Machine(3.0, 1.0, 0, 0.0, 0.8)
    found = fit(observe(truth), Machine(2.0, 0.6, 0, 0.0, 0.3), ("compute", "reduce", "startup")).machine
    for name in CONSTANTS:
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=0.02), name


def test_what_no_time_depends_on_stays_where_it_was() -> None:
    """A chain that nobody meets: its hand-overs cannot be seen."""
    alone = [generate("ascending", Problem(Full(), n, 128, 64, 128), 1) for n in (256, 512, 1024)]
    found = fit([Observation(s, simulate(s, H200[128]).makespan) for s in alone], Machine(1.0, 0.58, 2, 7.5, 3.85), ("compute", "latency"))
    assert (found.machine.compute, found.machine.latency) == (pytest.approx(1.93, rel=0.001), 7.5)


def test_noise_moves_the_constants_little() -> None:
    found = fit(observe(H200[128], noise=0.02), Machine(1.5, 0.58, 2, 2.0, 2.0), ("compute", "latency", "startup"))
    assert found.machine.compute == pytest.approx(1.93, rel=0.04)
    assert found.machine.latency == pytest.approx(2.9, rel=0.15)
    assert 0.001 < found.median_error < 0.05


def test_without_free_constants_only_the_errors_are_told() -> None:
    wrong = Machine(2 * 1.93, 2 * 0.58, 2, 2 * 2.9, 2 * 3.85)
    found = fit(observe(H200[128]), wrong, ())
    assert found.machine == wrong
    assert found.errors == pytest.approx([1.0] * len(schedules()))


@pytest.mark.parametrize(
    ("free", "count", "message"),
    [(("speed",), 5, "compute, reduce, latency, startup"), (CONSTANTS, 3, "at least as many"), ((), 0, "at least as many")],
)
def test_bad_requests(free: tuple[str, ...], count: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(observe(H200[128])[:count], H200[128], free)
    with pytest.raises(ValueError, match="positive"):
        fit([Observation(s, 0.0) for s in schedules()], H200[128])


@pytest.mark.parametrize("truth", [H200[128], Machine(3.0, 1.0, 0, 1.6, 0.8)])
def test_constants_are_read_off_spans(truth: Machine) -> None:
    runs = [(s, times_of(simulate(s, truth))) for s in schedules() if s.name == "ascending"]
    assert estimate(runs) == truth


def test_without_waits_a_hand_over_counts_as_a_reduce() -> None:
    schedule = generate("alternating", Problem(Causal(), 512, 512, 64, 128), 1)
    assert estimate([(schedule, times_of(simulate(schedule, Machine(2.0, 0.5, 2, 1.0))))]).latency == 0.5
    with pytest.raises(ValueError, match="at least one measured run"):
        estimate([])


def simulated_device(truth: Machine, **changes: Any) -> Device:
    """A device that runs exactly like the simulator."""

    def timeline(call: Any) -> Any:
        q, options = call.q, call.options
        problem = Problem(options.mask, q.shape[1], q.shape[1], 64, 128, q.shape[2], batch=q.shape[0])
        return simulate(generate(options.schedule, problem, WORKERS), truth)

    settings: dict[str, Any] = {
        "time": lambda call, grads: timeline(call).makespan,
        "free": ("compute", "latency", "startup"),
        **changes,
    }
    record = lambda call, grads, progress: times_of(timeline(call))  # noqa: E731
    return Device("simulated", "cpu", WORKERS, {64: (64, 128)}, torch.float32, "cpu", record, **settings)


@pytest.mark.parametrize("changes", [{}, {"time": None, "free": ()}], ids=["fitted", "read off the records"])
def test_a_device_is_calibrated(changes: dict[str, Any]) -> None:
    plan = Sweep(NAMES, (512, 1024), 1024, 2)
    seen: list[tuple[int, int]] = []
    found, rows = calibrate(simulated_device(H200[128], **changes), 64, plan, lambda done, total: seen.append((done, total)))
    for name in CONSTANTS:
        assert getattr(found.machine, name) == pytest.approx(getattr(H200[128], name), rel=0.01), name
    assert len(rows) == len(list(plan.problems((64, 128)))) == 12
    assert seen[-1] == (11, 12)
    assert {row["schedule"] for row in rows} == {name for _, names in NAMES for name in names}
    assert all(abs(row["error"]) < 0.01 and row["measured_us"] > 0 for row in rows)


def test_the_command_calibrates_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    small = Sweep(((Causal(), ("ascending", "alternating")),), (256,), 256, 1)
    monkeypatch.setattr(measured, "CPU_SWEEP", small)
    path = tmp_path / "machine.json"
    assert main(["calibrate", "--device", "cpu", "--threads", "2", "--output", str(path)]) == 0
    out = capsys.readouterr().out
    assert "head dim 64: compute " in out
    assert "causal 256 x 1, ascending" in out
    written = json.loads(path.read_text())
    assert [row["schedule"] for row in written["measured"]] == ["ascending", "alternating"]
    machine = load_machine(str(path))
    assert (machine.backend, machine.workers, machine.tiles) == ("cpu", 2, {64: (64, 128)})
    assert machine.constants[64].compute > machine.constants[64].reduce > 0
    assert main(["plan", "--seqlen", "512", "--machine", str(path), "--schedule", "auto"]) == 0
    assert "2 workers; compute " in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_need_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--device", "cuda"]) == 2
    assert "compute capability 9.0" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"compute capability 9\.0"):
        hopper_device()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--device cpu --head-dims 80", "--head-dims takes 64, 128 on "),
        ("--device cpu --head-dims x", "--head-dims must be whole numbers"),
        ("--device cpu --threads 0", "--threads must be a whole number >= 1; got 0"),
        ("--output nowhere/machine.json", "no directory"),
    ],
)
def test_bad_words(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", *words.split()]) == 2
    assert message in capsys.readouterr().err


def test_machine_files_survive_a_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(SHIPPED["h200"].to_json()))
    assert load_machine(str(path)) == SHIPPED["h200"] == load_machine("H200")
    assert load_machine("h200").pick(None) == (H200[128], (64, 128))
    assert load_machine("h200").pick(64) == (H200[64], (128, 128))


def of_one_dim(constants: str) -> str:
    return f'{{"machine": 1, "unit": "us", "name": "x", "backend": "cpu", "workers": 1, "head_dims": {{"64": {constants}}}}}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no json", "not JSON"),
        ("[]", "must be an object"),
        ('{"machine": 9, "unit": "us"}', "format 9"),
        ('{"machine": 1, "unit": "ms"}', "in 'ms'"),
        ('{"machine": 1, "unit": "us", "name": "x", "backend": "cpu", "workers": 1, "head_dims": {}}', "head dims"),
        (of_one_dim('{"compute": 1, "reduce": 0.3, "overlap": 0, "latency": 0, "startup": 0}'), "head_dims.64 lacks tiles"),
        (of_one_dim('{"compute": 1, "overlap": 0, "latency": 0, "startup": 0, "tiles": [1, 1]}'), "head_dims.64 lacks reduce"),
        (of_one_dim('{"compute": -1, "reduce": 0.3, "overlap": 0, "latency": 0, "startup": 0, "tiles": [1, 1]}'), "> 0"),
    ],
)
def test_other_files_are_refused(text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "machine.json"
    path.write_text(text)
    assert main(["plan", "--machine", str(path)]) == 2
    err = capsys.readouterr().err
    assert str(path) in err
    assert message in err


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["plan", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_calibrated_machine_brings_its_tiles_and_workers(capsys: pytest.CaptureFixture[str]) -> None:
    row = plan(capsys, "--machine", "h200", "--head-dim", "64", "--seqlen", "2048", "--heads", "8", "--schedule", "spt")
    expected = simulate(generate("spt", Problem(Causal(), 2048, 2048, 128, 128, 8), 132), H200[64])
    assert (row["makespan"], row["workers"], row["q_tiles"]) == (expected.makespan, 132, 16)
    row = plan(capsys, "--machine", "h200", "--seqlen", "2048", "--schedule", "spt", "--tile-q", "128", "--workers", "8")
    assert (row["workers"], row["q_tiles"]) == (8, 16)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--machine h200 --compute 2", "--compute cannot be combined with --machine"),
        ("--machine h200 --head-dim 96", "calibrated for head dims 64, 128"),
        ("--machine h300", "unknown machine 'h300'"),
    ],
)
def test_bad_machines(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words.split()]) == 2
    assert message in capsys.readouterr().err


MEASURED = ["plan", "--measured", "--device", "cpu", "--threads", "2", "--head-dim", "64", "--seqlen", "384"]


def test_plan_measures_beside_simulating(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "both.svg"
    assert main([*MEASURED, "--heads", "2", "--schedule", "ascending,shift", "--gantt", str(path)]) == 0
    out = capsys.readouterr().out
    assert "(cpu): ascending" in out
    assert "shift: serves full masks only" in out
    svg = path.read_text()
    assert "ascending, simulated" in svg
    assert "ascending, measured" in svg
    assert "microseconds" in svg


def test_measured_runs_are_traced_beside_simulated_ones(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    assert main([*MEASURED, "--heads", "2", "--schedule", "ascending", "--trace", str(path)]) == 0
    events = json.loads(path.read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert [name.split(":")[0] for name in names] == ["ascending", "ascending, measured"]
    computes = [sorted(e["name"] for e in events if e["pid"] == process and e.get("cat") == "compute") for process in (1, 2)]
    assert computes[0] == computes[1]
    assert len(computes[0]) == Problem(Causal(), 384, 384, 64, 128, 2).tasks


def test_measured_times_are_in_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    row = plan(capsys, *MEASURED[1:], "--schedule", "auto", "--compute", "100", "--reduce", "5")
    assert row["measured"] > 0
    assert row["makespan"] == pytest.approx(simulate(generate("auto", Problem(Causal(), 384, 384, 64, 128), 2), Machine(100, 5)).makespan)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan", "--measured", "--device", "cpu"], "--measured needs --seqlen"),
        ([*MEASURED, "--tile-q", "128"], "--tile-q is 64"),
        ([*MEASURED, "--workers", "5"], "--workers"),
        ([*MEASURED[:-4], "--head-dim", "80", "--seqlen", "384"], "measures 64, 128"),
        ([*MEASURED, "--schedule", "shift"], "full masks only"),
    ],
)
def test_what_cannot_be_measured(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_measuring_a_gpu_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--seqlen", "512", "--measured", "--device", "cuda"]) == 2
    assert "compute capability 9.0" in capsys.readouterr().err


def test_workers_must_fit() -> None:
    with pytest.raises(ValueError, match="same head dims"):
        Calibrated("x", "cpu", 2, {64: Machine()}, {})


@pytest.mark.parametrize("crowded", [False, True])
def test_labels_of_a_prediction_do_not_overlap(crowded: bool) -> None:
    """Nor leave the axes. In a crowd, some are left out."""
    pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Annotation, Text

    near = {"schedule": "spt", "mask": "causal", "head_dim": 64, "seqlen": 1024}
    rows = [{**near, "predicted_us": 900 + 5 * n, "measured_us": 1400 - 9 * n, "error": -0.36 + n / 99} for n in range(24)]
    shown = {"gpu": "here", "rows": rows} if crowded else pictures.read(STORED)
    figure = pictures.prediction_figure(shown)
    renderer = FigureCanvasAgg(figure).get_renderer()
    labels = [label for label in figure.axes[0].texts if isinstance(label, Annotation)]
    for label in labels:
        label.update_positions(renderer)
    boxes = [Text.get_window_extent(label, renderer) for label in labels]
    assert len(boxes) >= 12
    assert not [pair for pair in combinations(boxes, 2) if pair[0].overlaps(pair[1])]
    assert all(figure.axes[0].bbox.padded(1).contains(*corner) for box in boxes for corner in (box.min, box.max))
