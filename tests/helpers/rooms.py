"""The rooms of the package, top to bottom."""

from __future__ import annotations

from pathlib import Path

import dash_attn

PACKAGE = Path(dash_attn.__file__).parent
CORE = {"masks", "scheduling", "simulation"}
# Room -> the rooms it may import, beside `errors`, `formats` and `libraries`. DESIGN.md shows the same as a table, and says why.
ROOMS: dict[str, set[str]] = {
    "errors": set(),
    "formats": set(),
    "libraries": set(),
    "door": set(),
    "masks": set(),
    "scheduling": {"masks"},
    "simulation": {"masks", "scheduling"},
    "execution": {"masks", "scheduling"},
    "viewing": CORE,
    "call": CORE,
    "backends": {*CORE, "execution", "viewing", "call"},
    "attention": {*CORE, "call", "backends"},
    "invariance": {"door", "call", "backends", "distributed"},
    "distributed": {*CORE, "call", "backends", "attention"},
    "nn": {"masks", "attention"},
    "tools": {*CORE, "execution", "viewing", "call", "backends", "attention", "invariance", "distributed"},
    "ledgers": {"call", "backends", "attention", "tools"},
    "integrations": {"door", "masks", "call", "attention", "distributed", "ledgers"},
    "cli": {*CORE, "execution", "viewing", "call", "backends", "attention", "invariance", "nn", "tools", "ledgers"},
}
