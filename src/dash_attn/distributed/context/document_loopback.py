"""One process plays all ranks that share a row of documents: rows change hands, then unit by unit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...call.modifiers import Modifiers
from .document_moves import moves_of
from .document_passes import BackwardOfDocuments, forward_of_documents, sum_of_sinks
from .documents import SharedDocuments
from .loopback import Mailbox, Results
from .moving import Movement, apart, side_by_side
from .rows import by_head, by_row, rows_of


def play_documents(
    row: SharedDocuments,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    mailbox: Callable[[], Mailbox] = Mailbox,
    *,
    sinks: Tensor | None = None,
    dlse: Tensor | None = None,
    modifiers: Modifiers | None = None,
) -> Results:
    """Forward and backward of whole tensors, each rank with its own rows. mailbox: makes one for each document."""
    dlse = q.new_zeros(len(q), q.shape[2], q.shape[1], dtype=torch.promote_types(q.dtype, torch.float32)) if dlse is None else dlse
    own = [rows_of(row.sharding, rank, q.device) for rank in range(row.sharding.ranks)]
    moves = moves_of(row)
    dealt = _exchange(moves.to_workers, [(q[:, mine], dout[:, mine], by_row(dlse)[:, mine]) for mine in own])
    keys = _exchange(moves.keys, [(k[:, mine], v[:, mine]) for mine in own])
    ranks = []
    for rank, ((my_q, my_dout, my_dlse), (my_k, my_v)) in enumerate(zip(dealt, keys, strict=True)):
        out, lse = forward_of_documents(row, rank, (my_q, my_k, my_v), sinks, modifiers)
        rows, of_rows = (my_dout, my_q, out), (lse, by_head(my_dlse))
        ranks.append(BackwardOfDocuments(row, rank, rows, of_rows, (my_k, my_v), sinks is not None, modifiers))
    _run(row, ranks, mailbox)
    results = [(one.rows[2], by_row(one.of_rows[0]), *one.gradients) for one in ranks]
    found = [torch.empty_like(x) for x in (dout, by_row(dlse), q, k, v)]
    for mine, parts in zip(own, _exchange(moves.back, results), strict=True):
        for whole, part in zip(found, parts, strict=True):
            whole[:, mine] = part
    out, lse, dq, dk, dv = found
    return Results(out, by_head(lse), dq, dk, dv, None if sinks is None else _sink_gradient(row, ranks, sinks))


def _exchange(movement: Movement, tensors: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """By rank, what each gets of what each has."""
    sent = [movement.pieces(rank, side_by_side(mine)) for rank, mine in enumerate(tensors)]
    found = [movement.put_together(rank, [pieces[rank] for pieces in sent]) for rank in movement.ranks]
    return [apart(rows, like) for rows, like in zip(found, tensors, strict=True)]


def _run(row: SharedDocuments, ranks: list[BackwardOfDocuments], mailbox: Callable[[], Mailbox]) -> None:
    for document in row.in_turn:
        letters = mailbox()
        own = [next(one for one in ranks[rank].own if one.document is document) for rank in document.ranks]
        works = [ranks[rank].start(one, letters) for rank, one in zip(document.ranks, own, strict=True)]
        for unit in document.call.shared.units:
            works[unit.rank].step(unit)
        for rank, one, work in zip(document.ranks, own, works, strict=True):
            ranks[rank].end(one, work)


def _sink_gradient(row: SharedDocuments, ranks: list[BackwardOfDocuments], sinks: Tensor) -> Tensor:
    moves = moves_of(row)
    tiles = _exchange(moves.tiles, [(one.tiles_of_sinks(),) for one in ranks])
    sums = _exchange(moves.sums, [(one.sums_of_sinks(mine, sinks),) for one, (mine,) in zip(ranks, tiles, strict=True)])
    return sum_of_sinks(sums[0][0], sinks)
