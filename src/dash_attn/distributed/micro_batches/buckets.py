"""Sums over ranks, a bucket of parameters at a time. Additions are element by element, so buckets and shares never change bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..peers import Peers
from .gradients import Parameters, add, gradient_dtype, sum_dtype
from .tree import tree_sum

BUCKET_BYTES = 25 * 2**20
Presence = tuple[bool, ...]  # by rank: has it a partial sum of the parameter?


@dataclass(frozen=True)
class Bucket:
    """Parameters with one device, one dtype and one presence."""

    parameters: Parameters
    present: Presence

    @property
    def like(self) -> nn.Parameter:
        return next(iter(self.parameters.values()))

    @property
    def elements(self) -> int:
        return sum(p.numel() for p in self.parameters.values())


def buckets_of(parameters: Parameters, presence: dict[str, Presence]) -> Iterator[Bucket]:
    """Parameters without a gradient anywhere are in none. All ranks find the same buckets in the same order."""
    alike: dict[tuple[torch.device, torch.dtype, Presence], Parameters] = {}
    for name, p in parameters.items():
        if any(presence[name]):
            alike.setdefault((p.device, gradient_dtype(p), presence[name]), {})[name] = p
    for (*_, present), members in alike.items():
        for piece in _pieces(members):
            yield Bucket(piece, present)


def _pieces(members: Parameters) -> Iterator[Parameters]:
    """Of BUCKET_BYTES at most, or one parameter that is larger."""
    piece: Parameters = {}
    size = 0
    for name, p in members.items():
        added = p.numel() * sum_dtype(p).itemsize
        if piece and size + added > BUCKET_BYTES:
            yield piece
            piece, size = {}, 0
        piece[name] = p
        size += added
    yield piece


def reduce_bucket(bucket: Bucket, sums: dict[str, Tensor | None], peers: Peers, divisor: int | None) -> None:
    """Takes this rank's partial sums, and sets .grad to the quotient of the whole sum.

    Each rank adds one share of the elements: it gets that share of all partial sums, and the quotients are gathered.
    """
    rows = peers.exchange(_laid_out(bucket, sums, peers.count))
    share = tree_sum([row if there else None for row, there in zip(rows, bucket.present, strict=True)], add)
    assert share is not None  # some rank has a partial sum
    if divisor is not None:  # a tensor: PyTorch multiplies by the rounded reciprocal of a Python number on GPUs
        share.div_(torch.tensor(divisor, dtype=share.dtype, device=share.device))
    _deliver(bucket, peers.gather(share.to(gradient_dtype(bucket.like))))


def _laid_out(bucket: Bucket, sums: dict[str, Tensor | None], ranks: int) -> Tensor:
    """The partial sums end to end, filled up to as many equal shares as there are ranks."""
    share = max(-(-bucket.elements // ranks), 1)
    flat = torch.zeros(ranks * share, dtype=sum_dtype(bucket.like), device=bucket.like.device)
    begin = 0
    for name, p in bucket.parameters.items():
        partial = sums.pop(name)
        if partial is not None:
            flat[begin : begin + p.numel()] = partial.flatten()
        begin += p.numel()
    return flat


def _deliver(bucket: Bucket, flat: Tensor) -> None:
    begin = 0
    for p in bucket.parameters.values():
        p.grad = torch.empty_like(p, dtype=flat.dtype).copy_(flat[begin : begin + p.numel()].view(p.shape))
        begin += p.numel()
