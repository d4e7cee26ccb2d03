"""The wheel holds all that the package needs, and works where it is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import dash_attn

pytest.importorskip("build")
pytest.importorskip("setuptools")

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "dash_attn"

USE_IT = """
import dash_attn, torch
from dash_attn.backends.hopper.device.compile import sources
from pathlib import Path
x = torch.ones(1, 70, 2, 16, requires_grad=True)
dash_attn.flash_attn_func(x, x, x, causal=True).sum().backward()
print(Path(dash_attn.__file__).parent)
print(len(sources()))
"""


def run(*command: str, **environment: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, **environment}, cwd="/")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing is left beside the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(folder / "dist"), str(folder))
    (made,) = (folder / "dist").glob("*.whl")
    return made


def test_every_source_file_is_in_the_wheel(wheel: Path) -> None:
    packed = set(zipfile.ZipFile(wheel).namelist())
    files = [path for path in SOURCE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    missing = [str(path) for path in files if f"dash_attn/{path.relative_to(SOURCE).as_posix()}" not in packed]
    assert not missing
    assert "dash_attn/py.typed" in packed
    assert sum(name.endswith(".cuh") for name in packed) == len(list(SOURCE.rglob("*.cuh"))) > 10
    assert not [name for name in packed if not name.startswith(("dash_attn/", "dash_attn-"))]


def test_the_version_is_the_one_of_the_sources(wheel: Path) -> None:
    assert wheel.name.split("-")[1] == dash_attn.__version__


def test_it_works_in_a_clean_folder(wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(tmp_path), str(wheel))
    place, kernels = run(sys.executable, "-c", USE_IT, PYTHONPATH=str(tmp_path)).split()
    assert Path(place) == tmp_path / "dash_attn"
    assert int(kernels) == len(list(SOURCE.rglob("*.cuh"))) + 2  # two are generated
    assert "schedule" in run(
        sys.executable, "-m", "dash_attn.cli.main", "plan", "--mask", "causal", "--q-tiles", "4", PYTHONPATH=str(tmp_path)
    )
