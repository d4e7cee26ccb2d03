"""Kernel variants as parameters of a test (apart from kernel_variants.py, which works without pytest)."""

from __future__ import annotations

from typing import Any

import pytest

from kernel_variants import ALWAYS


def cases(variants: list[tuple[str, str]]) -> list[Any]:
    """A header and a kernel each."""
    return [pytest.param(*variant, marks=[] if variant[1] in ALWAYS else [pytest.mark.exhaustive], id=variant[1]) for variant in variants]
