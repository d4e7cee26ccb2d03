"""The page docs/explore-causal.html: what `dash-attn explore --save` writes for the first picture of the README."""

from __future__ import annotations

from dash_attn.cli.explore import START, answer
from dash_attn.viewing.explore.server import saved_page


def page() -> str:
    return saved_page(answer(START))
