"""What SECURITY.md and the issue template say of the code is so, and CITATION.cff has the version."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

import pytest

import dash_attn
from dash_attn.backends.hopper.driver.compile import Kernel, cache_folder, write_kernel
from dash_attn.invariance.record import Record
from rooms import PACKAGE

ROOT = Path(__file__).parents[2]
SECURITY = " ".join((ROOT / "SECURITY.md").read_text().split())
TREES = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
RUNS_WHAT_IT_READS = {"dill", "marshal", "pickle", "shelve"}
CONNECTS = {"ftplib", "http", "requests", "smtplib", "socket", "socketserver", "urllib"}


def imported(tree: ast.AST) -> set[str]:
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level}
    return {name.partition(".")[0] for name in names}


def calls_of(tree: ast.AST, function: str) -> list[str]:
    return [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == function]


def test_no_format_is_a_pickle() -> None:
    assert "None is a pickle" in SECURITY
    assert {name for name, tree in TREES.items() if imported(tree) & RUNS_WHAT_IT_READS} == set()
    assert {name for name, tree in TREES.items() if calls_of(tree, "eval") or calls_of(tree, "exec")} == set()
    loads = [call for tree in TREES.values() for call in calls_of(tree, "torch.load")]
    assert loads
    assert all("weights_only=True" in call for call in loads)
    assert not any("allow_pickle" in ast.unparse(tree) for tree in TREES.values())


def test_nothing_is_sent_anywhere() -> None:
    """The page of explore is served; a ledger asks the host for its name."""
    found = {(name, module) for name, tree in TREES.items() for module in imported(tree) & CONNECTS}
    assert found == {("viewing/explore/server.py", "http"), ("tools/machine.py", "socket")}
    assert re.findall(r"socket\.\w+", ast.unparse(TREES["tools/machine.py"])) == ["socket.gethostname"]
    assert "served to 127.0.0.1" in SECURITY


def test_files_in_the_cache_folder_are_for_their_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DASH_ATTN_CACHE", str(tmp_path / "cache"))
    assert "`DASH_ATTN_CACHE`, else `dash-attn` in `XDG_CACHE_HOME`, else `~/.cache/dash-attn`" in SECURITY
    before = os.umask(0)
    try:
        folder = cache_folder()
        write_kernel(folder / "kernel.cubin", Kernel(b"code", "symbol", "", "13.0"))
        Record({"gpu": "a GPU"}).put("a product", True)
    finally:
        os.umask(before)
    assert [oct(path.stat().st_mode & 0o777) for path in folder.iterdir()] == ["0o600"] * 2
    assert oct(folder.stat().st_mode & 0o777) == "0o777", "the folder has the rights of the umask"


def test_the_citation_has_this_version() -> None:
    """Valid by the schema of CFF 1.2.0: a message, a title, authors with names; a reference has a type, a title and authors."""
    yaml = pytest.importorskip("yaml")
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["cff-version"] == "1.2.0"
    assert cited["version"] == dash_attn.__version__
    assert f'license = "{cited["license"]}"' in (ROOT / "pyproject.toml").read_text()
    assert f'authors = [{{ name = "{cited["authors"][0]["name"]}" }}]' in (ROOT / "pyproject.toml").read_text()
    assert {"message", "title", "type"} <= cited.keys()
    (paper,) = cited["references"]
    assert paper["url"].endswith("/2601.21824")
    assert {"type", "title", "authors", "year"} <= paper.keys()
    assert all(author.keys() == {"given-names", "family-names"} for author in paper["authors"])


def test_a_report_asks_for_what_the_doctor_prints() -> None:
    assert "`dash-attn doctor --json`" in (ROOT / ".github/ISSUE_TEMPLATE/bug.md").read_text()
    assert "`dash-attn doctor --json`" in SECURITY
