"""What the models of a sweep are given: tokens, rows that are padded, and the sources of encoder-decoder models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tiny_models import TOKENS

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
