"""Pieces of Markdown that the generated pages share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import count, takewhile


def code(text: str) -> str:
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [row(header), row(["---"] * len(header)), *map(row, rows)]


def section(title: str, *blocks: Iterable[str]) -> list[str]:
    """With its heading; blocks of lines stand apart."""
    return ["", f"## {title}", *(line for block in blocks for line in ("", *block))]


def row(entry: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in entry)} |"


def cells(line: str) -> list[str]:
    """Of a row of a table; none if it is another line."""
    found = re.split(r"(?<!\\)\|", line)[1:-1] if line.startswith("|") else []
    return [cell.strip().replace(chr(92) + "|", "|") for cell in found]


def numbers_in_words(numbers: Sequence[int]) -> str:
    """Ascending numbers, evenly spaced stretches of four and more as "8 to 256 in steps of 8"."""
    parts, rest = [], list(numbers)
    while rest:
        step = rest[1] - rest[0] if len(rest) > 1 else 1
        even = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(rest, count(rest[0], step))))
        long = even > 3
        parts.append(f"{rest[0]} to {rest[even - 1]}" + (f" in steps of {step}" if step > 1 else "") if long else str(rest[0]))
        rest = rest[even if long else 1 :]
    return ", ".join(parts) or "none"
