"""The command line: exact numbers, error paths, and what it writes."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dash_attn import parse_mask
from dash_attn.cli import plan
from dash_attn.cli.main import main
from dash_attn.scheduling import GENERATORS, Problem, Schedule

SIZES = ["mask", "q_tiles", "kv_tiles", "heads", "workers", "tasks"]
KEYS = ["plan", "asked", "schedule", *SIZES, "makespan", "lower_bound", "gap", "utilization", "stalled"]
SMALL = ["--q-tiles", "8", "--kv-tiles", "8", "--heads", "4", "--workers", "8", "--compute", "3", "--reduce", "1"]


def plan_json(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["plan", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("mask", "schedule", "makespan", "gap"),
    [
        ("full", "shift", 128, 0),
        ("full", "ascending", 135, 135 / 128 - 1),
        ("causal", "symmetric_shift", 72, 0),
        ("causal", "alternating", 72, 0),
        ("causal", "ascending", 135, 135 / 72 - 1),
    ],
)
def test_exact_json(capsys: pytest.CaptureFixture[str], mask: str, schedule: str, makespan: int, gap: float) -> None:
    row = plan_json(capsys, "--mask", mask, *SMALL, "--schedule", schedule)
    assert list(row) == KEYS
    assert (row["schedule"], row["mask"], row["makespan"], row["gap"]) == (schedule, mask, makespan, gap)
    assert (row["q_tiles"], row["kv_tiles"], row["heads"], row["workers"]) == (8, 8, 4, 8)
    assert row["tasks"] == (256 if mask == "full" else 144)


def test_whole_numbers_print_without_a_point(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--mask", "full", *SMALL, "--schedule", "shift", "--json"]) == 0
    out = capsys.readouterr().out
    assert '"makespan": 128,' in out
    assert '"gap": 0,' in out
    assert "." not in out


def test_all_is_a_list_of_every_generator_that_serves(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--mask", "causal", *SMALL, "--json"]) == 0
    out, err = capsys.readouterr()
    names = [row["schedule"] for row in json.loads(out)]
    refused = [name for name in GENERATORS if name not in names]
    assert names == [name for name in GENERATORS if name not in ("shift", "shift_blocks")]
    assert all(name in err for name in refused)


@pytest.mark.parametrize(
    "words", ["ascending,weave", "ascending weave", "ascending --schedule weave", "ascending, --schedule weave,ascending"]
)
def test_ways_to_name_several_schedules(capsys: pytest.CaptureFixture[str], words: str) -> None:
    rows = plan_json(capsys, "--schedule", *words.split())
    assert [row["schedule"] for row in rows] == ["ascending", "weave"]


def test_what_auto_chose_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for mask, chosen in (("causal", "alternating"), ("full", "alternating"), ("documents:3,5", "weave")):
        row = plan_json(capsys, "--schedule", "auto", "--mask", mask)
        assert (row["asked"], row["schedule"]) == ("auto", chosen)
    assert main(["plan", "--schedule", "auto"]) == 0
    assert "auto: alternating" in capsys.readouterr().out


def test_table_marks_auto_and_lists_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--mask", "causal", *SMALL]) == 0
    out = capsys.readouterr().out
    assert "alternating (auto)" in out
    assert "144 tasks in 32 chains" in out
    assert "8 workers; compute 3, reduce 1" in out
    assert "shift: serves full masks only" in out.split("Cannot serve")[1]
    row = next(line for line in out.splitlines() if "ascending" in line)
    assert row.split() == ["ascending", "135", "72", "87.5", "%", "53.3", "%", "44.1", "%", "-1", "1"]


def test_tokens_and_tiles_describe_the_same_problem(capsys: pytest.CaptureFixture[str]) -> None:
    by_tiles = plan_json(capsys, "--mask", "window:2,1", "--q-tiles", "8", "--schedule", "weave")
    by_tokens = plan_json(capsys, "--mask", "window:256,128", "--seqlen", "1024", "--tile-q", "128", "--schedule", "weave")
    assert {**by_tiles, "mask": ""} == {**by_tokens, "mask": ""}
    assert by_tokens["mask"] == "window:256,128"


def test_group_batch_and_unequal_lengths(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--seqlen 100 --kv-seqlen 300 --tile-q 32 --tile-kv 64 --group 2 --batch 3 --heads 2 --schedule auto"
    row = plan_json(capsys, *words.split())
    problem = Problem(parse_mask("causal"), 100, 300, 32, 64, 2, 2, 3)
    assert (row["q_tiles"], row["kv_tiles"], row["tasks"]) == (4, 5, problem.tasks)


def random_mask(rng: random.Random, tiles: int) -> str:
    lengths, left = [], tiles
    while left:
        lengths.append(rng.randint(1, left))
        left -= lengths[-1]
    window = f"window:{rng.randint(-1, tiles)},{rng.randint(-1, tiles)}"
    return rng.choice(["full", "causal", window, "documents:" + ",".join(map(str, lengths)), f"prefix:{rng.randint(0, tiles)}"])


@pytest.mark.parametrize("seed", range(25))
def test_random_masks(capsys: pytest.CaptureFixture[str], seed: int) -> None:
    rng = random.Random(seed)
    kv_tiles = rng.randint(1, 9)
    mask = random_mask(rng, kv_tiles)
    machine = f"--workers {rng.randint(1, 12)} --overlap {rng.randint(0, 3)} --latency {rng.choice([0, 0.5, 2])}".split()
    q_tiles, heads = rng.randint(1, 9), rng.randint(1, 3)
    rows = plan_json(capsys, "--mask", mask, "--q-tiles", str(q_tiles), "--kv-tiles", str(kv_tiles), "--heads", str(heads), *machine)
    problem = Problem.from_tiles(mask, q_tiles, kv_tiles, heads=heads)
    assert {"ascending", "weave"} <= {row["schedule"] for row in rows}
    for row in rows:
        assert list(row) == KEYS
        assert row["mask"] == mask
        assert row["tasks"] == problem.tasks
        assert row["makespan"] >= row["lower_bound"] > 0
        assert row["gap"] >= 0
        assert 0 <= row["stalled"] <= 1 - row["utilization"] + 1e-9


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--mask diagonal", "unknown mask"),
        ("--mask tiles:x", "unknown mask 'tiles:x'"),
        ("--mask prefix:x", "lengths must be whole numbers, as in prefix:LEN"),
        ("--machine h100", "one of h200\n"),
        ("--device gpu", "must be one of auto, cpu, cuda; got gpu\n"),
        ("--mask window:1", "window:LEFT,RIGHT"),
        ("--mask window:a,b", "whole numbers"),
        ("--mask documents:3,4", "sum of the document lengths (7); got 8 queries and 8 keys"),
        ("--mask prefix:9", "prefix length must be at most the number of keys, 8; got 9"),
        ("--schedule fastest", "choose from all, auto, ascending"),
        ("--schedule shift", "full masks only"),
        ("--q-tiles 0", "--q-tiles must be a whole number >= 1; got 0"),
        ("--q-tiles eight", "--q-tiles must be a whole number >= 1; got eight"),
        ("--kv-tiles -3", "--kv-tiles must be"),
        ("--heads 0", "--heads must be"),
        ("--workers 0", "--workers must be"),
        ("--compute 0", "compute"),
        ("--compute nan", "compute"),
        ("--compute 1e300", "too large"),
        ("--schedule ,", "needs a name"),
        ("--reduce -1", "--reduce must be a finite number >= 0; got -1"),
        ("--latency inf", "--latency must be"),
        ("--overlap -1", "--overlap must be a whole number >= 0; got -1"),
        ("--seqlen 512 --q-tiles 8", "--q-tiles"),
        ("--tile-q 64", "--seqlen"),
        ("--kv-seqlen 64", "--seqlen"),
        ("--seqlen -5", "--seqlen must be a whole number >= 1; got -5"),
        ("--gantt chart.gif", ".png or .svg"),
        ("--gantt nowhere/chart.png", "no directory"),
        ("--trace nowhere/trace.json", "no directory"),
        ("--save schedule.json", "one schedule"),
        ("--schedule weave --save .", "directory"),
    ],
)
def test_bad_input_is_one_message_and_code_2(capsys: pytest.CaptureFixture[str], words: str, said: str) -> None:
    assert main(["plan", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("dash-attn: error: ")
    assert said.lower() in err.lower()
    assert len(err.strip().splitlines()) == 1
    assert "Traceback" not in out + err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("pln", "COMMAND must be one of plan, .*, diff; got pln; did you mean plan?"),
        ("fly", "COMMAND must be one of plan, .*, diff; got fly"),
        ("plna", "COMMAND must be one of plan, .*, diff; got plna; did you mean plan?"),
        ("plan --device cup", "--device must be one of auto, cpu, cuda; got cup; did you mean cpu?"),
        ("plan --device gpu", "--device must be one of auto, cpu, cuda; got gpu"),
        ("plan --sequlen=5", "unknown argument --sequlen=5; did you mean --seqlen?"),
        ("diff a b --jsn", "unknown argument --jsn; did you mean --json?"),
        ("doctor --wings", "unknown argument --wings; `dash-attn doctor --help` lists what there is"),
        ("doctor now", "unknown argument now; `dash-attn doctor --help` lists what there is"),
        ("plan --sharding zigzg", "--sharding must be one of zigzag, contiguous; got zigzg; did you mean zigzag?"),
        ("plan --schedule alternatin", "unknown schedule 'alternatin'; choose from all, .*; did you mean alternating?"),
        ("plan --mask casual", "unknown mask 'casual'; masks are written .*; did you mean causal?"),
        ("verify --schedule wave", "schedule must be one of auto, .*; got 'wave'; did you mean weave?"),
        ("diff a", "the following arguments are required: B"),
    ],
)
def test_mistyped_words_are_one_line_that_names_what_was_meant(capsys: pytest.CaptureFixture[str], words: str, said: str) -> None:
    assert main(words.split()) == 2
    out, err = capsys.readouterr()
    assert re.fullmatch(f"dash-attn: error: {re.escape(said).replace(re.escape('.*'), '.*')}\n", err)
    assert out == ""


def test_no_command_shows_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert all(name in err for name in ("usage: dash-attn", "plan", "explore", "diff"))
    assert out == ""


@pytest.mark.parametrize(
    ("words", "fits"),
    [
        pytest.param("--seqlen 1048576", "--tile-q 128 --tile-kv 256 with --seqlen, or 8192 x 4096 tiles", marks=pytest.mark.exhaustive),
        ("--seqlen 16384 --heads 4000", "--tile-q 128 --tile-kv 256 with --seqlen, or 128 x 64 tiles"),
        ("--seqlen 262144 --mask window:65536,0 --heads 40", "--tile-q 128 --tile-kv 256 with --seqlen, or 2048 x 1024 tiles"),
        ("--heads 100000000", "Take fewer tokens or heads, or larger tiles"),
        ("--heads 1000000000 --group 1000000000 --batch 1000000000", "Take fewer tokens or heads, or larger tiles"),
    ],
)
def test_too_many_tasks_are_refused_before_the_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: str, fits: str
) -> None:
    """And what is said to fit does."""
    monkeypatch.setattr(plan, "simulate_all", lambda *_: pytest.fail("it has begun to work"))
    assert main(["plan", *words.split()]) == 2
    said = capsys.readouterr().err.strip()
    assert "more than 50,000,000 tasks are too many to simulate." in said
    assert said.endswith(fits)
    for flags in re.findall("--tile-q .* --tile-kv [0-9]+", said):
        with pytest.raises(pytest.fail.Exception, match="begun to work"):
            main(["plan", *words.split(), *flags.split()])


@pytest.mark.parametrize("width", [60, 40, 24])
@pytest.mark.parametrize("command", ["plan --heads 4", "plan --ranks 4 --seqlen 16384"])
def test_a_narrow_terminal_keeps_every_number(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str, width: int
) -> None:
    assert main(command.split()) == 0
    wide = capsys.readouterr().out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(command.split()) == 0
    narrow = capsys.readouterr().out
    table = [line for line in narrow.splitlines() if re.match(r"(alternating|dash-attn|ring)\b.*\d", line) and "tasks in" not in line]
    assert "\033" not in narrow
    assert width < 30 or max(map(len, table)) <= width
    (row,) = (line for line in wide.splitlines() if line.startswith(("alternating (auto)", "dash-attn, launch")))
    name, *figures = re.split("  +", row)
    assert [figure for line in table if line.startswith(name) for figure in re.split("  +", line)[1:]] == figures
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "xterm")
    assert main(command.split()) == 0
    assert "\033[1;32m" in capsys.readouterr().out


def test_refused_schedule_in_json_mode_leaves_stdout_empty(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--schedule", "shift", "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "full masks only" in err


def test_only_refused_schedules_are_an_empty_list_and_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--schedule", "shift,shift_blocks", "--json"]) == 2
    assert json.loads(capsys.readouterr().out) == []


def run_without(modules: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process where some modules cannot be imported."""
    code = (
        f"import sys\nfor name in {modules.split()!r}: sys.modules[name] = None\n"
        f"from dash_attn.cli.main import main\nsys.exit(main({list(words)!r}))"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


def test_json_needs_numpy_alone() -> None:
    done = run_without("rich matplotlib PIL torch", "plan", "--mask", "full", *SMALL, "--schedule", "shift", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["makespan"] == 128


def test_table_without_rich_is_plain_text() -> None:
    done = run_without("rich matplotlib PIL torch", "plan", *SMALL)
    assert done.returncode == 0, done.stderr
    assert "alternating (auto)        72           72     0 %" in done.stdout


def test_gantt_without_matplotlib_says_what_to_install(tmp_path: Path) -> None:
    done = run_without("matplotlib", "plan", *SMALL, "--gantt", str(tmp_path / "chart.png"))
    assert done.returncode == 2
    assert "pip install 'dash-attn[cli]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_saved_schedule_reads_back(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "schedule.json"
    plan_json(capsys, *SMALL, "--schedule", "alternating", "--save", str(path))
    schedule = Schedule.from_json(path.read_text())
    assert schedule.name == "alternating"
    assert schedule.problem.tasks == 144


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("verify --schedule", "--schedule: empty.json is not a schedule, as `dash-attn plan --save` writes it: "),
        ("plan --machine", "empty.json is not a machine file: "),
    ],
)
def test_a_file_that_holds_something_else_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.json").write_text("{}")
    assert main([*words.split(), "empty.json"]) == 2
    assert capsys.readouterr().err.startswith(f"dash-attn: error: {said}")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is full")
@pytest.mark.parametrize("flag", ["--save", "--trace"])
def test_a_full_disk_names_the_file(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    assert main(["plan", "--schedule", "weave", flag, "/dev/full"]) == 2
    assert capsys.readouterr().err == "dash-attn: error: cannot write /dev/full: No space left on device\n"


@pytest.mark.parametrize("overlap", [0, 1, 2, 3])
def test_trace_is_sound(capsys: pytest.CaptureFixture[str], tmp_path: Path, overlap: int) -> None:
    path = tmp_path / "trace.json"
    words = [*SMALL, "--group", "2", "--overlap", str(overlap), "--latency", "2", "--schedule", "ascending", "weave"]
    rows = plan_json(capsys, *words, "--trace", str(path))
    events = json.loads(path.read_text())["traceEvents"]
    for process, row in enumerate(rows, start=1):
        slices = [e for e in events if e["pid"] == process and e["ph"] == "X"]
        check_slices(slices, row, workers=8, group=2)
        tracks = {e["tid"]: e["args"]["name"] for e in events if e["pid"] == process and e["name"] == "thread_name"}
        assert {e["tid"] for e in slices} <= set(tracks)
        assert len(tracks) == 8 * (1 + overlap)


def check_slices(slices: list[dict[str, Any]], row: dict[str, Any], workers: int, group: int) -> None:
    by_kind, by_track = defaultdict(list), defaultdict(list)
    for event in slices:
        by_kind[event["cat"]].append(event)
        by_track[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        assert event["ts"] >= 0
        assert event["ts"] + event["dur"] <= row["makespan"] + 1e-6
    assert len(by_kind["compute"]) == len(by_kind["reduce"]) == row["tasks"]
    assert len({event["name"] for event in by_kind["compute"]}) == row["tasks"]
    assert {event["args"]["turn"] for event in by_kind["compute"]} == set(range(8))
    assert len({event["args"]["chain"] for event in by_kind["compute"]}) == row["tasks"] // group * 8 // 36
    for spans in by_track.values():
        spans.sort()
        assert all(end <= start + 1e-6 for (_, end), (start, _) in pairwise(spans))
    waited = sum(event["dur"] for event in by_kind["wait"])
    assert waited == pytest.approx(row["stalled"] * row["makespan"] * workers)


def test_demo_shows_divergence_and_agreement(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("torch")
    output = tmp_path / "out"
    for steps in (2, 1):  # again, in the same folder
        assert main(["demo", "--steps", str(steps), "--device", "cpu", "--output", str(output)]) == 0
        out = capsys.readouterr().out
        unordered, ordered = out.split("All layers add in a planned order")
        assert unordered.count("DIFFERENT") == steps
        assert "The runs differ, first in step 0 on rank 0." in unordered
        assert re.search(r"direction +backward\n +module +blocks\.2\.attention\n +its inputs agreed +yes", unordered)
        assert "DIFFERENT" not in ordered
        assert "The runs agree" in ordered
        assert "Every bit of every tensor agrees" in ordered
        for name in ("gantt-causal.png", "runs-part.png"):
            assert str(output / name) in out
            assert (output / name).stat().st_size > 20_000
    command = out.split("$ dash-attn ")[1].splitlines()[0]  # the one that it shows
    assert main(command.split()) == 1
    assert capsys.readouterr().out in unordered


def test_demo_fails_if_ordered_runs_disagree(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from dash_attn.cli import training

    real = training.train
    monkeypatch.setattr(training, "train", lambda _, *rest: real(2, *rest))
    assert main(["demo", "--steps", "1", "--device", "cpu", "--output", str(tmp_path)]) == 1
    assert "FAILED: ordered runs must agree" in capsys.readouterr().out
