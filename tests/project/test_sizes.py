"""What keeps the code easy to read: short files, short functions, and few modules on the way of a call."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("benchmarks", "docs", "examples", "src", "tests", "tools")
CODE = {".cpp", ".css", ".cuh", ".h", ".html", ".js", ".py"}
MADE = {"explore-causal.html"}  # a page that a command writes
LONGEST_FILE, LONG_FUNCTION, SHORT = 400, 20, 0.95  # lines, lines, the share of functions that are no longer
MOST_MODULES = {"cold forward": 24, "cold backward": 28, "warm forward": 12, "warm backward": 9}  # of a call on Hopper


def long_files(lengths: dict[str, int]) -> list[str]:
    return [name for name, length in lengths.items() if length > LONGEST_FILE]


def test_no_file_is_longer_than_a_few_screens() -> None:
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in CODE and path.name not in MADE]
    assert len(paths) > 600
    assert long_files({path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in paths}) == []
    assert long_files({"one.py": 400, "other.py": 401}) == ["other.py"]


def lengths_of_functions(text: str) -> Iterator[int]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno is not None:
            yield node.end_lineno - node.lineno + 1


def test_most_functions_fit_in_twenty_lines() -> None:
    lengths = [length for path in (ROOT / "src").rglob("*.py") for length in lengths_of_functions(path.read_text())]
    assert len(lengths) > 2000
    assert sum(length <= LONG_FUNCTION for length in lengths) >= SHORT * len(lengths)
    assert list(lengths_of_functions("def f():\n    def g():\n        pass\n\n    return g\n")) == [5, 2]


def test_few_modules_are_on_the_way_of_a_call() -> None:
    """On a driver that launches nothing. The page says how many a warm call passes."""
    command = [sys.executable, str(ROOT / "tools/passed_modules.py")]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    passed = {what: int(count) for what, count in re.findall(r"^hopper (\w+ \w+): (\d+) modules", said, re.MULTILINE)}
    assert passed.keys() == MOST_MODULES.keys()
    assert {what: count for what, count in passed.items() if count > MOST_MODULES[what]} == {}
    page = " ".join((ROOT / "docs/how-a-call-runs.md").read_text().split())
    assert f"a warm call passes {passed['warm forward']} in the forward and {passed['warm backward']} in the backward" in page
