"""The file of a ledger: after a crash, damaged, cut off, foreign, locked, on a full disk."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import dash_attn
from dash_attn.cli.main import main
from dash_attn.ledgers import LedgerError, compare_runs, read_run
from dash_attn.ledgers.format import MARK, LedgerFile
from dash_attn.ledgers.reading import read_rank
from started import started
from tiny_gpt import Training

FILE = "rank-0.ledger"
NO_END = "has no end: the process was killed, its disk was full, or it is still running"
HELPERS = Path(__file__).parents[1] / "helpers"
KILLED = """
import os, signal, sys
from pathlib import Path
from tiny_gpt import Training
last = int(sys.argv[2])
Training(Path(sys.argv[1]), before_step=lambda step, model: os.kill(os.getpid(), signal.SIGKILL) if step == last else None).run()
"""
HOLD = (
    "import fcntl, sys, time; file = open(sys.argv[1], 'r+b'); fcntl.flock(file, fcntl.LOCK_EX); print('held', flush=True); time.sleep(60)"
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps. Not to be changed."""
    folder = tmp_path_factory.mktemp("ledgers") / "whole"
    Training(folder).run()
    return folder


def small_run(folder: Path, steps: int = 3, **options: object) -> None:
    """Quick: one layer, no attention."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    with dash_attn.ledger(folder, **options) as ledger:  # type: ignore[arg-type]
        for _ in range(steps):
            model.zero_grad()
            loss = model(torch.ones(2, 4)).square().mean()
            loss.backward()
            ledger.step(model, loss=loss)


@pytest.mark.exhaustive  # test_train_example.py kills the example
def test_a_killed_process_leaves_whole_steps(tmp_path: Path) -> None:
    """SIGKILL in step 2: no code of ours runs after it. Both runs have processes of their own: this one has other settings by now."""
    path = os.pathsep.join([str(Path(dash_attn.__file__).parents[1]), str(HELPERS)])
    environment = {**os.environ, "PYTHONPATH": path}
    whole = tmp_path / "a"
    for folder, last in ((whole, 99), (tmp_path / "b", 2)):
        done = subprocess.run([sys.executable, "-c", KILLED, str(folder), str(last)], env=environment, capture_output=True, timeout=120)
        assert (done.returncode < 0) == (last == 2), done.stderr
    found = compare_runs(whole, tmp_path / "b")
    assert (found.verdict, found.steps) == ("incomplete", (0, 1))
    assert found.lacking == [f"rank 0: B {NO_END}", "rank 0: step 2 of A alone"]
    assert compare_runs(whole, tmp_path / "b", partial=True).agree


def test_a_file_that_is_cut_off_anywhere(whole: Path, tmp_path: Path) -> None:
    data, cut = (whole / FILE).read_bytes(), tmp_path / FILE
    counts = []
    for length in [*range(0, 40), *range(40, len(data), 97), len(data) - 1]:
        cut.write_bytes(data[:length])
        try:
            counts.append(len(read_rank(cut).steps))
        except LedgerError as error:
            assert "is empty" in str(error) or "cut off" in str(error)  # noqa: PT017
    assert counts == sorted(counts)
    assert set(counts) == {0, 1, 2, 3}
    assert "ends in the middle of a record" in "\n".join(compare_runs(whole, tmp_path).lacking)


def test_a_file_with_a_damaged_byte_is_refused(whole: Path, tmp_path: Path) -> None:
    data, damaged = (whole / FILE).read_bytes(), tmp_path / FILE
    for place in [*range(len(MARK), 60), *range(60, len(data), 211)]:
        damaged.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
        with pytest.raises(LedgerError, match=r"damaged: the record at byte [\d,]+ of [\d,]+ does not match its checksum"):
            read_run(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty: the run ended before it wrote anything"),
        (b"PK\x03\x04 a checkpoint of somebody", "is not a ledger: it begins with"),
        (MARK[:3], "is cut off after 3 bytes, before its first record"),
        (MARK[:-1] + b"\x09 from the future", "has format 9 of ledgers; this version of dash-attn reads formats up to 1"),
    ],
)
def test_other_files_are_refused(content: bytes, message: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / FILE).write_bytes(content)
    assert main(["diff", str(whole), str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    if content:
        with pytest.raises(LedgerError, match=r"format 9|not a ledger|cut off"):
            small_run(tmp_path, resume_from=3)
        assert (tmp_path / FILE).read_bytes() == content  # not ours: left as it is


def test_folders_without_a_ledger_are_refused(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, message in ((tmp_path, "there is no ledger in"), (tmp_path / "no", "neither a folder nor a file has that name")):
        assert main(["diff", str(whole), str(path)]) == 2
        assert message in capsys.readouterr().err


def test_runs_with_nothing_in_common_cannot_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_run(tmp_path / "a", steps=2)
    small_run(tmp_path / "b", steps=2, resume_from=7)
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    assert "nothing was recorded in both runs: A has 2 steps from 0 to 1 and B has 2 steps from 7 to 8" in capsys.readouterr().err
    small_run(tmp_path / "ranks", rank=3)
    small_run(tmp_path / "ranks", rank=4)
    with pytest.raises(LedgerError, match=r"no rank is in both runs: A has \[0\], B has \[3, 4\]"):
        compare_runs(tmp_path / "a", tmp_path / "ranks")
    assert compare_runs(tmp_path / "a", tmp_path / "ranks" / "rank-3.ledger", partial=True).agree  # named one by one


def test_a_run_is_not_overwritten(whole: Path) -> None:
    before = (whole / FILE).read_bytes()
    with pytest.raises(LedgerError, match="has a run already: choose another folder, or continue that run with resume_from"):
        dash_attn.ledger(whole)
    assert (whole / FILE).read_bytes() == before


def test_two_ledgers_cannot_write_to_one_file(tmp_path: Path) -> None:
    with dash_attn.ledger(tmp_path):
        for options in ({}, {"resume_from": 1}):
            with pytest.raises(LedgerError, match="another ledger writes to"):
                dash_attn.ledger(tmp_path, **options)
        dash_attn.ledger(tmp_path, rank=1).close()
    dash_attn.ledger(tmp_path, resume_from=1).close()  # unlocked with its end


def test_two_processes_cannot_write_to_one_file(tmp_path: Path) -> None:
    small_run(tmp_path)
    with started([sys.executable, "-c", HOLD, str(tmp_path / FILE)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(LedgerError, match="another ledger writes to"):
            dash_attn.ledger(tmp_path, resume_from=3)
    dash_attn.ledger(tmp_path, resume_from=3).close()


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP], ids=errno.errorcode.get)
def test_a_file_system_without_locks_is_warned_of(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And recording goes on. Any other failure raises."""

    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("dash_attn.ledgers.format.fcntl.flock", refuse)
    with pytest.warns(RuntimeWarning, match="is written without a lock, keep other processes from it"):
        small_run(tmp_path)
    assert compare_runs(tmp_path, tmp_path).agree
    code = errno.EIO
    with pytest.raises(OSError, match="Input/output error"):
        dash_attn.ledger(tmp_path, rank=1)


def test_resuming_behind_a_record_that_was_cut_off(tmp_path: Path) -> None:
    small_run(tmp_path / "a", steps=5)
    small_run(tmp_path / "b", steps=3)
    file = tmp_path / "b" / FILE
    os.truncate(file, file.stat().st_size - 60)  # the end of the run, and a part of step 2
    assert sorted(read_rank(file).steps) == [0, 1]
    small_run(tmp_path / "b", steps=3, resume_from=2)
    found = read_rank(file)
    assert (sorted(found.steps), found.unfinished, len(found.heads)) == ([0, 1, 2, 3, 4], 0, 2)
    assert compare_runs(tmp_path / "a", tmp_path / "b").agree


def test_steps_that_a_resumed_run_gave_up_are_left_out(tmp_path: Path) -> None:
    small_run(tmp_path / "a", steps=6)
    small_run(tmp_path / "a", steps=1, resume_from=2)
    assert sorted(read_rank(tmp_path / "a" / FILE).steps) == [0, 1, 2]


def disk_with_room_for(writes: int) -> Callable[..., int]:
    """os.pwrite on a disk that becomes full: half of what comes next still fits."""
    left = [writes]

    def write_at(file: LedgerFile, data: bytes, place: int) -> int:
        left[0] -= 1
        if left[0] < -1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.pwrite(file._file, data if left[0] >= 0 else data[: len(data) // 2], place)

    return write_at


@pytest.mark.parametrize("steps_that_fit", [0, 1, 2])
def test_a_full_disk_stops_the_ledger_not_the_training(steps_that_fit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark_head_and_start = 3
    monkeypatch.setattr(LedgerFile, "_write_at", disk_with_room_for(mark_head_and_start + steps_that_fit))
    seen: list[int] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Training(tmp_path, steps=6, ledger={"detail": range(4, 6)}, before_step=lambda step, model: seen.append(step)).run()
    assert seen == [0, 1, 2, 3, 4, 5]
    told = [str(warning.message) for warning in caught if "the ledger" in str(warning.message)]
    assert len(told) == 1
    assert "stops here, the training goes on: cannot write: No space left on device" in told[0]
    found = read_rank(tmp_path / FILE)
    assert (len(found.steps), found.unfinished) == (steps_that_fit, 0)
