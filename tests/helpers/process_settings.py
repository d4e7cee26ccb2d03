"""Settings of the process that a trainer with full_determinism changes: environment variables, and PyTorch's own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def restored_settings() -> Iterator[None]:
    before = dict(os.environ)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        os.environ.clear()
        os.environ.update(before)
