"""Dropout and ALiBi on a device against their definitions: the pairs that a call keeps, read from its results, and dense references."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from budget import SIXTEEN_BITS, Slack, assert_in_budget
from dash_attn import Mask, flash_attn_func
from dash_attn.call.dropout import SQUARE, Dropout, threshold_of
from dense import Results
from inputs import Inputs
from kept_pairs import dense_modified

WIDTH = 64  # columns of values: pairs that one call tells


def expected_pairs(seeds: Tensor, heads: range, q_len: int, kv_len: int, dropout_p: float) -> Tensor:
    """(sequences, heads, queries, keys), as call/dropout.py defines it. heads: in the unsharded model."""
    rows, columns = (range(-(-length // SQUARE) * SQUARE) for length in (q_len, kv_len))
    dropout = Dropout(threshold_of(dropout_p), tuple(seeds.tolist()))
    found = [[dropout.kept(sequence, head, rows, columns)[:q_len, :kv_len] for head in heads] for sequence in range(len(seeds))]
    return torch.from_numpy(np.array(found))


def pairs_of_the_forward(q: Tensor, k: Tensor, **options: Any) -> Tensor:
    """Weights that are not 0, (batch, query heads, queries, keys): values tell them, one key per column."""
    kv_len, found = k.shape[1], []
    for first in range(0, kv_len, WIDTH):
        values = torch.zeros(*k.shape[:3], WIDTH, device=k.device, dtype=k.dtype)
        for column in range(min(WIDTH, kv_len - first)):
            values[:, first + column, :, column] = 1
        found.append(flash_attn_func(q, k, values, **options).transpose(1, 2)[..., : kv_len - first] != 0)
    return torch.cat(found, -1).cpu()


def pairs_of_the_backward(q: Tensor, k: Tensor, **options: Any) -> Tensor:
    """The same from dV, where gradients of the output tell them, one query per column. One query head per KV head."""
    q_len, found = q.shape[1], []
    values = torch.ones(*k.shape[:3], WIDTH, device=k.device, dtype=k.dtype, requires_grad=True)
    for first in range(0, q_len, WIDTH):
        gradient = torch.zeros(*q.shape[:3], WIDTH, device=q.device, dtype=q.dtype)
        for column in range(min(WIDTH, q_len - first)):
            gradient[:, first + column, :, column] = 1
        out = flash_attn_func(q, k, values, **options)
        (dv,) = torch.autograd.grad(out, (values,), gradient)
        found.append(dv.permute(0, 2, 3, 1)[:, :, : q_len - first] != 0)
    return torch.cat(found, 2).cpu()


def run_dense_modified(inputs: Inputs, mask: Mask, dtype: torch.dtype, **modifiers: Any) -> Results:
    q, k, v, dout = (x.detach().to(dtype) for x in inputs)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with q.device:  # masks and distances are made where the tensors are
        out, lse = dense_modified(q, k, v, mask, **modifiers)
    return Results(out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout))


def assert_modified(ours: Results, inputs: Inputs, mask: Mask, slack: Slack = SIXTEEN_BITS, **modifiers: Any) -> None:
    """Against dense attention in fp64, with the budget of dense attention in the dtype of the inputs."""
    truth = run_dense_modified(inputs, mask, torch.float64, **modifiers)
    assert_in_budget(ours, run_dense_modified(inputs, mask, inputs[0].dtype, **modifiers), truth, slack)
