"""Every causal, masked and encoder-decoder language model of transformers, tiny, with attn_implementation="dash_attn" and with eager: a
step of training, also of padded rows, and (`decode_sweep.py`) decoding.

Run as a script it writes the outcomes to tools/model_sweep.json, from which docs/models.md is made.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from dash_attn.integrations import huggingface
from decode_sweep import decoding, unusual
from sweep_models import BATCH, LENGTH, NAMES, TOLERANCE, Outcome, architectures, build, changed, compared, padding, quiet, source, tokens

RECORD = Path(__file__).with_suffix(".json")
SIDES = ("left", "right")  # on which the first row is padded; of an encoder-decoder model, that of the source


def logits(model: Any, ids: Tensor, sides: tuple[str, ...] = (), **arguments: Any) -> Tensor:
    """With a fresh seed: a few draw random numbers also in eval mode. sides: of each row, which is padded."""
    torch.manual_seed(2)
    if "use_cache" not in arguments and getattr(model.config, "use_cache", None):
        arguments["use_cache"] = False
    if model.config.is_encoder_decoder:
        given = {**source(model, sides or ("",) * len(ids)), "decoder_input_ids": ids}
    else:
        given = {"input_ids": ids, **({"attention_mask": padding(sides)} if sides else {})}
    return model(**{**given, **arguments}).logits


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


def influence(model: Any, ids: Tensor, place: int) -> float:
    """How far the logits of other tokens move when one token changes, as a part of the largest logit."""
    before, moved = _moved(model, ids, changed(ids, place))
    moved[..., place, :] = 0
    return float(moved.max() / before.abs().max())


def influence_of_source(model: Any, ids: Tensor) -> float:
    """The same for a part of the source of an encoder-decoder model."""
    before, moved = _moved(model, ids, ids, **source(model, ("",) * len(ids), another=True))
    return float(moved.max() / before.abs().max())


def _moved(model: Any, ids: Tensor, other: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
    model.eval()
    with torch.no_grad():
        before = logits(model, ids)
        return before, (before - logits(model, other, **arguments)).abs()


def outcome(kind: str, model_type: str, side: str = "") -> Outcome:
    """What becomes of an architecture: one step of training as eager makes it, or an error of ours."""
    huggingface.enable()

    def expected() -> tuple[list[Tensor], float]:
        """And what one token does to the others. An error must also be small beside that, or it would not show."""
        eager = build(kind, model_type, "eager")
        ids = tokens(eager)
        found, reach = step(eager, ids, side), influence(eager, ids, -3)
        return found, min(reach, influence_of_source(eager, ids)) if kind == "encoder-decoder" else reach

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
