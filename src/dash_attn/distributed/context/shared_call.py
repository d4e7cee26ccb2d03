"""A call of attention whose row is shared by ranks: what all of them must agree on, and the plans that follow from it.

A row is a list of documents, each planned as it is alone. A sequence without documents is a row of one that has the row's own chunks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from ...backends import Ranks, import_ranks, resolve
from ...call.options import AttentionOptions
from ...call.planning import DEFAULT_WORKERS, hash_of, plan_for, schedule_for
from ...scheduling.plan import Plan
from ...scheduling.problem import Problem
from ...scheduling.ranks.sharding import Sharding, SharedDocument, deal_documents, in_turn
from ...scheduling.ranks.share import in_legs, share
from ...scheduling.ranks.units import SharedSchedule, Unit

MOST_GATHERS = 4  # in which keys and values of all KV heads come
Lengths = tuple[int, ...]  # of documents


@dataclass(frozen=True)
class SharedCall:
    """options: those of one document alone. Heads are those of one rank: with Ulysses, its share of the KV heads and their query heads.
    lengths: of the documents; None: the row is one sequence, whose tiles its chunks must not cut."""

    options: AttentionOptions
    sharding: Sharding
    batch: int
    kv_heads: int
    group: int
    dims: tuple[int, int]  # of q and k, and of v
    backend_name: str
    lengths: Lengths | None = None

    @classmethod
    def of(
        cls,
        tensors: tuple[Tensor, Tensor, Tensor],
        options: AttentionOptions,
        sharding: Sharding,
        lengths: Lengths | None = None,
        heads_of: int = 1,
        backend: str | None = None,
    ) -> SharedCall:
        """Of a rank's q, k and v. heads_of: among how many ranks their heads are dealt. backend: that of the tensors, unless it is named
        because they stand for others. Raises where they cannot be shared."""
        q, k, v = tensors
        kv_heads, group = k.shape[2] // heads_of, q.shape[2] // k.shape[2]
        backend = resolve(options.backend, q.device) if backend is None else backend
        call = cls(options, sharding, q.shape[0], kv_heads, group, (q.shape[3], v.shape[3]), backend, lengths)
        call.documents  # noqa: B018  raises where lengths do not fit, or where an order has circles
        return call

    @property
    def backend(self) -> Ranks:
        return import_ranks(self.backend_name)

    @cached_property
    def tiles(self) -> tuple[int, int]:
        """Rows of a Q tile and of a KV tile."""
        return self.backend.backward_tiles(*self.dims)

    @cached_property
    def documents(self) -> tuple[Document, ...]:
        """In the order of the row."""
        return _planned(self)

    @property
    def in_turn(self) -> tuple[Document, ...]:
        """In the order in which ranks take them."""
        return tuple(sorted(self.documents, key=lambda document: document.turn))

    @property
    def is_one(self) -> bool:
        """Whether all ranks share one document, and each works on the rows that it has."""
        return len(self.documents) == 1 and self.documents[0].sharding == self.sharding

    def described(self, rank: int) -> dict[str, Any]:
        """What decides the bits of a rank's rows, as JSON has it. Order and tiles are those of one rank alone."""
        plans = [document.plan for document in self.documents]
        return {
            "backend": self.backend_name,
            "schedule": " and ".join(dict.fromkeys(plan.schedule_name for plan in plans)),
            "order_hash": plans[0].order_hash if self.lengths is None else hash_of(*(plan.order_hash for plan in plans)),
            "backward_tiles": list(self.tiles),
            "machine_code": self.backend.machine_code(),
            "ranks": self.sharding.ranks,
            "rank": rank,
            "chunks": [list(self.sharding.lengths), list(self.sharding.owners)],
            **({} if self.lengths is None else {"documents": list(self.lengths)}),
        }


@dataclass(frozen=True, eq=False)
class Document(SharedDocument):
    """One of a row, planned."""

    row: SharedCall
    number: int  # in the row
    turn: int  # in the order in which ranks take documents
    first_tag: int  # of its messages

    @property
    def in_words(self) -> str:
        """For errors: which of several it is."""
        return "" if self.row.lengths is None else f" of document {self.number} (rows {self.rows.start} to {self.rows.stop - 1} of all)"

    @cached_property
    def problem(self) -> Problem:
        row, rows = self.row, self.sharding.rows
        return Problem(row.options.mask, rows, rows, *row.tiles, row.kv_heads, row.group, row.batch, row.options.head_offset)

    @cached_property
    def plan(self) -> Plan:
        return plan_for(self.problem, self.row.options.schedule, DEFAULT_WORKERS)

    @cached_property
    def shared(self) -> SharedSchedule:
        together = self.row.backend.heads_together(self.problem, self.sharding)
        return _shared(self.problem, self.row.options.schedule, self.sharding, together)

    @cached_property
    def gathers(self) -> list[range]:
        """KV heads whose keys and values come together. While some are worked on, the next are on their way."""
        each = -(-self.row.kv_heads // MOST_GATHERS)
        return [range(first, min(first + each, self.row.kv_heads)) for first in range(0, self.row.kv_heads, each)]

    def gathers_of(self, unit: Unit) -> list[int]:
        """The gathers that a unit needs the keys of. An ending needs none."""
        if unit.leg is None:
            return []
        each = len(self.gathers[0])
        return sorted({part // self.problem.parts // each for _, part in unit.heads})

    def uses(self, units: Sequence[Unit]) -> list[tuple[int, int]]:
        """(unit, gather that it needs)."""
        return [(unit.number, number) for unit in units for number in self.gathers_of(unit)]

    @cached_property
    def gather_starts(self) -> list[int]:
        """Of each gather the unit with which it starts: the first, on whichever rank, that needs the one before it, or itself, or one
        behind it. Gathers start in the order of their numbers, units need them in any. So a rank that waits for a gather waits for ranks
        that are at earlier units, and those never wait for this one."""
        first_use = {number: unit for unit, number in reversed(self.uses(self.shared.units))}
        everything = range(len(self.gathers))
        needed = [[first_use[other] for other in everything[number - 1 :] if other in first_use] for number in everything[1:]]
        return [0, *(min(units, default=0) for units in needed)]


class OwnDocument(NamedTuple):
    """A document that a rank works on."""

    document: Document
    rank: int  # of the document's
    rows: slice  # among those that the rank works on
    keys: slice  # among those that it gets


@lru_cache(maxsize=16)
def _planned(call: SharedCall) -> tuple[Document, ...]:
    """States of different documents have different tags: these count on from document to document."""
    if call.lengths is None:
        places: tuple[SharedDocument, ...] = (SharedDocument(range(call.sharding.rows), call.sharding, tuple(range(call.sharding.ranks))),)
    else:
        places = deal_documents(call.sharding, call.lengths, math.lcm(*call.tiles))
    found, tag = [], 0
    for turn, number in enumerate(in_turn(places)):
        place = places[number]
        found.append(Document(place.rows, place.sharding, place.ranks, call, number, turn, tag))
        tag += len(found[-1].shared.units)
    return tuple(sorted(found, key=lambda document: document.number))


@lru_cache(maxsize=64)
def _shared(problem: Problem, schedule: str, sharding: Sharding, heads_together: int) -> SharedSchedule:
    made = schedule_for(problem, schedule, DEFAULT_WORKERS)
    # Of a document that one rank has alone, gangs could not wait for each other in one launch, either.
    return share(made, sharding, heads_together) if sharding.chunks > 1 else in_legs(made, heads_together)


@lru_cache(maxsize=64)
def own_documents(call: SharedCall, rank: int) -> tuple[OwnDocument, ...]:
    """Those that a rank of the row works on, in the order of the row."""
    found: list[OwnDocument] = []
    first = first_key = 0
    for document in call.documents:
        if rank not in document.ranks:
            continue
        own = document.ranks.index(rank)
        end, end_key = first + len(document.sharding.rows_of(own)), first_key + document.sharding.rows
        found.append(OwnDocument(document, own, slice(first, end), slice(first_key, end_key)))
        first, first_key = end, end_key
    return tuple(found)
