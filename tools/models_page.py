"""The page docs/models.md: which models of transformers take dash_attn, from the record of the last sweep over all of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from page_parts import code, table

RECORD = Path(__file__).parent / "model_sweep.json"
INTRODUCTION = """
Every language model of transformers {version} with `attn_implementation="dash_attn"`, built tiny from its default configuration and
compared with `eager` on the CPU: the logits and all gradients of one step of training, and that later tokens do not move earlier logits
of a causal model. `python tools/model_sweep.py` makes the comparison, `make pages` this page. `make test-all` repeats the comparison and
fails when the page is out of date; `make test` does so for the best known. Dropout is 0 here.
Other kinds of models (vision, audio, encoder-decoder) are checked in the same way as they are built and in their first forward, but are
not on this page.

The same comparison with a padded row, on the left and on the right, counts the logits of its tokens only. All models have the same
outcome there as above{but}.
"""
TITLES = {"causal": "Causal language models", "masked": "Masked language models"}


def page() -> str:
    record: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    lines = [
        "# Models of Hugging Face transformers",
        "",
        *INTRODUCTION.format(version=record["transformers"], but=", but for the last table" if _changed(record) else "")
        .strip()
        .splitlines(),
        "",
        *table(["", "match eager", "raise an error", "no comparison", "anything else"], [_counts(kind, record[kind]) for kind in TITLES]),
    ]
    for kind, title in TITLES.items():
        lines += ["", f"## {title}", "", f"Match eager: {', '.join(code(name) for name in _with(record[kind], 'matches'))}.", ""]
        lines += table(["raise an error", "which"], [[code(name), record[kind][name][1]] for name in _with(record[kind], "refused")])
        missing = _with(record[kind], "no comparison")
        if missing:
            lines += ["", *table(["do not run with eager here either", "why"], [[code(name), record[kind][name][1]] for name in missing])]
    if _changed(record):
        lines += ["", "## Padded rows", "", *table(["other than without padding", "padded on the", "outcome"], _changed(record))]
    return "\n".join(lines) + "\n"


def _changed(record: dict[str, Any]) -> list[list[str]]:
    """Models whose outcome is another where a row is padded."""
    padded = record["padded"].items()
    return [[code(name), side, why] for side, kinds in padded for kind in TITLES for name, (_, why) in kinds[kind].items()]


def _with(outcomes: dict[str, Any], status: str) -> list[str]:
    return [name for name, (found, _) in outcomes.items() if found == status]


def _counts(kind: str, outcomes: dict[str, Any]) -> list[str]:
    counts = [len(_with(outcomes, status)) for status in ("matches", "refused", "no comparison")]
    return [TITLES[kind].lower(), *map(str, (*counts, len(outcomes) - sum(counts)))]
