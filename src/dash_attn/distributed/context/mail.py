"""States that hop between ranks, over torch.distributed.

A message is known by the number of the unit that sends it. Between two ranks, messages of both directions are begun in the order of
their numbers on both sides. Backends that run the messages of a pair one after another (NCCL) then never wait in a circle: the first
message that has not ended was sent by a unit that waits for no later one.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...scheduling.ranks.units import Unit
from ..hosts import Lost
from ..peers import Peers
from .shared_call import Document


class _Letter(NamedTuple):
    """A message that is on its way, and its memory."""

    work: Any
    state: Tensor
    unit: Unit  # that sent it
    other: int  # the rank at the other end


class RankMail:
    """The messages of one rank, for one document."""

    def __init__(self, peers: Peers, document: Document, like: Tensor, before: RankMail | None = None) -> None:
        """like: a tensor with the dtype and the device of states. before: of the document that all ranks have worked on before this one."""
        self.peers, self.document, self.shared, self.like = peers, document, document.shared, like
        self.tile_size = document.row.backend.tile_size(*document.row.dims)  # numbers in the state of one KV tile
        self.awaited: dict[int, deque[Unit]] = defaultdict(deque)  # by rank: units that will send here, in order
        for unit in self.shared.units:
            if self.shared.hops(unit) and unit.after is not None and self._rank_of(unit.after) == peers.rank:
                self.awaited[self._rank_of(unit.number)].append(unit)
        self.coming: dict[int, _Letter] = {}  # by the number of the unit that sends it
        self.leaving: list[_Letter] = []
        self.of_before: list[_Letter] = [] if before is None else before.of_before + before.leaving

    def send(self, unit: Unit, state: Tensor) -> None:
        assert unit.after is not None
        to = self._rank_of(unit.after)
        self._expect(to, unit.number)
        try:
            work = self.peers.send(state, to, self.document.first_tag + unit.number)
        except RuntimeError as error:
            raise self._lost("send", unit, to, error) from error
        self.leaving.append(_Letter(work, state, unit, to))
        self.leaving = [letter for letter in self.leaving if not letter.work.is_completed()]

    def receive(self, unit: Unit) -> Tensor:
        assert unit.before is not None
        source = self.shared.units[unit.before]
        self._expect(self._rank_of(source.number), source.number + 1)
        letter = self.coming.pop(source.number)
        self._wait("receive", letter)
        self._forget_arrived(source)
        return letter.state

    def finish(self) -> None:
        """Wait until what was sent has left."""
        for letter in self.of_before + self.leaving:
            self._wait("send", letter)

    def _forget_arrived(self, unit: Unit) -> None:
        """The rank of a unit that has sent its states has run all its units before, so what those took has arrived. Gloo does not say
        so by itself, and memory would be held until the end."""
        sender = self._rank_of(unit.number)
        arrived = [letter for letter in self.leaving if letter.other == sender and (letter.unit.after or 0) < unit.number]
        arrived += [letter for letter in self.of_before if letter.other == sender]
        for letter in arrived:
            self._wait("send", letter)
        self.leaving, self.of_before = (
            [letter for letter in letters if all(letter is not other for other in arrived)] for letters in (self.leaving, self.of_before)
        )

    def _expect(self, source: int, before: int) -> None:
        """Begin to receive all messages from a rank that were sent before this number."""
        while self.awaited[source] and self.awaited[source][0].number < before:
            unit = self.awaited[source].popleft()
            state = torch.empty(self.shared.state_tiles(unit) * self.tile_size, dtype=self.like.dtype, device=self.like.device)
            try:
                work = self.peers.receive(state, source, self.document.first_tag + unit.number)
            except RuntimeError as error:
                raise self._lost("receive", unit, source, error) from error
            self.coming[unit.number] = _Letter(work, state, unit, source)

    def _wait(self, what: str, letter: _Letter) -> None:
        try:
            letter.work.wait()
        except RuntimeError as error:
            raise self._lost(what, letter.unit, letter.other, error) from error

    def _rank_of(self, number: int) -> int:
        """Of a unit."""
        return self.document.ranks[self.shared.units[number].rank]

    def _lost(self, what: str, unit: Unit, other: int, error: RuntimeError) -> Lost:
        way = "to" if what == "send" else "from"
        states = f"the states of {self.shared.describe(unit)}{self.document.in_words}"
        missing = [dist.get_global_rank(self.peers.group, other)] if self.peers.group is not None else []
        return Lost(f"rank {self.peers.rank} of {self.peers.count} could not {what} {states} {way} rank {other}", error, missing)
