"""What mkdocs needs to make the site of docs/ and of files beside it, as we write them.

A hook: DESIGN.md, CONTRIBUTING.md, RELEASING.md and SECURITY.md become pages. Links are written as they lead somewhere in the
repository; here they are turned into links between pages.

The API page has our docstrings. An argument is named at the start of a line, "mask: any mask ...": these lines become a list. A field is
explained by the comment behind it: that becomes its text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
PAGES = {"design.md": "DESIGN.md", "contributing.md": "CONTRIBUTING.md", "releasing.md": "RELEASING.md", "security.md": "SECURITY.md"}
ARGUMENT = re.compile(r"(\w+(?:, \w+)*(?: and \w+)?): (.*)")
COMMENT = re.compile(r"  # (.+)$")


def on_files(files: Any, config: Any) -> Any:
    for page, source in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        for other, its_source in PAGES.items():
            text = text.replace(f"]({its_source}", f"]({other}")
        text = text.replace("](docs/", "](").replace("](README.md", "](index.md")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Of a page in docs/ itself; none in a folder below it links to these files."""
    for page, source in PAGES.items():
        markdown = markdown.replace(f"](../{source}", f"]({page}")
    return markdown


class OurDocstrings(griffe.Extension):
    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        _rewrite(func.docstring, {parameter.name for parameter in func.parameters})

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        names = {parameter.name for parameter in cls.parameters} | set(cls.members)
        _rewrite(cls.docstring, names)

    def on_attribute(self, *, attr: griffe.Attribute, **_: Any) -> None:
        comment = COMMENT.search(attr.source)
        if comment and attr.docstring is None and "noqa" not in comment[1]:
            attr.docstring = griffe.Docstring(comment[1][0].upper() + comment[1][1:] + ".", parent=attr)


def _rewrite(docstring: griffe.Docstring | None, names: set[str]) -> None:
    if docstring is not None:
        docstring.value = as_list(docstring.value, {name.lstrip("*") for name in names})


def as_list(text: str, names: set[str]) -> str:
    """Lines that start with one of these names and a colon become items; what is indented below them belongs to them."""
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        found = ARGUMENT.match(line)
        if found and found[1] in names:
            if not inside and lines and lines[-1]:
                lines.append("")
            lines.append(f"- `{found[1]}`: {found[2]}")
            inside = True
            continue
        if inside and line and not line.startswith(" "):
            lines.append("")
            inside = False
        lines.append(line)
    return "\n".join(lines)
