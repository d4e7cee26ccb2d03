"""What one rank does and sends, where the row that ranks share has documents."""

from __future__ import annotations

import torch
from torch import Tensor

from ...call.modifiers import Modifiers
from ..peers import Peers
from .document_moves import moves_of
from .document_passes import BackwardOfDocuments, forward_of_documents, sum_of_sinks
from .documents import DocumentCall, SharedDocuments
from .mail import RankMail
from .moving import move
from .rows import by_head, by_row


def forward_on_ranks(
    row: SharedDocuments, peers: Peers, tensors: tuple[Tensor, ...], sinks: Tensor | None, modifiers: Modifiers | None
) -> tuple[Tensor, Tensor]:
    """Output and LSE of this rank's own rows. tensors: its q, k and v."""
    q, k, v = tensors
    moves = moves_of(row)
    (q,) = move(moves.to_workers, peers, q)
    k, v = move(moves.keys, peers, k, v)
    out, lse = forward_of_documents(row, peers.rank, (q, k, v), sinks, modifiers)
    out, lse = move(moves.back, peers, out, by_row(lse))
    return out, by_head(lse)


def backward_on_ranks(
    row: SharedDocuments,
    peers: Peers,
    tensors: tuple[Tensor, ...],
    of_rows: tuple[Tensor, Tensor | None],
    sinks: Tensor | None,
    modifiers: Modifiers | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dQ, dK and dV of this rank's own rows. tensors: its dout, q, k, v and out; of_rows: LSE and its gradient. The sinks' gradient is
    complete on the first rank, and zero on the others."""
    dout, q, k, v, out = tensors
    moves = moves_of(row)
    dlse = torch.zeros_like(of_rows[0]) if of_rows[1] is None else of_rows[1]  # another rank may have used its own
    dout, q, out, lse, dlse = move(moves.to_workers, peers, dout, q, out, by_row(of_rows[0]), by_row(dlse))
    lse, dlse = by_head(lse), by_head(dlse)
    k, v = move(moves.keys, peers, k, v)
    work = BackwardOfDocuments(row, peers.rank, (dout, q, out), (lse, dlse), (k, v), sinks is not None, modifiers)
    mail: RankMail | None = None

    def mail_of(document: DocumentCall) -> RankMail:
        nonlocal mail
        call = document.call
        mail = RankMail(peers, call.shared, call.of_backend.tile_size(*call.dims), lse, document.route, before=mail)
        return mail

    work.run(mail_of)
    if mail is not None:
        mail.finish()
    dq, dk, dv = move(moves.back, peers, *work.gradients)
    if sinks is None:
        return dq, dk, dv, None
    (tiles,) = move(moves.tiles, peers, work.tiles_of_sinks())
    (sums,) = move(moves.sums, peers, work.sums_of_sinks(tiles, sinks))
    return dq, dk, dv, sum_of_sinks(sums, sinks)
