"""Decoding of the models of the sweep (`model_sweep.py`), compared with eager: greedily with padded rows, in beams, from a static cache.

Rows of padding alone mean nothing in eager, so there only the other rows are compared, and ours must be finite.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor

from dash_attn.integrations import huggingface
from sweep_models import TOLERANCE, Outcome, build, compared, padding, source, tokens

NEW_TOKENS = 5
PLAIN = ("", "")
# Of each way: which side of each row is padded, and what `generate` is told. For an encoder-decoder model, of its source.
WAYS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "whole": (PLAIN, {}),
    "left": (("", "left"), {}),
    "right": (("", "right"), {}),
    "empty": (("", "left", "empty"), {}),
    "beams": (("", "left"), {"num_beams": 3}),
    "static": (("", "left"), {"cache_implementation": "static"}),
}
SOURCES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    **WAYS,
    "beams": (("", "left", "right"), {"num_beams": 3}),
    "static": (("", "left", "right"), {"cache_implementation": "static"}),
    "prompt": (("", "left", "right"), {"prompt": 7}),
}
EXPECTED = {("causal", "right"): "refused"}  # new tokens come after a hole


def decoded(model: Any, sides: tuple[str, ...], choices: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The tokens of every row, and the logits of every step, (steps, rows, vocabulary)."""
    told = {name: choice for name, choice in choices.items() if name != "prompt"}
    special = {"pad_token_id": 0, "bos_token_id": 1, "decoder_start_token_id": 1}  # none ends a row
    model.generation_config = transformers.GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, **special, **told)
    given = inputs(model, sides, choices.get("prompt", 0))
    torch.manual_seed(2)
    made = transformers.GenerationMixin.generate(model.eval(), **given, return_dict_in_generate=True, output_logits=True)
    return made.sequences, torch.stack(made.logits)


def inputs(model: Any, sides: tuple[str, ...], prompt: int) -> dict[str, Tensor]:
    """prompt: how many tokens the decoder of an encoder-decoder model begins with, or 0."""
    ids = tokens(model, len(sides))
    if not model.config.is_encoder_decoder:
        return {"input_ids": ids, "attention_mask": padding(sides)}
    return {**source(model, sides), **({"decoder_input_ids": ids[:, :prompt]} if prompt else {})}


def decoding(kind: str, model_type: str) -> dict[str, Outcome]:
    """What becomes of each way. Where padded rows raise, beams and static caches have whole ones."""
    huggingface.enable()
    eager, ours = (build(kind, model_type, implementation) for implementation in ("eager", "dash_attn"))
    found: dict[str, Outcome] = {}
    for way, (sides, choices) in (SOURCES if kind == "encoder-decoder" else WAYS).items():
        refused = choices and found["left"].status != "matches"
        given = PLAIN if refused else sides, choices
        found[way] = compared(partial(decoded, eager, *given), lambda _, given=given: decoded(ours, *given), partial(_judged, given[0]))
    return found


def unusual(kind: str, found: dict[str, Outcome]) -> dict[str, list[str]]:
    """What is not as it is with nearly all models."""
    return {way: [one.status, one.detail] for way, one in found.items() if one.status != EXPECTED.get((kind, way), "matches")}


def _judged(sides: tuple[str, ...], made: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> Outcome:
    if not made[1].isfinite().all():
        return Outcome("wrong", "some logits are not finite")
    (mine, my_logits), (theirs, their_logits) = (_meant(*found, sides) for found in (made, expected))
    off = float((my_logits - their_logits).abs().max() / their_logits.abs().max()) if mine.shape == theirs.shape else torch.inf
    if not off <= TOLERANCE:
        return Outcome("wrong", f"off by {off:.0e}")
    return Outcome("matches") if torch.equal(mine, theirs) else Outcome("wrong", "other tokens")


def _meant(sequences: Tensor, logits: Tensor, sides: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    """Without rows of padding alone. Beams have rows of logits of their own."""
    meant = torch.tensor([side != "empty" for side in sides])
    return sequences[meant], logits[:, meant.repeat_interleave(logits.shape[1] // len(sides))]
