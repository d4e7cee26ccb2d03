"""Tests marked `gpu` run on a Hopper GPU and are skipped elsewhere."""

from __future__ import annotations

import gc

import pytest


def has_hopper() -> bool:
    try:
        import torch

        from dash_attn.backends.gpus import is_hopper
    except ImportError:
        return False
    return torch.cuda.is_available() and is_hopper()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked or has_hopper():
        return
    for item in marked:
        item.add_marker(pytest.mark.skip(reason="needs a Hopper GPU (compute capability 9.0)"))


def pytest_collection_finish() -> None:
    """Imported modules and collected tests stay to the end. Looking through them for garbage again and again would take long."""
    gc.collect()
    gc.freeze()
