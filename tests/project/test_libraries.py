"""Versions of other libraries: an older one is refused by name when a door is opened, and all places say the same."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dash_attn import libraries
from dash_attn.backends.triton.support import check_triton
from dash_attn.errors import Unsupported
from dash_attn.integrations import huggingface, megatron, sdpa, torch_flash
from dash_attn.libraries import LEAST, LEAST_WITH_FLASH_PLUG, check_library, installed, numbers
from needs_triton import needs_triton

PROJECT = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
OPENED: dict[str, tuple[str, str, Callable[[], Any]]] = {
    "sdpa": ("torch", "2.8.0+cu128", sdpa.enable),
    "torch_flash": ("torch", "2.9.1", torch_flash.enable),
    "huggingface": ("transformers", "5.5.4", huggingface.enable),
    "megatron": ("megatron.core", "0.15.3", lambda: megatron.enable(SimpleNamespace())),
    "triton": ("triton", "3.3.1", check_triton),
    "torchtitan": ("torchtitan", "0.2.2", lambda: import_module("dash_attn.integrations.torchtitan")),
}


@pytest.mark.parametrize("door", [pytest.param(door, marks=needs_triton if door == "triton" else ()) for door in OPENED])
def test_an_older_library_is_refused_when_a_door_is_opened(door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, version, opened = OPENED[door]
    if module == "torch":
        monkeypatch.setattr(torch, "__version__", version)
    else:
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(__version__=version, __spec__=object()))
    name = module.replace(".", "-")
    least = LEAST_WITH_FLASH_PLUG if door == "torch_flash" else LEAST[name]
    with pytest.raises(
        Unsupported, match=rf"(?i){door}.* needs {name} {least} or later; got {re.escape(version)}: pip install '{name}>={least}'"
    ):
        opened()


@pytest.mark.parametrize("implementation", ["dash_attn", "paged|dash_attn", "eager"])
def test_generate_batch_of_early_versions_is_refused_with_dash_attn(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = pytest.importorskip("transformers.generation.continuous_batching.continuous_api")
    made: list[Any] = []
    monkeypatch.setattr(pages.ContinuousBatchingManager, "__init__", lambda self, model, *_, **__: made.append(model))
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.16.1")
    model = SimpleNamespace(config=SimpleNamespace(_attn_implementation=implementation))
    refused = pytest.raises(Unsupported, match=r"generate_batch with dash_attn needs transformers 5.17 or later; got 5.16.1")
    with huggingface.enable(), nullcontext() if implementation == "eager" else refused:
        pages.ContinuousBatchingManager(model=model)
    assert len(made) == (implementation == "eager")


def test_the_oldest_that_works_and_later_ones_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in (LEAST["transformers"], "5.6.0.dev0", "5.30.1", "6.0", "10.0.0rc1"):
        monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(__version__=version))
        check_library("transformers", "a test")
    assert numbers("2.10.0+cpu") > numbers("2.9")


def test_a_version_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(__version__="main"))
    with pytest.raises(Unsupported, match="got main"):
        check_library("transformers", "a test")


def test_pip_knows_a_library_that_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    monkeypatch.setattr(libraries, "version", lambda name: {"transformers": "5.0.0"}[name])
    assert installed("transformers") == "5.0.0"
    monkeypatch.undo()
    assert installed("a-library-that-nobody-has") is None


@pytest.mark.parametrize("name", ["torch", "transformers", "megatron-core"])
def test_the_package_asks_for_the_same(name: str) -> None:
    assert re.findall(rf'"{name}>=([\d.]+)', PROJECT) == [LEAST[name]]


def test_tests_ask_for_no_older_triton() -> None:
    (least,) = re.findall(r'"triton>=([\d.]+)', PROJECT)
    assert numbers(least) >= numbers(LEAST["triton"]), "whose interpreter works with the NumPy of the tests"
