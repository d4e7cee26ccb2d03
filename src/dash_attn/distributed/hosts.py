"""Small messages between the hosts of ranks: before they work together, they tell each other what they are about to do.

They go over a gloo of our own, beside the group's backend. So no host waits for a GPU, and they never meet another message. All ranks
begin whatever they do together with one of one size. Backends end the process, or wait, where ranks send different sizes.
Each rank sends to each, not around a ring: where one does not come, every other rank knows which.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

from .late_values import NUMBERS, LateValues

ATTENTION, BACKWARD, UNSHARD, FINISH = CALLS = (
    "context_parallel_attention",
    "the backward of context_parallel_attention",
    "unshard",
    "TreeAccumulator.finish",
)
MOST = 8  # numbers that a call may tell in its first message
SILENT = -(2**63)  # a number that no rank sends
LONGEST_PAUSE = 3.0  # seconds in which other ranks may say why they stopped


class Lost(RuntimeError):
    """A message that did not come through. missing: global ranks that this one waits for. sure: for each, not for one of them."""

    def __init__(self, what: str, cause: BaseException, missing: Sequence[int], sure: bool = True) -> None:
        super().__init__(f"{what}. The backend says: {cause}")
        self.what, self.missing, self.sure = what, missing, sure


class Hosts:
    """Of the ranks of a group, as one of them sees it."""

    def __init__(self, group: ProcessGroup, limit: timedelta, meet: Callable[[], object]) -> None:
        """meet: a message of the group itself. It finds ranks that have ended at once: new connections would wait for them."""
        self.rank, self.ranks, self.limit, self._meet = group.rank(), dist.get_process_group_ranks(group), limit, meet
        self.count = len(self.ranks)
        self.number = 0  # of calls that the ranks have begun
        self.values = LateValues()
        self._call = ""
        self._store = distributed_c10d.PrefixStore("dash_attn", group.get_group_store())

    def begin(self, call: str, numbers: Sequence[int], refused: bool = False) -> list[list[int]]:
        """What the ranks tell of a call, by rank: up to MOST numbers. Raises where they do not begin the same, or one refuses."""
        self.number, self._call = self.number + 1, call
        rows = self.gather([CALLS.index(call), refused, *self.values.tell(), *numbers, *[0] * (MOST - len(numbers))])
        begun = [CALLS[row[0]] for row in rows]
        odd = next((rank for rank in range(self.count) if begun[rank] != begun[0]), None)
        if odd is not None:
            raise RuntimeError(
                "ranks of a group must call the same functions in the same order;"
                f" rank 0 is in {begun[0]} and rank {odd} in {begun[odd]} (call {self.number} of the group)"
            )
        refuses = next((rank for rank, row in enumerate(rows) if row[1]), None)
        if refuses is not None:
            raise RuntimeError(f"rank {refuses} refused this call, so rank {self.rank} cannot go on: see the error of rank {refuses}")
        self.values.hear([row[2 : 2 + NUMBERS] for row in rows])
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

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Those of every rank, by rank. All ranks give equally many: after `begin` has said so."""
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

    @cached_property
    def _gloo(self) -> Any:
        """Made when it is first needed, by all ranks."""
        self._meet()
        made = distributed_c10d.ProcessGroupGloo(self._store, self.rank, self.count, self.limit)
        self._meet = lambda: None  # it holds the group, which would then never be freed
        return made

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
