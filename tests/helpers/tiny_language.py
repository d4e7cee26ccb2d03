"""A language of a few words for tests of trainers: its tokenizer, and texts of given lengths. Nothing is downloaded."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = 14  # so few that a random model often ends a text by itself
PAD, END = 0, 1
VOCABULARY = WORDS + 2


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": PAD, "<end>": END} | {f"w{word}": word + 2 for word in range(WORDS)}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<end>")


def texts(lengths: list[int]) -> list[str]:
    """One text per length, in words; the same in every run."""
    source = torch.Generator().manual_seed(0)
    return [" ".join(f"w{word}" for word in torch.randint(WORDS, (length,), generator=source).tolist()) for length in lengths]
