"""A call of attention whose row ranks share, where the row has documents: what all ranks agree on, and a plan for each document."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ...backends import Ranks, import_ranks, resolve
from ...call.documents import of_a_document, runs_packed
from ...call.options import AttentionOptions, refuse_given_schedule
from ...call.planning import hash_of
from ...masks import Documents, is_whole
from ...scheduling.ranks.documents import SharedDocument, deal_documents, in_turn
from ...scheduling.ranks.sharding import Sharding
from .mail import Route
from .shared_call import SharedCall

Offsets = Tensor | tuple[int, ...] | list[int]


def documents_in(options: AttentionOptions, cu_seqlens: Offsets | None, rows: int) -> tuple[AttentionOptions, tuple[int, ...] | None]:
    """The options of one document alone, and the lengths of all; None: the row is one sequence."""
    if cu_seqlens is None:
        options.mask.check(rows, rows)
        if not runs_packed(options):
            return options, None
        assert isinstance(options.mask, Documents)
        return of_a_document(options), options.mask.lengths
    if isinstance(options.mask, Documents):
        raise ValueError("give documents once, as mask=Documents(...) or as cu_seqlens; got both")
    refuse_given_schedule(options)
    if options.dropout_p:
        raise ValueError(
            f"dropout needs a seed for each document, and ranks that share them take one per sequence: dropout_p must be 0 with cu_seqlens;"
            f" got {options.dropout_p!r}. On one rank, flash_attn_varlen_func takes one per document"
        )
    lengths = _lengths(cu_seqlens, rows)
    for length in set(lengths):
        options.mask.check(length, length)
    return options, lengths


def _lengths(cu_seqlens: Offsets, rows: int) -> tuple[int, ...]:
    """Empty documents are left out."""
    ends = _numbers(cu_seqlens)
    if len(ends) < 2 or ends[0] != 0 or ends[-1] != rows:
        raise ValueError(f"cu_seqlens must begin with 0 and end with the {rows} rows of all ranks together; got {_shortened(ends)}")
    for entry, (start, end) in enumerate(pairwise(ends), 1):
        if end < start:
            raise ValueError(f"cu_seqlens must not decrease; got {start} followed by {end} at entry {entry}")
    return tuple(end - start for start, end in pairwise(ends) if end > start)


def _numbers(cu_seqlens: Offsets) -> list[int]:
    if isinstance(cu_seqlens, Tensor):
        if cu_seqlens.device.type != "cpu":
            raise ValueError(
                f"cu_seqlens must be on the host, because the ranks plan by it; got a tensor on {cu_seqlens.device}. Pass"
                " cu_seqlens.tolist(), made once per batch: it waits for the device"
            )
        if cu_seqlens.ndim != 1 or cu_seqlens.is_floating_point() or cu_seqlens.dtype == torch.bool:
            raise ValueError(f"cu_seqlens must be 1-d, of whole numbers; got {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}")
        return [int(end) for end in cu_seqlens.tolist()]
    if not isinstance(cu_seqlens, (tuple, list)) or not all(map(is_whole, cu_seqlens)):
        raise TypeError(f"cu_seqlens must be a tensor, or a tuple or list of whole numbers; got {_shortened(cu_seqlens)}")
    return list(cu_seqlens)


def _shortened(found: Any) -> str:
    words = repr(found)
    return words if len(words) < 80 else f"{words[:80]}..."


@dataclass(frozen=True)
class DocumentCall:
    """One of the documents. Device i of its call is rank `ranks[i]`."""

    call: SharedCall
    place: SharedDocument
    number: int  # in the row
    turn: int  # in the order in which ranks take documents
    first_tag: int  # of its messages

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.place.ranks

    @property
    def route(self) -> Route:
        rows = self.place.rows
        return Route(self.ranks, self.first_tag, f" of document {self.number} (rows {rows.start} to {rows.stop - 1} of all)")


@dataclass(frozen=True)
class SharedDocuments:
    """options: those of one document alone. Other fields are as in SharedCall, `sharding` is that of the row."""

    options: AttentionOptions
    lengths: tuple[int, ...]
    sharding: Sharding
    batch: int
    kv_heads: int
    group: int
    dims: tuple[int, int]
    backend: str

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        options: AttentionOptions,
        lengths: tuple[int, ...],
        sharding: Sharding,
        heads_of: int = 1,
        backend: str | None = None,
    ) -> SharedDocuments:
        """Arguments as those of SharedCall.of. Raises where the documents cannot be shared."""
        kv_heads, group = k.shape[2] // heads_of, q.shape[2] // k.shape[2]
        backend = resolve(options.backend, q.device) if backend is None else backend
        made = cls(options, lengths, sharding, q.shape[0], kv_heads, group, (q.shape[3], v.shape[3]), backend)
        made.documents  # noqa: B018  raises where an order has circles
        return made

    @property
    def of_backend(self) -> Ranks:
        return import_ranks(self.backend)

    @property
    def documents(self) -> tuple[DocumentCall, ...]:
        """In the order of the row."""
        return _planned(self)

    @property
    def in_turn(self) -> tuple[DocumentCall, ...]:
        """In the order in which ranks take them."""
        return tuple(sorted(self.documents, key=lambda document: document.turn))

    def described(self, rank: int) -> dict[str, Any]:
        """What decides the bits of a rank's rows, as JSON has it: as SharedCall tells it of one sequence."""
        plans = [document.call.plan for document in self.documents]
        longest = max(self.documents, key=lambda document: len(document.place.rows)).call.described(rank)
        names = " and ".join(dict.fromkeys(plan.schedule_name for plan in plans))
        row = {"ranks": self.sharding.ranks, "chunks": [list(self.sharding.lengths), list(self.sharding.owners)]}
        order = hash_of(*(plan.order_hash for plan in plans))
        return {**longest, **row, "schedule": names, "order_hash": order, "documents": list(self.lengths)}


@lru_cache(maxsize=16)
def _planned(row: SharedDocuments) -> tuple[DocumentCall, ...]:
    """States of different documents have different tags: these count on from document to document."""
    places = deal_documents(row.sharding, row.lengths, math.lcm(*row.of_backend.backward_tiles(*row.dims)))
    found, tag = [], 0
    for turn, number in enumerate(in_turn(places)):
        call = SharedCall(row.options, places[number].sharding, row.batch, row.kv_heads, row.group, row.dims, row.backend)
        found.append(DocumentCall(call, places[number], number, turn, tag))
        tag += len(call.shared.units)
    return tuple(sorted(found, key=lambda document: document.number))


def shared_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: AttentionOptions,
    documents: tuple[int, ...] | None,
    sharding: Sharding,
    heads_of: int = 1,
    backend: str | None = None,
) -> SharedCall | SharedDocuments:
    """Of one sequence, or of documents in a row. The other arguments are those of SharedCall.of."""
    if documents is None:
        return SharedCall.of(q, k, v, options, sharding, heads_of, backend)
    return SharedDocuments.of(q, k, v, options, documents, sharding, heads_of, backend)
