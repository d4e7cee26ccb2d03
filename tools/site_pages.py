"""A hook of mkdocs: DESIGN.md, CONTRIBUTING.md and RELEASING.md, which lie beside docs/, become pages of the site.

Links are written as they lead somewhere in the repository; here they are turned into links between pages.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
PAGES = {"design.md": "DESIGN.md", "contributing.md": "CONTRIBUTING.md", "releasing.md": "RELEASING.md"}


def on_files(files: Any, config: Any) -> Any:
    for page, source in PAGES.items():
        files.append(File.generated(config, page, content=_as_page((ROOT / source).read_text(encoding="utf-8"))))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Of a page in docs/ itself; none in a folder below it links to these files."""
    for page, source in PAGES.items():
        markdown = markdown.replace(f"](../{source}", f"]({page}")
    return markdown


def _as_page(text: str) -> str:
    for page, source in PAGES.items():
        text = text.replace(f"]({source}", f"]({page}")
    return text.replace("](docs/", "](").replace("](README.md", "](index.md")
