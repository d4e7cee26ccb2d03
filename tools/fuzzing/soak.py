"""Repeats on a GPU: the tests that say "the same bits every time", as often as asked, test by test until the time is up.

Their families run beside matrix products on another stream, in memory full of NaN, planned for fewer SMs than there are, and on sequences
of up to 256k tokens. A part goes on with the tests that no part of this commit has passed as often.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fuzzing.record import Part, Recorder

ROOT = Path(__file__).parents[2]
TESTS = (
    "tests/attention/test_families.py",  # under load, with dirty memory
    "tests/gpu/test_gpu_determinism.py",  # at full size, every schedule, a busy GPU
    "tests/gpu/test_gpu_families.py",  # in CUDA graphs, on two streams
    "tests/gpu/test_gpu_invariance.py",  # batches, tensor-parallel ranks, SMs taken away
    "tests/gpu/test_gpu_groups.py",
    "tests/gpu/test_gpu_boolean_masks.py",
    "tests/gpu/test_gpu_dropout.py",
    "tests/gpu/test_gpu_kv_cache.py",
    "tests/gpu/test_gpu_played_ranks.py",
    "tests/gpu/test_gpu_faults.py",  # planted races
    "tests/gpu/test_gpu_large.py",  # up to 256k tokens
)


class Plugin:
    """Skips what was passed, ends when the time is up, and writes each outcome down."""

    def __init__(self, recorder: Recorder, passed: set[str], time_left: Callable[[], bool]) -> None:
        self.recorder, self.passed, self.time_left = recorder, passed, time_left
        self.wanted = 0  # tests

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        done = [item for item in items if item.nodeid in self.passed]
        config.hook.pytest_deselected(items=done)
        items[:] = [item for item in items if item.nodeid not in self.passed]
        self.wanted = len(items)

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if not self.time_left():
            pytest.exit("the time of this part is up", returncode=0)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.recorder.part["tests"][report.nodeid] = report.outcome
            self.recorder.part["left"] = self.wanted - len(self.recorder.part["tests"])
            self.recorder.keep()


def passed_before(parts: list[Part], commit: str | None, repeats: int) -> set[str]:
    """With as many repeats, of the same sources."""
    same = [part for part in parts if part["kind"] == "soak" and part["commit"] == commit and part["repeats"] >= repeats]
    return {test for part in same for test, outcome in part["tests"].items() if outcome == "passed"}


def run(recorder: Recorder, parts: list[Part], device: str, time_left: Callable[[], bool], tests: tuple[str, ...] = TESTS) -> int:
    """How many failed. What a part has skipped is left to the next one, or needs another machine."""
    part = recorder.part
    part |= {"tests": {}, "left": 0}
    os.environ["DASH_ATTN_REPEATS"] = str(part["repeats"])
    plugin = Plugin(recorder, passed_before(parts, part["commit"], part["repeats"]), time_left)
    words = [*(str(ROOT / test) for test in tests), "-p", "no:cacheprovider", f"--rootdir={ROOT}", "-c", str(ROOT / "pyproject.toml")]
    chosen = ["-k", "cuda or gpu"] if device == "cuda" else []
    pytest.main([*words, *chosen], plugins=[plugin])
    recorder.keep(at_once=True)
    outcomes = list(part["tests"].values())
    print(f"{part['repeats']} repeats: {outcomes.count('passed')} tests passed, {outcomes.count('failed')} failed")
    return outcomes.count("failed")
