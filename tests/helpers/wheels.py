"""Building the package in a copy, so that nothing is left beside the sources, and installing it into a folder of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from email import message_from_string
from email.message import Message
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")
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


def metadata_of(folder: Path) -> Message:
    """What the wheel of a copy would say of itself; nothing is built."""
    (folder / "metadata").mkdir()
    code = "import build_with_kernels; build_with_kernels.prepare_metadata_for_build_wheel('metadata')"
    subprocess.run([sys.executable, "-c", code], cwd=folder, env={**os.environ, "PYTHONPATH": "tools"}, check=True, capture_output=True)
    (written,) = (folder / "metadata").glob("*/METADATA")
    return message_from_string(written.read_text(encoding="utf-8"))


def install(wheel: Path, folder: Path) -> Path:
    """By name, as docs/clusters.md says: also a candidate, which is the only version there."""
    found = ("--no-index", "--find-links", str(wheel.parent))
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", *found, "--target", str(folder), "dash-attn")
    return folder
