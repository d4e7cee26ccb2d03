"""Small messages between the hosts of ranks: before they work together, they tell each other what they are about to do.

They go over a gloo of our own, beside the group's backend. So no host waits for a GPU, and they never meet another message. All ranks
begin whatever they do together with one of one size. Backends end the process, or wait, where ranks send different sizes.
Each rank sends to each, not around a ring: where one does not come, every other rank knows which.

Ranks that work on one sequence compare what they were asked to do at every call, forward and backward, whatever the device. Where they
disagree, every rank raises. Work that was queued on a GPU goes on meanwhile.
"""

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d

from ..errors import LostRank

ATTENTION, BACKWARD, UNSHARD, FINISH = CALLS = (
    "context_parallel_attention",
    "the backward of context_parallel_attention",
    "unshard",
    "TreeAccumulator.finish",
)
ORDER = "ranks that share a sequence must run their backwards in one order"
MOST = 8  # numbers that a call may tell in its first message
SILENT = -(2**63)  # a number that no rank sends
LONGEST_PAUSE = 3.0  # seconds in which other ranks may say why they stopped
NAMES = ("the sinks", "dropout_seed", "alibi_slopes")  # of values that are compared late
NUMBERS = 1 + len(NAMES)  # in a message

Facts = dict[str, object]  # what must be the same on every rank, by name
Made = TypeVar("Made")


def number_of(facts: object) -> int:
    """A hash of 63 bits, to fit a signed number."""
    return int.from_bytes(hashlib.sha256(repr(facts).encode()).digest()[:8], "big") >> 1


def odd_rank(values: Sequence[object]) -> int:
    """The first rank whose value is not that of rank 0; 0 if there is none."""
    return next((rank for rank, value in enumerate(values) if value != values[0]), 0)


def _bytes(x: Tensor | None) -> bytes:
    return b"" if x is None else x.contiguous().view(torch.uint8).numpy().tobytes()


class Lost(LostRank):
    """A message that did not come through. missing: global ranks that this one waits for. sure: for each, not for one of them."""

    def __init__(self, what: str, cause: BaseException, missing: Sequence[int], sure: bool = True) -> None:
        super().__init__(f"{what}. The backend says: {cause}")
        self.what, self.missing, self.sure = what, missing, sure


class LateValues:
    """Values on a GPU that must be the same on every rank, as one rank has them. Copies come to the host when they come, and later calls
    compare them: no host waits for a GPU. Each message tells up to which call values are here. The next one has a hash of all values up
    to the call that every rank had then. So ranks compare the same calls, at the same call, whenever their copies came."""

    def __init__(self) -> None:
        self._coming: deque[tuple[int, Any, list[Tensor | None]]] = deque()  # call, event behind the copies, copies
        self._here = self._everywhere = 0  # calls whose values have come: to this rank, to all
        self._hashes = {0: [0] * len(NAMES)}  # by call: of all values up to it

    def keep(self, call: int, tensors: Sequence[Tensor | None]) -> None:
        """Of NAMES. All ranks keep those of the same calls."""
        given = [x for x in tensors if x is not None]
        if given and given[0].is_cuda and not torch.cuda.is_current_stream_capturing():
            copies = [None if x is None else x.detach().to("cpu", non_blocking=True) for x in tensors]
            self._coming.append((call, torch.cuda.current_stream(given[0].device).record_event(), copies))

    def tell(self) -> list[int]:
        while self._coming and self._coming[0][1].query():
            call, _, copies = self._coming.popleft()
            self._hashes[call] = [number_of((before, _bytes(x))) for before, x in zip(self._hashes[self._here], copies, strict=True)]
            self._here = call
        return [self._here, *self._hashes[self._everywhere]]

    def hear(self, rows: Sequence[Sequence[int]]) -> None:
        """What all ranks told."""
        for place, name in enumerate(NAMES, 1):
            if odd := odd_rank([row[place] for row in rows]):
                last = self._everywhere
                self.__init__()  # type: ignore[misc]  # on every rank: what follows may be right
                raise RuntimeError(
                    f"ranks that share a sequence must be asked for the same; rank 0 and rank {odd} differ in the values of {name}, in a"
                    f" call up to number {last} of the group (values on a GPU are compared when they have come to the host)"
                )
        self._everywhere = min(row[0] for row in rows)
        self._hashes = {call: hashes for call, hashes in self._hashes.items() if call >= self._everywhere}


class Hosts:
    """Of the ranks of a group, as one of them sees it. None: this process is alone, and tells itself."""

    def __init__(self, group: ProcessGroup | None, limit: timedelta, meet: Callable[[], object]) -> None:
        """meet: a message of the group itself. It finds ranks that have ended at once: new connections would wait for them."""
        self.rank, self.ranks = (0, [0]) if group is None else (group.rank(), dist.get_process_group_ranks(group))
        self.count, self.limit, self._meet = len(self.ranks), limit, meet
        self.number = 0  # of calls that the ranks have begun
        self._values = LateValues()
        self._call = ""
        self._made: Any = None
        store = dist.HashStore() if group is None else group.get_group_store()  # type: ignore[attr-defined]
        self._store = distributed_c10d.PrefixStore("dash_attn", store)

    def begin(self, call: str, numbers: Sequence[int], refused: bool = False) -> list[list[int]]:
        """What the ranks tell of a call, by rank: up to MOST numbers. Raises where they do not begin the same, or one refuses."""
        self.number, self._call = self.number + 1, call
        rows = self.gather([CALLS.index(call), refused, *self._values.tell(), *numbers, *[0] * (MOST - len(numbers))])
        begun = [CALLS[row[0]] for row in rows]
        if odd := odd_rank(begun):
            raise RuntimeError(
                "ranks of a group must call the same functions in the same order;"
                f" rank 0 is in {begun[0]} and rank {odd} in {begun[odd]} (call {self.number} of the group)"
            )
        refuses = next((rank for rank, row in enumerate(rows) if row[1]), None)
        if refuses is not None:
            raise RuntimeError(f"rank {refuses} refused this call, so rank {self.rank} cannot go on: see the error of rank {refuses}")
        self._values.hear([row[2 : 2 + NUMBERS] for row in rows])
        return [row[2 + NUMBERS :] for row in rows]

    @contextmanager
    def refusing(self, call: str) -> Iterator[None]:
        """Around what a rank checks by itself: where it raises before it has begun a call, the others hear of it."""
        before = self.number
        try:
            yield
        except Exception:  # whatever it is
            if self.number == before:
                with suppress(RuntimeError):  # this rank has an error to raise already
                    self.begin(call, [], refused=True)
            raise

    def keep(self, values: Sequence[Tensor | None]) -> None:
        """Values on a GPU, of NAMES, that the last call was given, for later calls to compare."""
        if self.count > 1:
            self._values.keep(self.number, values)

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Those of every rank, by rank. All ranks give equally many: after `begin` has said so."""
        if self.count == 1:
            return [list(numbers)]
        sent = np.tile(np.array(numbers, dtype=np.int64), self.count)
        received = np.full_like(sent, SILENT)
        with self.telling():
            gloo = self._gloo
            try:
                gloo.alltoall_base(torch.from_numpy(received), torch.from_numpy(sent), [], []).wait()
            except RuntimeError as error:
                missing = [rank for rank, first in zip(self.ranks, received[:: len(numbers)], strict=True) if first == SILENT]
                call = f"call {self.number} of the group, {self._call}"
                raise Lost(f"rank {self.rank} of {self.count} could not compare {call}, with the others", error, missing) from error
        rows: list[list[int]] = received.reshape(self.count, -1).tolist()
        return rows

    @property
    def _gloo(self) -> Any:
        """Made when it is first needed, by all ranks. (A cached_property has one lock for all groups in Python 3.11 and earlier: threads
        that make two of them would wait for each other, across ranks.)"""
        if self._made is None:
            self._meet()
            self._made = distributed_c10d.ProcessGroupGloo(self._store, self.rank, self.count, self.limit)
            self._meet = lambda: None  # it holds the group, which would then never be freed
        return self._made

    @contextmanager
    def telling(self) -> Iterator[None]:
        """What stops a rank inside, others that wait for it can read. So they do not take it for the rank that is missing."""
        try:
            yield
        except Lost as error:
            self._leave_word(error.what)
            raise RuntimeError(f"{error}. {self._of_others(error)}") from error
        except Exception as error:
            self._leave_word(repr(error)[:200])
            raise

    def _leave_word(self, why: str) -> None:
        with suppress(RuntimeError):  # the store may be gone with its rank
            self._store.set(f"stopped {self.rank} {self.number}", why)

    def _of_others(self, error: Lost) -> str:
        """Who was heard of last: a rank that waits, too, is not the one that is missing."""
        missing = [self.ranks.index(rank) for rank in error.missing if rank != self.ranks[self.rank]]
        stopped = self._why_stopped(missing)
        words = [f"Rank {rank} stopped, too, and says: {why}" for rank, why in stopped.items()]
        silent = [str(rank) for rank in missing if rank not in stopped]
        return ". ".join(words + ([f"Nothing was heard of rank {(' and ' if error.sure else ' or ').join(silent)}"] if silent else []))

    def _why_stopped(self, ranks: Sequence[int]) -> dict[int, str]:
        """What they said. Ranks that wait, too, reach their own time limit a little later, it may be."""
        found: dict[int, str] = {}
        end = time.monotonic() + min(self.limit.total_seconds() / 4, LONGEST_PAUSE)
        with suppress(RuntimeError):
            while len(found) < len(ranks) and time.monotonic() < end:
                found |= {rank: why for rank in ranks if (why := self._word_of(rank))}
                time.sleep(0.05)
        return found

    def _word_of(self, rank: int) -> str:
        """Of this call, of the one before, which it may not have ended, or of the next: a rank that failed may have gone on."""
        keys = [f"stopped {rank} {number}" for number in (self.number, self.number - 1, self.number + 1)]
        return next((self._store.get(key).decode() for key in keys if self._store.check([key])), "")


def agree(hosts: Hosts, call: str, make: Callable[[], tuple[Made, Facts]], backward_of: int = 0) -> Made:
    """What `make` gives, if it gives it on every rank and all ranks have the same facts. `make` sends no message: others may not
    make the same. call: which function this is. backward_of: the number of the call whose backward it is."""
    with hosts.refusing(call):
        made, facts = make()
    if hosts.count > 1:
        _compare(hosts, hosts.begin(call, [number_of(facts), len(facts), backward_of]), facts)
    return made


def _compare(hosts: Hosts, rows: list[list[int]], facts: Facts) -> None:
    """rows: hash and number of facts, and the call whose backward it is, by rank."""
    found, lengths, forwards = ([row[place] for row in rows] for place in range(3))
    if odd := odd_rank(forwards):
        raise RuntimeError(f"{ORDER}; rank 0 is in that of call {forwards[0]} of the group, and rank {odd} in that of call {forwards[odd]}")
    if len(set(lengths)) > 1:
        raise RuntimeError(f"ranks that share a sequence must have one version of dash_attn; they compare {lengths} facts, by rank")
    if len(set(found)) == 1:
        return
    # Fact by fact, so that the error names the one that differs.
    rows = hosts.gather([number_of({name: value}) for name, value in facts.items()])
    for place, (name, value) in enumerate(facts.items()):
        column = [row[place] for row in rows]
        if odd := odd_rank(column):
            raise RuntimeError(
                f"ranks that share a sequence must be asked for the same; rank 0 and rank {odd} differ in {name}."
                f" Here, on rank {hosts.rank}, it is {value} (as on {column.count(column[hosts.rank])} of {hosts.count} ranks)"
            )
