"""What one of several ranks on a Hopper GPU is given: records of its launches, legs of walks, masks of its rows, heads of a unit."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch

from dash_attn import Causal, Documents, Full, Mask, Prefix, Window, flash_attn_func
from dash_attn.call.call import Call, Saved
from dash_attn.call.planning import schedule_for
from dash_attn.scheduling import Problem
from dash_attn.scheduling.ranks.sharding import Sharding
from dash_attn.scheduling.ranks.share import heads_that_fill
from played_ranks import Case
from rank_cases import CASES, UNEVEN

leg_tables = import_module("dash_attn.backends.hopper.calls.leg_tables")
of_hopper = import_module("dash_attn.backends.hopper.ranks")
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@each_case
def test_records_stay_inside_of_their_tables(case: Case) -> None:
    """What the kernels index with 32 bits, and what a state's semaphore must not touch."""
    shared, plan = case.shared, case.plan
    dims = import_module("dash_attn.backends.hopper.tiles").backward_dims(*case.dims)
    tiles = import_module("dash_attn.backends.hopper.tiles").backward_tiles(*dims)
    for rank in range(case.sharding.ranks):
        made = leg_tables.LegTables(plan, shared, rank, tiles)
        sizes, records = made.sizes, {name: made.records[:, i] for i, name in enumerate(leg_tables.CHAIN_FIELDS)}
        assert (made.runs[:, leg_tables.LENGTH] > 0).all()
        assert (records["first_run"] < len(made.runs)).all()
        assert (records["first_sum"] >= sizes.dq_tiles).all()
        assert (records["first_sum"] + tiles.sum_pieces <= sizes.first_sum).all()
        assert (records["first_dq_tile"] + sizes.q_tiles <= sizes.dq_tiles).all()
        assert (records["steps"] > 0).all(), "a leg has tasks"
        assert sum(unit.leg is not None for unit in made.units) == len(made.counters)
        assert (made.endings[:, leg_tables.ENDING_FIELDS.index("sum")] < sizes.all_sums).all()
        assert len(set(records["first_sum"].tolist())) == len(made.records) == sizes.states, "a semaphore for every state"
        for unit in made.units:
            if unit.leg is None:
                ending = dict(zip(leg_tables.ENDING_FIELDS, made.endings[list(made.ends[unit.number])].T, strict=True))
                assert (ending["first"] + (ending["count"] - 1) * ending["stride"] < shared.state_tiles(unit)).all()


@each_case
def test_legs_put_together_are_the_whole_walk(case: Case) -> None:
    """Every task of the plan is in one leg of one rank, with its turn."""
    shared, plan = case.shared, case.plan
    found: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for rank in range(case.sharding.ranks):
        rows = leg_tables.RankRows(case.problem, case.sharding, rank)
        own = rows.q_tiles
        for kind, trips in enumerate(shared.trips):
            for column in trips.columns:
                for number, leg in enumerate(column.legs):
                    if leg.chunk not in rows.moved:
                        continue
                    runs = leg_tables.LegRuns(plan)
                    for kv_tile in leg.kv_tiles:
                        steps = trips.steps(kv_tile, number)
                        first = runs.add(kind, kv_tile, steps, rows.moved[leg.chunk] // plan.problem.tile_q)
                        walked = _decoded(runs, first)
                        assert all(0 <= q_tile < len(own) for q_tile, *_ in walked)
                        expected = plan.steps(kind, kv_tile)[steps].tolist()
                        assert [[int(own[q_tile]), *rest] for q_tile, *rest in walked] == expected
                        found.setdefault((kind, kv_tile), []).extend(map(tuple, expected))
    for kind in range(plan.kinds):
        for kv_tile in range(plan.problem.kv_tiles):
            assert sorted(found.get((kind, kv_tile), [])) == sorted(map(tuple, plan.steps(kind, kv_tile).tolist()))


def _decoded(runs: Any, first: int) -> list[list[int]]:
    listed = [entry for entries in runs.entries for entry in entries.tolist()]
    whole: list[list[int]] = []
    for q_first, q_stride, length, turn_mul, turn_add, turn_div, partial, entries in np.array(runs.runs[first:]).tolist():
        for i in range(length):
            regular = [q_first + i * q_stride, (turn_mul * i + turn_add) // turn_div, partial]
            whole.append(regular if entries < 0 else listed[entries + i])
    return whole


# The forward


@pytest.mark.parametrize(
    "mask",
    [
        Full(),
        Causal(),
        Window(200, 0),
        Window(100, 70),
        Window(-1, 300),
        Window(300, -1),
        Window(0, 2000),
        Window(2000, 5),
        Prefix(400),
        Documents((100, 300, 600)),
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [range(256), range(256, 512), range(768, 1000)], ids=str)
def test_the_mask_of_some_rows(mask: Mask, rows: range) -> None:
    """Aligned with the last key of those that are given, it keeps what the mask of the whole keeps there."""
    own, keys = of_hopper.mask_of_rows(mask, rows, 1000)
    whole = mask.keep(slice(rows.start, rows.stop), slice(0, 1000), 1000, 1000)
    some = own.keep(slice(0, len(rows)), slice(0, keys), len(rows), keys)
    assert np.array_equal(whole[:, :keys], some)
    tiles = own.tile_map(len(rows), keys, 64, 128)
    assert ((tiles > 0) == [[some[i : i + 64, j : j + 128].any() for j in range(0, keys, 128)] for i in range(0, len(rows), 64)]).all()
    assert not whole[:, keys:].any()


@pytest.mark.parametrize(
    ("mask", "keys"),
    [(Window(150, 40), (168, 1096, 424, 936, 552, 680)), (Causal(), (128, 1096, 384, 896, 512, 640)), (Prefix(400), (1096,) * 6)],
)
def test_the_forward_of_a_device(monkeypatch: pytest.MonkeyPatch, mask: Mask, keys: tuple[int, ...]) -> None:
    seen = []

    def plain(call: Call) -> Saved:
        seen.append((call.q.shape[1], call.k.shape[1], call.options.mask, call.options.schedule))
        return Saved(*flash_attn_func(*call.tensors, mask=call.options.mask, sinks=call.sinks, return_lse=True))

    monkeypatch.setattr(of_hopper, "forward_of_batch", plain)
    case = Case(mask, UNEVEN, (2, 1), schedule="alternating")
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, UNEVEN.rows, heads, 64) for heads in (2, 1, 1))
    out, lse = flash_attn_func(q, k, v, mask=case.mask, return_lse=True)
    for rank in range(UNEVEN.ranks):
        mine = torch.from_numpy(UNEVEN.rows_of(rank).copy()).long()
        found = of_hopper.forward(Call(q[:, mine], k, v, case.options), case.problem, UNEVEN, rank)
        torch.testing.assert_close(found, (out[:, mine], lse[:, :, mine]))
    assert [entry[:2] for entry in seen] == list(zip((128, 200, 256, 256, 128, 128), keys, strict=True))
    assert {entry[3] for entry in seen} == {"auto"}, "a forward needs no schedule"
    assert len({hash(entry[2]) for entry in seen}) > 0, "calls are found by their masks"


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("mask", [Causal(), Full()], ids=str)
@pytest.mark.parametrize("batch", [1, 3])
def test_heads_of_a_unit_fill_the_machine(batch: int, mask: Mask, ranks: int) -> None:
    """As the trips of the schedule say, which take time to find."""
    problem = Problem(mask, 16384, 16384, 64, 128, 8, 4, batch)
    sharding = Sharding.zigzag(16384, ranks)
    expected = heads_that_fill(schedule_for(problem, "auto", 132), sharding, 132)
    assert expected / 1.5 <= of_hopper.heads_together(problem, sharding) <= expected * 1.5
