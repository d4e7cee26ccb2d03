"""Causal attention of long sequences at some queries and keys, in double precision: the whole matrix would not fit."""

from __future__ import annotations

import torch
from torch import Tensor

from budget import FLOOR
from dense import Results
from inputs import Inputs

BLOCK = 8192  # queries of which the probabilities of a key are summed at once
ROUNDING = 2.0**-8  # of bfloat16
ALLOWED = 4  # roundings of the largest number


def at_queries(inputs: Inputs, ours: Results, places: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Output, LSE and dQ of some queries of the first head: ours, and as they should be."""
    q, k, v, dout = (x[0, :, 0].double() for x in inputs)
    scale = q.shape[-1] ** -0.5
    scores = (q[places] @ k.T * scale).masked_fill(torch.arange(len(k), device=k.device) > places[:, None], -torch.inf)
    weights = torch.softmax(scores, -1)
    out, dweights = weights @ v, dout[places] @ v.T
    delta = (dout[places] * out).sum(-1, keepdim=True)
    dq = (weights * (dweights - delta)) @ k * scale
    return [(ours.out[0, places, 0], out), (ours.lse[0, 0, places], torch.logsumexp(scores, -1)), (ours.dq[0, places, 0], dq)]


def at_keys(inputs: Inputs, ours: Results, places: Tensor) -> list[tuple[Tensor, Tensor]]:
    """dK and dV of some keys of the first head, which has a query head alone. Output and LSE are taken as ours are."""
    q, k, v, dout = (x[0, :, 0].double() for x in inputs)
    scale = q.shape[-1] ** -0.5
    dk, dv = torch.zeros_like(k[places]), torch.zeros_like(v[places])
    for first in range(0, len(q), BLOCK):
        rows = torch.arange(first, min(first + BLOCK, len(q)), device=q.device)
        scores = (q[rows] @ k[places].T * scale).masked_fill(places > rows[:, None], -torch.inf)
        weights = torch.exp(scores - ours.lse[0, 0, rows, None].double())
        delta = (dout[rows] * ours.out[0, rows, 0].double()).sum(-1, keepdim=True)
        dv += weights.T @ dout[rows]
        dk += (weights * (dout[rows] @ v[places].T - delta)).T @ q[rows] * scale
    return [(ours.dk[0, places, 0], dk), (ours.dv[0, places, 0], dv)]


def worst(pairs: list[tuple[Tensor, Tensor]]) -> float:
    """The largest error, in what is allowed of it."""
    found = [(mine.double() - exact).abs().max() / (exact.abs().max().clamp(min=1) * (ALLOWED * ROUNDING + FLOOR)) for mine, exact in pairs]
    return float(torch.stack(found).max())
