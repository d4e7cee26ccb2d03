"""A compiler that tests need. A developer may be without one; a test that CI skips would protect nothing."""

from __future__ import annotations

import os
import shutil

import pytest


def needs_gxx() -> str:
    """The path of g++. Without it a test is skipped, and fails where CI=true is set."""
    found = shutil.which("g++")
    if found is None and os.environ.get("CI", "").lower() in ("true", "1"):
        pytest.fail("needs g++, which CI must have: install it (apt-get install g++)", pytrace=False)
    if found is None:
        pytest.skip("needs g++")
    return found
