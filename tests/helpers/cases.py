"""Which schedule serves which mask, as written in DESIGN.md."""

from __future__ import annotations

from dash_attn.scheduling import GENERATORS

NAMES = ("auto", *GENERATORS)
MASKS = ("full", "causal", "window:2,0", "window:1,2", "documents:2,4,2", "documents-full:3,5", "prefix:3")
ONLY = {"shift": ("full",), "shift_blocks": ("full",), "symmetric_shift": ("full", "causal", "prefix:3")}

SERVED = [(name, mask) for name in NAMES for mask in MASKS if mask in ONLY.get(name, MASKS)]
REFUSED = [(name, mask) for name in ONLY for mask in MASKS if mask not in ONLY[name]]
