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
fails when the page is out of date; `make test` does so for the best known. Dropout is 0 here, as it must be in training with dash_attn.
Other kinds of models (vision, audio, encoder-decoder) are checked in the same way as they are built and in their first forward, but are
not on this page.
"""
TITLES = {"causal": "Causal language models", "masked": "Masked language models"}


def page() -> str:
    record: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    lines = [
        "# Models of Hugging Face transformers",
        "",
        *INTRODUCTION.format(version=record["transformers"]).strip().splitlines(),
        "",
        *table(["", "match eager", "raise an error", "no comparison", "anything else"], [_counts(kind, record[kind]) for kind in TITLES]),
    ]
    for kind, title in TITLES.items():
        lines += ["", f"## {title}", "", f"Match eager: {', '.join(code(name) for name in _with(record[kind], 'matches'))}.", ""]
        lines += table(["raise an error", "which"], [[code(name), record[kind][name][1]] for name in _with(record[kind], "refused")])
        missing = _with(record[kind], "no comparison")
        if missing:
            lines += ["", *table(["do not run with eager here either", "why"], [[code(name), record[kind][name][1]] for name in missing])]
    return "\n".join(lines) + "\n"


def _with(outcomes: dict[str, Any], status: str) -> list[str]:
    return [name for name, (found, _) in outcomes.items() if found == status]


def _counts(kind: str, outcomes: dict[str, Any]) -> list[str]:
    counts = [len(_with(outcomes, status)) for status in ("matches", "refused", "no comparison")]
    return [TITLES[kind].lower(), *map(str, (*counts, len(outcomes) - sum(counts)))]
