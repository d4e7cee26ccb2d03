"""Makes the API page of docstrings as we write them.

An argument is named at the start of a line, "mask: any mask ...": these lines become a list. A field is explained by
the comment behind it: that becomes its text.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ARGUMENT = re.compile(r"(\w+(?:, \w+)*(?: and \w+)?): (.*)")


COMMENT = re.compile(r"  # (.+)$")


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
