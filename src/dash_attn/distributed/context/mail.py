"""What travels between ranks over torch.distributed: states that hop, and keys that are gathered.

A message is known by its tag: the number of the unit that sends it, counted on from document to document in the order in which ranks take
them. Between two ranks, messages of both directions are begun in the order of their tags on both sides. Backends that run the messages of
a pair one after another (NCCL) then never wait in a circle: the first message that has not ended was sent by a unit that waits for no
later one.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...scheduling.ranks.sharding import Sharding
from ...scheduling.ranks.units import Unit
from ..hosts import Lost
from ..peers import REACH_OTHERS, Peers, Pending
from .rows import rows_of
from .shared_call import Document, OwnDocument, SharedCall


class _Hop(NamedTuple):
    """Of the states behind a unit, from rank to rank."""

    document: Document
    unit: Unit
    tag: int
    tag_behind: int  # of the unit that takes them
    source: int
    target: int

    @classmethod
    def of(cls, document: Document, unit: Unit) -> _Hop:
        assert unit.after is not None
        ranks, first, behind = document.ranks, document.first_tag, document.shared.units[unit.after]
        return cls(document, unit, first + unit.number, first + behind.number, ranks[unit.rank], ranks[behind.rank])


class _Letter(NamedTuple):
    """A message that is on its way, and its memory."""

    work: Any
    state: Tensor
    hop: _Hop


class RankMail:
    """Carries states from rank to rank: the messages of one. A copied float32 number is the same number."""

    def __init__(self, peers: Peers, call: SharedCall, like: Tensor) -> None:
        """like: a tensor with the dtype and the device of states."""
        self.peers, self.like, self.tile_size = peers, like, call.backend.tile_size(*call.dims)  # numbers in the state of one KV tile
        self.awaited: dict[int, deque[_Hop]] = defaultdict(deque)  # by rank: units that will send here, in order
        for document in call.in_turn:
            for hop in (_Hop.of(document, unit) for unit in document.shared.units if document.shared.hops(unit)):
                if hop.target == peers.rank:
                    self.awaited[hop.source].append(hop)
        self.coming: dict[int, _Letter] = {}  # by tag
        self.leaving: list[_Letter] = []

    def send(self, document: Document, unit: Unit, state: Tensor) -> None:
        """The states behind this unit, to the rank of the unit after it. The sender does not use their memory again."""
        hop = _Hop.of(document, unit)
        self._expect(hop.target, hop.tag)
        with self._or_lost(hop):
            work = self.peers.send(state, hop.target, hop.tag)
        self.leaving.append(_Letter(work, state, hop))
        self.leaving = [letter for letter in self.leaving if not letter.work.is_completed()]

    def receive(self, document: Document, unit: Unit) -> Tensor:
        """The states before this unit, from the rank of the unit before it."""
        assert unit.before is not None
        hop = _Hop.of(document, document.shared.units[unit.before])
        self._expect(hop.source, hop.tag + 1)
        letter = self.coming.pop(hop.tag)
        self._wait(letter)
        self._forget_arrived(hop)
        return letter.state

    def finish(self) -> None:
        """Wait until what was sent has left."""
        for letter in self.leaving:
            self._wait(letter)

    def _forget_arrived(self, hop: _Hop) -> None:
        """A rank that has sent these states has run all its units before, so what those took has arrived. Gloo does not say so by itself,
        and memory would be held until the end."""
        arrived = {letter.hop.tag for letter in self.leaving if letter.hop.target == hop.source and letter.hop.tag_behind < hop.tag}
        for letter in self.leaving:
            if letter.hop.tag in arrived:
                self._wait(letter)
        self.leaving = [letter for letter in self.leaving if letter.hop.tag not in arrived]

    def _expect(self, source: int, before: int) -> None:
        """Begin to receive all messages from a rank whose tags are below this one."""
        while self.awaited[source] and self.awaited[source][0].tag < before:
            hop = self.awaited[source].popleft()
            tiles = hop.document.shared.state_tiles(hop.unit)
            state = torch.empty(tiles * self.tile_size, dtype=self.like.dtype, device=self.like.device)
            with self._or_lost(hop):
                work = self.peers.receive(state, source, hop.tag)
            self.coming[hop.tag] = _Letter(work, state, hop)

    def _wait(self, letter: _Letter) -> None:
        with self._or_lost(letter.hop):
            letter.work.wait()

    @contextmanager
    def _or_lost(self, hop: _Hop) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            peers, to = self.peers, hop.source == self.peers.rank
            states = f"the states of {hop.document.shared.describe(hop.unit)}{hop.document.in_words}"
            way = f"send {states} to rank {hop.target}" if to else f"receive {states} from rank {hop.source}"
            missing = [dist.get_global_rank(peers.group, hop.target if to else hop.source)] if peers.group is not None else []
            raise Lost(f"rank {peers.rank} of {peers.count} could not {way}", error, missing) from error


class Mailbox:
    """The same in one process that plays all ranks. The sender's memory is overwritten, as a real sender's might be."""

    def __init__(self) -> None:
        self.states: dict[int, Tensor] = {}  # by unit: of one document at a time

    def send(self, document: Document, unit: Unit, state: Tensor) -> None:
        self.states[unit.number] = state.clone()
        state.fill_(torch.nan)

    def receive(self, document: Document, unit: Unit) -> Tensor:
        assert unit.before is not None
        return self.states.pop(unit.before)


def gather_rows(peers: Peers, sharding: Sharding, x: Tensor) -> Tensor:
    """(rows of a rank, ...) -> (all rows, ...)."""
    return _put_together(_start(peers, sharding, x, REACH_OTHERS), sharding, x.shape[1:])


def _start(peers: Peers, sharding: Sharding, x: Tensor, purpose: str) -> Pending:
    """Ranks with fewer rows send as many as the others, because a gather has one shape."""
    most = max(len(sharding.rows_of(rank)) for rank in range(peers.count))
    padded = x if len(x) == most else torch.cat([x, x.new_zeros(most - len(x), *x.shape[1:])])
    return peers.start_gather(padded.contiguous().flatten(), purpose)


def _put_together(gather: Pending, sharding: Sharding, shape: Sequence[int]) -> Tensor:
    """shape: of a row."""
    found = gather.wait()
    whole = found.new_empty(sharding.rows, *shape)
    if found.numel() == 0:  # of rows without numbers nobody can tell how many came
        return whole
    everything = found.view(sharding.ranks, -1, *shape)
    for rank, part in enumerate(everything):
        mine = rows_of(sharding, rank, whole.device)
        whole[mine] = part[: len(mine)]
    return whole


class Keys:
    """The keys and values of a document, some KV heads at a time. Where each rank has its own rows, they come in one gather after the
    other, in the order of their numbers."""

    def __init__(self, document: Document, k: Tensor, v: Tensor, peers: Peers | None = None) -> None:
        """peers: with whom the rows are shared; None: all of them are here."""
        self.document, self.k, self.v, self.peers = document, k, v, peers
        self.started: list[Pending | None] = []

    def start(self, number: int) -> None:
        """Let this gather, and those before it, begin. All ranks must do so sooner or later."""
        while self.peers is not None and len(self.started) <= number:
            both = torch.cat([x.flatten(2) for x in self._some(len(self.started))], dim=2).transpose(0, 1)
            self.started.append(_start(self.peers, self.document.sharding, both, self._purpose(self.peers, len(self.started))))

    def get(self, number: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a gather that was started."""
        if self.peers is None:
            return self._some(number)
        gather, self.started[number] = self.started[number], None
        assert gather is not None, "keys are taken once"
        heads, dims = len(self.document.gathers[number]), self.document.row.dims
        both = _put_together(gather, self.document.sharding, (len(self.k), heads * sum(dims))).transpose(0, 1)
        k, v = both.split([heads * dim for dim in dims], dim=2)
        return k.unflatten(2, (heads, -1)), v.unflatten(2, (heads, -1))

    def finish(self) -> None:
        """Wait for gathers that nobody took: other ranks need what this one sends."""
        for gather in self.started:
            if gather is not None:
                gather.wait()

    def _some(self, number: int) -> tuple[Tensor, Tensor]:
        heads = self.document.gathers[number]
        return self.k[:, :, heads.start : heads.stop], self.v[:, :, heads.start : heads.stop]

    def _purpose(self, peers: Peers, number: int) -> str:
        """For errors: which keys for which queries."""
        sharding, heads = self.document.sharding, self.document.gathers[number]
        queries = [(sharding.rows_of_chunk(chunk), chunk) for chunk in sharding.chunks_of(peers.rank)]
        of = " and ".join(f"{rows.start} to {rows.stop - 1} (chunk {chunk})" for rows, chunk in queries)
        return f"gather keys 0 to {sharding.rows - 1} of KV heads {heads.start} to {heads.stop - 1} for its queries {of}"


def whole_keys(k: Tensor, v: Tensor) -> Callable[[OwnDocument], Keys]:
    """Of all documents that a rank works on, one behind the other."""
    return lambda own: Keys(own.document, k[:, own.keys], v[:, own.keys])
