"""The forward's tables: which KV tiles each Q tile visits. A Q tile is one worker's alone, so nothing has to be ordered.

KV tiles go downward, and Q tiles with many visits are taken first. Both are functions of the problem alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .order import Ints, frozen_ints
from .problem import Problem


@dataclass(frozen=True, eq=False)
class VisitTables:
    """Q tile `q` owns the runs first_runs[q]:first_runs[q + 1]; a run is (first KV tile, 2 * length + partial), going downward.

    `q_order` leaves out Q tiles that visit nothing: their output is 0 without any work.
    """

    q_order: Ints
    first_runs: Ints
    runs: Ints
    visits: Ints

    def of(self, q_tile: int) -> list[tuple[int, bool]]:
        """(KV tile, partial) in the order of the visit."""
        runs = self.runs[self.first_runs[q_tile] : self.first_runs[q_tile + 1]].tolist()
        return [(first - i, bool(packed & 1)) for first, packed in runs for i in range(packed >> 1)]


def visit_tables(problem: Problem) -> VisitTables:
    runs: list[tuple[int, int]] = []
    first_runs = [0]
    for q_tile in range(problem.q_tiles):
        kv_tiles = np.flatnonzero(problem.kept[q_tile])[::-1]
        partial = problem.partial[q_tile, kv_tiles]
        breaks = np.flatnonzero((np.diff(kv_tiles) != -1) | (np.diff(partial.astype(np.int8)) != 0)) + 1
        for part in np.split(np.arange(len(kv_tiles)), breaks):
            if len(part):
                runs.append((int(kv_tiles[part[0]]), 2 * len(part) + int(partial[part[0]])))
        first_runs.append(len(runs))
    visits = problem.turns_per_q_tile
    longest_first = np.lexsort((-np.arange(problem.q_tiles), -visits))[: np.count_nonzero(visits)]
    return VisitTables(
        frozen_ints(longest_first), frozen_ints(first_runs), frozen_ints(np.array(runs, dtype=np.int32).reshape(-1, 2)), frozen_ints(visits)
    )
