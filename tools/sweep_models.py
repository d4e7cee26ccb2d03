"""Models of a sweep, built tiny with one implementation or another, and what they are given: tokens, rows that are padded, and the
sources of encoder-decoder models."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import Tensor
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from dash_attn.integrations import _caches, huggingface
from tiny_models import TOKENS, TWO_MODELS, tiny_config, tiny_pair

# By kind, the tables of modeling_auto that have its models.
TASKS = {"causal": ("CAUSAL_LM",), "masked": ("MASKED_LM",), "encoder-decoder": ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ")}


def _names(kind: str) -> list[str]:
    names = [name for task in TASKS[kind] for name in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")]
    return names if kind != "encoder-decoder" else [*sorted({*filter(_has_an_encoder, names)}), *TWO_MODELS]


def _has_an_encoder(name: str) -> bool:
    """The others of these tables are decoders that are given sounds. Two models in one are in TWO_MODELS."""
    config: Any = CONFIG_MAPPING[name]
    return getattr(config, "is_encoder_decoder", False) and not name.endswith("encoder-decoder")


NAMES = {kind: _names(kind) for kind in TASKS}
# Eager takes the softmax in float32 also of float64 scores; gemma4, with the largest scores, is off by 2e-5, by 3e-14 from sdpa.
TOLERANCE = 5e-5
SHARPER = 4.0  # times the initial weights, with which scores are all nearly 0 and any mask is nearly right
NOISE = 0.02  # some start with gates at 0, behind which nothing shows
SINGLE = ("inkling2_text", "mra", "xglm")  # their code has float32 written into it
BATCH, LENGTH = 2, 40
PADDED = {"": slice(0, 0), "left": slice(None, 13), "right": slice(-13, None), "empty": slice(None)}  # what is padded of a row
# Sounds, (frames, features) or samples, of which encoders make fewer; Whisper has features first and reads a fixed length.
SOUNDS: dict[str, Callable[[Any], tuple[int, ...]]] = {
    "speech_to_text": lambda config: (4 * LENGTH, config.input_feat_per_channel),
    "whisper": lambda config: (config.num_mel_bins, 2 * config.max_source_positions),
    "canary": lambda config: (8 * LENGTH, config.encoder_config.num_mel_bins),
    "cohere_asr": lambda config: (8 * LENGTH, config.encoder_config.num_mel_bins),
    "moonshine": lambda config: (400 * LENGTH,),
    "speecht5": lambda config: (400 * LENGTH,),
}
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
    mappings = (getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING") for task in TASKS[kind])
    model_class = next(mapping[type(config)] for mapping in mappings if type(config) in mapping)
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


def tokens(model: Any, batch: int = BATCH) -> Tensor:
    rows = batch * getattr(model.config, "num_codebooks", 1) if "Musicgen" in type(model).__name__ else batch
    return torch.randint(TOKENS.start, TOKENS.stop, (rows, LENGTH), generator=torch.Generator().manual_seed(1))


def padding(sides: tuple[str, ...], length: int = LENGTH) -> Tensor:
    """An attention_mask with a row for each side. The padded part is that of LENGTH columns."""
    kept = torch.ones(len(sides), LENGTH, dtype=torch.long)
    for row, side in zip(kept, sides, strict=True):
        row[PADDED[side]] = 0
    return kept.repeat_interleave(length // LENGTH, 1)


def changed(ids: Tensor, place: int) -> Tensor:
    """Another token at one place of each row."""
    other = ids.clone()
    other[:, place] = TOKENS.start + (other[:, place] - TOKENS.start + 1) % len(TOKENS)
    return other


def source(model: Any, sides: tuple[str, ...], another: bool = False) -> dict[str, Tensor]:
    """What the encoder reads, by the names of the arguments, padded. another: with something else in the middle."""
    name = model.main_input_name
    if name == "input_ids":
        made = torch.randint(TOKENS.start, TOKENS.stop, (len(sides), LENGTH), generator=torch.Generator().manual_seed(3))
        return {name: changed(made, LENGTH // 2) if another else made, "attention_mask": padding(sides)}
    if model.config.model_type not in SOUNDS:
        raise NotImplementedError(f"the sweep makes no {name} for this model")
    shape = SOUNDS[model.config.model_type](model.config)
    sounds = torch.randn(len(sides), *shape, generator=torch.Generator().manual_seed(3), dtype=model.dtype)
    if another:
        sounds[:, shape[0] // 2] += 1
    return {name: sounds, "attention_mask": padding(sides, max(shape))}


def compared(expected: Callable[[], Any], made: Callable[[list[str]], Any], judged: Callable[[Any, Any], Outcome]) -> Outcome:
    """What becomes of `made`, which is given the calls of our attention as they come, beside what eager gives."""
    try:
        with finite_masks():
            theirs = expected()
    except Exception as error:
        return Outcome("no comparison", text_of(error))
    try:
        with counted_calls() as calls:
            ours = made(calls)
    except Exception as error:
        return outcome_of(error)
    return judged(ours, theirs) if calls else Outcome("wrong", "dash_attn was not called")


@contextlib.contextmanager
def counted_calls() -> Iterator[list[str]]:
    """The calls of our attention that models make."""
    calls: list[str] = []

    def counting(name: str, original: Any) -> Any:
        return lambda *args, **kwargs: calls.append(name) or original(*args, **kwargs)  # type: ignore[func-returns-value]

    with contextlib.ExitStack() as stack:
        for module, name in (
            (huggingface, "flash_attn_func"),
            (huggingface, "flash_attn_varlen_func"),
            (_caches, "flash_attn_with_kvcache"),
        ):
            stack.enter_context(patch.object(module, name, counting(name, getattr(module, name))))
        yield calls


def finite_masks() -> Any:
    """Eager's masks, with the lowest float32. The lowest float64 is -inf in eager's softmax, which is float32: rows of padding are NaN."""

    def finite_mask(*args: Any, **kwargs: Any) -> Tensor | None:
        mask = eager_mask(*args, **kwargs)
        return mask if mask is None else mask.clamp(min=torch.finfo(torch.float32).min)

    return patch.dict(AttentionMaskInterface._global_mapping, eager=finite_mask)


def outcome_of(error: Exception) -> Outcome:
    """Of ours: an error is right if it is ours and says so."""
    return Outcome("refused" if isinstance(error, OURS) and "dash_attn" in str(error) else "wrong", text_of(error))


def text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]


def quiet() -> None:
    transformers.logging.set_verbosity_error()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
