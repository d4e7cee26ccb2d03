"""Lower bounds on the makespan of any schedule of a problem."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..scheduling.engine import Costs
from ..scheduling.problem import Problem


class LowerBounds(NamedTuple):
    """In ticks. No order and no placement can be faster than `best`."""

    work: Fraction
    longest_chain: Fraction
    most_loaded_q_tile: Fraction
    offsets: Fraction

    @property
    def best(self) -> Fraction:
        return max(self)


def lower_bounds(problem: Problem, costs: Costs, workers: int) -> LowerBounds:
    compute, reduce, latency, overlap, startup = costs
    # Without overlap a task holds its worker for compute + reduce. With it the slower of the two stages is the pace,
    # and the last reduce of a worker still follows its last compute.
    pace = Fraction(compute + reduce) if overlap == 0 else max(Fraction(compute), Fraction(reduce, overlap))
    tail = reduce if overlap and pace == compute else 0
    members = np.array([len(problem.members(part)) for part in range(problem.parts)])
    lengths = np.outer(members, problem.chain_lengths[problem.chain_lengths > 0]).ravel()  # of all chains of a KV head
    copies = problem.batch * problem.heads
    most_turns = int(problem.turns_per_q_tile.max(initial=0))
    if not problem.tasks:
        return LowerBounds(Fraction(0), Fraction(0), Fraction(0), Fraction(0))
    return LowerBounds(
        work=(problem.tasks * pace + len(lengths) * copies * startup) / workers + tail,
        longest_chain=int(lengths.max()) * pace + startup + tail,
        most_loaded_q_tile=Fraction(startup + compute + (most_turns - 1) * max(reduce, latency) + reduce),
        offsets=_pigeonhole(np.sort(lengths), copies, workers, pace, startup) + tail,
    )


def _pigeonhole(ascending: NDArray[np.int64], copies: int, workers: int, pace: Fraction, startup: int) -> Fraction:
    """Of the k * workers + 1 longest chains, k + 1 share a worker: at least the k + 1 shortest of those."""
    longest_first = np.append(ascending[::-1], 0)
    before = np.concatenate([[0], np.cumsum(longest_first)])
    chains = (len(longest_first) - 1) * copies
    shared = np.arange(1, (chains - 1) // workers + 1)

    def total(count: NDArray[np.int64]) -> NDArray[np.int64]:
        """Length of the `count` longest chains, each of which occurs `copies` times."""
        whole, rest = np.divmod(count, copies)
        return np.asarray(before[whole] * copies + longest_first[whole] * rest)

    together = total(shared * workers + 1) - total(shared * workers - shared)
    scaled = together * pace.numerator + (shared + 1) * (startup * pace.denominator)
    return Fraction(int(scaled.max(initial=0)), pace.denominator)
