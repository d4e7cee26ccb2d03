"""What CONTRIBUTING.md and RELEASING.md say of files outside src holds."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

import dash_attn

ROOT = Path(__file__).parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text()
TEXT = {".cfg", ".cpp", ".cuh", ".h", ".json", ".md", ".py", ".toml", ".txt", ".yaml", ".yml"}
FOLDERS = (".github", "benchmarks", "docs", "examples", "src", "tests", "tools")


def test_the_version_stands_in_one_place() -> None:
    """A literal: setuptools reads it without importing numpy, which need not be there yet."""
    assigned = [
        node.value
        for node in ast.parse((ROOT / "src/dash_attn/__init__.py").read_text()).body
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__version__"]
    ]
    assert [ast.literal_eval(value) for value in assigned] == [dash_attn.__version__]
    assert is_version(dash_attn.__version__)
    assert 'version = { attr = "dash_attn.__version__" }' in PROJECT
    assert not re.search(r'^version = "', PROJECT, re.M)
    assert f"\n## {dash_attn.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def is_version(text: str) -> bool:
    """A release, or a candidate for one that is no patch."""
    return bool(re.fullmatch(r"\d+\.\d+\.(\d+|0rc[1-9]\d*)", text))


def classifier_of(version: str) -> str:
    return "4 - Beta" if version.startswith("0.") or "rc" in version else "5 - Production/Stable"


def test_a_candidate_is_no_release() -> None:
    """RELEASING.md: the classifier changes with the release, and every candidate has the heading of the section they share."""
    assert re.findall(r'"Development Status :: (.+)"', PROJECT) == [classifier_of(dash_attn.__version__)]
    said = ("0.1.0", "1.0.0rc1", "1.0.0", "1.4.2", "2.0.0rc1")
    assert [classifier_of(version)[0] for version in said] == ["4", "4", "5", "5", "4"]
    assert [is_version(version) for version in (*said, "1.2.0rc10")] == [True] * 6
    assert [is_version(version) for version in ("1.0", "1.0.0rc0", "1.0.0.dev1", "1.0.1rc1", "1.0.0-rc1", "1.0.0rc")] == [False] * 6
    assert len(re.findall(rf"^## {dash_attn.__version__.partition('rc')[0]}", (ROOT / "CHANGELOG.md").read_text(), re.M)) == 1


def test_ci_runs_on_the_oldest_and_the_newest_python() -> None:
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    named = re.findall(r"Python :: (3\.\d+)", PROJECT)
    assert re.findall(r'"(3\.\d+)"', workflow) == [named[0], named[-1]]
    assert f'requires-python = ">={named[0]}"' in PROJECT
    assert "- run: .ci/run\n" in workflow
    assert "g++" in workflow
    assert os.access(ROOT / ".ci/run", os.X_OK)


def test_ci_may_not_take_longer_than_contributors_are_told() -> None:
    (minutes,) = re.findall(r"timeout-minutes: (\d+)", (ROOT / ".github/workflows/ci.yml").read_text())
    assert f"under {minutes} minutes" in (ROOT / "CONTRIBUTING.md").read_text()


def test_every_text_file_ends_with_one_newline() -> None:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in TEXT and path.is_file()]
    files += [path for path in ROOT.iterdir() if path.suffix in TEXT]
    files = [path for path in files if not any(part.endswith(".egg-info") for part in path.parts)]  # pip's, not ours
    assert len(files) > 200
    assert [str(path) for path in files if not ends_with_one_newline(path.read_bytes())] == []


def ends_with_one_newline(text: bytes) -> bool:
    return text in (b"", text.rstrip(b"\r\n") + b"\n")


def test_the_end_of_a_file_is_looked_at() -> None:
    assert [ends_with_one_newline(text) for text in (b"a", b"a\n\n", b"a\r\n", b"\n\n", b"a\n", b"")] == [False] * 4 + [True] * 2


def test_tests_import_no_tests() -> None:
    """What two of them share is a helper: a test that is imported runs twice, or brings its fixtures along."""
    modules = [path for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py"]
    imported = [(path.name, name) for path in modules for name in _imported(path) if re.match(r"test_|conftest$|tests$", name)]
    assert imported == []
    assert len(modules) > 80


def _imported(path: Path) -> set[str]:
    """First parts of the names of all modules that a file imports."""
    return _names(ast.parse(path.read_text()))


def _names(tree: ast.AST) -> set[str]:
    nodes = list(ast.walk(tree))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.partition(".")[0] for name in names}


def test_only_other_libraries_may_be_missing() -> None:
    """A module of ours that cannot be imported is a fault: no test is skipped for it."""
    ours = {"dash_attn", *(path.stem for folder in ("tests", "tools") for path in (ROOT / folder).rglob("*.py"))}
    paths = list((ROOT / "tests").rglob("*.py"))
    excused = {(path.name, name) for path in paths for name in _may_be_missing(ast.parse(path.read_text()))}
    assert {pair for pair in excused if pair[1] in ours} == set()
    assert {("test_megatron_core.py", "megatron"), ("test_torchtitan_models.py", "torchtitan"), ("conftest.py", "torch")} <= excused


def _may_be_missing(tree: ast.AST) -> Iterator[str]:
    """First parts of the names of modules whose ImportError is a skip, or caught."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.importorskip" and isinstance(node.args[0], ast.Constant):
            yield node.args[0].value.partition(".")[0]
        if isinstance(node, ast.Try) and any("ImportError" in ast.unparse(handler.type or node) for handler in node.handlers):
            yield from _names(node)


def test_paths_in_these_files_exist() -> None:
    """Also of files that moved: what a contributor is sent to is there."""
    for document in ("CONTRIBUTING.md", "RELEASING.md", "tests/README.md"):
        text = (ROOT / document).read_text()
        named = re.findall(r"`((?:src|tests|tools|docs|benchmarks|\.github)/[\w/.]+)`", text)
        assert named, document
        assert [path for path in named if not (ROOT / path).exists() and "<" not in path] == []
