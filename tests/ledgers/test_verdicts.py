"""What exit code 0 of `dash-attn diff` means, and what each of the others."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dash_attn
from dash_attn.cli.main import main
from dash_attn.ledgers import compare_runs
from dash_attn.ledgers.entries import Entry
from dash_attn.ledgers.framing import END, HEAD, LAYOUT, MARK, STEP, STEP_FIELDS, as_json, framed, records

FILE = "rank-0.ledger"
OLD = Path(__file__).parent / "format_1"  # written by the first version that had ledgers, of `exact_run`
AGREE, DIFFER, ERROR, INCOMPLETE = 0, 1, 2, 3


def run(
    folder: Path,
    steps: int = 4,
    *,
    first: int = 0,
    before_step: Callable[[int, Any, Any], None] = lambda step, model, optimizer: None,
    left_out: tuple[str, ...] = (),
    model: Any = None,
    **options: Any,
) -> Any:
    """A training of one layer with momentum and dropout's generator left alone. The state it ends with."""
    if model is None:
        torch.manual_seed(0)
        layer = nn.Linear(4, 4)
        model = layer, torch.optim.AdamW(layer.parameters())
    layer, optimizer = model
    with dash_attn.ledger(folder, resume_from=first or None, **options) as ledger:
        ledger.watch(layer, optimizer)
        for step in range(first, first + steps):
            before_step(step, layer, optimizer)
            layer.zero_grad()
            batch = torch.full((2, 4), float(step))
            loss = layer(batch).square().mean()
            loss.backward()
            optimizer.step()
            given = {"optimizer": optimizer, "loss": loss, "batch": batch}
            ledger.step(layer, **{name: value for name, value in given.items() if name not in left_out})
    return model


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


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Exit code, first line and all lines of a comparison."""

    def ask(a: Path, b: Path, *options: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["diff", str(a), str(b), *options])
        printed = "".join(capsys.readouterr())
        return code, printed.splitlines()[0], printed

    return ask


Said = Callable[..., tuple[int, str, str]]


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


def cut_behind(file: Path, place: int) -> None:
    """Without the records from `place` on."""
    os.truncate(file, list(records(file))[place].place)


def full_disk(folder: Path) -> None:
    patch = pytest.MonkeyPatch()

    def fill(step: int, model: Any, optimizer: Any) -> None:
        if step == 3:
            patch.setattr("dash_attn.ledgers.writing.os.pwrite", no_space)

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
def test_a_run_that_lacks_something_does_not_agree(how: str, whole: Path, tmp_path: Path, said: Said) -> None:
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


def test_a_whole_run_agrees(whole: Path, tmp_path: Path, said: Said) -> None:
    """The control of the test above, with and without a resume."""
    run(tmp_path)
    for options in ((), ("--partial",), ("--first",), ("--rank", "0")):
        code, first, _ = said(whole, tmp_path, *options)
        assert (code, first.split(":")[0]) == (AGREE, "The runs agree")


def test_a_ledger_that_is_closed_by_hand_in_a_crash_says_so(tmp_path: Path, said: Said) -> None:
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


def test_steps_that_nobody_recorded_are_lacking(tmp_path: Path, said: Said) -> None:
    run(tmp_path, 2, first=6, model=run(tmp_path, 2))
    code, _, printed = said(tmp_path, tmp_path)
    assert code == INCOMPLETE
    assert "rank 0: B lacks 4 steps from 2 to 5 between others" in printed


def test_a_state_that_was_given_up_is_not_compared(whole: Path, tmp_path: Path, said: Said) -> None:
    """The second segment started wrong, and the third one went back behind it."""
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
def test_a_damaged_ledger_never_agrees(places: int | None, whole: Path, tmp_path: Path, said: Said) -> None:
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
def test_a_step_that_was_not_written_is_lacking(place: int, tmp_path: Path, said: Said) -> None:
    """Though the run went on, and ended well: a device that failed did not tell its last step."""
    run(tmp_path)
    file = tmp_path / FILE
    data, gone = file.read_bytes(), list(records(file))[place]
    file.write_bytes(data[: gone.place] + data[gone.end :])
    assert said(tmp_path, tmp_path)[0] == INCOMPLETE


def test_zeros_behind_the_last_record_are_cut_off_by_a_resume(whole: Path, tmp_path: Path, said: Said) -> None:
    """Also where a record was begun: the file had its size before it had its bytes."""
    model = run(tmp_path / "b", 2)
    file = tmp_path / "b" / FILE
    size, last = file.stat().st_size, list(records(file))[-1]
    os.truncate(file, last.place + 20)
    os.truncate(file, size + 4096)
    assert said(whole, tmp_path / "b")[0] == INCOMPLETE
    run(tmp_path / "b", 2, first=2, model=model)
    assert said(whole, tmp_path / "b")[0] == AGREE


def test_ledgers_of_the_first_version_are_read(tmp_path: Path, said: Said) -> None:
    """What they did not record is not compared."""
    exact_run(tmp_path / "now")
    code, first, printed = said(OLD, tmp_path / "now")
    assert (code, first.split(":")[0]) == (AGREE, "The runs agree"), printed
    assert "of steps 0 to 2, rank 0." in first
    shutil.copytree(OLD, tmp_path / "killed")
    cut_behind(tmp_path / "killed" / FILE, -1)
    assert said(OLD, tmp_path / "killed")[0] == INCOMPLETE
    assert said(OLD, tmp_path / "killed", "--partial")[0] == AGREE


def of_ranks(folder: Path, monkeypatch: pytest.MonkeyPatch, size: int, fault: Callable[[int, int, Any], None] | None = None) -> Path:
    """One rank after the other: all have the same weights."""
    for rank in range(size):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(size))
        run(folder, 3, before_step=lambda step, model, _, rank=rank: fault and fault(rank, step, model))  # type: ignore[misc]
    return folder


def corrupt_rank_1(rank: int, step: int, model: Any) -> None:
    if (rank, step) == (1, 1):
        with torch.no_grad():
            model.weight[0, 0] += 1


def test_every_rank_of_a_run_must_have_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Said) -> None:
    a, b, one = (of_ranks(tmp_path / name, monkeypatch, size) for name, size in (("a", 2), ("b", 2), ("one", 1)))
    assert said(a, b)[0] == AGREE
    assert said(a, one)[0] == said(one, a)[0] == AGREE
    (b / "rank-1.ledger").unlink()
    for pair, run_name in (((a, b), "B"), ((one, b), "B"), ((b, b), "A")):
        code, _, printed = said(*pair)
        assert code == INCOMPLETE
        assert f"{run_name} has no file of rank 1 of 2" in printed
        assert said(*pair, "--partial")[0] == INCOMPLETE  # it is not shorter: a part was lost
    assert said(a, b, "--rank", "0")[0] == AGREE  # all that was asked for
    (a / "rank-1.ledger").rename(a / "rank-0.ledger")
    assert "is the file of rank 1, under the name of another" in said(a, one)[2]


def test_every_rank_must_have_the_steps_of_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Said) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in range(2):
        run(tmp_path, 3 - rank, rank=rank)
    code, _, printed = said(tmp_path, tmp_path)
    assert code == INCOMPLETE
    assert "rank 1: A lacks step 2 of its rank 0" in printed


def test_ranks_that_are_numbered_by_hand(tmp_path: Path, said: Said) -> None:
    """Nobody knows how many there are: what the other run has is asked for."""
    for name, ranks in (("a", 2), ("b", 2), ("c", 1)):
        for rank in range(ranks):
            run(tmp_path / name, rank=rank)
    assert said(tmp_path / "a", tmp_path / "b")[0] == AGREE
    assert "B has no file of rank 1 of 2" in said(tmp_path / "a", tmp_path / "c")[2]
    files = tmp_path / "a" / FILE, tmp_path / "b" / "rank-1.ledger"
    assert said(*files)[0] == AGREE  # named one by one
    cut_behind(files[1], -1)
    assert said(*files)[0] == INCOMPLETE


def test_runs_that_follow_each_other_have_no_step_in_common(tmp_path: Path, said: Said) -> None:
    """What one ended with is what the other started with, and that is no run that was repeated."""
    run(tmp_path / "b", 2, first=2, model=run(tmp_path / "a", 2))
    for options in ((), ("--partial",)):
        code, _, printed = said(tmp_path / "a", tmp_path / "b", *options)
        assert (code, "no step is in both" in printed) == (INCOMPLETE, True)


def test_a_run_that_went_on_with_fewer_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Said) -> None:
    """What the rank that left had recorded past that is no part of the run: it may not be compared."""
    of_ranks(tmp_path / "b", monkeypatch, 2, lambda rank, step, model: rank and step == 2 and model.weight.data.zero_())
    of_ranks(tmp_path / "a", monkeypatch, 1)
    assert said(tmp_path / "a", tmp_path / "b")[0] == DIFFER
    torch.manual_seed(0)
    model = run(tmp_path / "first two", 2)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    run(tmp_path / "b", 1, first=2, model=model)
    cut_behind(tmp_path / "b" / "rank-1.ledger", -1)  # killed, as ranks are that a job goes on without
    assert said(tmp_path / "a", tmp_path / "b")[0] == AGREE


@pytest.mark.parametrize("sizes", [(2, 2), (1, 2), (2, 1)], ids=str)
def test_the_rank_is_named(sizes: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Said) -> None:
    """Weights are compared on every rank, also beside a run of one. Control: without the fault, above."""
    faults = [corrupt_rank_1 if size == 2 and size not in sizes[:place] else None for place, size in enumerate(sizes)]
    a, b = (of_ranks(tmp_path / str(place), monkeypatch, size, faults[place]) for place, size in enumerate(sizes))
    code, first, _ = said(a, b)
    assert (code, "first in step 1 on rank 1." in first) == (DIFFER, True)
    assert said(a, b, "--rank", "1")[0] == DIFFER
    assert said(a, b, "--rank", "0")[0] == AGREE
    assert "no rank 5 can be compared" in said(a, b, "--rank", "5")[2]


def changed(name: str, value: Any) -> Callable[[int, Any, Any], None]:
    def change(step: int, model: Any, optimizer: Any) -> None:
        if step == 2:
            optimizer.param_groups[0][name] = value

    return change


@pytest.mark.parametrize(("name", "value"), [("lr", 1.0000001e-3), ("weight_decay", 0.1), ("betas", (0.9, 0.99))])
def test_a_hyper_parameter_is_named_not_a_module(name: str, value: Any, whole: Path, tmp_path: Path) -> None:
    run(tmp_path, before_step=changed(name, value))
    first = compare_runs(whole, tmp_path).first
    assert first is not None
    assert (first.step, first.before_it, first.culprit.direction, first.culprit.module) == (2, False, "update", None)
    assert first.culprit.why == f"hyper-parameters of the optimizer differ: group 0 {name}"
    assert first.culprit.inputs_agreed
    assert first.pair.element is not None


def lost(model: Any) -> Any:
    return model[0], torch.optim.AdamW(model[0].parameters())


def emptied(model: Any) -> Any:
    """Of the right shapes, with nothing in it."""
    layer, optimizer = lost(model)
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    settings = optimizer.param_groups[0]
    settings["lr"], kept = 0.0, settings["lr"]
    optimizer.step()
    settings["lr"] = kept
    return layer, optimizer


@pytest.mark.parametrize(("change", "tensor"), [(lost, "of states"), (emptied, "of steps")])
def test_a_lost_state_of_the_optimizer_is_named_before_the_first_step(change: Any, tensor: str, whole: Path, tmp_path: Path) -> None:
    """Between two steps at which all of it is recorded."""
    run(tmp_path, 2, first=2, model=change(run(tmp_path, 2)))
    found = compare_runs(whole, tmp_path)
    assert found.first is not None
    assert (found.first.step, found.first.before_it, found.first.pair.entry.tensor) == (2, True, tensor)
    assert "the optimizer has lost its state" in found.first.culprit.why
    assert any(f"B resumed at step 2 from another state than it had after step 1: optimizer count {tensor}" in note for note in found.notes)


def test_a_learning_rate_that_a_schedule_changed_is_no_lost_state(tmp_path: Path, said: Said) -> None:
    """A checkpoint has the learning rate of the next step, the record of a step its own."""

    def warm_up(step: int, model: Any, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] = 1e-3 * (step + 1)

    run(tmp_path / "a", before_step=warm_up)
    model = run(tmp_path / "b", 2, before_step=warm_up)
    warm_up(2, *model)
    run(tmp_path / "b", 2, first=2, model=model, before_step=warm_up)
    assert said(tmp_path / "a", tmp_path / "b")[0] == AGREE


def test_a_generator_that_changes_nothing_is_a_note(tmp_path: Path, said: Said) -> None:
    """Somebody draws from it, in both runs: a logger, a retry. What is behind it is the verdict."""

    def draw(step: int, model: Any, optimizer: Any) -> None:
        random.random()

    def draw_and_change(step: int, model: Any, optimizer: Any) -> None:
        random.random()
        model.weight.data += step == 3

    def draw_and_change_a_gradient(step: int, model: Any, optimizer: Any) -> None:
        random.random()
        if step == 0:
            model.bias.register_hook(lambda gradient: gradient + 1)

    for name, before_step in (("a", draw), ("b", draw), ("weight", draw_and_change), ("gradient", draw_and_change_a_gradient)):
        random.seed(name)
        run(tmp_path / name, before_step=before_step)
    code, _, printed = said(tmp_path / "a", tmp_path / "b")
    assert code == AGREE
    assert "note: the generator python has another state since before step 0, which changed nothing" in printed
    for name, step, phase in (("weight", 3, "loss"), ("gradient", 0, "gradient")):  # in step 0 the loss agrees: nothing was drawn for it
        found = compare_runs(tmp_path / "a", tmp_path / name)
        assert found.first is not None
        assert (found.first.step, found.first.before_it, found.first.pair.entry.phase) == (step, False, phase)
        assert "the generator python has another state since before step 0" in found.notes


def test_a_generator_that_parts_the_runs_is_the_verdict(tmp_path: Path) -> None:
    """The control of the one above: another batch comes from it, in the step after it differed first."""

    def noise(step: int, model: Any, optimizer: Any) -> None:
        model.bias.data += torch.rand(4)

    def more_noise(step: int, model: Any, optimizer: Any) -> None:
        torch.rand(int(step == 2))
        noise(step, model, optimizer)

    run(tmp_path / "a", before_step=noise)
    run(tmp_path / "b", before_step=more_noise)
    model = run(tmp_path / "c", 2, before_step=noise)
    torch.manual_seed(7)
    run(tmp_path / "c", 2, first=2, model=model, before_step=noise)
    drawn, lost_state = (compare_runs(tmp_path / "a", tmp_path / other).first for other in "bc")
    assert drawn is not None
    assert (drawn.step, drawn.pair.entry.phase) == (2, "loss")  # it agreed until then
    assert lost_state is not None
    assert (lost_state.step, lost_state.before_it, lost_state.pair.entry.tensor) == (2, True, "torch cpu")


def test_json_is_printed_on_every_exit(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "shorter", 3)
    run(tmp_path / "other", before_step=changed("lr", 0.5))
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / FILE).write_bytes(b"something else")
    asked = {"shorter": "incomplete", "other": "differ", "damaged": "error", "nowhere": "error", str(whole): "agree"}
    for name, verdict in asked.items():
        capsys.readouterr()
        code = main(["diff", str(whole), str(tmp_path / name), "--json"])
        found = json.loads(capsys.readouterr().out)
        assert (found["verdict"], found["exit_code"], found["agree"]) == (verdict, code, verdict == "agree")
    for words in (["--rank", "nine"], ["--no-such-option"], ["a third run"]):
        with pytest.raises(SystemExit, match="2"):
            main(["diff", "a", "b", "--json", *words])
        assert json.loads(capsys.readouterr().out)["verdict"] == "error"


def test_the_exit_codes_are_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["diff", "--help"])
    shown = capsys.readouterr().out
    page = (Path(__file__).parents[2] / "docs" / "ledger.md").read_text()
    for code in (AGREE, DIFFER, ERROR, INCOMPLETE):
        assert f"\n  {code}  " in shown
        assert f"\n| {code} | " in page


STEPS, TENSORS = 5000, 2000


def large_ledger(folder: Path, seed: int) -> Path:
    """Of tensors that no other seed has."""
    folder.mkdir()
    entries = [Entry("gradient", f"layers.{place}", "weight", "float32", (4, 4)).to_json() for place in range(TENSORS)]
    sums = np.random.default_rng(seed).integers(2**63, size=(STEPS, TENSORS), dtype=np.uint64)
    head = {"first_step": 0, "rank": 0, "world_size": 1, "environment": {}}
    with (folder / FILE).open("wb") as file:
        file.write(MARK + framed(HEAD, as_json(head)) + framed(LAYOUT, as_json({"entries": entries, "attention": []})))
        for step in range(STEPS):
            file.write(framed(STEP, STEP_FIELDS.pack(step, 0.0, 0, 0) + sums[step].tobytes()))
        file.write(framed(END, as_json({"next_step": STEPS, "reason": ""})))
    return folder


MEASURED = """
import pathlib, re, sys
from dash_attn.cli.main import main
code = main(sys.argv[1:])
print(code, re.search(r"VmHWM:\\s+(\\d+) kB", pathlib.Path("/proc/self/status").read_text())[1], file=sys.stderr)
"""


def test_long_runs_that_differ_everywhere_take_little_time_and_memory(tmp_path: Path) -> None:
    a, b = (large_ledger(tmp_path / str(seed), seed) for seed in range(2))
    for option, told in (((), f"Steps that differ: {STEPS} of {STEPS}."), (("--first",), "Later steps were not compared (--first).")):
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", MEASURED, "diff", str(a), str(b), *option], capture_output=True, text=True, timeout=120, check=True
        )
        code, kilobytes = done.stderr.split()
        assert int(code) == DIFFER
        assert told in done.stdout
        assert time.perf_counter() - start < 20  # 1 s here
        assert int(kilobytes) < 200 * 1024  # 47 MiB here: PyTorch alone would take more
