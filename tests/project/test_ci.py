"""CI has all that tests need: what is skipped there protects nothing."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from compilers import needs_gxx

ON_CI = os.environ.get("CI", "").lower() in ("true", "1")
SKIPPED_WITHOUT = (
    "accelerate",
    "build",
    "cuda.bindings.nvrtc",
    "matplotlib",
    "megatron.core",
    "pytest_timeout",
    "setuptools",
    "transformers",
    "xdist",
)
FROM_PYTHON_3_11 = ("mkdocs", "mkdocstrings", "trl") if sys.version_info >= (3, 11) else ()  # the pinned versions need it


@pytest.mark.parametrize("name", SKIPPED_WITHOUT + FROM_PYTHON_3_11)
@pytest.mark.skipif(not ON_CI, reason="a developer may be without the dev extra")
def test_ci_has_every_package(name: str) -> None:
    assert importlib.util.find_spec(name) is not None, f"tests are skipped without {name}; it is in the dev extra"


@pytest.mark.parametrize("ci", ["true", "1", "True"])
def test_tests_fail_on_ci_without_gxx(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ci: str) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CI", ci)
    with pytest.raises(pytest.fail.Exception, match=r"needs g\+\+, which CI must have"):
        needs_gxx()


@pytest.mark.parametrize("ci", ["", "false"])
def test_a_developer_may_be_without_gxx(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ci: str) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CI", ci)
    with pytest.raises(pytest.skip.Exception, match=r"needs g\+\+"):
        needs_gxx()
