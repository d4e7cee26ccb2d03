"""Forward and backward of one rank, where the row that ranks share has documents: one document after the other, in one order for all.

Ranks cannot wait in a circle. All units of all documents have one sequence, that of the first document, then that of the next. Inside
a document each unit comes after those that it waits for, and no unit waits for one of another document. What ranks exchange besides
states, they exchange before the first unit or behind the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ...call.modifiers import Modifiers
from ...call.sums import sum_in_order
from .documents import DocumentCall, SharedDocuments
from .gathering import WholeKeys
from .passes import BackwardPass, Mail, forward_pass


@dataclass(frozen=True)
class OwnDocument:
    """A document that a rank works on."""

    document: DocumentCall
    rank: int  # of the document's
    rows: slice  # among those that the rank works on
    keys: slice  # among those that it got

    @property
    def number(self) -> int:
        return self.document.number

    def keys_of(self, k: Tensor, v: Tensor) -> WholeKeys:
        return WholeKeys(self.document.call, k[:, self.keys], v[:, self.keys])


@lru_cache(maxsize=16)
def own_documents(row: SharedDocuments, rank: int) -> tuple[OwnDocument, ...]:
    """In the order of the row."""
    found, first, first_key = [], 0, 0
    for document in row.documents:
        if rank not in document.ranks:
            continue
        end, end_key = first + len(document.place.rows_of(rank)), first_key + len(document.place.rows)
        found.append(OwnDocument(document, document.ranks.index(rank), slice(first, end), slice(first_key, end_key)))
        first, first_key = end, end_key
    return tuple(found)


def forward_of_documents(
    row: SharedDocuments, rank: int, tensors: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None, modifiers: Modifiers | None
) -> tuple[Tensor, Tensor]:
    """Output and LSE of the rows that a rank works on. tensors: their q, and the k and v that it got."""
    q, k, v = tensors
    out = q.new_empty(*q.shape[:3], row.dims[1])
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.promote_types(q.dtype, torch.float32))
    for own in own_documents(row, rank):
        found = forward_pass(own.document.call, own.rank, q[:, own.rows], own.keys_of(k, v), sinks, modifiers)
        out[:, own.rows], lse[:, :, own.rows] = found
    return out, lse


class BackwardOfDocuments:
    """Of one rank: `start` and `end` each of its documents, in turn; between, a `step` for each unit."""

    def __init__(
        self,
        row: SharedDocuments,
        rank: int,
        rows: Sequence[Tensor],
        of_rows: Sequence[Tensor],
        keys: tuple[Tensor, Tensor],
        sinks: bool,
        modifiers: Modifiers | None,
    ) -> None:
        """rows: dout, q and out of the rows that the rank works on; of_rows: their LSE and its gradient."""
        self.row, self.rows, self.of_rows, self.keys = row, rows, of_rows, keys
        self.sinks, self.modifiers = sinks, modifiers
        self.own = own_documents(row, rank)
        self.gradients = torch.empty_like(rows[1]), *(x.new_empty(x.shape[0], rows[1].shape[1], *x.shape[2:]) for x in keys)
        self.kept: dict[int, BackwardPass] = {}  # by document: the gradient of sinks needs them behind their units

    def start(self, own: OwnDocument, mail: Mail) -> BackwardPass:
        rows = tuple(x[:, own.rows] for x in self.rows)
        lse, dlse = (x[:, :, own.rows] for x in self.of_rows)
        return BackwardPass(own.document.call, own.rank, rows, (lse, dlse), own.keys_of(*self.keys), mail, self.modifiers)

    def end(self, own: OwnDocument, work: BackwardPass) -> None:
        for whole, part in zip(self.gradients, work.finish(), strict=True):
            whole[:, own.rows] = part
        if self.sinks:
            self.kept[own.number] = work

    def run(self, mail_of: Callable[[DocumentCall], Mail]) -> None:
        for own in sorted(self.own, key=lambda own: own.document.turn):
            work = self.start(own, mail_of(own.document))
            for unit in work.units:
                work.step(unit)
            self.end(own, work)

    def tiles_of_sinks(self) -> Tensor:
        """What the gradient of sinks needs of all tiles that the rank works on: (1, tiles, ...)."""
        like = self.of_rows[0].new_empty(0, *self._of_a_tile())
        works = [self.kept[own.number] for own in self.own]
        return torch.cat([like, *(work.backward.rows_of_sinks.movedim(-2, 0) for work in works)])[None]

    def sums_of_sinks(self, tiles: Tensor, sinks: Tensor) -> Tensor:
        """(1, documents, batch, query heads): of documents whose first rank this is, from all their tiles."""
        firsts = [self.kept[own.number] for own in self.own if own.rank == 0]
        counts = [work.call.problem.q_tiles for work in firsts]
        found = [sinks.new_empty(0, self.row.batch, len(sinks), dtype=self.of_rows[0].dtype)]
        for work, part in zip(firsts, tiles[0].split(counts) if counts else (), strict=True):
            found.append(work.backward.sink_gradients(part.movedim(0, -2).contiguous(), sinks)[None])
        return torch.cat(found)[None]

    def _of_a_tile(self) -> tuple[int, ...]:
        batch, heads, _ = self.of_rows[0].shape
        return 2, batch, heads, self.row.documents[0].call.problem.tile_q


def sum_of_sinks(sums: Tensor, sinks: Tensor) -> Tensor:
    """From those of all documents: sequence by sequence, document by document, as packed sequences are summed. Zero without any."""
    parts = sums[0].transpose(0, 1).flatten(0, 1)  # (sequences x documents, query heads)
    return sum_in_order(parts).to(sinks.dtype) if len(parts) else torch.zeros_like(sinks)
