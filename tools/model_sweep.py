"""Every causal and masked language model of transformers, tiny, with attn_implementation="dash_attn" and with eager.

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
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from dash_attn.integrations import huggingface
from tiny_models import TOKENS, tiny_config

RECORD = Path(__file__).with_suffix(".json")
KINDS = {"causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING, "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING}
NAMES = {"causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES}
BATCH, LENGTH = 2, 40
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
    return model_class(config).to(torch.float32 if model_type in SINGLE else torch.float64)


def tokens(model: Any) -> Tensor:
    rows = BATCH * getattr(model.config, "num_codebooks", 1) if "Musicgen" in type(model).__name__ else BATCH
    return torch.randint(TOKENS.start, TOKENS.stop, (rows, LENGTH), generator=torch.Generator().manual_seed(1))


def logits(model: Any, ids: Tensor, **arguments: Any) -> Tensor:
    """With a fresh seed: a few draw random numbers also in eval mode."""
    torch.manual_seed(2)
    if "use_cache" not in arguments and getattr(model.config, "use_cache", None):
        arguments["use_cache"] = False
    return model(input_ids=ids, **arguments).logits


def step(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Logits, and the gradient of the embeddings, in training mode. Dropout is 0 in a tiny configuration."""
    model.train()
    found = logits(model, ids)
    found.square().mean().backward()
    return found.detach(), model.get_input_embeddings().weight.grad


def future_influence(model: Any, ids: Tensor) -> float:
    """How far earlier logits move when only the last token changes."""
    changed = ids.clone()
    changed[:, -1] = TOKENS.start + (changed[:, -1] - TOKENS.start + 1) % len(TOKENS)
    model.eval()
    with torch.no_grad():
        moved = (logits(model, ids) - logits(model, changed)).abs()
    return moved[..., :-1, :].max().item()
