"""What the page of `dash-attn explore --ledgers A B` shows: where two runs part, step by step and module by module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..viewing.explore.packing import packed

MOST_CELLS = 20_000_000  # modules times steps: about 100 MB in a browser


def ledgers_answer(a: str | Path, b: str | Path) -> dict[str, Any]:
    """Raises LedgerError, a ValueError, for what cannot be compared."""
    from ..ledgers.comparing import compare_runs
    from ..ledgers.spread import DIRECTIONS, spread
    from .diff import as_json, rows_of, verdict

    found = compare_runs(a, b)
    seen = spread(a, b, None if found.first is None else found.first.rank)
    cells = len(seen.modules) * len(seen.steps)
    if cells > MOST_CELLS:
        raise ValueError(f"a page shows at most {MOST_CELLS:,} modules times steps; got {len(seen.modules):,} x {len(seen.steps):,}")
    return {
        "format": 1,
        "kind": "ledgers",
        "title": [f"A: {a}", f"B: {b}"],
        "command": f"dash-attn diff {a} {b}",
        "verdict": verdict(found),
        "rows": [] if found.first is None else rows_of(found.first),
        "comparison": {**as_json(found), "notes": [*found.lacking, *found.notes]},
        "rank": seen.rank,
        "directions": list(DIRECTIONS),
        "modules": list(seen.modules),
        "steps": packed(seen.steps),
        "compared": [packed(each.ravel()) for each in seen.compared],
        "differing": [packed(each.ravel()) for each in seen.differing],
    }
