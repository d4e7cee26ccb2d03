"""Sustained runs and fresh processes without a GPU: made-up counters, medians over made-up processes, the whole command on the CPU."""

from __future__ import annotations

import argparse
import ctypes
import json
from collections.abc import Callable
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from bench_results import failed, made_up_results, made_up_row
from bench_stand_ins import SMALL, fake_times, math_attention, spoiled
from benchmarks import pictures, power, result_files, suite
from benchmarks.power import Endurance, NoCounter, NvmlCounter, Sample, summed_up
from benchmarks.result_files import merged, ours_over, print_report, read
from benchmarks.suite import main
from benchmarks.suites import SUITES, Cases
from dash_attn.cli import bench
from dash_attn.tools.bench.candidates import Candidate
from dash_attn.tools.bench.measure import measure
from dash_attn.tools.bench.report import save
from dash_attn.tools.bench.shape import Shape
from picture_texts import overlaps

CPU = torch.device("cpu")


class BusyGpu:
    """Steps are queued at once and done in order. For a while it draws too little and runs fast; then it sits at its limit."""

    def __init__(self, ms: float, settled: float = 0.3) -> None:
        self.ms, self.settled, self.now, self.queued, self.done, self.most_queued = ms, settled, 0.0, 0, 0, 0
        self.used, self.shown, self.idle_waits = 0.0, 0.0, 0

    def step(self) -> None:
        self.queued += 1
        self.most_queued = max(self.most_queued, self.queued - self.done)

    def mark(self) -> Callable[[], None]:
        return lambda number=self.queued: self._run_to(number)  # type: ignore[misc]

    def _run_to(self, number: int) -> None:
        self.idle_waits += self.queued == number  # nothing is left to do after the wait
        while self.done < number:
            end = self.now + self.ms / 1000
            self.used += (690.0 if self.now >= self.settled else 300.0) * self.ms / 1000
            if int(end * 10) > int(self.now * 10):
                self.shown = self.used
            self.now, self.done = end, self.done + 1

    def endurance(self, seconds: float = 2.0) -> Endurance:
        return Endurance(lambda: self.shown, self.mark, lambda: 1200.0 if self.now >= self.settled else 1980.0, seconds, lambda: self.now)


@pytest.mark.parametrize("ms", [0.04, 1.0, 7.0, 60.0])
def test_a_settled_gpu_is_measured(ms: float) -> None:
    gpu = BusyGpu(ms)
    found = gpu.endurance().of(gpu.step, ms)
    assert found.ms == pytest.approx(ms, rel=0.01)
    assert found.watts == pytest.approx(690.0, rel=0.05), "what was drawn before the limit does not count"
    assert found.megahertz == 1200.0
    assert found.joules == pytest.approx(0.69 * ms, rel=0.05)
    assert 2.0 <= gpu.now - Endurance.warm_up < 2.0 + 4 * max(Endurance.chunk, ms / 1000)


def test_the_gpu_never_waits_for_the_host() -> None:
    gpu = BusyGpu(1.0)
    gpu.endurance().of(gpu.step, 1.0)
    assert gpu.idle_waits == 1, "only the last wait leaves nothing to do"
    assert gpu.most_queued <= 3 * Endurance.chunk * 1000
    assert gpu.queued == gpu.done


def test_without_the_warm_up_it_would_be_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the first tenths of a second are unlike the rest."""
    monkeypatch.setattr(Endurance, "warm_up", 0.0)
    gpu = BusyGpu(1.0)
    assert gpu.endurance(0.6).of(gpu.step, 1.0).watts < 600


def test_a_counter_that_stands_still_is_an_error() -> None:
    still = [Sample(t / 10, t, 5.0, 1000.0) for t in range(20)]
    with pytest.raises(NoCounter, match="stood still"):
        summed_up(still)
    once = [*still, Sample(2.1, 21, 6.0, 1000.0)]
    with pytest.raises(NoCounter, match="stood still"):
        summed_up(once)


class FakeNvml:
    def __init__(self, failing: str = "") -> None:
        self.failing, self.kind = failing, -1

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        return 0

    def nvmlDeviceGetClockInfo(self, handle: Any, kind: int, value: Any) -> int:
        self.kind = kind
        ctypes.cast(value, ctypes.POINTER(ctypes.c_uint)).contents.value = 1305
        return 3 if self.failing else 0


def test_nvml_tells_the_clock_of_the_sms() -> None:
    library = FakeNvml()
    assert NvmlCounter(library, "GPU-1").sm_megahertz() == 1305.0
    assert library.kind == 1  # NVML_CLOCK_SM
    with pytest.raises(NoCounter, match="nvmlDeviceGetClockInfo answered 3"):
        NvmlCounter(FakeNvml("clock"), "GPU-1").sm_megahertz()


def test_rows_have_what_the_scale_read() -> None:
    gpu = BusyGpu(2.0)
    bad = Candidate("bad", spoiled(lambda dq, dk, dv: (dq * 2, dk, dv)))

    class Scale:
        def readings(self, step: Callable[[], Any], expected_ms: float) -> dict[str, Any]:
            return gpu.endurance().readings(gpu.step, expected_ms)

    rows = {
        (row["candidate"], row["pass"]): row
        for row in measure(SMALL, [Candidate("good", math_attention), bad], 2, fake_times, CPU, Scale())
    }
    found = rows["good", "backward"]["sustained"]
    assert found["tflops"] == pytest.approx(SMALL.tflops("backward", found["ms"]))
    assert {"seconds", "ms", "watts", "sm_mhz", "joules"} < set(found)
    assert "energy_j" not in rows["good", "backward"]
    assert "sustained" not in rows["bad", "backward"], "no figure for what fails its check"


def sustained_results() -> dict[str, Any]:
    shapes = [*SUITES["quick"].shapes(), Shape("causal", 8192, 2, 16, 16, 128, q_seqlen=1024)]
    rows = [made_up_row("backward", shape, name) for shape in shapes for name in ("dash-attn", "cuDNN")]
    for row in rows:
        tflops = 607.4 if row["candidate"] == "dash-attn" else 527.0
        row["sustained"] = {"seconds": 2.0, "ms": 2.0, "watts": 689.6, "sm_mhz": 1305.0, "joules": 1.3792, "tflops": tflops}
    return {**made_up_results(), "suite": "quick", "rows": rows}


def test_tables_and_pictures_of_sustained_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib import rc_context

    from dash_attn.tools.calibrate.pictures import STYLE

    results, source, picture = sustained_results(), tmp_path / "s.json", tmp_path / "s.svg"
    save(results, source)
    assert main(["--from", str(source), "--plot", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "backward, sustained for 2 s: causal, head dim 128, 16 heads, 2 x 1024 queries on 8192 keys" in " ".join(out.split())
    line = next(line for line in out.splitlines() if "607" in line)
    assert line.split() == ["dash-attn", "607", "690", "1305", "1.38"]
    svg = picture.read_text()
    assert "backward for 2 s on Nonesuch, at 690 to 690 W" in svg
    with rc_context(STYLE):
        figure = pictures.sustained_figure(results, results["rows"], "backward")
        assert overlaps(figure) == []
    speed, work = figure.axes
    assert [points.get_offsets()[0, 0] for points in speed.collections] == pytest.approx([607.4, 527.0])
    assert [points.get_offsets()[0, 0] for points in work.collections] == pytest.approx([607.4 / 0.6896, 527.0 / 0.6896])
    with pytest.raises(ValueError, match="nothing to draw"):
        pictures.draw(results, tmp_path / "f.svg", "forward", "sustained")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("sustained", {"seconds": 2.0}, "sustained.ms"),
        ("sustained", {"seconds": 2.0, "ms": 1, "watts": -1, "sm_mhz": 1, "joules": 1, "tflops": 1}, "sustained.watts"),
        ("process_ms", [1.0, "x"], "process_ms"),
        ("identity", 2**63, "identity must be an object"),
        ("identity", {"planning_ms": {"mask": 1.0}}, "planning_ms lacks forward"),
        ("identity", {"planning_ms": {"mask": 1.0, "forward": "x", "backward": -0.1, "elements": 1.0}}, "planning_ms.forward"),
        ("spread", {"ratio_to_cudnn": [1.0]}, "lowest and a highest"),
        ("spread", {"ratio_to_cudnn": [0.0, 1.0]}, "spread.ratio_to_cudnn"),
    ],
)
def test_damaged_files_are_refused(field: str, value: Any, message: str, tmp_path: Path) -> None:
    results, path = sustained_results(), tmp_path / "bad.json"
    results["rows"][0][field] = value
    save(results, path)
    with pytest.raises(ValueError, match=message):
        read(path)


def runs(*factors: float) -> list[dict[str, Any]]:
    """Processes whose clocks differ: cuDNN is as fast in each, ours is not."""
    made = []
    for factor in factors:
        results = deepcopy(sustained_results())
        for row in results["rows"]:
            if row["candidate"] == "dash-attn":
                row |= {"median_ms": 2.0 / factor, "ratio_to_cudnn": factor, "ratio_to_unordered": factor / 2, "energy_j": factor}
                row["sustained"]["watts"] = 600 + factor
        made.append(results)
    return made


def test_medians_and_spread_over_processes() -> None:
    found = merged(runs(1.2, 1.0, 1.1))
    assert found["processes"] == 3
    row = found["rows"][0]
    assert row["ratio_to_cudnn"] == row["energy_j"] == 1.1
    assert row["spread"] == {"ratio_to_cudnn": [1.0, 1.2], "ratio_to_unordered": [0.5, 0.6]}
    assert row["process_ms"] == pytest.approx([2.0 / 1.2, 2.0, 2.0 / 1.1])
    assert row["median_ms"] == pytest.approx(2.0 / 1.1)
    assert row["tflops"] == pytest.approx(Shape.from_json(row["shape"]).tflops("backward", 2.0 / 1.1))
    assert row["sustained"]["watts"] == 601.1
    assert row["sustained"]["tflops"] == 607.4
    assert len(found["rows"]) == len(runs(1.0)[0]["rows"])


def test_what_fails_in_one_process_has_no_figure() -> None:
    several = runs(1.0, 1.1, 1.2)
    several[1]["rows"][0] = failed(several[1]["rows"][0], "failed check", "dq changes from run to run")
    del several[2]["rows"][3]
    bad, good, _, missing, *_ = merged(several)["rows"]
    assert (bad["status"], bad["reason"]) == ("failed check", "dq changes from run to run")
    assert (missing["status"], missing["reason"]) == ("ok in some processes only", "2 of 3 processes have it")
    assert all("median_ms" not in row and "tflops" not in row for row in (bad, missing))
    assert good["status"] == "ok"


def test_ratios_are_taken_inside_each_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Clocks differ between processes by more than kernels do: the ratio of the medians would be 1.2."""
    several = runs(1.0, 1.2, 1.1)
    for results, slowness in zip(several, (1, 2, 4), strict=True):
        for row in results["rows"]:
            row["median_ms"] = (2.0 / row["ratio_to_cudnn"] if row["candidate"] == "dash-attn" else 2.0) * slowness
    results = merged(several)
    ratios = next(iter(ours_over(results, "backward").values()))
    assert ratios["cuDNN"] == pytest.approx((1.1, 1.0, 1.2))
    save(results, tmp_path / "r.json")
    print_report(read(tmp_path / "r.json"))
    out = capsys.readouterr().out
    assert "medians of 5 in 3 processes" in out
    assert "dash-attn relative to each, median (lowest-highest) of 3 processes" in " ".join(out.split())
    assert "1.10 (1.00-1.20)" in out
    assert "\N{HORIZONTAL ELLIPSIS}" not in out, "nothing is cut off"


def writes(results: dict[str, Any], status: int = 0) -> Any:
    def run(words: list[str]) -> int:
        folder = Path(words[words.index("--output") + 1])
        save(results, folder / "nonesuch-quick.json")
        return status

    return run


def test_processes_run_one_after_the_other(tmp_path: Path) -> None:
    children = iter([writes(results, status) for results, status in zip(runs(1.0, 1.3, 1.1), (0, 1, 0), strict=True)])
    found = list(result_files.measured_anew(["quick"], 3, lambda words: next(children)(words)))
    assert [name for name, _ in found] == ["nonesuch-quick.json"] * 3
    assert [results["processes"] for _, results in found] == [1, 2, 3]
    assert found[-1][1]["rows"][0]["ratio_to_cudnn"] == 1.1


@pytest.mark.parametrize("child", [lambda words: 0, writes(sustained_results(), 2), lambda words: -9])
def test_a_process_that_fails_is_an_error(child: Any) -> None:
    with pytest.raises(ValueError, match="a process of this benchmark ended with exit code"):
        list(result_files.measured_anew([], 2, child))


def parsed(words: list[str]) -> argparse.Namespace:
    return suite.parser_of_suites().parse_args(words)


def test_a_process_gets_every_option_that_measures() -> None:
    """An option that is new must be passed on, or be named here."""
    words = "ranks --seqlens 4096,8192 --head-dims 128 --masks causal --passes backward --repeats 7 --without cuDNN"
    given = [*words.split(), "--schedules", "--no-peers", "--no-energy", "--sustained", "1.5", "--backend", "triton"]
    given += ["--processes", "3", "--plot", "a.svg", "--plot-pass", "forward", "--plot-schedules", "b.svg"]
    asked = parsed(given)
    again = vars(parsed(suite.parser_of_parent().parse_known_args(given)[1]))
    stays = {"processes", "plot", "plot_pass", "plot_schedules"}
    assert {name: again[name] for name in again if name not in stays} == {n: v for n, v in vars(asked).items() if n not in stays}
    default = vars(parsed([]))
    assert {name for name in default if default[name] == again[name]} == {*stays, "output", "list", "source"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--processes", "0"], "--processes must be a whole number >= 1; got 0"),
        (["--sustained", "0"], "--sustained must be a number of seconds > 0"),
        (["--sustained", "nan"], "--sustained must be a number of seconds > 0"),
        (["host", "--sustained"], "--sustained does not go with suite host"),
        (["--from", "x.json", "--processes", "3"], "--processes does not go with --from"),
    ],
)
def test_options_that_do_not_fit(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole command with one small suite, a timer that does not wait and no GPU."""
    monkeypatch.setattr(bench, "require_gpu", lambda backend: None)
    monkeypatch.setattr(bench, "current_device", lambda: CPU)
    monkeypatch.setattr("dash_attn.tools.machine.gpu_environment", lambda backend: {"gpu": "NVIDIA N100"})
    monkeypatch.setattr("dash_attn.tools.bench.measure.cuda_times", fake_times)
    monkeypatch.setitem(SUITES, "ranks", Cases((Shape("causal", 130, 1, 2, 1, 32), Shape("full", 130, 1, 1, 1, 32, q_seqlen=60))))


@pytest.mark.usefixtures("on_the_cpu")
def test_the_whole_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["ranks", "--passes", "backward", "--no-peers", "--repeats", "2", "--no-energy"]
    monkeypatch.setattr(result_files, "_run", lambda words: main(words))
    assert main([*common, "--processes", "2", "--output", str(tmp_path)]) == 0
    results = read(tmp_path / "n100-ranks.json")
    assert results["processes"] == 2
    assert {row["pass"] for row in results["rows"]} == {"backward"}
    assert [row["candidate"] for row in results["rows"]] == [
        "dash-attn",
        "dash-attn unordered",
        "dash-attn equal heads",
        "dash-attn",
        "dash-attn unordered",
    ]
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["failed"] == 0


@pytest.mark.usefixtures("on_the_cpu")
def test_the_whole_command_sustained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["ranks", "--passes", "backward", "--no-peers", "--repeats", "2", "--output", str(tmp_path)]
    gpu = BusyGpu(50.0)
    monkeypatch.setattr(Endurance, "chunk", 0.001)  # one real step for each of the made-up GPU

    def endurance(seconds: float) -> Endurance:
        assert seconds == 0.5
        real = gpu.endurance(seconds)
        return Endurance(real.joules, lambda: (gpu.step(), gpu.mark())[1], real.megahertz, seconds, real.clock)

    monkeypatch.setattr(power, "gpu_meter", endurance)
    assert main([*common, "--sustained", "0.5"]) == 0
    rows = read(tmp_path / "n100-ranks-sustained.json")["rows"]
    assert all(row["sustained"]["watts"] > 600 for row in rows)
    assert "sustained for 0.5 s" in capsys.readouterr().out


@pytest.mark.usefixtures("on_the_cpu")
def test_no_nvml_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def none(seconds: float) -> Endurance:
        return power._library()  # type: ignore[no-any-return]

    monkeypatch.setattr(power, "LIBRARY", "libnothing-of-this-name.so")
    monkeypatch.setattr(power, "gpu_meter", none)
    assert main(["ranks", "--no-peers", "--sustained", "--output", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "--sustained needs the GPU's energy counter and its clock (NVML): there is no NVML here" in err
    assert "libnothing-of-this-name" in err


@pytest.mark.usefixtures("on_the_cpu")
def test_a_counter_that_stands_still_ends_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ticks = iter(range(10**6))
    still = Endurance(lambda: 1.0, lambda: lambda: None, lambda: 1.0, 0.5, lambda: next(ticks) / 10)
    monkeypatch.setattr(power, "gpu_meter", lambda seconds: still)
    assert main(["ranks", "--no-peers", "--sustained", "--output", str(tmp_path)]) == 2
    assert "stood still" in capsys.readouterr().err


def test_samples_count_steps_in_order() -> None:
    gpu = BusyGpu(3.0)
    samples: list[int] = []

    def joules() -> float:
        samples.append(gpu.done)
        return gpu.shown

    Endurance(joules, gpu.mark, lambda: 1.0, 0.5, lambda: gpu.now).of(gpu.step, 3.0)
    assert {after - before for before, after in pairwise(samples)} == {round(Endurance.chunk * 1000 / 3.0)}
