"""Log-probabilities of tokens, and tokens drawn with a seed per sequence: neither depends on who else is in the batch.

A token is drawn by adding a random number to each logit and taking the largest (Gumbel). The number is a function of the sequence's
seed, the token's place and the entry of the vocabulary, by the integers of `call/dropout.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..call.dropout import GAMMA, MIX_1, MIX_2
from .rows import OF_NORMS, at_least

BITS = 32  # of a random number


def log_probs(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probabilities of tokens (...), given logits (..., vocabulary), in float32. The same for sampling and training; differentiable."""
    if logits.shape[:-1] != tokens.shape:
        raise ValueError(
            f"logits must have the shape of the tokens and one dimension more; got {tuple(logits.shape)} for {tuple(tokens.shape)}"
        )
    rows = _cooled(logits, temperature).reshape(-1, logits.shape[-1])
    if not len(rows):
        return rows.new_empty(tokens.shape)
    scores = at_least(OF_NORMS, rows).log_softmax(-1)[: len(rows)]
    return scores.gather(1, tokens.reshape(-1, 1)).view(tokens.shape)


def sample(logits: Tensor, seeds: Tensor, position: int | Tensor, temperature: float = 1.0) -> Tensor:
    """A token for each row of logits (batch, vocabulary). seeds (batch): one per sequence. position: of the token in its sequence, one
    for all or one each; a seed and a position give one token."""
    if logits.ndim != 2 or seeds.shape != logits.shape[:1] or seeds.dtype != torch.int64:
        raise ValueError(
            f"sample takes logits (batch, vocabulary) and an int64 seed per row; got {tuple(logits.shape)} and {tuple(seeds.shape)},"
            f" {seeds.dtype}"
        )
    return (_cooled(logits, temperature) + noise(seeds, position, logits.shape[1])).argmax(-1)


def _cooled(logits: Tensor, temperature: float) -> Tensor:
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0; got {temperature}: the largest logit is logits.argmax(-1)")
    return logits.float() / temperature


def noise(seeds: Tensor, position: int | Tensor, entries: int) -> Tensor:
    """Gumbel's distribution, (batch, entries)."""
    keys = _mixed(_mixed(seeds) + (torch.as_tensor(position, device=seeds.device) + 1) * _signed(GAMMA))
    numbers = _mixed(keys[:, None] + (torch.arange(entries, device=seeds.device) + 1) * _signed(GAMMA))
    uniform = (_shifted(numbers, 64 - BITS).double() + 0.5) * 2.0**-BITS
    return -(-uniform.log()).log().float()


def _mixed(x: Tensor) -> Tensor:
    """SplitMix64's finalizer, in int64, whose products wrap."""
    x = (x ^ _shifted(x, 30)) * _signed(MIX_1)
    x = (x ^ _shifted(x, 27)) * _signed(MIX_2)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Without the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


class SeededTokens:
    """For `generate(..., do_sample=False, logits_processor=[SeededTokens(seeds)])` of transformers: the largest of the scores that this
    gives is a token drawn with the sequence's seed. Tokens are counted from the first one sampled, so padding does not matter."""

    def __init__(self, seeds: Tensor, temperature: float = 1.0) -> None:
        self.seeds, self.temperature = seeds, temperature
        self._prompt = self._length = -1

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        length = input_ids.shape[1]
        if len(self.seeds) != len(scores) or (self._prompt >= 0 and length != self._length + 1):
            raise ValueError(
                f"SeededTokens has {len(self.seeds)} seeds, one per sequence, for one call of generate, token by token; got {len(scores)}"
                f" sequences of {length} tokens{f' behind {self._length}' if self._prompt >= 0 else ''}"
            )
        self._prompt, self._length = self._prompt if self._prompt >= 0 else length, length
        return _cooled(scores, self.temperature) + noise(self.seeds.to(scores.device), length - self._prompt, scores.shape[1])
