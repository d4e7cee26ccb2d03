"""The forward's tables: every kept tile once, downward. The sequence of visits decides the bits of out and LSE."""

from __future__ import annotations

import numpy as np
import pytest

from dash_attn.scheduling import Problem
from dash_attn.scheduling.plan import visit_tables
from golden_problems import SMALL, many

PROBLEMS = {**SMALL, **dict(many())}


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_every_kept_tile_is_visited_once_and_downward(problem: Problem) -> None:
    tables = visit_tables(problem)
    for q_tile in range(problem.q_tiles):
        kept = [int(kv_tile) for kv_tile in range(problem.kv_tiles)[::-1] if problem.kept[q_tile, kv_tile]]
        runs = tables.runs[tables.first_runs[q_tile] : tables.first_runs[q_tile + 1]].tolist()
        visited = [(first - i, bool(packed & 1)) for first, packed in runs for i in range(packed >> 1)]
        assert visited == [(kv_tile, bool(problem.partial[q_tile, kv_tile])) for kv_tile in kept]
        assert tables.visits[q_tile] == len(kept)


@pytest.mark.parametrize("problem", SMALL.values(), ids=SMALL)
def test_long_rows_are_taken_first_and_empty_ones_never(problem: Problem) -> None:
    tables = visit_tables(problem)
    assert sorted(tables.q_order.tolist()) == np.flatnonzero(problem.kept.any(1)).tolist()
    keys = [(-int(tables.visits[q_tile]), -int(q_tile)) for q_tile in tables.q_order]
    assert keys == sorted(keys)
