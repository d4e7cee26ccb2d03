"""PyTorch's settings for products on a GPU, on a machine that has none. `settings` is a fixture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dash_attn.invariance import switches
from dash_attn.invariance.switches import SWITCHES, WITHOUT_SPLITS

OURS = {"library": "cublaslt", "bf16": WITHOUT_SPLITS, "fp16": WITHOUT_SPLITS}


class Settings(dict[str, Any]):
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(library="cublas", bf16=(True, True), fp16=(True, True))
        for name in self:
            getter, setter = (lambda _, name=name: self[name]), (lambda _, value, name=name: self.__setitem__(name, value))
            monkeypatch.setattr(type(SWITCHES), name, property(getter, setter))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(switches, "_cublaslt", lambda: "cublaslt")


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    yield Settings(monkeypatch)
    SWITCHES.before, SWITCHES.ours = {}, {}
