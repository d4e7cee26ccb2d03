"""What users call: names, signatures and flags as last decided. A refresh has to be asked for: DASH_ATTN_UPDATE_GOLDEN=1."""

from __future__ import annotations

import os
from pathlib import Path

import dash_attn
from surface import surface

GOLDEN = Path(__file__).parents[1] / "golden" / "public_surface.txt"


def test_the_public_surface_is_the_one_that_was_decided() -> None:
    found = "\n".join(surface()) + "\n"
    if os.environ.get("DASH_ATTN_UPDATE_GOLDEN"):
        GOLDEN.write_text(found)
    missing = set(GOLDEN.read_text().splitlines()) - set(found.splitlines())
    more = set(found.splitlines()) - set(GOLDEN.read_text().splitlines())
    assert found == GOLDEN.read_text(), f"gone: {sorted(missing)}; new: {sorted(more)}"


def test_every_name_at_the_top_can_be_had_and_every_flag_is_seen() -> None:
    assert all(getattr(dash_attn, name) is not None for name in dash_attn.__all__)
    lines = surface()
    assert any(line.startswith("dash-attn verify --ranks") for line in lines)
    assert any(line.startswith("dash_attn.attention.functions.flash_attn_func(q: Tensor") for line in lines)
