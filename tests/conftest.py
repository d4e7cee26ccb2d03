"""Tests marked `gpu` run on a Hopper GPU and are skipped elsewhere. A test that does not end fails by name."""

from __future__ import annotations

import faulthandler
import gc
import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

LIMIT = 600  # seconds of a test with its fixtures; the slowest of `make test` take a tenth of it
LONG_LIMIT = 3600  # of those that are exhaustive, or repeat their work as often as DASH_ATTN_REPEATS says
GRACE = 60
STDERR = pytest.StashKey[int]()
AHEAD = pytest.StashKey[list[Any]]()


def has_hopper() -> bool:
    try:
        import torch
    except ImportError:
        return False
    from dash_attn.backends.gpus import is_hopper

    return torch.cuda.is_available() and is_hopper()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STDERR] = os.dup(sys.__stderr__.fileno())  # tests have another one, which is lost with their process


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without a Hopper GPU, `make test` does not read the thousands of GPU tests only to skip them. `make test-all` does."""
    quick = config.option.markexpr == "not exhaustive"
    return True if quick and collection_path == Path(__file__).parent / "gpu" and not has_hopper() else None


def leave_to_test_all(items: list[pytest.Item]) -> None:
    """Of families that repeat one promise over a grid or over seeds, `make test` runs as many parameters as tests/sampled.txt says, evenly
    spread. The others are `make test-all`'s.
    """
    lines = (Path(__file__).parent / "sampled.txt").read_text().splitlines()
    keep = {family: int(count) for family, count in (line.rsplit(" ", 1) for line in lines)}
    families: dict[str, list[pytest.Item]] = {}
    for item in items:
        family = item.nodeid.split("[")[0]
        if family in keep and not item.get_closest_marker("exhaustive") and not item.get_closest_marker("gpu"):
            families.setdefault(family, []).append(item)
    for family, found in families.items():
        kept = {index * len(found) // keep[family] for index in range(keep[family])}
        for index, item in enumerate(found):
            if index not in kept:
                item.add_marker("exhaustive")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    leave_to_test_all(items)
    for item in items:
        if not item.get_closest_marker("timeout"):
            takes_long = item.get_closest_marker("exhaustive") or item.get_closest_marker("gpu")
            item.add_marker(pytest.mark.timeout(LONG_LIMIT if takes_long else LIMIT))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked or has_hopper():
        return
    for item in marked:
        item.add_marker(pytest.mark.skip(reason="needs a Hopper GPU (compute capability 9.0)"))


@pytest.fixture(autouse=True)
def _nothing_is_known() -> None:
    """Calls like those of another test would take the short way past what this one may have changed."""
    known = sys.modules.get("dash_attn.attention.known")
    if known is not None:
        known._known.cache_clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """pytest-timeout raises in the test, so that it can tidy up. A test that is stuck in C code does not hear it, and without
    pytest-timeout none does: a little later its process ends, with all stacks on stderr, and pytest-xdist names the test.
    """
    (limit,) = item.get_closest_marker("timeout").args  # type: ignore[union-attr]
    faulthandler.dump_traceback_later(limit + GRACE, exit=True, file=item.config.stash[STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Imported modules and collected tests stay to the end. Looking through them for garbage again and again would take long."""
    gc.collect()
    gc.freeze()
    session.config.stash[AHEAD] = groups_ahead(session)


def groups_ahead(session: pytest.Session) -> list[Any]:
    """Groups of ranks mostly wait. In `make test` a process lets those of its tests run beside earlier tests, one at a time."""
    number, count = (os.environ.get(f"PYTEST_XDIST_WORKER{name}", "") for name in ("", "_COUNT"))
    if session.config.option.markexpr != "not exhaustive" or not number:
        return []
    from processes import Group

    share = -(-len(session.items) // int(count))  # pytest-xdist deals that many tests in their order to each process
    first = share * int(number.removeprefix("gw"))
    modules = dict.fromkeys(item.module for item in session.items[first : first + share])  # type: ignore[attr-defined]
    return [value for module in modules for value in vars(module).values() if isinstance(value, Group)]


def pytest_runtest_setup(item: pytest.Item) -> None:
    groups = item.config.stash[AHEAD]
    waiting = [group for group in groups if group.context is None]
    if waiting and not any(group.is_running() for group in groups):
        waiting[0].start()


def pytest_sessionfinish(session: pytest.Session) -> None:
    for group in session.config.stash.get(AHEAD, []):
        group.stop()
