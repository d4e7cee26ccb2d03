"""A call of attention whose sequence is shared by ranks: what all of them must agree on, and the plans that follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from torch import Tensor

from ...backends import Ranks, import_ranks, resolve
from ...call.documents import runs_packed
from ...call.given_schedule import schedule_for
from ...call.options import AttentionOptions
from ...call.planning import DEFAULT_WORKERS, plan_for
from ...scheduling.plan import Plan
from ...scheduling.problem import Problem
from ...scheduling.ranks.in_legs import in_legs
from ...scheduling.ranks.sharding import Sharding
from ...scheduling.ranks.share import share
from ...scheduling.ranks.units import SharedSchedule

MOST_GATHERS = 4  # in which keys and values of all KV heads come


@dataclass(frozen=True)
class SharedCall:
    """Heads are those of one rank: with Ulysses, its share of the KV heads and their query heads."""

    options: AttentionOptions
    sharding: Sharding
    batch: int
    kv_heads: int
    group: int
    dims: tuple[int, int]  # of q and k, and of v
    backend: str

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        options: AttentionOptions,
        sharding: Sharding,
        heads_of: int = 1,
        backend: str | None = None,
    ) -> SharedCall:
        """Of a rank's tensors. heads_of: among how many ranks their heads are dealt. backend: that of the tensors, unless it is named
        because they stand for others. Raises where they cannot be shared."""
        kv_heads, group = k.shape[2] // heads_of, q.shape[2] // k.shape[2]
        backend = resolve(options.backend, q.device) if backend is None else backend
        call = cls(options, sharding, q.shape[0], kv_heads, group, (q.shape[3], v.shape[3]), backend)
        call._check()
        return call

    def _check(self) -> None:
        assert not runs_packed(self.options), "documents have calls of their own (documents.py)"
        self.shared  # noqa: B018  raises where lengths do not fit, or where the order has circles

    @property
    def of_backend(self) -> Ranks:
        return import_ranks(self.backend)

    @cached_property
    def problem(self) -> Problem:
        rows, tiles = self.sharding.rows, self.of_backend.backward_tiles(*self.dims)
        return Problem(self.options.mask, rows, rows, *tiles, self.kv_heads, self.group, self.batch, self.options.head_offset)

    @cached_property
    def plan(self) -> Plan:
        return plan_for(self.problem, self.options.schedule, DEFAULT_WORKERS)

    def described(self, rank: int) -> dict[str, Any]:
        """What decides the bits of a rank's rows, as JSON has it. Order and tiles are those of one rank alone."""
        plan = self.plan
        return {
            "backend": self.backend,
            "schedule": plan.schedule_name,
            "order_hash": plan.order_hash,
            "backward_tiles": [self.problem.tile_q, self.problem.tile_kv],
            "machine_code": self.of_backend.machine_code(),
            "ranks": self.sharding.ranks,
            "rank": rank,
            "chunks": [list(self.sharding.lengths), list(self.sharding.owners)],
        }

    @cached_property
    def shared(self) -> SharedSchedule:
        return _shared(self.problem, self.options.schedule, self.sharding, self.of_backend.heads_together(self.problem, self.sharding))

    @property
    def gathers(self) -> list[range]:
        """KV heads whose keys and values come together. While some are worked on, the next are on their way."""
        each = -(-self.kv_heads // MOST_GATHERS)
        return [range(first, min(first + each, self.kv_heads)) for first in range(0, self.kv_heads, each)]


@lru_cache(maxsize=64)
def _shared(problem: Problem, schedule: str, sharding: Sharding, heads_together: int) -> SharedSchedule:
    made = schedule_for(problem, schedule, DEFAULT_WORKERS)
    # Of a document that one rank has alone, gangs could not wait for each other in one launch, either.
    return share(made, sharding, heads_together) if sharding.chunks > 1 else in_legs(made, heads_together)
