"""`enable()` puts back what was there, whatever happens inside; versions that cannot raise by name."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dash_attn import Unsupported, invariance
from dash_attn.invariance.products import _Product
from dash_attn.invariance.switches import SWITCHES, WITHOUT_SPLITS
from dense import same_bits
from gpu_settings import Settings, settings

__all__ = ["settings"]
PLACES = [(functional, "linear"), (torch, "matmul"), (torch, "mean"), (torch, "layer_norm"), (functional, "silu")]
METHODS = ["mean", "matmul", "mm", "__matmul__", "sigmoid"]


def state() -> list[Any]:
    return [*(getattr(owner, name) for owner, name in PLACES), *(vars(Tensor).get(name) for name in METHODS), SWITCHES.stance]


def test_everything_comes_back_after_an_error() -> None:
    before = state()
    with suppress(KeyError), invariance.enable():
        assert not set(map(id, before[: len(PLACES)])) & set(map(id, state()))
        raise KeyError
    assert state() == before


def test_blocks_nest_and_disable_closes_all() -> None:
    before = state()
    with invariance.enable():
        inside = state()
        with invariance.enable():
            assert state() == inside
        assert state() == inside
        invariance.disable()
        assert state() == before
    assert state() == before
    with pytest.raises(RuntimeError, match=r"dash_attn.invariance is not enabled"):
        invariance.disable()


def test_an_error_on_the_way_in_changes_nothing(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where PyTorch has no cuBLASLt."""

    def refuse(_: Any, value: Any) -> None:
        raise RuntimeError("no such library")

    before = state()
    monkeypatch.setattr(type(SWITCHES), "library", property(lambda _: "cublas", refuse))
    with pytest.raises(RuntimeError, match="no such library"):
        invariance.enable()
    assert state() == before


def test_a_backend_for_all_compiled_programs_comes_back() -> None:
    before = SWITCHES.stance
    try:
        torch.compiler.set_stance("default", force_backend="eager")
        with invariance.enable():
            assert SWITCHES.stance.stance == "force_eager"
        assert SWITCHES.stance.backend == "eager"
    finally:
        SWITCHES.stance = before


def test_functions_that_others_have_replaced_are_not_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "linear", len)
    with pytest.raises(RuntimeError, match="would undo what replaced PyTorch's linear: <built-in function len>"):
        invariance.enable()


def test_switches_are_set_and_come_back(settings: Settings) -> None:
    before, ours = dict(settings), {"library": "cublaslt", "bf16": WITHOUT_SPLITS, "fp16": WITHOUT_SPLITS}
    with suppress(KeyError), invariance.enable():
        assert settings == ours
        with invariance.enable(), SWITCHES.as_before():
            assert settings == before
        assert settings == ours
        raise KeyError
    assert settings == before


def test_gradients_of_weights_have_the_settings_of_before(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, Any]] = []
    monkeypatch.setattr("dash_attn.invariance.products._mm", lambda a, b: (seen.append(("weight", settings["bf16"])), a @ b)[1])
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True)
    with invariance.enable():
        _Product.apply(x, weight, None).sum().backward()
        assert settings["bf16"] == WITHOUT_SPLITS
    assert seen == [("weight", (True, True))]


def test_versions_without_the_switch_raise_by_name(settings: Settings) -> None:
    settings["bf16"] = True
    before = state()
    with pytest.raises(Unsupported, match=r"can switch split-K off.*takes a pair; got PyTorch \d"):
        invariance.enable()
    assert state() == before


def test_other_threads_have_the_same_bits() -> None:
    x, weight = torch.randn(100, 300), torch.randn(50, 300)
    found: dict[int, Tensor] = {}
    with invariance.enable():
        whole = functional.linear(x, weight)
        threads = [threading.Thread(target=lambda n=n: found.update({n: functional.linear(x[:n], weight)})) for n in (1, 7, 33)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(same_bits(rows, whole[:n]) for n, rows in found.items())


def test_a_door_that_is_first_imported_inside_knows_pytorchs_own_functions() -> None:
    """It watches models for attention of their own."""
    pytest.importorskip("transformers")
    code = (
        "import torch; from dash_attn import invariance; own = torch.softmax\n"
        "with invariance.enable():\n"
        "    assert torch.softmax is not own\n"
        "    from dash_attn.integrations._model_check import SOFTMAX\n"
        "assert own in SOFTMAX"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
