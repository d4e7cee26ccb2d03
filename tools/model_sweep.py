"""Every causal, masked and encoder-decoder language model of transformers, tiny, with attn_implementation="dash_attn" and with eager: a
step of training, also of padded rows, and decoding: greedily with padded rows, in beams, from a static cache.

Run as a script it writes the outcomes to tools/model_sweep.json, from which docs/models.md is made.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from dash_attn.integrations import huggingface
from sweep_models import BATCH, LENGTH, NAMES, TOLERANCE, Outcome, architectures, build, changed, compared, padding, quiet, source, tokens

RECORD = Path(__file__).with_suffix(".json")
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
EXPECTED = {("causal", "right"): "refused"}  # new tokens go on from padding
SIDES = ("left", "right")  # on which the first row is padded; of an encoder-decoder model, that of the source


def logits(model: Any, ids: Tensor, sides: tuple[str, ...] = (), **arguments: Any) -> Tensor:
    """With a fresh seed: a few draw random numbers also in eval mode. sides: of each row, which is padded."""
    torch.manual_seed(2)
    if "use_cache" not in arguments and getattr(model.config, "use_cache", None):
        arguments["use_cache"] = False
    return model(**{**given(model, ids, sides), **arguments}).logits


def given(model: Any, ids: Tensor, sides: tuple[str, ...]) -> dict[str, Tensor]:
    """The decoder of an encoder-decoder model may begin with no tokens."""
    if model.config.is_encoder_decoder:
        return {**source(model, sides or ("",) * len(ids)), **({"decoder_input_ids": ids} if ids.shape[1] else {})}
    return {"input_ids": ids, **({"attention_mask": padding(sides)} if sides else {})}


def step(model: Any, ids: Tensor, side: str = "") -> list[Tensor]:
    """Logits and gradients, in training mode. Dropout is 0 in a tiny configuration. side: where a row is padded; logits there say
    nothing and do not count."""
    model.train()
    found = logits(model, ids, (side, "") if side else ())
    if side and found.shape[1] == LENGTH and not model.config.is_encoder_decoder:
        found = found[padding((side, "")).repeat_interleave(len(found) // BATCH, 0).bool()]
    found.square().mean().backward()
    return [found.detach(), *(weight.grad for weight in model.parameters() if weight.grad is not None and weight.numel())]


def difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest error of the logits, and of the gradients, each as a part of the largest value."""
    logits_off = (found[0] - expected[0]).abs().max() / expected[0].abs().max()
    largest = max(gradient.abs().max() for gradient in expected[1:])
    gradients_off = max((mine - theirs).abs().max() for mine, theirs in zip(found[1:], expected[1:], strict=True)) / largest
    return float(max(logits_off, gradients_off))


def influence(model: Any, ids: Tensor, place: int | None) -> float:
    """How far the logits of other tokens move when the token at a place changes, as a part of the largest logit. None: when a part of the
    source of an encoder-decoder model changes."""
    other, more = (ids, source(model, ("",) * len(ids), another=True)) if place is None else (changed(ids, place), {})
    model.eval()
    with torch.no_grad():
        before = logits(model, ids)
        moved = (before - logits(model, other, **more)).abs()
    if place is not None:
        moved[..., place, :] = 0
    return float(moved.max() / before.abs().max())


def outcome(kind: str, model_type: str, side: str = "") -> Outcome:
    """What becomes of an architecture: one step of training as eager makes it, or an error of ours."""
    huggingface.enable()

    def expected() -> tuple[list[Tensor], float]:
        """And what one token does to the others. An error must also be small beside that, or it would not show."""
        eager = build(kind, model_type, "eager")
        ids = tokens(eager)
        found, reach = step(eager, ids, side), influence(eager, ids, -3)
        return found, min(reach, influence(eager, ids, None)) if kind == "encoder-decoder" else reach

    def made(calls: list[str]) -> tuple[list[Tensor], int, float]:
        model = build(kind, model_type, "dash_attn")
        ids = tokens(model)
        return step(model, ids, side), len(calls), influence(model, ids, -1)

    def judged(ours: tuple[list[Tensor], int, float], theirs: tuple[list[Tensor], float]) -> Outcome:
        (found, calls, ahead), (right, reach) = ours, theirs
        off, allowed = difference(found, right), min(TOLERANCE, reach / 10)
        if calls == 0:
            return Outcome("wrong", "dash_attn was not called in training")
        if not off <= allowed:
            return Outcome("wrong", f"off by {off:.0e}; a token moves the others by {reach:.0e}")
        if kind != "masked" and not ahead <= allowed:
            return Outcome("wrong", f"the last token moves earlier logits by {ahead:.0e}")
        return Outcome("matches", f"{calls} {'call' if calls == 1 else 'calls'}")

    return compared(expected, made, judged)


# ---- decoding. Rows of padding alone mean nothing in eager, so there only the other rows are compared, and ours must be finite.


def decoded(model: Any, sides: tuple[str, ...], choices: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The tokens of every row, and the logits of every step, (steps, rows, vocabulary)."""
    told = {name: choice for name, choice in choices.items() if name != "prompt"}
    special = {"pad_token_id": 0, "bos_token_id": 1, "decoder_start_token_id": 1}  # none ends a row
    model.generation_config = transformers.GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, **special, **told)
    ids = tokens(model, len(sides))
    if model.config.is_encoder_decoder:
        ids = ids[:, : choices.get("prompt", 0)]
    inputs = given(model, ids, sides)
    torch.manual_seed(2)
    made = transformers.GenerationMixin.generate(model.eval(), **inputs, return_dict_in_generate=True, output_logits=True)
    return made.sequences, torch.stack(made.logits)


def decoding(kind: str, model_type: str) -> dict[str, Outcome]:
    """What becomes of each way. Where padded rows raise, beams and static caches have whole ones."""
    huggingface.enable()
    eager, ours = (build(kind, model_type, implementation) for implementation in ("eager", "dash_attn"))
    found: dict[str, Outcome] = {}
    for way, (sides, choices) in (SOURCES if kind == "encoder-decoder" else WAYS).items():
        refused = choices and found["left"].status != "matches"
        asked = PLAIN if refused else sides, choices
        found[way] = compared(partial(decoded, eager, *asked), lambda _, asked=asked: decoded(ours, *asked), partial(_judged, asked[0]))
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


# ---- all of them


def sweep() -> dict[str, Any]:
    record: dict[str, Any] = {"transformers": transformers.__version__, **{kind: {} for kind in NAMES}}
    record["padded"] = {side: {kind: {} for kind in NAMES} for side in SIDES}  # only what differs
    record["decoding"] = {kind: {} for kind in NAMES if kind != "masked"}  # of those that match: only what is unusual
    for kind, model_type in architectures():
        for side in ("", *SIDES):
            found = outcome(kind, model_type, side)
            if not side or found != recorded(record, kind, model_type):
                (record["padded"][side] if side else record)[kind][model_type] = [found.status, found.detail]
            print(kind, model_type, side, found.status, found.detail, flush=True)
        if kind != "masked" and recorded(record, kind, model_type).status == "matches":
            record["decoding"][kind][model_type] = unusual(kind, decoding(kind, model_type))
            print(kind, model_type, "decoding", record["decoding"][kind][model_type], flush=True)
    return record


def recorded(record: dict[str, Any], kind: str, model_type: str, side: str = "") -> Outcome:
    padded = record["padded"][side][kind] if side else {}
    return Outcome(*padded.get(model_type, record[kind][model_type]))


if __name__ == "__main__":
    quiet()
    RECORD.write_text(json.dumps(sweep(), indent=1) + "\n", encoding="utf-8")
