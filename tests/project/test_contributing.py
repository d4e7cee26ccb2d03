"""CONTRIBUTING.md: its answers name files that are there, and its steps to add a schedule work in a clean clone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
LEADS = (ROOT / "README.md").read_text(encoding="utf-8") + (ROOT / "DESIGN.md").read_text(encoding="utf-8")
GENERATORS = "src/dash_attn/scheduling/generators"


def test_every_answer_is_a_file_whose_room_the_design_names() -> None:
    answers = re.findall(r"^\| .* \| `([\w/]+\.\w+)` \|$", PAGE.split("## Where would you change")[1].split("\n## ")[0], re.MULTILINE)
    assert len(answers) == 8
    for answer in answers:
        assert (ROOT / "src/dash_attn" / answer).exists(), answer
        assert f"  {answer.split('/')[0]}/" in LEADS, answer


def run(clone: Path, *words: str, **environment: str) -> None:
    """A command of the guide, in the clone."""
    settings = {**os.environ, "PYTHONPATH": f"{clone}/src", **environment}
    done = subprocess.run([sys.executable, "-m", *words], cwd=clone, env=settings, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, f"{old!r} in {path}"
    path.write_text(text.replace(old, new))


def changed(clone: Path) -> set[str]:
    words = ["git", "status", "--short", "--untracked-files=all"]
    return {line[3:] for line in subprocess.run(words, cwd=clone, capture_output=True, text=True, check=True).stdout.splitlines()}


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    if not (ROOT / ".git").exists():
        pytest.skip("a clone needs the repository")
    subprocess.run(["git", "clone", "-q", str(ROOT), str(tmp_path / "clone")], check=True)
    return tmp_path / "clone"


@pytest.mark.exhaustive
def test_a_schedule_is_added_in_three_steps(clone: Path) -> None:
    """A copy of `arrival` under another name: two files of src, and what the command writes."""
    folder = clone / GENERATORS
    (folder / "rising.py").write_text((folder / "arrival.py").read_text().replace("arrival", "rising"))
    edit(folder / "__init__.py", "from .shift import", "from .rising import rising\nfrom .shift import")
    edit(folder / "__init__.py", "alternating, arrival, weave)", "alternating, arrival, weave, rising)")
    edit(folder / "__init__.py", '"arrival", "weave"\n', '"arrival", "weave", "rising"\n')
    run(clone, "pytest", "-q", "-p", "no:cacheprovider", "tests/scheduling/test_golden.py", DASH_ATTN_UPDATE_GOLDEN="1")
    run(clone, "pytest", "-q", "-p", "no:cacheprovider", "-m", "not exhaustive", "tests/scheduling/test_golden.py")
    run(clone, "pytest", "-q", "-p", "no:cacheprovider", "-m", "not exhaustive", "tests/scheduling/test_generators.py", "-k", "rising")
    golden = {"tests/golden/rising.json", "tests/golden/order_hashes.txt"}
    assert changed(clone) == {f"{GENERATORS}/__init__.py", f"{GENERATORS}/rising.py", *golden}
