"""Reads pages of docs/: their code, and their tables."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str, fence: str) -> list[str]:
    return re.findall(rf"^```{fence}\n(.*?)^```", page, re.S | re.M)


def rows(page: str, columns: int) -> list[list[str]]:
    """Cells of all table rows with that many columns; \\| is no border."""
    lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in page.splitlines() if line.startswith("|")]
    return [[cell.strip().replace("\\|", "|") for cell in cells] for cells in lines if len(cells) == columns]


def run_long_sequences(_: int) -> bool:
    """What a rank does that follows the page on long sequences: all blocks, one after another."""
    page = (DOCS / "long-sequences.md").read_text()
    exec(compile("\n".join(blocks(page, "python")), "<long-sequences.md>", "exec"), {})
    return True
