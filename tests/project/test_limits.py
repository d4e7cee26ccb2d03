"""A test that does not end fails by name, and what it has started ends with it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
# Tests of their own folder, under the rules of tests/conftest.py with a shorter grace.
CONFTEST = f"""
import runpy
rules = runpy.run_path({str(TESTS / "conftest.py")!r})
rules["pytest_configure"].__globals__["GRACE"] = 0.5
globals().update({{name: rule for name, rule in rules.items() if name.startswith("pytest_")}})
"""
HANGS = """
import ctypes
import pytest
from started import started

@pytest.mark.timeout(1)
def test_python_waits_for_a_process():
    with started(["sh", "-c", "sleep 20 & echo $! > its_own; echo $$ > pid; wait"]) as process:
        process.wait()

@pytest.mark.timeout(1)
def test_c_code_waits_and_keeps_the_lock_of_the_interpreter():
    ctypes.PyDLL(None).sleep(60)

def test_the_next_one_runs(request):
    assert request.node.get_closest_marker("timeout").args == (600,)
"""


def wait_for_the_end(file: Path) -> None:
    """Of the process whose number is there. Orphans stay as zombies until somebody asks for them."""
    pid, end = int(file.read_text()), time.monotonic() + 5
    while (state := Path(f"/proc/{pid}/stat")).exists() and state.read_text().split()[2] != "Z":
        assert time.monotonic() < end, f"process {pid} still runs"
        time.sleep(0.05)


def run_hanging(folder: Path, *options: str) -> str:
    """What pytest says. The process that a test has started is gone."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_hangs.py").write_text(HANGS)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = timeout(seconds): as in pyproject.toml\naddopts = --strict-markers\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    environment = {**os.environ, "PYTHONPATH": str(TESTS / "helpers")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    wait_for_the_end(folder / "pid")
    return done.stdout + done.stderr


def test_a_hanging_test_fails_by_name(tmp_path: Path) -> None:
    pytest.importorskip("pytest_timeout")
    pytest.importorskip("xdist")
    said = run_hanging(tmp_path, "-n", "1")
    assert "FAILED test_hangs.py::test_python_waits_for_a_process - Failed: Timeout" in said
    assert "FAILED test_hangs.py::test_c_code_waits_and_keeps_the_lock_of_the_interpreter" in said
    assert "2 failed, 1 passed" in said, said
    wait_for_the_end(tmp_path / "its_own")


def test_without_the_plugin_a_hanging_test_ends_the_run(tmp_path: Path) -> None:
    """As on a machine that has pytest alone."""
    said = run_hanging(tmp_path, "-p", "no:timeout", "-k", "python_waits")
    assert "test_hangs.py" in said
    assert "in test_python_waits_for_a_process" in said
    assert "Unknown config option" not in said


def test_processes_are_started_by_what_ends_them() -> None:
    """subprocess.run ends its own; `started` and `run_processes` do for all that run beside a test."""
    found = {
        path.name
        for path in TESTS.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("Popen", "start_processes", "spawn", "Process")
    }
    assert found == {"started.py", "processes.py"}
