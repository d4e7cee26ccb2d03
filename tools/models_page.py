"""The page docs/models.md: which models of transformers take dash_attn, from the record of the last sweep over all of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from page_parts import code, section, table

RECORD = Path(__file__).parent / "model_sweep.json"
INTRODUCTION = """
This page lists every language model of transformers {version} with `attn_implementation="dash_attn"`, built small from its default
configuration and compared with `eager` on the CPU. The comparison covers the logits and all gradients of one training step and, for a model
that decodes, that later tokens do not change earlier logits. `python tools/model_sweep.py` makes the comparison, `make pages` this page.
`make test-all` repeats it and fails when the page is out of date; `make test` does so for the best-known models. Dropout is 0 here.
Other kinds of models (vision, audio without text) are checked in the same way when they are built and in their first forward, but are
not on this page.

The same comparison with a padded row, on the left and on the right, counts only the logits of its tokens. For an encoder-decoder model the
source is padded. All models have the same outcome there as above{but}.

**Decoding** compares the tokens and logits of `generate` with a cache: greedily for rows that are *whole* or padded on the *left* or
*right*, next to a row that is all padding (*empty*, whose own logits mean nothing and must only be finite), in *beams*, with a *static*
cache and, for encoder-decoder models, from a *prompt* of several tokens. Models that the tables call "as eager" match in all of these. For
causal models, prompts padded on the right raise: new tokens would come after padding.
"""
TITLES = {"causal": "Causal language models", "masked": "Masked language models", "encoder-decoder": "Encoder-decoder models"}
STATUS = {"refused": "raises", "no comparison": "does not run with eager here either:"}


def page() -> str:
    record: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    header = ["", "match eager", "decode as eager", "raise an error", "no comparison", "anything else"]
    introduction = INTRODUCTION.format(version=record["transformers"], but=", except in the last table" if _changed(record) else "")
    counts = table(header, [_counts(kind, record) for kind in TITLES])
    lines = ["# Models of Hugging Face transformers", "", introduction.strip(), "", *counts]
    for kind, title in TITLES.items():
        refused, missing = ([[code(name), record[kind][name][1]] for name in _with(record[kind], status)] for status in STATUS)
        blocks = [_matching(kind, record), table(["raise an error", "which"], refused)]
        lines += section(title, *blocks, *([table(["do not run with eager here either", "why"], missing)] if missing else []))
    if _changed(record):
        lines += section("Padded rows", table(["differs with padding", "padded on the", "outcome"], _changed(record)))
    return "\n".join(lines) + "\n"


def _matching(kind: str, record: dict[str, Any]) -> list[str]:
    """A table of the models that match: those that decode alike in one row."""
    names = _with(record[kind], "matches")
    if kind not in record["decoding"]:
        return [f"Match eager: {', '.join(map(code, names))}."]
    alike: dict[str, list[str]] = {"as eager": []}
    for name in names:
        alike.setdefault(_decoding(record["decoding"][kind][name]), []).append(name)
    return table(["match eager", "decoding"], [[", ".join(map(code, found)), words] for words, found in alike.items() if found])


def _decoding(unusual: dict[str, list[str]]) -> str:
    """Ways with one outcome, together."""
    ways: dict[str, list[str]] = {}
    for way, (status, why) in unusual.items():
        ways.setdefault(f"{STATUS.get(status, status)} {why}", []).append(way)
    return "; ".join(f"{', '.join(found)}: {words}" for words, found in ways.items()) or "as eager"


def _changed(record: dict[str, Any]) -> list[list[str]]:
    """Models whose outcome is another where a row is padded."""
    padded = record["padded"].items()
    return [[code(name), side, why] for side, kinds in padded for kind in TITLES for name, (_, why) in kinds[kind].items()]


def _with(outcomes: dict[str, Any], status: str) -> list[str]:
    return [name for name, (found, _) in outcomes.items() if found == status]


def _counts(kind: str, record: dict[str, Any]) -> list[str]:
    outcomes = record[kind]
    counts = [len(_with(outcomes, status)) for status in ("matches", "refused", "no comparison")]
    decoding = record["decoding"].get(kind)
    decode = "-" if decoding is None else str(sum(not unusual for unusual in decoding.values()))
    return [TITLES[kind].lower(), *map(str, (counts[0], decode, *counts[1:], len(outcomes) - sum(counts)))]
