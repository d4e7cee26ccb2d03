"""Attention written down directly, with the full score matrix: in fp64 the truth, in other dtypes the error budget."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dash_attn import BooleanMask, Causal, Documents, Full, Mask, Prefix, TileMap, Window, flash_attn_func
from inputs import Inputs, make_inputs

torch.set_num_threads(1)  # the dense matrices are small; more threads than free cores make them many times slower

NAMES = ("out", "lse", "dq", "dk", "dv")


class Results(NamedTuple):
    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor

    def of_heads(self, queries: slice, keys: slice) -> Results:
        """Those of some query heads and some KV heads."""
        of_queries = self.out[:, :, queries], self.lse[:, queries], self.dq[:, :, queries]
        return Results(*of_queries, self.dk[:, :, keys], self.dv[:, :, keys])


class WithSinks(NamedTuple):
    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor


def element_mask(mask: Mask, q_len: int, kv_len: int) -> Tensor:
    """Which query attends to which key, from the definition of each mask."""
    row = torch.arange(q_len)[:, None]
    key = torch.arange(kv_len)
    position = row + kv_len - q_len
    everything = torch.ones(q_len, kv_len, dtype=torch.bool)
    if isinstance(mask, Causal):
        return everything & (key <= position)
    if isinstance(mask, Window):
        left = key >= position - mask.left if mask.left >= 0 else everything
        right = key <= position + mask.right if mask.right >= 0 else everything
        return left & right
    if isinstance(mask, Prefix):
        return everything & ((key <= position) | (key < mask.length))
    if isinstance(mask, Documents):
        document = torch.repeat_interleave(torch.arange(len(mask.lengths)), torch.tensor(mask.lengths))
        return (document[:, None] == document) & ((key <= row) | (not mask.causal))
    if isinstance(mask, TileMap):
        return torch.tensor(mask.blocks)[row // mask.block_q, key // mask.block_kv]
    assert isinstance(mask, Full)
    return everything


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Mask | Tensor, scale: float | None = None, softcap: float = 0.0) -> tuple[Tensor, Tensor]:
    """Output and LSE in the dtype of the inputs, differentiable by PyTorch. mask: one of ours, or which query attends to which key."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    keep = mask if isinstance(mask, Tensor) else element_mask(mask, q.shape[2], k.shape[2])
    attends = keep.any(-1, keepdim=True)
    scores = scores.masked_fill(~keep, -torch.inf)
    weights = torch.softmax(scores.masked_fill(~attends, 0), -1) * attends
    return (weights @ v).transpose(1, 2), torch.logsumexp(scores, -1)


def random_inputs(
    q_len: int,
    kv_len: int,
    heads: tuple[int, int] = (2, 2),
    dim: int = 32,
    dtype: torch.dtype = torch.float32,
    batch: int = 1,
    seed: int = 0,
) -> Inputs:
    """Small, on the CPU, rounded from fp64; `heads` are (query heads, KV heads)."""
    return make_inputs("cpu", (q_len, kv_len), heads, (dim, 0), dtype, batch, seed, drawn=torch.float64)


def run_dense(
    inputs: tuple[Tensor, ...], mask: Mask | Tensor, dtype: torch.dtype, scale: float | None = None, softcap: float = 0.0
) -> Results:
    q, k, v, dout = (x.detach().to(dtype) for x in inputs)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = dense(q, k, v, mask, scale, softcap)
    return Results(out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout))


def run_ours(inputs: tuple[Tensor, ...], mask: Mask | BooleanMask | Tensor, **options: object) -> Results:
    q, k, v, dout = inputs
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = flash_attn_func(*leaves, mask=mask, return_lse=True, **options)
    return Results(out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout))


def repeated(inputs: tuple[Tensor, ...], mask: Mask, **options: object) -> Callable[[], Results]:
    """As run_ours, but the forward runs now and once. Each call runs the backward, all that workers and interleavings can reach."""
    q, k, v, dout = inputs
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = flash_attn_func(*leaves, mask=mask, return_lse=True, **options)
    return lambda: Results(out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout, retain_graph=True))


def run_dense_with_sinks(
    inputs: tuple[Tensor, ...], sinks: Tensor, mask: Mask | Tensor, dtype: torch.dtype, scale: float | None = None, softcap: float = 0.0
) -> WithSinks:
    """The definition: one more column of scores, neither scaled nor capped; the softmax sees it, the values do not."""
    q, k, v, dout = (x.detach().to(dtype) for x in inputs)
    leaves = [x.requires_grad_() for x in (q, k, v, sinks.detach().to(dtype))]
    group = q.shape[2] // k.shape[2]
    queries, keys, values = (x.transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    scores = queries @ keys.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    with q.device:  # the mask is made where the tensors are
        keep = mask if isinstance(mask, Tensor) else element_mask(mask, q.shape[1], k.shape[1])
    scores = scores.masked_fill(~keep, -torch.inf)
    column = leaves[3].view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    all_scores = torch.cat([column, scores], -1)
    out = (torch.softmax(all_scores, -1)[..., 1:] @ values).transpose(1, 2)
    return WithSinks(out.detach(), torch.logsumexp(all_scores, -1).detach(), *torch.autograd.grad(out, leaves, dout))


def run_ours_with_sinks(inputs: tuple[Tensor, ...], sinks: Tensor, **options: object) -> WithSinks:
    leaves = [x.detach().requires_grad_() for x in (*inputs[:3], sinks)]
    out, lse = flash_attn_func(*leaves[:3], sinks=leaves[3], return_lse=True, **options)
    return WithSinks(out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, inputs[3]))


def largest_error(actual: Tensor, truth: Tensor) -> float:
    """Largest absolute difference; infinities must be equal, and nothing may be NaN."""
    actual, truth = actual.double(), truth.double()
    assert not actual.isnan().any(), "NaN in a result"
    assert torch.equal(actual.isinf(), truth.isinf()), "infinities in different places"
    finite = truth.isfinite()
    off = (actual - truth).abs_()
    return off.masked_fill_(~finite, 0).max().item() if finite.any() else 0.0


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_as_integers(a), _as_integers(b))


def assert_same_bits(actual: Results, expected: Results, what: str = "") -> None:
    """Compare as integers, so that -0.0 differs from 0.0 and NaN equals itself; name the first element that differs."""
    for name, a, b in zip(NAMES, actual, expected, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), f"{what} {name}: {a.dtype} {tuple(a.shape)} against {b.dtype} {tuple(b.shape)}"
        differs = _as_integers(a) != _as_integers(b)
        if differs.any():
            place = tuple(differs.nonzero()[0].tolist())
            count = int(differs.sum())
            raise AssertionError(f"{what} {name}{list(place)}: {a[place].item()!r} against {b[place].item()!r}; {count} elements differ")


def digest(*tensors: Tensor) -> str:
    """A hash of all bits."""
    return hashlib.sha256(b"".join(t.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes() for t in tensors)).hexdigest()


def _as_integers(x: Tensor) -> Tensor:
    return x.contiguous().view({8: torch.int64, 4: torch.int32, 2: torch.int16}[x.element_size()])
