"""The build backend: that of setuptools, and a source distribution also gets the kernels, compiled by one NVRTC.

`python -m build` makes a source distribution, and a wheel from it, so both have them. What is built straight from a checkout
(`pip install .`, `pip install -e .`) has none: that takes seconds, and kernels are compiled on first use.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  the hooks that stay as they are

NVRTC = "13.4.92"  # another one makes other machine code, so other bits: say so in CHANGELOG.md
VARIANTS = Path("tests/helpers/kernel_variants.py")  # an unpacked source distribution is without, and has the kernels already
SHIPPED = Path("src/dash_attn/backends/hopper/shipped")
Settings = dict[str, Any] | None


def get_requires_for_build_sdist(config_settings: Settings = None) -> list[str]:
    compilers = ["numpy>=1.24", "cuda-bindings>=13.0", f"nvidia-cuda-nvrtc=={NVRTC}"] if VARIANTS.exists() else []
    return [*build_meta.get_requires_for_build_sdist(config_settings), *compilers]


def build_sdist(sdist_directory: str, config_settings: Settings = None) -> str:
    if not VARIANTS.exists():
        return build_meta.build_sdist(sdist_directory, config_settings)
    try:
        subprocess.run([sys.executable, "tools/ship_kernels.py"], check=True)
        return build_meta.build_sdist(sdist_directory, config_settings)
    finally:
        shutil.rmtree(SHIPPED, ignore_errors=True)  # a checkout that keeps them would test those instead of its own
