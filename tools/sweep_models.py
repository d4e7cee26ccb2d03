"""Models of a sweep, built tiny with one implementation or another, and what two of them are compared with."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from dash_attn.integrations import _cached_keys, huggingface
from tiny_models import TWO_MODELS, tiny_config, tiny_pair

SEQ_TO_SEQ = (modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES)


def _has_an_encoder(name: str) -> bool:
    """The others of these tables are decoders that are given sounds. Two models in one are in TWO_MODELS."""
    config: Any = CONFIG_MAPPING[name]
    return getattr(config, "is_encoder_decoder", False) and not name.endswith("encoder-decoder")


NAMES = {
    "causal": list(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    "masked": list(modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    "encoder-decoder": [*sorted(name for name in {**SEQ_TO_SEQ[0], **SEQ_TO_SEQ[1]} if _has_an_encoder(name)), *TWO_MODELS],
}
MAPPINGS = {
    "causal": (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,),
    "masked": (modeling_auto.MODEL_FOR_MASKED_LM_MAPPING,),
    "encoder-decoder": (modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING),
}
TOLERANCE = (
    5e-5  # eager takes the softmax in float32 also of float64 scores; gemma4, with the largest scores, is off by 2e-5, by 3e-14 from sdpa
)
SHARPER = 4.0  # times the initial weights, with which scores are all nearly 0 and any mask is nearly right
NOISE = 0.02  # some start with gates at 0, behind which nothing shows
SINGLE = ("inkling2_text", "mra", "xglm")  # their code has float32 written into it
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


def _classes(kind: str, model_type: str) -> tuple[Any, Any]:
    """The class of the model, and its tiny configuration."""
    if model_type in TWO_MODELS:
        return transformers.EncoderDecoderModel, tiny_pair(model_type)
    config = tiny_config(CONFIG_MAPPING[model_type], model_type)
    model_class = next(mapping[type(config)] for mapping in MAPPINGS[kind] if type(config) in mapping)
    model_class = model_class[0] if isinstance(model_class, tuple) else model_class
    part = config.get_text_config(decoder=True)
    if not isinstance(config, model_class.config_class) and isinstance(part, model_class.config_class):
        config = part
    return model_class, config


def build(kind: str, model_type: str, implementation: str) -> Any:
    model_class, config = _classes(kind, model_type)
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


@contextlib.contextmanager
def counted_calls() -> Iterator[list[str]]:
    """The calls of our attention that models make."""
    calls: list[str] = []
    names = {"flash_attn_func": huggingface, "flash_attn_varlen_func": huggingface, "flash_attn_with_kvcache": _cached_keys}
    originals = {name: getattr(module, name) for name, module in names.items()}

    def counting(name: str) -> Any:
        return lambda *args, **kwargs: calls.append(name) or originals[name](*args, **kwargs)  # type: ignore[func-returns-value]

    for name, module in names.items():
        setattr(module, name, counting(name))
    try:
        yield calls
    finally:
        for name, module in names.items():
            setattr(module, name, originals[name])


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


def outcome_of(error: Exception) -> Outcome:
    """Of ours: an error is right if it is ours and says so."""
    return Outcome("refused" if isinstance(error, OURS) and "dash_attn" in str(error) else "wrong", text_of(error))


def text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]


def quiet() -> None:
    transformers.logging.set_verbosity_error()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
