"""Energy per step: counters that move in steps, stand still or are not there; never a zero for what was not measured."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bench_results import made_up_results
from bench_stand_ins import SMALL, fake_times, math_attention, spoiled
from benchmarks import power as energy
from benchmarks.power import Meter, NoCounter, NvmlCounter
from benchmarks.result_files import print_report
from dash_attn.tools.bench.candidates import Candidate
from dash_attn.tools.bench.measure import measure
from dash_attn.tools.bench.report import table

CPU = torch.device("cpu")


class FakeGpu:
    """Steps take time and power; the counter shows the energy of the last whole tenth of a second."""

    def __init__(self, update: float = 0.1) -> None:
        self.now, self.used, self.update, self.steps = 0.0, 0.0, update, 0

    def step(self, ms: float, watts: float) -> None:
        self.steps += 1
        end = self.now + ms / 1000
        if int(end / self.update) > int(self.now / self.update):
            self.shown = self.used + watts * (int(end / self.update) * self.update - self.now)
        self.used += watts * ms / 1000
        self.now = end

    shown = 0.0

    def meter(self) -> Meter:
        return Meter(lambda: self.shown, lambda: lambda: None, clock=lambda: self.now)


@pytest.mark.parametrize(("ms", "watts"), [(0.05, 700.0), (1.0, 600.0), (7.0, 450.0), (40.0, 300.0)])
def test_joules_of_a_step(ms: float, watts: float) -> None:
    gpu = FakeGpu()
    found = gpu.meter().of(lambda: gpu.step(ms, watts), ms)
    assert found.joules == pytest.approx(ms / 1000 * watts, rel=0.15)  # the counter's tick lies somewhere inside a chunk of steps
    assert gpu.now >= energy.SECONDS


def test_a_naive_reading_would_be_off() -> None:
    """The control: the counter before and after a batch that begins just before a tick counts a tenth of a second too much."""
    gpu = FakeGpu()
    gpu.step(99, 600.0)
    before, steps = gpu.shown, 0
    while gpu.now < 0.102 + energy.SECONDS:
        gpu.step(1.0, 600.0)
        steps += 1
    assert (gpu.shown - before) / steps / 0.6 > 1.15


def test_a_counter_that_stands_still_gives_nothing() -> None:
    gpu = FakeGpu(update=1e9)
    assert gpu.meter().readings(lambda: gpu.step(1.0, 600.0), 1.0) == {}
    assert gpu.now < 2 * energy.PATIENCE * energy.SECONDS


def test_a_counter_that_fails_midway_gives_nothing() -> None:
    readings = iter([1.0, 2.0, 3.0])

    def joules() -> float:
        found = next(readings, None)
        if found is None:
            raise NoCounter("the GPU has fallen off the bus")
        return found

    assert Meter(joules, lambda: lambda: None, clock=lambda: 0.0).readings(lambda: None, 1.0) == {}


class FakeNvml:
    """Answers like libnvidia-ml: a status, values by reference."""

    def __init__(self, failing: str = "") -> None:
        self.failing, self.asked = failing, b""

    def nvmlInit_v2(self) -> int:
        return 999 if self.failing == "nvmlInit_v2" else 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        self.asked = uuid
        return 6 if self.failing == "nvmlDeviceGetHandleByUUID" else 0

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any, value: Any) -> int:
        ctypes.cast(value, ctypes.POINTER(ctypes.c_ulonglong)).contents.value = 123456
        return 3 if self.failing == "nvmlDeviceGetTotalEnergyConsumption" else 0


def test_nvml_counts_millijoules_of_the_right_gpu() -> None:
    library = FakeNvml()
    assert NvmlCounter(library, "GPU-1234").joules() == pytest.approx(123.456)
    assert library.asked == b"GPU-1234"


@pytest.mark.parametrize("call", ["nvmlInit_v2", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetTotalEnergyConsumption"])
def test_every_refusal_of_nvml_is_named(call: str) -> None:
    with pytest.raises(NoCounter, match=call):
        NvmlCounter(FakeNvml(call), "GPU-1234").joules()


def test_no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "LIBRARY", "libnothing-of-this-name.so")
    with pytest.raises(NoCounter, match="libnothing-of-this-name"):
        energy._library()


def rows_with(meter: Meter | None) -> list[dict[str, Any]]:
    bad: Callable[..., Any] = spoiled(lambda dq, dk, dv: (dq * 2, dk, dv))
    return measure(SMALL, [Candidate("good", math_attention), Candidate("bad", bad)], 2, fake_times, CPU, meter)


def test_rows_have_energy_only_where_it_was_measured() -> None:
    counts = iter(range(10**9))

    def count() -> float:
        return float(next(counts))

    rows = {(row["candidate"], row["pass"]): row for row in rows_with(Meter(count, lambda: lambda: None, clock=count))}
    assert rows["good", "backward"]["energy_j"] > 0
    assert "energy_j" not in rows["bad", "backward"], "no figure for what fails its check"
    assert all("energy_j" not in row for row in rows_with(None))
    assert all("energy_j" not in row for row in rows_with(Meter(lambda: 0.0, lambda: lambda: None, clock=count)))


def test_the_table_has_a_column_of_joules(capsys: pytest.CaptureFixture[str]) -> None:
    results = made_up_results()
    rows = [row for row in results["rows"] if row["shape"]["seqlen"] in (512, 1024) and row["shape"]["head_dim"] == 64]
    rows = [row for row in rows if row["shape"]["mask"] == "causal" and row["pass"] == "backward"]
    assert table(rows)[0] == ["", "512", "1024"]
    rows[0]["energy_j"] = 0.61234
    header, cells = table(rows)
    assert header == ["", "512", "1024", "J at 512"]
    assert [line[-1] for line in cells] == ["0.612", "-", "-", "-", "-"]
    print_report({**results, "rows": rows, "energy": {"missing": "there is no NVML here"}})
    out = capsys.readouterr().out
    assert "0.612" in out
    assert "energy: not measured (there is no NVML here)" in out
