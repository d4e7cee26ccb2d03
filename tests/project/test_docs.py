"""What the pages of docs/ show runs, and what their tables say is so."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dash_attn
import stand_ins
from dash_attn import Mask, ScheduleError
from dash_attn.cli.main import _parser, main
from dash_attn.distributed.micro_batches.tree import fitting_ranks, tree_sum
from dash_attn.scheduling import GENERATORS, Problem, generate
from dash_attn.scheduling.order import ALL_GUARANTEES, CONTEXT_PARALLEL_INVARIANT
from dash_attn.tools.doctor import CHECKS
from doc_pages import DOCS, blocks, rows

DETERMINISM, MIGRATION, INDEX = ((DOCS / name).read_text() for name in ("determinism.md", "migration.md", "index.md"))
LOG, ROADMAP, EXAMPLES, DISTRIBUTED = ((DOCS / name).read_text() for name in ("log.md", "roadmap.md", "examples.md", "distributed.md"))

README = DOCS.parent / "README.md"


def run(code: str, **names: Any) -> dict[str, Any]:
    exec(compile(code, "<docs>", "exec"), names)
    return names


@pytest.mark.parametrize("code", blocks(INDEX, "python") + blocks(DETERMINISM, "python"))
def test_blocks_run(code: str) -> None:
    run(code)


def test_blocks_of_rollouts_run() -> None:
    """One after another, in a process of its own: doors stay open."""
    pytest.importorskip("transformers")
    code = "\n".join(blocks((DOCS / "rollouts.md").read_text(), "python"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "by construction  Linear: in blocks of 32 rows" in done.stdout


FIRST_BLOCKS = {path.name: found[0] for path in [README, *sorted(DOCS.rglob("*.md"))] if (found := blocks(path.read_text(), "python"))}
RUN_ELSEWHERE = ["README", "determinism", "distributed", "index", "long-sequences", "migration", "rollouts"]  # with their other blocks
ONE_RANK = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # as torchrun says it
IN_TURN = """
import sys
for path in sys.argv[1:]:
    exec(compile(open(path).read(), path, "exec"), {})
"""


@pytest.mark.parametrize(
    "pages",
    [
        pytest.param([page for page in FIRST_BLOCKS if page.removesuffix(".md") not in RUN_ELSEWHERE], id="together"),
        *(pytest.param([page], id=page, marks=pytest.mark.exhaustive) for page in FIRST_BLOCKS),
    ],
)
def test_first_blocks_run_as_they_stand(pages: list[str], tmp_path: Path) -> None:
    """In a folder of their own, with nothing imported or made before."""
    assert len(FIRST_BLOCKS) > 12
    for page in pages:
        (tmp_path / page).write_text(FIRST_BLOCKS[page])
    command, env = [sys.executable, "-c", IN_TURN, *pages], os.environ | ONE_RANK
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def test_commands_of_all_pages_are_understood() -> None:
    """Those of pages that run them, too. A file that is named is one of the repository, or one that commands write."""
    pages = [README, *(README.parent / name for name in ("DESIGN.md", "CONTRIBUTING.md", "RELEASING.md")), *DOCS.rglob("*.md")]
    text = "\n".join(block.replace("\\\n", " ") for path in pages for block in blocks(path.read_text(), "sh"))
    commands = [words[1:] for line in text.splitlines() if (words := shlex.split(line, comments=True))[:1] == ["dash-attn"]]
    assert len(commands) > 20
    for words in commands:
        _parser().parse_args(words)
    assert all((README.parent / script).exists() for script in re.findall(r"python (examples/\S+)", text))


@pytest.mark.parametrize("command", [line for block in blocks(DETERMINISM, "sh") for line in block.splitlines()])
def test_determinism_commands_work(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    length = "1024" if "--ranks" in command else "400"  # chunks of whole tiles, on four ranks
    quick = ["--seqlen", length, "--heads", "1", "--head-dim", "16", "--batch", "1", "--runs", "2", "--no-fresh"]
    if "--against" in command:
        main(["verify", "--output", "here.json", *quick])
    assert main([*shlex.split(command, comments=True)[1:], *quick]) == 0


def test_blocks_for_many_ranks_run() -> None:
    """One after another, in the only process of a group, as torchrun would start it."""
    code = "import torch\ntorch.distributed.init_process_group('gloo')\n" + "\n".join(blocks(DISTRIBUTED, "python"))
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | ONE_RANK, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_tables_for_many_ranks_are_what_the_code_says() -> None:
    sums = {int(count): cell.strip("`") for count, cell in rows(DISTRIBUTED, 2) if count.isdecimal() and "+" in cell}
    fitting = {int(count): cell for count, cell in rows(DISTRIBUTED, 2) if count.isdecimal() and "," in cell}
    assert len(sums) == len(fitting) == 4
    assert fitting == {count: ", ".join(map(str, fitting_ranks(count))) for count in fitting}
    for count, formula in sums.items():
        assert f"({formula})" == tree_sum([str(index) for index in range(count)], lambda left, right: f"({left} + {right})")


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
    assert tuple(offered) == (*ALL_GUARANTEES, CONTEXT_PARALLEL_INVARIANT)


def test_checks_and_tests_that_are_named_exist() -> None:
    table = DETERMINISM.split("## What breaks it")[1].split("Two things")[0]
    named = {name for *_, checks in rows(table, 3)[2:] for name in re.findall(r"`([\w-]+)`", checks)}
    assert len(named) > 10
    assert named <= set(CHECKS)
    files = set(re.findall(r"`(test_\w+\.py)`", DETERMINISM))
    assert len(files) == 12
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


def recipes() -> list[Any]:
    """Blocks that stand alone: all that are titled, but neither before nor after."""
    found = re.findall(r'^```python title="([^"]+)"\n(.*?)^```', MIGRATION, re.S | re.M)
    slow = {
        "TRL",
        "Megatron-Core",
        "torchtitan",
        "Hugging Face transformers",
        "padding",
        "torch.compile",
    }  # of which tests/ has the calls, too
    alone = [(title, code) for title, code in found if title not in ("before", "after")]
    return [pytest.param(code, id=title, marks=pytest.mark.exhaustive if title in slow else ()) for title, code in alone]


@pytest.mark.parametrize("code", recipes())
def test_recipes_run(code: str) -> None:
    for package in ("transformers", "trl", "megatron.core", "torchtitan"):
        if f"from {package}" in code:
            pytest.importorskip(package)
    if "torch.compile" in code and not shutil.which("g++"):
        pytest.skip("torch.compile needs a C++ compiler")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_every_section_has_an_example() -> None:
    assert len(pairs()) == 5
    assert len(recipes()) == 7
    assert MIGRATION.count("\n## ") == 9
    assert all('python title="' in section for section in MIGRATION.split("\n## ")[1:])


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


def entries() -> list[tuple[str, str]]:
    """(title, text) of every entry of the log."""
    parts = re.split(r"^### ", LOG, flags=re.M)[1:]
    return [(part.split("\n", 1)[0], part.split("\n", 1)[1]) for part in parts]


def anchor(title: str) -> str:
    """As the site makes them."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip())


@pytest.mark.parametrize(("title", "text"), entries(), ids=[title for title, _ in entries()])
def test_log_entries_have_date_commit_and_verdict(title: str, text: str) -> None:
    said = re.match(r"\n\*(\d{4}-\d\d-\d\d), ([0-9a-f]{7}), \*\*(kept|lost|open)\*\*\.\*\n", text)
    assert said is not None
    if said[3] == "open":
        assert f"log.md#{anchor(title)})" in ROADMAP, "what is open stands in the roadmap"


def test_what_is_to_try_is_in_the_roadmap_only() -> None:
    assert len(entries()) > 60
    assert not re.findall(r"to try\b|to do\b", LOG.split("## Backward kernel")[1], re.I)
    linked = set(re.findall(r"log\.md#([\w-]+)\)", ROADMAP))
    assert linked <= {anchor(title) for title, _ in entries()}


def test_examples_are_described_as_they_are() -> None:
    folder = DOCS.parent / "examples"
    described = [(script.strip("`"), line.strip("`")) for script, _, line in rows(EXAMPLES, 3) if script.startswith("`")]
    assert {script for script, _ in described} == {f"examples/{path.name}" for path in folder.glob("train_*.py")}
    for script, line in described:
        changed = [text for text in (DOCS.parent / script).read_text().splitlines() if "the one changed line" in text]
        assert line in changed[0]
