"""What README, DESIGN and the first pages show runs, and their links lead somewhere. Their figures: test_results.py."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dash_attn.cli.main import main
from dash_attn.scheduling import GENERATORS
from rooms import PACKAGE, ROOMS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README, DESIGN = (ROOT / "README.md").read_text(), (ROOT / "DESIGN.md").read_text()
INDEX, SIMULATOR, CALL = ((DOCS / f"{name}.md").read_text() for name in ("index", "simulator", "how-a-call-runs"))
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
REFUSED = ("biases other than ALiBi", "double backward", "`torch.func`")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, re.S)


@pytest.mark.parametrize(("page", "most"), [(README, 900), (DESIGN, 1800)], ids=["README", "DESIGN"])
def test_it_is_short_enough_to_be_read(page: str, most: int) -> None:
    assert len(page.split()) <= most
    assert max(len(line) for line in page.splitlines() if not line.startswith("|")) <= 125


@pytest.mark.parametrize("page", [README, INDEX], ids=["README", "index"])
def test_what_is_refused_is_named(page: str) -> None:
    sentence = re.sub(r"\s+", " ", page[page.index("Refused today") :]).split(". ")[0]
    assert all(name in sentence for name in REFUSED)
    assert "paged" not in sentence, "pages are served"


BITS = "\nimport hashlib\nprint(hashlib.sha256(b''.join(x.grad.float().cpu().numpy().tobytes() for x in (q, k, v))).hexdigest())"


EXAMPLES = zip(("README", "index"), [*blocks(README, "python"), *blocks(INDEX, "python")], ((), pytest.mark.exhaustive), strict=True)


@pytest.mark.parametrize("example", [pytest.param(example, id=name, marks=marks) for name, example, marks in EXAMPLES])
def test_the_examples_give_the_same_bits_in_every_run(example: str) -> None:
    """What they print, and the gradients that they promise."""
    runs = [subprocess.run([sys.executable, "-c", example + BITS], capture_output=True, text=True, timeout=120) for _ in range(2)]
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr
    assert runs[0].stdout == runs[1].stdout
    assert "nan" not in runs[0].stdout


def plan_commands() -> list[str]:
    """Of the pages that say how to look at schedules. Long ones go on behind a backslash."""
    lines = "\n".join(block.replace("\\\n", " ") for page in (README, SIMULATOR, CALL) for block in blocks(page, "sh")).splitlines()
    return [line for line in lines if line.startswith("dash-attn plan")]


@pytest.mark.parametrize("command", plan_commands())
def test_plan_commands_work(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out
    for name in re.findall(r"--(?:gantt|trace) (\S+)", command):
        assert (tmp_path / name).stat().st_size > 1000


def test_plan_commands_are_found() -> None:
    assert len(plan_commands()) == 7


def links() -> list[Any]:
    return [
        pytest.param(page.parent / link, id=f"{page.name}: {link}")
        for page in PAGES
        for link in re.findall(r"\]\((?!http|#)([^)#\s]+)(?:#[^)]*)?\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.S))
    ]


@pytest.mark.parametrize("target", links())
def test_links_lead_somewhere(target: Path) -> None:
    assert target.exists()


def test_the_tree_names_every_room() -> None:
    (tree,) = blocks(README, "text")
    named = {
        word.removesuffix("/").removesuffix(".py") for line in tree.splitlines() if (word := line.split()[0]) and line.startswith("  ")
    }
    assert named | {"nn"} == set(ROOMS)
    assert "nn.py" in tree


def test_the_design_has_the_rules_of_the_rooms() -> None:
    """The same table as in test_imports.py, which checks it against the code."""
    section = DESIGN.split("## Rooms")[1].split("## ")[0]
    core = set(re.findall(r"`(\w+)`", re.findall(r"\*Core\* is (.*)\.", section)[0]))
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", section, re.M)
    said = {
        room: set(re.findall(r"`(\w+)`", cells)) | (core if "core" in cells.replace("`", " ").split(",")[0].split() else set())
        for room, cells in rows
    }
    assert said == ROOMS
    assert [room for room, _ in rows] == list(ROOMS)


def test_the_design_has_every_schedule() -> None:
    section = DESIGN.split("## The schedules")[1].split("## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.M)) == {"auto", *GENERATORS}


def test_files_that_the_guide_names_exist() -> None:
    named = set(re.findall(r"`([\w/]+\.(?:py|cuh)|[\w/]+/)`", CALL)) - {"src/dash_attn/"}
    assert len(named) > 30
    known = [path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*")]
    missing = [name for name in sorted(named) if not any(f"/{path}".endswith(f"/{name.rstrip('/')}") for path in known)]
    assert not missing


def test_six_questions_of_a_newcomer_have_an_answer() -> None:
    rows = re.findall(r"^\| (a .*|the .*) \|(.*)\|$", CALL.split("## Where to look")[1].split("## ")[0], re.M)
    assert len(rows) == 6
    assert "def tile_map" in (PACKAGE / "masks/rules.py").read_text()
    assert "store_release(p.semaphores" in (PACKAGE / "backends/hopper/kernels/backward/drain.cuh").read_text()
    assert "cuLaunchKernelEx" in (PACKAGE / "backends/hopper/driver/launch.py").read_text()
    assert "class Order" in (PACKAGE / "scheduling/order.py").read_text()
    assert "class Backend(Protocol)" in (PACKAGE / "backends/__init__.py").read_text()
