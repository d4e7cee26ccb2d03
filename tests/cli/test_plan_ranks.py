"""`dash-attn plan --ranks`: figures, peers, the picture, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from clusters import shared
from dash_attn.cli import cluster as command
from dash_attn.cli.main import main
from dash_attn.simulation.cluster import Cluster, simulate_ranks

SMALL = ["plan", "--ranks", "2", "--seqlen", "2048", "--heads", "4"]


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main([*SMALL, *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_is_what_the_simulator_says(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "--heads-together", "2", "--hop-latency", "3", "--bandwidth", "50")
    runs = [
        simulate_ranks(shared("causal", 2048, 2, 4, together=2), Cluster(hop_latency_us=3, bandwidth_GBs=50), execution)
        for execution in ("launch", "overlap")
    ]
    assert [run["execution"] for run in found["runs"]] == ["launch", "overlap"]
    assert [run["makespan_us"] for run in found["runs"]] == [run.makespan for run in runs]
    assert [run["efficiency"] for run in found["runs"]] == [run.efficiency for run in runs]
    assert found["runs"][0]["backward_bytes"] == list(runs[0].sent)
    assert found["runs"][0]["states_waiting"] == list(runs[0].waiting)
    assert found["one_rank_us"] == runs[0].one_rank
    assert [peer["name"] for peer in found["peers"]] == ["ring attention", "Ulysses"]
    assert (found["model"], found["sharding"], found["schedule"], found["heads_together"]) == ("tiles", "zigzag", "alternating", 2)


def test_the_table_has_a_row_per_way(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(SMALL) == 0
    out = capsys.readouterr().out
    rows = [line.strip() for line in out.splitlines()]
    for name in ("dash-attn, launch", "dash-attn, overlap", "ring attention", "Ulysses"):
        assert sum(row.startswith(f"{name} ") for row in rows) == 1
    assert "2 ranks, zigzag sharding, hop 10 us, 400 GB/s; 2 heads side by side in a unit" in out
    assert "compute 1.93" in out  # an H200, unless told otherwise
    assert "Simulated task by task." in out
    assert "models, shown at their best" in out


def test_one_execution_and_ulysses_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--ranks", "2", "--seqlen", "2048", "--heads", "3", "--execution", "overlap"]) == 0
    out = capsys.readouterr().out
    assert "dash-attn, launch" not in out
    assert "Ulysses cannot serve this problem: it needs a number of KV heads that 2 ranks divide; got 3" in out


def test_large_problems_fall_back_and_say_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert planned(capsys)["model"] == "tiles"
    assert main([*SMALL, "--model", "chunks"]) == 0
    assert "Simulated by the chunk model. It leaves out hand-overs" in capsys.readouterr().out
    monkeypatch.setattr(command, "MOST_TASKS_OF_TILES", 100)
    assert planned(capsys)["model"] == "chunks"
    assert main(SMALL) == 0
    assert "Simulated by the chunk model, because there are more than 100 tasks." in capsys.readouterr().out
    assert planned(capsys, "--model", "tiles")["model"] == "tiles"


def test_constants_and_links_count(capsys: pytest.CaptureFixture[str]) -> None:
    plain = planned(capsys)
    slow = planned(capsys, "--bandwidth", "1")
    assert slow["runs"][0]["makespan_us"] > plain["runs"][0]["makespan_us"]
    assert slow["peers"][0]["makespan"] > plain["peers"][0]["makespan"]
    narrow = planned(capsys, "--head-dim", "64")
    assert narrow["runs"][0]["forward_bytes"] == [size // 2 for size in plain["runs"][0]["forward_bytes"]]
    blocks = planned(
        capsys, "--compute", "1", "--reduce", "0", "--workers", "1", "--hop-latency", "0", "--bandwidth", "inf", "--head-dim", "96"
    )
    assert blocks["runs"][0]["work_efficiency"] == 1.0
    contiguous = planned(capsys, "--sharding", "contiguous", "--model", "chunks")
    assert contiguous["runs"][0]["efficiency"] < 0.7


def test_other_schedules_and_masks(capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(capsys, "--schedule", "descending")["schedule"] == "descending"
    assert planned(capsys, "--mask", "full", "--sharding", "contiguous")["schedule"] == "shift_blocks"
    window = planned(capsys, "--mask", "window:300,0", "--group", "2", "--batch", "2")
    assert all(math.isfinite(run["efficiency"]) and 0 < run["efficiency"] <= 1 for run in window["runs"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "--ranks 3 --seqlen 2048",
            "zigzag sharding of 3 ranks has 6 chunks of equal length; 2048 rows cannot be dealt so (but 2046 or 2052",
        ),
        ("--ranks 2 --seqlen 2056", "4 chunks of equal length fit sequences of 2048 or 2560 rows"),
        ("--ranks 2 --seqlen 2048 --kv-seqlen 1024", "the same 2048 rows"),
        ("--ranks 0 --seqlen 2048", "--ranks must be a whole number >= 1; got 0"),
        ("--ranks 2", "--ranks needs --seqlen"),
        ("--ranks 2 --q-tiles 8", "--ranks needs --seqlen"),
        ("--ranks 2 --seqlen 2048 --schedule auto weave", "--ranks takes one schedule"),
        ("--ranks 2 --seqlen 2048 --measured", "--measured does not go with --ranks, which only simulates"),
        ("--ranks 2 --seqlen 2048 --trace t.json", "--trace does not go with --ranks"),
        ("--ranks 2 --seqlen 2048 --save s.json", "--save does not go with --ranks"),
        ("--ranks 2 --seqlen 2048 --hop-latency -1", "--hop-latency must be a finite number >= 0; got -1"),
        ("--ranks 2 --seqlen 2048 --bandwidth 0", "--bandwidth must be a number > 0; got 0"),
        ("--ranks 2 --seqlen 2048 --heads-together 0", "--heads-together must be a whole number >= 1; got 0"),
        ("--ranks 2 --seqlen 2048 --machine h200 --head-dim 96", "was calibrated for head dims 64, 128; got 96"),
        ("--ranks 2 --seqlen 2048 --gantt chart.pdf", ".png or .svg"),
        ("--sharding zigzag", "--sharding goes with --ranks"),
        ("--hop-latency 3", "--hop-latency goes with --ranks"),
        ("--bandwidth 3", "--bandwidth goes with --ranks"),
        ("--execution launch", "--execution goes with --ranks"),
        ("--heads-together 2", "--heads-together goes with --ranks"),
        ("--model chunks", "--model goes with --ranks"),
        pytest.param("--ranks 8 --seqlen 1048576", "or larger tiles: --tile-q 128 --tile-kv 256", marks=pytest.mark.exhaustive),
        ("--ranks 8 --seqlen 131072 --heads 8 --group 8 --model tiles", "more than 50,000,000 tasks are too many to simulate."),
    ],
)
def test_what_cannot_be_planned_is_one_clear_line(capsys: pytest.CaptureFixture[str], words: str, said: str) -> None:
    assert main(["plan", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("dash-attn: error: ")
    assert said in err
    assert len(err.strip().splitlines()) == 1
    assert out == ""


@pytest.mark.parametrize("name", ["ranks.png", "ranks.svg"])
def test_the_chart_is_written(capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    assert main([*SMALL, "--gantt", str(tmp_path / name)]) == 0
    assert f"wrote {tmp_path / name}" in capsys.readouterr().err
    assert (tmp_path / name).stat().st_size > 5000
