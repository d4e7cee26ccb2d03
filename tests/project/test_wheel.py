"""The wheel holds all that the package needs, and works where it is installed."""

from __future__ import annotations

import re
import sys
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

import dash_attn
from wheels import ROOT, build, copy_tree, install, metadata_of, run

pytest.importorskip("build")
pytest.importorskip("setuptools")

SOURCE = ROOT / "src" / "dash_attn"
README = (ROOT / "README.md").read_text()
ADDRESS = "https://forge.example/group/dash-attn"

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


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Message:
    """The metadata of a project that has an address."""
    tree = copy_tree(tmp_path_factory.mktemp("described"))
    with (tree / "pyproject.toml").open("a") as file:
        file.write(f'\n[project.urls]\nRepository = "{ADDRESS}/"\n')
    return metadata_of(tree)


def test_an_index_shows_readme_with_whole_addresses(described: Message) -> None:
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)]+)\)", described.get_payload())
    assert all(target.startswith("https://") for _, target in links)
    for mark, kind in (("", "blob"), ("!", "raw")):
        start = f"{ADDRESS}/{kind}/v{dash_attn.__version__}/"
        ours = [target.removeprefix(start) for found, target in links if found == mark and target.startswith(start)]
        assert len(ours) >= (2 if mark else 10)
        assert [target for target in ours if not (ROOT / target.partition("#")[0]).exists()] == []
    assert described.get_all("Project-URL") == [f"Repository, {ADDRESS}/"]
    assert described["Description-Content-Type"] == "text/markdown"
    assert "description" not in described.get_all("Dynamic", []), "known before the build"


def test_links_alone_are_changed(described: Message) -> None:
    text, readme = (page.splitlines() for page in (described.get_payload(), README))
    changed = [old for old, new in zip(readme, text, strict=True) if old != new]
    assert all("](" in line for line in changed)
    assert {line for line in readme if re.search(r"\]\((?!https:)", line)} == set(changed)


def test_without_an_address_nothing_is_made_up(wheel: Path) -> None:
    """As the project is: it has none yet. Who gives it one will see this test."""
    with zipfile.ZipFile(wheel) as packed:
        (name,) = (name for name in packed.namelist() if name.endswith("METADATA"))
        told = message_from_bytes(packed.read(name))
    assert told.get_payload(decode=True).decode() == README  # type: ignore[union-attr]
    assert "Project-URL" not in told


def test_it_works_in_a_clean_folder(wheel: Path, tmp_path: Path) -> None:
    install(wheel, tmp_path)
    place, kernels = run(sys.executable, "-c", USE_IT, PYTHONPATH=str(tmp_path)).split()
    assert Path(place) == tmp_path / "dash_attn"
    assert int(kernels) == len(list(SOURCE.rglob("*.cuh"))) + 3  # three are generated
    assert "schedule" in run(
        sys.executable, "-m", "dash_attn.cli.main", "plan", "--mask", "causal", "--q-tiles", "4", PYTHONPATH=str(tmp_path)
    )
