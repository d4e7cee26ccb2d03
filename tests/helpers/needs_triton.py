"""Tests that interpret or compile Triton kernels. They are skipped where Triton is not installed, except on CI, where they fail."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

HAS_TRITON = find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON and os.environ.get("CI") != "true", reason="needs Triton: pip install -e '.[dev]'")
