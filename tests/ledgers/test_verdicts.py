"""What exit code 0 of `dash-attn diff` means, and what each of the others."""

from __future__ import annotations

import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dash_attn
from dash_attn.ledgers.format import records
from small_runs import AGREE, ERROR, FILE, INCOMPLETE, cut_behind, run, said

OLD = Path(__file__).parents[1] / "old_files" / "exact-ledger"  # written by the first version that had ledgers, of `exact_run`


def exact_run(folder: Path) -> None:
    """Every number is exact, so that any processor has these bits."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        model.bias.fill_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    with dash_attn.ledger(folder) as ledger:
        ledger.watch(model, optimizer)
        for step in range(3):
            optimizer.zero_grad()
            loss = model(torch.full((1, 2), 2.0**step)).sum()
            loss.backward()
            optimizer.step()
            ledger.step(model, optimizer, loss=loss, batch=step)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps that resumed once. Not to be changed."""
    folder = tmp_path_factory.mktemp("verdicts") / "whole"
    run(folder, 2, first=2, model=run(folder, 2))
    return folder


def stopping(step: int, error: BaseException) -> Callable[[int, Any, Any], None]:
    def stop(number: int, model: Any, optimizer: Any) -> None:
        if number == step:
            raise error

    return stop


def crashed(folder: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        run(folder, before_step=stopping(3, ZeroDivisionError("planted")))


def closed_while_it_crashed(folder: Path) -> None:
    """Without a `with` statement."""
    ledger = dash_attn.ledger(folder)
    try:
        run_with(ledger)
        raise ZeroDivisionError("planted")
    finally:
        ledger.close()


def run_with(ledger: Any) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    ledger.step(model, loss=model(torch.ones(1, 4)).sum())


def killed(folder: Path) -> None:
    """No code of ours runs after SIGKILL: the file ends behind a step."""
    run(folder)
    cut_behind(folder / FILE, -2)


def full_disk(folder: Path) -> None:
    patch = pytest.MonkeyPatch()

    def fill(step: int, model: Any, optimizer: Any) -> None:
        if step == 3:
            patch.setattr("dash_attn.ledgers.format.os.pwrite", no_space)

    with pytest.warns(RuntimeWarning, match="No space left on device"):
        run(folder, before_step=fill)
    patch.undo()


def no_space(*_: Any) -> int:
    raise OSError(28, "No space left on device")


def without(phase: str) -> Callable[[Path], None]:
    return lambda folder: run(folder, left_out=(phase,)) and None


LACKING: dict[str, tuple[Callable[[Path], Any], str]] = {
    "crashed": (crashed, "rank 0: B ended by ZeroDivisionError: planted"),
    "killed": (killed, "rank 0: B has no end: the process was killed"),
    "full disk": (full_disk, "rank 0: B has no end: the process was killed, its disk was full"),
    "shorter": (lambda folder: run(folder, 3), "rank 0: step 3 of A alone"),
    "no step": (lambda folder: run(folder, 0), "no step is in both"),
    "no batch": (without("batch"), "rank 0: A alone has batch, in 4 steps"),
    "no loss": (without("loss"), "rank 0: A alone has loss, in 4 steps"),
    "no optimizer": (without("optimizer"), "rank 0: A alone has optimizer, in 4 steps"),
    "more detail": (lambda folder: run(folder, detail=range(1, 3)), "rank 0: B alone has forward, in 2 steps"),
}
SHORTER = ("crashed", "killed", "full disk", "shorter", "more detail")


@pytest.mark.parametrize("how", LACKING)
def test_a_run_that_lacks_something_does_not_agree(how: str, whole: Path, tmp_path: Path) -> None:
    make, lacking = LACKING[how]
    make(tmp_path)
    code, first, printed = said(whole, tmp_path)
    assert (code, first.split(":")[0]) == (INCOMPLETE, "Not complete")
    steps = {"no step": "the states they start with", **dict.fromkeys(SHORTER[:4], "steps 0 to 2")}.get(how, "steps 0 to 3")
    assert f"agree only as far as both go, {steps}." in first
    assert lacking in printed
    assert said(tmp_path, whole)[0] == INCOMPLETE
    assert said(tmp_path, tmp_path)[0] == (AGREE if how not in ("crashed", "killed", "full disk", "no step") else INCOMPLETE)
    code, first, printed = said(whole, tmp_path, "--partial")
    assert code == (AGREE if how in SHORTER else INCOMPLETE)
    if how in SHORTER:
        assert first.startswith("The runs agree as far as both go: ")
        assert f"note: {lacking}" in printed


def test_a_whole_run_agrees(whole: Path, tmp_path: Path) -> None:
    """The control of the test above, with and without a resume."""
    run(tmp_path)
    for options in ((), ("--partial",), ("--first",), ("--rank", "0")):
        code, first, _ = said(whole, tmp_path, *options)
        assert (code, first.split(":")[0]) == (AGREE, "The runs agree")


def test_a_ledger_that_is_closed_by_hand_in_a_crash_says_so(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        closed_while_it_crashed(tmp_path / "a")
    try:
        raise KeyError("being handled: not the run's")
    except KeyError:
        ledger = dash_attn.ledger(tmp_path / "b")
        run_with(ledger)
        ledger.close()
    assert "rank 0: A ended by ZeroDivisionError: planted" in said(tmp_path / "a", tmp_path / "b")[2]
    assert said(tmp_path / "b", tmp_path / "b")[0] == AGREE


def test_steps_that_nobody_recorded_are_lacking(tmp_path: Path) -> None:
    run(tmp_path, 2, first=6, model=run(tmp_path, 2))
    code, _, printed = said(tmp_path, tmp_path)
    assert code == INCOMPLETE
    assert "rank 0: B lacks 4 steps from 2 to 5 between others" in printed


def test_a_state_that_was_given_up_is_not_compared(whole: Path, tmp_path: Path) -> None:
    """The second stint started wrong, and the third one went back behind it."""
    model = run(tmp_path, 2)
    kept = {name: value.clone() for name, value in model[0].state_dict().items()}, model[1].state_dict()
    with torch.no_grad():
        model[0].weight += 1
    run(tmp_path, 1, first=3, model=model)
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    layer.load_state_dict(kept[0])
    again = layer, torch.optim.AdamW(layer.parameters())
    run(tmp_path / "other", 2)
    again[1].load_state_dict(run(tmp_path / "another", 2)[1].state_dict())
    run(tmp_path, 2, first=2, model=again)
    assert said(whole, tmp_path)[0] == AGREE


def damages(data: bytes, ends: list[int], count: int) -> Iterator[bytes]:
    """Cut off anywhere, at every record; zeros behind it, or in place of its end; flipped bytes. `count`: how many places are tried."""
    source = random.Random(0)
    for cut in (*range(16), *ends[:-1], *source.sample(range(len(data)), count)):
        yield data[:cut]
        yield data[:cut] + bytes(source.choice((1, 12, 13, 512, 4096)))
    yield from (data + bytes(count) for count in (1, 12, 13, 4096))
    for place in source.sample(range(len(data)), count):
        yield data[:place] + bytes([data[place] ^ (1 << source.randrange(8))]) + data[place + 1 :]


@pytest.mark.parametrize("places", [100, pytest.param(None, marks=pytest.mark.exhaustive, id="all")])
def test_a_damaged_ledger_never_agrees(places: int | None, whole: Path, tmp_path: Path) -> None:
    data, file = (whole / FILE).read_bytes(), tmp_path / FILE
    tried = {INCOMPLETE: 0, ERROR: 0}
    for damaged in damages(data, [record.end for record in records(whole / FILE)], places or len(data)):
        file.write_bytes(damaged)
        code, first, _ = said(whole, tmp_path)
        tried[code] += 1  # a KeyError: an exit code that says something else
        assert first.startswith("Not complete" if code == INCOMPLETE else "dash-attn: error: ")
        assert said(whole, tmp_path, "--json")[0] == code
    assert min(tried.values()) > 40
    file.write_bytes(data)
    assert said(whole, tmp_path)[0] == AGREE


@pytest.mark.parametrize("place", [-2, -3])
def test_a_step_that_was_not_written_is_lacking(place: int, tmp_path: Path) -> None:
    """Though the run went on, and ended well: a device that failed did not tell its last step."""
    run(tmp_path)
    file = tmp_path / FILE
    data, gone = file.read_bytes(), list(records(file))[place]
    file.write_bytes(data[: gone.place] + data[gone.end :])
    assert said(tmp_path, tmp_path)[0] == INCOMPLETE


def test_zeros_behind_the_last_record_are_cut_off_by_a_resume(whole: Path, tmp_path: Path) -> None:
    """Also where a record was begun: the file had its size before it had its bytes."""
    model = run(tmp_path / "b", 2)
    file = tmp_path / "b" / FILE
    size, last = file.stat().st_size, list(records(file))[-1]
    os.truncate(file, last.place + 20)
    os.truncate(file, size + 4096)
    assert said(whole, tmp_path / "b")[0] == INCOMPLETE
    run(tmp_path / "b", 2, first=2, model=model)
    assert said(whole, tmp_path / "b")[0] == AGREE


def test_ledgers_of_the_first_version_are_read(tmp_path: Path) -> None:
    """What they did not record is not compared."""
    exact_run(tmp_path / "now")
    code, first, printed = said(OLD, tmp_path / "now")
    assert (code, first.split(":")[0]) == (AGREE, "The runs agree"), printed
    assert "of steps 0 to 2, rank 0." in first
    shutil.copytree(OLD, tmp_path / "killed")
    cut_behind(tmp_path / "killed" / FILE, -1)
    assert said(OLD, tmp_path / "killed")[0] == INCOMPLETE
    assert said(OLD, tmp_path / "killed", "--partial")[0] == AGREE


def test_runs_that_follow_each_other_have_no_step_in_common(tmp_path: Path) -> None:
    """What one ended with is what the other started with, and that is no run that was repeated."""
    run(tmp_path / "b", 2, first=2, model=run(tmp_path / "a", 2))
    for options in ((), ("--partial",)):
        code, _, printed = said(tmp_path / "a", tmp_path / "b", *options)
        assert (code, "no step is in both" in printed) == (INCOMPLETE, True)


@pytest.mark.parametrize(("code", "verdict"), [(None, AGREE), (0, AGREE), (1, INCOMPLETE)])
def test_an_exit_of_the_program_is_a_good_end_if_its_code_is(code: int | None, verdict: int, tmp_path: Path) -> None:
    def leave(step: int, *given: object) -> None:
        if step == 2:
            sys.exit(code)

    for name in "ab":
        with pytest.raises(SystemExit):
            run(tmp_path / name, before_step=leave)
    assert said(tmp_path / "a", tmp_path / "b")[0] == verdict


def test_a_file_of_zeros_is_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(bytes(4096))
    run(tmp_path)
    assert said(tmp_path, tmp_path)[0] == AGREE
