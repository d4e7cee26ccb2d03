"""Writes the generated pages of docs/. Run it by `make pages`; tests compare the committed pages with it."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import compatibility_page
import dash_page
import errors_page
import evidence_page
import models_page
import pictures
import support_page
from dash_attn.cli.explore import START, answer
from dash_attn.viewing.explore.server import saved_page

DOCS = Path(__file__).parent.parent / "docs"
PAGES = {
    "compatibility.md": compatibility_page.page,
    "dash.md": dash_page.page,
    "errors.md": errors_page.page,
    "evidence.md": evidence_page.page,
    "explore-causal.html": lambda: saved_page(answer(START)),  # what `dash-attn explore --save` writes
    "models.md": models_page.page,
    "support.md": support_page.page,
}


def main() -> None:
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
    with TemporaryDirectory() as folder:
        (DOCS / pictures.TUTORIAL).write_text(pictures.tutorial_page(Path(folder)), encoding="utf-8")
    pictures.refresh()


if __name__ == "__main__":
    main()
