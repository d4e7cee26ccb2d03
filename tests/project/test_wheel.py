"""The wheel holds all that the package needs, and works where it is installed."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

import dash_attn
from wheels import ROOT, build, copy_tree, install, run

pytest.importorskip("build")
pytest.importorskip("setuptools")

SOURCE = ROOT / "src" / "dash_attn"

USE_IT = """
import dash_attn, torch
from dash_attn.backends.hopper.driver.compile import sources
from pathlib import Path
x = torch.ones(1, 70, 2, 16, requires_grad=True)
dash_attn.flash_attn_func(x, x, x, causal=True).sum().backward()
print(Path(dash_attn.__file__).parent)
print(len(sources()))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Straight from a checkout: without compiled kernels."""
    return build(copy_tree(tmp_path_factory.mktemp("wheel")), "--wheel")


def test_every_source_file_is_in_the_wheel(wheel: Path) -> None:
    packed = set(zipfile.ZipFile(wheel).namelist())
    files = [path for path in SOURCE.rglob("*") if path.is_file() and not {"__pycache__", "shipped"} & {*path.parts}]
    missing = [str(path) for path in files if f"dash_attn/{path.relative_to(SOURCE).as_posix()}" not in packed]
    assert not missing
    assert "dash_attn/py.typed" in packed
    assert sum(name.endswith(".cuh") for name in packed) == len(list(SOURCE.rglob("*.cuh"))) > 10
    assert not [name for name in packed if not name.startswith(("dash_attn/", "dash_attn-"))]
    assert not [name for name in packed if name.endswith(".cubin")]


def test_the_version_is_the_one_of_the_sources(wheel: Path) -> None:
    assert wheel.name.split("-")[1] == dash_attn.__version__


def test_it_works_in_a_clean_folder(wheel: Path, tmp_path: Path) -> None:
    install(wheel, tmp_path)
    place, kernels = run(sys.executable, "-c", USE_IT, PYTHONPATH=str(tmp_path)).split()
    assert Path(place) == tmp_path / "dash_attn"
    assert int(kernels) == len(list(SOURCE.rglob("*.cuh"))) + 3  # three are generated
    assert "schedule" in run(
        sys.executable, "-m", "dash_attn.cli.main", "plan", "--mask", "causal", "--q-tiles", "4", PYTHONPATH=str(tmp_path)
    )
