"""One process plays all ranks that share a row: rows change hands, then unit by unit. To test and to prove, without processes."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...call.call import Given
from ...scheduling.ranks.units import Unit
from .mail import Mailbox, whole_keys
from .moves import Movement, apart, moves_of, side_by_side
from .of_rank import BackwardPass, RowBackward, forward_of_rank, sum_of_sinks
from .rows import by_head, by_row, rows_of
from .shared_call import SharedCall


class Results(NamedTuple):
    """Of the whole row."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor | None = None


def play_all_ranks(
    call: SharedCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    mailbox: Mailbox | None = None,
    *,
    sinks: Tensor | None = None,
    dlse: Tensor | None = None,
    units: Iterable[Unit] | None = None,
) -> Results:
    """Forward and backward of whole tensors, each rank with its own rows. dlse: the gradient of the LSE, where it was used. units: those
    of the only document in the order to run them, if it is not their own."""
    given, moves = Given(sinks), moves_of(call)
    lse = q.new_empty(len(q), q.shape[1], q.shape[2], 1, dtype=torch.promote_types(q.dtype, torch.float32))
    of_rows = [] if dlse is None and moves.to_workers.still else [torch.zeros_like(lse) if dlse is None else by_row(dlse)]
    own = [rows_of(call.sharding, rank, q.device) for rank in moves.ranks]
    dealt = exchange(moves.to_workers, [[x[:, mine] for x in (q, dout, *of_rows)] for mine in own])
    keys = [[k, v]] * len(own) if call.is_one else exchange(moves.keys, [[k[:, mine], v[:, mine]] for mine in own])
    ranks = [_forward(call, rank, dealt[rank], keys[rank], given) for rank in moves.ranks]
    _run(call, ranks, Mailbox() if mailbox is None else mailbox, units)
    found = exchange(moves.back, [[one.rows[2], by_row(one.of_rows[0]), *one.gradients()] for one in ranks])
    whole = [torch.empty_like(dout), lse, *map(torch.empty_like, (q, k, v))]
    for mine, parts in zip(own, found, strict=True):
        for x, part in zip(whole, parts, strict=True):
            x[:, mine] = part
    out, lse, dq, dk, dv = whole
    return Results(out, by_head(lse), dq, dk, dv, None if sinks is None else _sink_gradient(call, ranks, sinks))


def exchange(movement: Movement, tensors: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """By rank, what each gets of what each has."""
    sent = [movement.pieces(rank, side_by_side(mine)) for rank, mine in enumerate(tensors)]
    found = [movement.put_together(rank, [pieces[rank] for pieces in sent]) for rank in movement.ranks]
    return [apart(rows, like) for rows, like in zip(found, tensors, strict=True)]


def _forward(call: SharedCall, rank: int, rows: Sequence[Tensor], keys: Sequence[Tensor], given: Given) -> RowBackward:
    """Of one rank; its backward has not begun. rows: q, dout and, where it is used, the gradient of the LSE."""
    q, dout, *dlse = rows
    keys_of = whole_keys(*keys)
    out, lse = forward_of_rank(call, rank, q, keys_of, given)
    return RowBackward(call, rank, (dout, q, out), (lse, by_head(dlse[0]) if dlse else None), keys_of, given)


def _run(call: SharedCall, ranks: Sequence[RowBackward], mailbox: Mailbox, units: Iterable[Unit] | None) -> None:
    for document in call.in_turn:
        own = [next(one for one in ranks[rank].own if one.document.number == document.number) for rank in document.ranks]
        works = [BackwardPass(ranks[rank], one, mailbox) for rank, one in zip(document.ranks, own, strict=True)]
        for unit in document.shared.units if units is None else units:
            works[unit.rank].step(unit)
        for rank, one, work in zip(document.ranks, own, works, strict=True):
            ranks[rank].end(one, work)


def _sink_gradient(call: SharedCall, ranks: Sequence[RowBackward], sinks: Tensor) -> Tensor:
    moves = moves_of(call)
    tiles = exchange(moves.tiles, [[one.tiles_of_sinks()] for one in ranks])
    sums = exchange(moves.sums, [[one.sums_of_sinks(mine)] for one, (mine,) in zip(ranks, tiles, strict=True)])
    return sum_of_sinks(sums[0][0], sinks)
