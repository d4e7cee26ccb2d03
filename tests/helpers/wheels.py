"""Building the package in a copy, so that nothing is left beside the sources, and installing it into a folder of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")
FOLDERS = ("src", "tools", "tests/helpers")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.egg-info", "shipped")


def run(*command: str, limit: float = 300, **environment: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit, env={**os.environ, **environment}, cwd="/")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def copy_tree(folder: Path) -> Path:
    """All that a build needs."""
    for name in FILES:
        shutil.copy(ROOT / name, folder / name)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=LEFT_OUT)
    return folder


def build(folder: Path, *options: str, limit: float = 300) -> Path:
    """The wheel of a copy, in its dist."""
    run(sys.executable, "-m", "build", "--no-isolation", *options, "--outdir", str(folder / "dist"), str(folder), limit=limit)
    (made,) = (folder / "dist").glob("*.whl")
    return made


def install(wheel: Path, folder: Path) -> Path:
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(folder), str(wheel))
    return folder
