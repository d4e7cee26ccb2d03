"""The site builds without a warning and without the network, and its API page has every public name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

import dash_attn
from dash_attn import distributed

pytest.importorskip("mkdocs")
pytest.importorskip("mkdocstrings")
from site_pages import as_list

ROOT = Path(__file__).parents[2]
BUILD = """
import socket, sys
def refuse(*_): raise OSError("the site must build without the network")
socket.socket.connect = socket.getaddrinfo = refuse
from mkdocs.__main__ import cli
cli(["build", "--strict", "--site-dir", sys.argv[1]])
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-c", BUILD, str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) >= 10
    for page in pages:
        loaded = re.findall(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"?(https?:[^\s\">]+)", page.read_text())
        assert not loaded, page.name


def test_the_first_page_opens_with_picture_table_and_installation(site: Path) -> None:
    """And what lies beside docs/ is a page, too."""
    page = (site / "index.html").read_text()
    places = [
        page.index(text)
        for text in (
            'alt="Where two training runs part',
            'alt="Two schedules',
            "<table>",
            'id="install"',
            ">'.[gpu]'<",
            'id="where-to-go-on"',
        )
    ]
    assert places == sorted(places)
    assert 'href="design/"' in page
    assert all((site / name / "index.html").exists() for name in ("design", "contributing", "results", "examples", "how-a-call-runs"))


def test_every_public_name_is_on_the_api_page(site: Path) -> None:
    api = (site / "api" / "index.html").read_text()
    missing = [name for name in dash_attn.__all__ if not re.search(rf'id="dash_attn\.[\w.]*\b{name}"', api)]
    assert missing == ["Mask"]  # the base of the masks
    assert "GENERATORS" in api
    assert [name for name in distributed.__all__ if not re.search(rf'id="dash_attn\.[\w.]*\b{name}"', api)] == []


def test_every_function_has_one_signature(site: Path) -> None:
    api = (site / "api" / "index.html").read_text()
    for name in ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache", "explain"):
        entry = re.split(rf'id="dash_attn\.[\w.]*\.{name}"', api)[1].split('class="doc doc-heading"')[1]
        assert entry.count("doc-signature") == 1, name
    assert "doc-overloads" not in api


def test_every_page_can_be_dark(site: Path) -> None:
    """Pictures have a ground of their own, so that their dark letters can be read on it."""
    assert all('data-md-color-scheme="slate"' in page.read_text() for page in site.rglob("*.html") if "md-content" in page.read_text())
    for path in (ROOT / "docs").rglob("*.png"):
        picture = Image.open(path)
        assert picture.convert("RGBA").getextrema()[3] == (255, 255), path.name


def test_arguments_become_a_list() -> None:
    text = "Does it.\n\nmask: which\n    keys.\nscale: how much\nother: no argument\n\nReturns out."
    assert as_list(text, {"mask", "scale"}).splitlines() == [
        "Does it.",
        "",
        "- `mask`: which",
        "    keys.",
        "- `scale`: how much",
        "",
        "other: no argument",
        "",
        "Returns out.",
    ]
