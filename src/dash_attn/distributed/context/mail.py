"""States that hop between ranks, over torch.distributed.

A message is known by its tag: the number of the unit that sends it, counted on from document to document in the order in which ranks take
them. Between two ranks, messages of both directions are begun in the order of their tags on both sides. Backends that run the messages of
a pair one after another (NCCL) then never wait in a circle: the first message that has not ended was sent by a unit that waits for no
later one.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...scheduling.ranks.units import Unit
from ..hosts import Lost
from ..peers import Peers
from .shared_call import Document, SharedCall


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
