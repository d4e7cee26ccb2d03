"""The page docs/tutorial/schedules.md: the script beside it, cell by cell, with what each cell prints."""

from __future__ import annotations

import io
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

SCRIPT = Path(__file__).parent.parent / "docs" / "tutorial" / "schedules.py"


def page(pictures: Path) -> str:
    """Run every cell, draw the pictures into that directory, and return the page."""
    namespace: dict[str, Any] = {"__name__": "tutorial", "__file__": str(SCRIPT)}
    parts = []
    with patch.object(sys, "argv", [str(SCRIPT), str(pictures)]):
        for is_text, cell in cells(SCRIPT.read_text(encoding="utf-8")):
            prose = "\n".join(line.removeprefix("#").removeprefix(" ") for line in cell.splitlines())
            parts.append(prose if is_text else _code(cell, namespace))
    return "\n\n".join(parts) + "\n"


def cells(source: str) -> list[tuple[bool, str]]:
    """(whether it is text, content) of every cell; what is before the first one is for those who open the script."""
    _, *found = re.split(r"^# %%(?=[ \n])", source, flags=re.M)
    return [(cell.startswith(" [markdown]"), cell.split("\n", 1)[1].strip("\n")) for cell in found]


def _code(cell: str, namespace: dict[str, Any]) -> str:
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(cell, str(SCRIPT), "exec"), namespace)
    output = printed.getvalue().rstrip()
    return f"```python\n{cell.strip()}\n```" + (f"\n\n```text\n{output}\n```" if output else "")
