"""What the pages of docs/ show runs, and what their tables say is so."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dash_attn
import stand_ins
from dash_attn import GENERATORS, Mask, Problem, ScheduleError, generate
from dash_attn.cli.main import main
from dash_attn.scheduling.order import ALL_GUARANTEES
from dash_attn.tools.doctor import CHECKS

DOCS = Path(__file__).parents[2] / "docs"
DETERMINISM, MIGRATION, INDEX = ((DOCS / name).read_text() for name in ("determinism.md", "migration.md", "index.md"))


def blocks(page: str, fence: str) -> list[str]:
    return re.findall(rf"^```{fence}\n(.*?)^```", page, re.S | re.M)


def rows(page: str, columns: int) -> list[list[str]]:
    """Cells of all table rows with that many columns; \\| is no border."""
    lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in page.splitlines() if line.startswith("|")]
    return [[cell.strip().replace("\\|", "|") for cell in cells] for cells in lines if len(cells) == columns]


def run(code: str, **names: Any) -> dict[str, Any]:
    exec(compile(code, "<docs>", "exec"), names)
    return names


@pytest.mark.parametrize("code", blocks(INDEX, "python") + blocks(DETERMINISM, "python"))
def test_blocks_run(code: str) -> None:
    run(code)


@pytest.mark.parametrize("command", [line for block in blocks(DETERMINISM, "sh") for line in block.splitlines()])
def test_determinism_commands_work(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    quick = ["--seqlen", "400", "--heads", "1", "--runs", "2", "--no-fresh"]
    if "--against" in command:
        main(["verify", "--output", "here.json", *quick])
    assert main([*shlex.split(command, comments=True)[1:], *quick]) == 0


FROM_SOME_NUMBER_ON = (*ALL_GUARANTEES[:2], f"{ALL_GUARANTEES[2]} (N workers or more)")


def guarantees_of(name: str) -> set[tuple[str, ...]]:
    """Of a schedule on masks with and without gangs; N stands for the number of workers."""
    found = set()
    for mask, tiles in (("full", (8, 8)), ("full", (64, 32)), ("causal", (8, 8))):
        try:
            guarantees = generate(name, Problem.from_tiles(mask, *tiles, heads=2), 64).guarantees
        except ScheduleError:  # does not serve the mask
            continue
        found.add(tuple(re.sub(r"\d+", "N", guarantee) for guarantee in guarantees))
    return found


def test_the_table_of_modes_is_what_schedules_say() -> None:
    said = [
        (name, tuple(guarantees.split(", ")))
        for accumulation, schedules, guarantees in rows(DETERMINISM, 3)
        for name in re.findall(r"`(\w+)`", schedules)
        if accumulation.startswith("`ordered`")
    ]
    found = {name: guarantees_of(name) for name in ("auto", *GENERATORS)}
    gangs = {name for name, guarantees in found.items() if FROM_SOME_NUMBER_ON in guarantees}
    expected = {(name, FROM_SOME_NUMBER_ON if name in gangs else min(found[name])) for name in found} | {("auto", ALL_GUARANTEES)}
    assert set(said) == expected
    assert gangs == {"auto", "shift_blocks", "symmetric_shift", "arrival"}
    assert len(said) == len(expected)
    offered = re.findall(r"^\| \d \| `([\w-]+)` \|", DETERMINISM, re.M)
    assert tuple(offered) == ALL_GUARANTEES


def test_checks_and_tests_that_are_named_exist() -> None:
    table = DETERMINISM.split("## What breaks it")[1].split("Two things")[0]
    named = {name for *_, checks in rows(table, 3)[2:] for name in re.findall(r"`([\w-]+)`", checks)}
    assert len(named) > 10
    assert named <= {check.id for check in CHECKS}
    files = set(re.findall(r"`(test_\w+\.py)`", DETERMINISM))
    assert len(files) == 5
    tests = {path.name for path in Path(__file__).parents[1].rglob("test_*.py")}
    assert files <= tests


def pairs() -> list[Any]:
    """(title, before, after) of every example of migration.md."""
    found = []
    for section in MIGRATION.split("\n## ")[1:]:
        title = section.splitlines()[0]
        sides = zip(blocks(section, 'python title="before"'), blocks(section, 'python title="after"'), strict=True)
        found += [pytest.param(before, after, id=f"{title} {number}") for number, (before, after) in enumerate(sides)]
    return found


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("before", "after"), pairs())
def test_after_gives_what_before_gave(before: str, after: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in stand_ins.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    (setup,) = blocks(MIGRATION, "python")
    old, new = (run(setup + code)["out"] for code in (before, after))
    assert new.shape == old.shape
    assert torch.allclose(new, old, atol=1e-5)


def test_every_section_but_the_last_has_an_example() -> None:
    assert len(pairs()) == 5
    assert MIGRATION.count("\n## ") == 5


def mask_rows() -> list[tuple[str, str]]:
    """(condition, mask) of the rows that are one piece of code on either side."""
    found = [
        re.fullmatch(r"`([^`]+)`", left) and re.fullmatch(r"`([^`]+)`", right) and (left[1:-1], right[1:-1])
        for left, right in rows(MIGRATION, 2)
    ]
    return [pair for pair in found if pair and re.search(r"\bj\b", pair[0])]


@pytest.mark.parametrize(("condition", "mask"), mask_rows())
def test_flex_conditions_are_the_masks_beside_them(condition: str, mask: str) -> None:
    values = {"w": 5, "p": 7}
    i, j = torch.arange(20)[:, None], torch.arange(20)
    ours = eval(mask, vars(dash_attn) | values)
    assert isinstance(ours, Mask)
    assert np.array_equal(ours.keep(slice(0, 20), slice(0, 20), 20, 20), eval(condition, values | {"i": i, "j": j}).numpy())


def test_mask_rows_are_found() -> None:
    assert len(mask_rows()) == 4
