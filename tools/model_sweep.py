"""Every causal and masked language model of transformers, tiny, with attn_implementation="dash_attn" and with eager; also padded.

Run as a script it writes the outcomes to tools/model_sweep.json, from which docs/models.md is made.
"""

from __future__ import annotations

import contextlib
import json
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from dash_attn.integrations import huggingface
from tiny_models import TOKENS, tiny_config

RECORD = Path(__file__).with_suffix(".json")
KINDS = {"causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING, "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING}
NAMES = {"causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES}
BATCH, LENGTH = 2, 40
SIDES = {"left": slice(None, 13), "right": slice(-13, None)}  # what is padded of the first row
TOLERANCE = (
    5e-5  # eager takes the softmax in float32 also of float64 scores; gemma4, with the largest scores, is off by 2e-5, by 3e-14 from sdpa
)
SHARPER = 4.0  # times the initial weights, with which scores are all nearly 0 and any mask is nearly right
NOISE = 0.02  # some start with gates at 0, behind which nothing shows
SINGLE = ("mra", "xglm")  # their code has float32 written into it
OURS = (ValueError, TypeError, NotImplementedError, RuntimeError, AttributeError)


@dataclass(frozen=True)
class Outcome:
    """status: "matches", "refused", "no comparison" (eager does not run here either) or "wrong"."""

    status: str
    detail: str = ""


def architectures() -> Iterator[tuple[str, str]]:
    for kind, names in NAMES.items():
        for model_type in names:
            yield kind, model_type


def build(kind: str, model_type: str, implementation: str) -> Any:
    config_class = CONFIG_MAPPING[model_type]
    config = tiny_config(config_class, model_type)
    model_class = KINDS[kind][config_class]
    model_class = model_class[0] if isinstance(model_class, tuple) else model_class
    part = config.get_text_config(decoder=True)
    if not isinstance(config, model_class.config_class) and isinstance(part, model_class.config_class):
        config = part
    if kind == "causal" and hasattr(config, "is_decoder"):
        config.is_decoder = True
    config._attn_implementation = implementation
    config._experts_implementation = "eager"  # in float64
    torch.manual_seed(0)
    model = model_class(config).to(torch.float32 if model_type in SINGLE else torch.float64)
    for weight in model.parameters():
        weight.data *= SHARPER if weight.ndim > 1 else 1.0
        weight.data += NOISE * torch.randn_like(weight)
    return model


def tokens(model: Any) -> Tensor:
    rows = BATCH * getattr(model.config, "num_codebooks", 1) if "Musicgen" in type(model).__name__ else BATCH
    return torch.randint(TOKENS.start, TOKENS.stop, (rows, LENGTH), generator=torch.Generator().manual_seed(1))


def logits(model: Any, ids: Tensor, **arguments: Any) -> Tensor:
    """With a fresh seed: a few draw random numbers also in eval mode."""
    torch.manual_seed(2)
    if "use_cache" not in arguments and getattr(model.config, "use_cache", None):
        arguments["use_cache"] = False
    return model(input_ids=ids, **arguments).logits


def attention_mask(side: str) -> Tensor:
    kept = torch.ones(BATCH, LENGTH, dtype=torch.long)
    kept[0, SIDES[side]] = 0
    return kept


def step(model: Any, ids: Tensor, side: str = "") -> list[Tensor]:
    """Logits and gradients, in training mode. Dropout is 0 in a tiny configuration. side: where a row is padded; logits there say
    nothing and do not count."""
    model.train()
    found = logits(model, ids, **({"attention_mask": attention_mask(side)} if side else {}))
    if side and found.shape[1] == LENGTH:
        found = found[attention_mask(side).repeat_interleave(len(found) // BATCH, 0).bool()]
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
    changed = ids.clone()
    changed[:, place] = TOKENS.start + (changed[:, place] - TOKENS.start + 1) % len(TOKENS)
    model.eval()
    with torch.no_grad():
        before, after = logits(model, ids), logits(model, changed)
    moved = (before - after).abs()
    moved[..., place, :] = 0
    return float(moved.max() / before.abs().max())


@contextlib.contextmanager
def counted_calls() -> Iterator[list[str]]:
    """The calls of our attention that models make."""
    calls: list[str] = []
    originals = {name: getattr(huggingface, name) for name in ("flash_attn_func", "flash_attn_varlen_func")}

    def counting(name: str) -> Any:
        return lambda *args, **kwargs: calls.append(name) or originals[name](*args, **kwargs)  # type: ignore[func-returns-value]

    for name in originals:
        setattr(huggingface, name, counting(name))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(huggingface, name, original)


@contextlib.contextmanager
def finite_masks() -> Iterator[None]:
    """Eager's masks, with the lowest float32. The lowest float64 is -inf in eager's softmax, which is float32: rows of padding are NaN."""

    def finite_mask(*args: Any, **kwargs: Any) -> Tensor | None:
        mask = eager_mask(*args, **kwargs)
        return mask if mask is None else mask.clamp(min=torch.finfo(torch.float32).min)

    AttentionMaskInterface.register("eager", finite_mask)
    try:
        yield
    finally:
        AttentionMaskInterface.register("eager", eager_mask)


def outcome(kind: str, model_type: str, side: str = "") -> Outcome:
    """What becomes of an architecture: one step of training as eager makes it, or an error of ours."""
    huggingface.register()
    try:
        eager = build(kind, model_type, "eager")
        ids = tokens(eager)
        with finite_masks():
            expected = step(eager, ids, side)
        reach = influence(eager, ids, -3)
    except Exception as error:
        return Outcome("no comparison", _text(error))
    try:
        with counted_calls() as calls:
            model = build(kind, model_type, "dash_attn")
            found = step(model, ids, side)
            made = len(calls)
            ahead = influence(model, ids, -1)
    except Exception as error:
        return Outcome("refused" if isinstance(error, OURS) and "dash_attn" in str(error) else "wrong", _text(error))
    return _judged(kind, reach, (found, expected), ahead, made)


def _judged(kind: str, reach: float, steps: tuple[list[Tensor], list[Tensor]], ahead: float, calls: int) -> Outcome:
    """reach: what one token does to the others in eager. An error must also be small beside that, or it would not show."""
    off, allowed = difference(*steps), min(TOLERANCE, reach / 10)
    if calls == 0:
        return Outcome("wrong", "dash_attn was not called")
    if not off <= allowed:
        return Outcome("wrong", f"off by {off:.0e}; a token moves the others by {reach:.0e}")
    if kind == "causal" and not ahead <= allowed:
        return Outcome("wrong", f"the last token moves earlier logits by {ahead:.0e}")
    return Outcome("matches", f"{calls} {'call' if calls == 1 else 'calls'}")


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]


def sweep() -> dict[str, Any]:
    record: dict[str, Any] = {"transformers": transformers.__version__, "causal": {}, "masked": {}}
    record["padded"] = {side: {"causal": {}, "masked": {}} for side in SIDES}  # only what differs
    for kind, model_type in architectures():
        for side in ("", *SIDES):
            found = outcome(kind, model_type, side)
            if not side or found != recorded(record, kind, model_type):
                (record["padded"][side] if side else record)[kind][model_type] = [found.status, found.detail]
            print(kind, model_type, side, found.status, found.detail, flush=True)
    return record


def recorded(record: dict[str, Any], kind: str, model_type: str, side: str = "") -> Outcome:
    padded = record["padded"][side][kind] if side else {}
    return Outcome(*padded.get(model_type, record[kind][model_type]))


def quiet() -> None:
    transformers.logging.set_verbosity_error()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


if __name__ == "__main__":
    quiet()
    RECORD.write_text(json.dumps(sweep(), indent=1) + "\n", encoding="utf-8")
