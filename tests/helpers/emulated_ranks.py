"""Memory that launches of ranks may use, on kernels that are emulated in numpy: what was not made for it is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from emulated_kernels import EmulatedDriver, EmulatedMap, Memory

NAMES = ("rank_backward", "kernel_names", "leg_tables", "tables", "backward_setup")
calls, kernel_names, leg_tables, tables, setups = (import_module(f"dash_attn.backends.hopper.calls.{name}") for name in NAMES)
of_hopper = import_module("dash_attn.backends.hopper.ranks")
workspaces = import_module("dash_attn.backends.hopper.driver.workspace")
recently_used = import_module("dash_attn.backends.kept")


class Stream:
    def synchronize(self) -> None:
        """The tables are there."""


def emulated_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:
    driver = EmulatedDriver()
    memory = driver.memory

    class Tables(tables.DeviceTables):  # type: ignore[misc, name-defined]
        def __init__(self, arrays: dict[str, Any], device: torch.device) -> None:
            super().__init__(arrays, device)
            memory.kept.append(self.memory)
            for name, array in arrays.items():
                memory.add(name, self[name], 4 * np.size(array))

        def copy_of(self, name: str) -> Tensor:
            return memory.add_tensor(name, super().copy_of(name))

    class Workspace(workspaces.Workspace):  # type: ignore[misc, name-defined]
        def __init__(self, **sizes: int) -> None:
            super().__init__(**sizes)
            self.sizes = sizes

        def allocate(self, device: torch.device) -> tuple[Tensor, dict[str, int]]:
            kept, at = super().allocate(device)
            kept.fill_(0x7F)  # nobody may rely on zeros
            memory.kept.append(kept)
            for name, size in self.sizes.items():
                memory.add(name, at[name], size)
            return kept, at

    monkeypatch.setattr(kernel_names, "load_kernel", driver.load)
    ready = calls.tma_ready
    stand_ins = {
        "sm_count": lambda index: 132,
        "TensorMap": EmulatedMap,
        "current_stream": lambda index: 0,
        "raise_if_troubled": lambda: None,
        "on_device": lambda index: nullcontext(),
        "device_index": lambda device: 0,
        "Workspace": Workspace,
        "tma_ready": lambda x: memory.add_tensor("tensor", ready(x)),
    }
    for name, value in stand_ins.items():
        monkeypatch.setattr(calls, name, value)
    monkeypatch.setattr(setups, "report_address", lambda: 0)
    for module in (tables, leg_tables):
        monkeypatch.setattr(module, "DeviceTables", Tables)
    monkeypatch.setattr(leg_tables, "_kept", recently_used.Kept(64))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream())
    tables.mask_on_device.cache_clear()
    yield memory
    tables.mask_on_device.cache_clear()
    EmulatedMap.made.clear()
