"""Pieces of Markdown that the generated pages share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


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
    parts, first = [], 0
    while first < len(numbers):
        last = first
        while last + 2 < len(numbers) and numbers[last + 2] - numbers[last + 1] == numbers[first + 1] - numbers[first]:
            last += 1
        last = min(last + 1, len(numbers) - 1)
        if last - first < 3:
            parts.append(str(numbers[first]))
            first += 1
        else:
            step = numbers[first + 1] - numbers[first]
            parts.append(f"{numbers[first]} to {numbers[last]}" + (f" in steps of {step}" if step > 1 else ""))
            first = last + 1
    return ", ".join(parts) or "none"
