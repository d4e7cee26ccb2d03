"""Dropout and ALiBi by their definitions: pair by pair, in whole numbers of Python."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dash_attn import Mask
from dense import element_mask

WORD, LONG = 2**32 - 1, 2**64 - 1


def finalized(x: int) -> int:
    """The finalizer of SplitMix64."""
    x &= LONG
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = ((x ^ (x >> shift)) * factor) & LONG
    return x ^ (x >> 31)


def number_of(seed: int, head: int, row: int, column: int) -> int:
    """The 16 bits of a pair."""
    key = finalized(finalized(seed) + (head + 1) * 0x9E3779B97F4A7C15)
    high, low = key >> 32, key & WORD
    words = [(row // 16 * 8 + row % 8) ^ high, column // 16 * 8 + column % 8]
    for turn in range(7):
        product = words[0] * 0xD256D193
        words = [(product >> 32) ^ ((low + turn * 0x9E3779B9) & WORD) ^ words[1], product & WORD]
    word = words[column // 8 % 2]
    return word >> 16 if row // 8 % 2 else word & 0xFFFF


def kept_pairs_at_once(seed: int, head: int, q_len: int, kv_len: int, dropout_p: float) -> Tensor:
    """The same in numbers of 64 bits, which wrap around, all pairs together. Quicker where there are many."""
    key = finalized(finalized(seed) + (head + 1) * 0x9E3779B97F4A7C15)
    row, column = np.arange(q_len, dtype=np.uint64)[:, None], np.arange(kv_len, dtype=np.uint64)
    first, second = np.broadcast_arrays((row // 16 * 8 + row % 8) ^ np.uint64(key >> 32), column // 16 * 8 + column % 8)
    for turn in range(7):
        product = first * np.uint64(0xD256D193)
        first, second = (product >> np.uint64(32)) ^ np.uint64((key + turn * 0x9E3779B9) & WORD) ^ second, product & np.uint64(WORD)
    word = np.where(column // 8 % 2 == 1, second, first)
    number = np.where(row // 8 % 2 == 1, word >> np.uint64(16), word & np.uint64(0xFFFF))
    return torch.from_numpy(number < 65536 - round(65536 * dropout_p))


def kept_pairs(seed: int, head: int, q_len: int, kv_len: int, dropout_p: float) -> Tensor:
    threshold = 65536 - round(65536 * dropout_p)
    return torch.tensor([[number_of(seed, head, row, column) < threshold for column in range(kv_len)] for row in range(q_len)])


def dense_modified(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | Tensor,
    *,
    kept: Tensor | None = None,
    dropout_p: float = 0.0,
    slopes: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and LSE, differentiable by PyTorch. kept: (batch, query heads, queries, keys). slopes: (.., query heads).
    Where a query attends nothing, and has no sink, the output is 0 and the LSE -inf."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    q_len, kv_len = scores.shape[2:]
    if slopes is not None:
        distance = (torch.arange(q_len)[:, None] + kv_len - q_len - torch.arange(kv_len)).abs()
        scores = scores - slopes.to(q.dtype).reshape(-1, q.shape[1], 1, 1) * distance
    attends = mask if isinstance(mask, Tensor) else element_mask(mask, q_len, kv_len)
    scores = scores.masked_fill(~attends, -torch.inf)
    column = (torch.full((q.shape[1],), -torch.inf) if sinks is None else sinks).to(q.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    everything = torch.cat([column, scores], -1)
    nothing = (everything == -torch.inf).all(-1, keepdim=True)
    everything = everything.masked_fill(nothing, 0)
    weights = torch.softmax(everything, -1)[..., 1:] * ~nothing
    if kept is not None:
        weights = weights * kept * (65536 / (65536 - round(65536 * dropout_p)))
    return (weights @ v).transpose(1, 2), torch.logsumexp(everything, -1).masked_fill(nothing[..., 0], -torch.inf)
