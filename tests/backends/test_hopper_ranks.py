"""One of several ranks on a Hopper GPU, without one: its tables and launches drive kernels that are emulated in numpy.

What the kernels themselves compute is tested on a GPU (tests/gpu/test_gpu_played_ranks.py). Here every address, record, run, rank, mask and
turn is used as they would use it, and memory that was not made for it is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dash_attn import Causal, Documents, Full, Mask, Prefix, TileMap, Window, flash_attn_func
from dash_attn.call.call import Call, Saved
from dash_attn.call.options import AttentionOptions, Choices, options_for
from dash_attn.call.parts import of_a_document
from dash_attn.call.planning import plan_for, schedule_for
from dash_attn.distributed.context.loopback import play_all_ranks
from dash_attn.distributed.context.shared_call import SharedCall
from dash_attn.scheduling import Problem
from dash_attn.scheduling.plan import Plan
from dash_attn.scheduling.ranks.sharding import Sharding
from dash_attn.scheduling.ranks.share import heads_that_fill, in_legs
from dash_attn.scheduling.ranks.units import SharedSchedule
from emulated_kernels import EmulatedDriver, EmulatedMap, Memory
from played_ranks import Case, Played, in_random_order, play_ranks

NAMES = ("rank_backward", "kernel_names", "leg_tables", "tables", "backward_setup")
calls, kernel_names, leg_tables, tables, setups = (import_module(f"dash_attn.backends.hopper.calls.{name}") for name in NAMES)
of_hopper = import_module("dash_attn.backends.hopper.ranks")
workspaces = import_module("dash_attn.backends.hopper.driver.workspace")
recently_used = import_module("dash_attn.backends.kept")


class Stream:
    def synchronize(self) -> None:
        """The tables are there."""


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:
    driver = EmulatedDriver()
    memory = driver.memory

    class Tables(tables.DeviceTables):  # type: ignore[misc, name-defined]
        def __init__(self, arrays: dict[str, Any], device: torch.device) -> None:
            super().__init__(arrays, device)
            memory.kept.append(self.memory)
            for name, array in arrays.items():
                memory.add(name, self[name], 4 * np.size(array))

        def copy_of(self, name: str) -> Tensor:
            return memory.add_tensor(name, super().copy_of(name))

    class Workspace(workspaces.Workspace):  # type: ignore[misc, name-defined]
        def __init__(self, **sizes: int) -> None:
            super().__init__(**sizes)
            self.sizes = sizes

        def allocate(self, device: torch.device) -> tuple[Tensor, dict[str, int]]:
            kept, at = super().allocate(device)
            kept.fill_(0x7F)  # nobody may rely on zeros
            memory.kept.append(kept)
            for name, size in self.sizes.items():
                memory.add(name, at[name], size)
            return kept, at

    monkeypatch.setattr(kernel_names, "load_kernel", driver.load)
    ready = calls.tma_ready
    stand_ins = {
        "sm_count": lambda index: 132,
        "TensorMap": EmulatedMap,
        "current_stream": lambda index: 0,
        "raise_if_troubled": lambda: None,
        "on_device": lambda index: nullcontext(),
        "device_index": lambda device: 0,
        "Workspace": Workspace,
        "tma_ready": lambda x: memory.add_tensor("tensor", ready(x)),
    }
    for name, value in stand_ins.items():
        monkeypatch.setattr(calls, name, value)
    monkeypatch.setattr(setups, "report_address", lambda: 0)
    for module in (tables, leg_tables):
        monkeypatch.setattr(module, "DeviceTables", Tables)
    monkeypatch.setattr(leg_tables, "_kept", recently_used.Kept(64))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream())
    tables.mask_on_device.cache_clear()
    yield memory
    tables.mask_on_device.cache_clear()
    EmulatedMap.made.clear()


UNEVEN = Sharding((128, 256, 128, 128, 256, 200), (0, 1, 2, 2, 1, 0))
CASES = {
    "causal": Case(Causal(), Sharding.zigzag(1024, 2), (2, 2)),
    "causal, fp16, uneven": Case(Causal(), UNEVEN, (2, 2), (128, 128), dtype=torch.float16),
    "causal, contiguous, batch": Case(Causal(), Sharding.contiguous(1024, 4), (2, 2), (128, 128), batch=2, together=3),
    "a group in parts": Case(Causal(), Sharding.zigzag(2560, 2), (6, 2), (64, 64), together=4),
    "a group in parts, batch": Case(Full(), Sharding.contiguous(2304, 2), (2, 1), (64, 64), batch=2, together=4),
    "parts of several heads": Case(Causal(), Sharding.zigzag(1536, 3), (10, 2), (64, 64), together=2, head_offset=1),
    "window": Case(Window(300, 0), Sharding.zigzag(1024, 4), (2, 2), (128, 128)),
    "window ahead": Case(Window(150, 90), UNEVEN, (3, 1), (192, 128), head_offset=1),
    "full": Case(Full(), Sharding.contiguous(2560, 2), (2, 1), (64, 64)),
    "full, few tiles": Case(Full(), Sharding.zigzag(512, 2), (2, 1), (256, 256)),
    "full, one rank, many chunks": Case(Full(), Sharding((640,) * 4, (0,) * 4), (2, 2), (64, 64), together=2),
    "padded head dims": Case(Causal(), Sharding.zigzag(512, 2), (2, 2), (59, 40)),
    "values of another dim": Case(Causal(), Sharding.zigzag(512, 2), (2, 1), (96, 40)),
    "head dim 192": Case(Causal(), Sharding.zigzag(512, 2), (4, 2), (192, 192), together=2),
    "prefix": Case(Prefix(700), Sharding.zigzag(1024, 2), (2, 2), (128, 128), schedule="alternating"),
    "documents": Case(Documents((300, 21, 775)), UNEVEN, (2, 2), (64, 64), schedule="alternating"),
    "weave, listed entries": Case(Window(-1, 100), Sharding((512,), (0,)), (2, 2), (64, 64), schedule="weave"),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def play(case: Case, memory: Memory, inputs: tuple[Tensor, ...], **rest: Any) -> Played:
    """On emulated kernels, which know what memory there is."""
    return play_ranks(case, inputs, made=memory.add_tensor, **rest)


def inputs_of(case: Case, sinks: Tensor | None = None) -> tuple[tuple[Tensor, ...], list[Tensor], Tensor | None]:
    """What the ranks get, and what float32 on the CPU says of it; dlse, where there are sinks."""
    torch.manual_seed(0)
    (q_heads, kv_heads), (dim, v_dim), rows = case.heads, case.dims, case.sharding.rows
    shapes = [(q_heads, dim), (kv_heads, dim), (kv_heads, v_dim), (q_heads, v_dim)]
    q, k, v, dout = (torch.randn(case.batch, rows, *shape).to(case.dtype) for shape in shapes)
    q32, k32, v32 = (x.float().requires_grad_() for x in (q, k, v))
    options = {"mask": case.mask, "schedule": case.schedule, "return_lse": True, "head_offset": case.head_offset}
    out, lse = flash_attn_func(q32, k32, v32, sinks=sinks, **options)
    dlse = None if sinks is None else torch.randn_like(lse)
    torch.autograd.backward([out, lse], [dout.float(), torch.zeros_like(lse) if dlse is None else dlse])
    return (dout, q, k, v, out.detach().to(case.dtype), lse.detach()), [q32.grad, k32.grad, v32.grad], dlse


def assert_near(found: list[Tensor], expected: list[Tensor]) -> None:
    for name, one, other in zip(("dq", "dk", "dv"), found, expected, strict=True):
        worst = (one.float() - other).abs().max() / other.abs().max()
        assert worst < 0.02, f"{name}: off by {worst:.3f} of the largest"


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.exhaustive), True])
@each_case
def test_all_ranks_together_are_the_whole_call(memory: Memory, case: Case, overlap: bool) -> None:
    inputs, expected, _ = inputs_of(case)
    played = play(case, memory, inputs, overlap=overlap)
    assert_near(played.gradients, expected)


def test_what_a_launch_may_overlap(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the first one, and none whose states come from another rank; those that come from here are waited for."""
    case, seen = CASES["causal"], []
    walk = calls.RankBackward._walk

    def note(backward: Any, launch: Any, stream: Any) -> None:
        seen.append((backward.number, backward.leg.overlaps, backward.leg.awaited))
        walk(backward, launch, stream)

    monkeypatch.setattr(calls.RankBackward, "_walk", note)
    played = play(case, memory, inputs_of(case)[0], overlap=True)
    legs, begun = [unit for unit in played.shared.units if unit.leg is not None], set()
    for unit, (rank, overlaps, awaited) in zip(legs, seen, strict=True):
        assert rank == unit.rank
        semaphores = played.backwards[rank].legs.host.semaphore_of
        comes_from = None if unit.before is None else played.shared.units[unit.before].rank
        assert overlaps == (rank in begun and comes_from in (None, rank))
        assert awaited == (semaphores[unit.before] if overlaps and unit.before is not None else -1)
        begun.add(rank)
    assert {overlaps for _, overlaps, _ in seen} == {0, 1}
    assert max(awaited for *_, awaited in seen) > 0


def test_nothing_overlaps_a_launch_whose_keys_are_gone(memory: Memory, small: tuple[Case, Any, SharedSchedule]) -> None:
    """Their memory may be given to the next states."""
    _, backward, shared = small
    backward.overlap = True
    first, *rest = [unit for unit in shared.by_rank[0] if unit.leg is not None and unit.before is None]
    again = next(unit for unit in rest if not [w for w in shared.waits[unit.number] if shared.units[w].rank == 0])
    for unit, overlaps in ((first, 0), (again, 1)):
        backward._begin(unit, state := memory.add_tensor("states", backward.new_state(unit)))
        assert backward.leg.overlaps == overlaps
        backward.run(unit, state)
    keys = backward.keys[0].tensors
    backward.drop_keys(0, 2)
    backward.take_keys(*keys, 0)
    backward._begin(again, state)
    assert backward.leg.overlaps == 0


def test_the_first_launch_waits_for_the_preprocess(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also behind an ending of keys that nobody attends, which has no leg before it."""
    problem = Problem(Window(100, 0), 256, 1024, 128, 128, 2)
    plan, options = plan_for(problem, "auto", 132), options_for(Choices(mask=problem.mask), 64)
    legs = in_legs(schedule_for(problem, "auto", 132), 132)
    endings = [unit for unit in legs.units if unit.leg is None and unit.before is None]
    assert endings
    rows, keys = torch.zeros(1, 256, 2, 64).bfloat16(), torch.zeros(1, 1024, 2, 64).bfloat16()
    of_rows = memory.add_tensor("rows", torch.zeros(1, 2, 256)), None
    backward = calls.RankBackward(plan, legs, 0, options, (rows, rows, rows), of_rows, overlap=True)
    backward.take_keys(keys, keys, 0)
    seen, walk = [], calls.RankBackward._walk
    monkeypatch.setattr(calls.RankBackward, "_walk", lambda self, *of: (seen.append(self.leg.overlaps), walk(self, *of)))
    states = {}
    for unit in [*endings, *(unit for unit in legs.units if unit not in endings)]:
        state = memory.add_tensor("states", backward.new_state(unit)) if unit.before is None else states.pop(unit.before)
        backward.run(unit, state)
        states[unit.number] = state
    assert seen[0] == 0
    assert set(seen[1:]) == {1}
    dq, dk, dv = backward.finish()
    assert (dq.shape, dk.shape, dv.shape) == (rows.shape, keys.shape, keys.shape)


def test_endings_that_wait_are_bounded(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["a group in parts"]
    inputs, expected, _ = inputs_of(case)
    monkeypatch.setattr(calls, "MOST_WAITING", 4 * of_hopper.tile_size(64, 64) * 30)
    assert_near(play(case, memory, inputs, overlap=True).gradients, expected)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.exhaustive
def test_units_in_another_sequence(memory: Memory, seed: int) -> None:
    """A rank may run its units in any sequence in which each comes behind those that it waits for."""
    case = CASES["a group in parts"]
    inputs, expected, _ = inputs_of(case)
    assert_near(play(case, memory, inputs, units=in_random_order(case.shared, seed)).gradients, expected)


def test_two_states_swapped_would_be_seen(memory: Memory) -> None:
    """The control: the sums of other keys."""
    case = CASES["causal"]
    inputs, expected, _ = inputs_of(case)

    def swap(unit: Any, state: Tensor) -> None:
        if unit.before is not None and unit.leg is not None:
            halves = state.view(2, -1) if state.numel() // of_hopper.tile_size(*case.dims) > 1 else state.view(1, -1)
            state.copy_(halves.flip(0).flatten())

    with pytest.raises(AssertionError, match="dk: off by"):
        assert_near(play(case, memory, inputs, change=swap).gradients, expected)


@pytest.mark.parametrize(
    "case",
    [
        CASES["a group in parts"],
        Case(Causal(), Sharding.zigzag(512, 2), (4, 4), batch=2, together=3),
        Case(Full(), Sharding.contiguous(512, 2), (6, 3), (192, 192), together=4),
    ],
    ids=str,
)
@pytest.mark.exhaustive
def test_keys_that_come_head_by_head(memory: Memory, case: Case) -> None:
    """A unit whose heads have their keys in several tensors is launched in parts; its records are made once."""
    inputs, expected, _ = inputs_of(case)
    first, again = (play(case, memory, inputs, gathers=case.heads[1]) for _ in range(2))
    for played in (first, again):
        assert_near(played.gradients, expected)
    for one, other in zip(first.backwards, again.backwards, strict=True):
        assert one.legs is other.legs
        assert len(one.more_counters) == len(other.more_counters) == len(one.legs._some) > 0


def test_keys_may_go_when_they_are_not_needed(memory: Memory) -> None:
    case = CASES["causal"]
    inputs, _, _ = inputs_of(case)
    backward = play(case, memory, inputs).backwards[0]
    backward.drop_keys(0, 2)
    unit = next(unit for unit in case.shared.by_rank[0] if unit.leg is not None)
    backward._ran.clear()
    with pytest.raises(RuntimeError, match=r"needs the keys of KV heads \[0\]; there are those of \[\]"):
        backward._launches(unit)


def test_sinks_and_gradients_of_the_lse(memory: Memory) -> None:
    case = Case(Causal(), Sharding.zigzag(1000 + 24, 2), (4, 2), batch=2)
    sinks = torch.randn(4)
    inputs, expected, dlse = inputs_of(case, sinks)
    played = play(case, memory, inputs, dlse=dlse)
    assert_near(played.gradients, expected)
    tile = case.problem.tile_q
    place = np.argsort(np.concatenate([leg_tables.RankRows(case.problem, case.sharding, rank).q_tiles for rank in range(2)]))
    rows = torch.cat([backward.rows_of_sinks for backward in played.backwards], dim=3)[:, :, :, torch.from_numpy(place)]
    assert rows.shape == (2, 2, 4, 1024 // tile, tile)
    logits = sinks.clone().requires_grad_()
    dout, q, k, v, *_ = (x.float() for x in inputs)
    out, lse = flash_attn_func(q, k, v, mask=case.mask, sinks=logits, return_lse=True)
    torch.autograd.backward([out, lse], [dout, dlse])
    torch.testing.assert_close(played.backwards[1].sink_gradients(rows, sinks).sum(0), logits.grad, rtol=0.02, atol=0.05)


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
                first, count = made.ends[unit.number]
                ending = dict(zip(leg_tables.ENDING_FIELDS, made.endings[first : first + count].T, strict=True))
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


# What is refused


@pytest.fixture
def small(memory: Memory) -> tuple[Case, Any, SharedSchedule]:
    """Device 0 of a small case, with its keys."""
    case = Case(Causal(), Sharding.zigzag(512, 2), (2, 2))
    dout, q, k, v, out, lse = inputs_of(case)[0]
    mine, shared = torch.from_numpy(case.sharding.rows_of(0).copy()).long(), case.shared
    of_rows = memory.add_tensor("rows", lse[:, :, mine].contiguous()), None
    backward = calls.RankBackward(case.plan, shared, 0, case.options, (dout[:, mine], q[:, mine], out[:, mine]), of_rows)
    backward.take_keys(k, v, 0)
    return case, backward, shared


def test_a_unit_before_its_turn_is_refused(memory: Memory, small: tuple[Case, Any, SharedSchedule]) -> None:
    _, backward, shared = small
    mine = shared.by_rank[0]
    late = next(u for u in mine if any(shared.units[w].rank == 0 for w in shared.waits[u.number]))
    with pytest.raises(RuntimeError, match=r"waits for unit \d+ .* which has not run on this rank"):
        backward.run(late, memory.add_tensor("states", backward.new_state(late)))
    first = mine[0]
    state = memory.add_tensor("states", backward.new_state(first))
    backward.run(first, state)
    with pytest.raises(RuntimeError, match=f"unit {first.number} ran already"):
        backward.run(first, state)
    other = next(u for u in shared.units if u.rank == 1)
    with pytest.raises(ValueError, match="belongs to rank 1; this is rank 0"):
        backward.run(other, memory.add_tensor("states", backward.new_state(other)))
    with pytest.raises(RuntimeError, match=rf"{len(mine) - 1} units of rank 0 have not run; the first is {mine[1].number} \("):
        backward.finish()


def test_states_that_do_not_fit_are_refused(small: tuple[Case, Any, SharedSchedule]) -> None:
    _, backward, shared = small
    unit = shared.by_rank[0][0]
    state = backward.new_state(unit)
    assert state.numel() == backward.state_size(unit) == shared.state_tiles(unit) * of_hopper.tile_size(64, 64)
    for wrong in (state[:-4], state.double(), state.bfloat16()):
        with pytest.raises(ValueError, match="float32 numbers on cpu; got"):
            backward.run(unit, wrong)
    longer = torch.zeros(state.numel() + 1)
    with pytest.raises(ValueError, match="multiple of 16 bytes"):
        backward.run(unit, longer[1:])


def test_keys_that_do_not_fit_are_refused(small: tuple[Case, Any, SharedSchedule]) -> None:
    _, backward, _ = small
    keys = torch.zeros(1, 512, 2, 64, dtype=torch.bfloat16)
    for wrong in (keys[:, :256], keys.half(), keys[..., :32]):
        with pytest.raises(ValueError, match="k must have all 512 rows of 1 sequences, head dim 64"):
            backward.take_keys(wrong, keys, 0)
    with pytest.raises(ValueError, match="v must have all 512 rows"):
        backward.take_keys(keys, keys[:, :, :1], 0)


def test_what_a_device_cannot_do(memory: Memory) -> None:
    case = Case(Causal(), Sharding.zigzag(512, 2), (2, 2))
    shared, rows = case.shared, torch.zeros(1, 256, 2, 64, dtype=torch.bfloat16)
    lse = torch.zeros(1, 2, 256)

    def make(plan: Plan = case.plan, options: AttentionOptions = case.options, rows: Tensor = rows) -> None:
        calls.RankBackward(plan, shared, 0, options, (rows, rows, rows), (lse, None))

    with pytest.raises(ValueError, match="unordered"):
        make(options=options_for(Choices(mask=Causal(), accumulation="unordered"), 64))
    with pytest.raises(ValueError, match="tiles of 128 x 128 rows in the plan; the kernels of head dims"):
        make(rows=torch.zeros(1, 256, 2, 128, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"has \(batch, rows, query heads\) \(1, 256, 2\); got q of \(1, 250, 2\)"):
        make(rows=rows[:, :250])
    with pytest.raises(ValueError, match="bfloat16 and float16"):
        make(rows=rows.float())
    blocks = Case(TileMap(np.tri(4, dtype=bool), 128, 128), Sharding.zigzag(512, 2), (2, 2), schedule="alternating")
    with pytest.raises(NotImplementedError, match="one interval of keys per query; got"):
        calls.RankBackward(blocks.plan, blocks.shared, 0, blocks.options, (rows, rows, rows), (lse, None))
    with pytest.raises(NotImplementedError, match="one interval of keys per query; got"):
        of_hopper.forward(Call(rows, rows, rows, blocks.options), blocks.problem, blocks.sharding, 0)


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


@pytest.fixture
def plain_forward(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU. States and rows may be anywhere: they are made inside."""

    def plain(call: Call) -> Saved:
        q, k, v = (x.float() for x in call.tensors)
        out, lse = flash_attn_func(q, k, v, mask=call.options.mask, return_lse=True)
        return Saved(out.to(call.q.dtype), lse)

    monkeypatch.setattr(of_hopper, "forward_of_batch", plain)
    for name in ("states", "rows"):
        memory.add(name, 0, 2**62)


@pytest.mark.usefixtures("plain_forward")
def test_processes_drive_ranks() -> None:
    """What context_parallel_attention does with a backend, in one process: gathers of keys, states that are copied on their way."""
    case = Case(Causal(), Sharding.zigzag(1024, 2), (12, 6))
    (dout, q, k, v, *_), expected, _ = inputs_of(case)
    call = SharedCall(case.options, case.sharding, 1, 6, 2, case.dims, "hopper")
    assert len(call.documents[0].gathers) > 1
    found = play_all_ranks(call, q, k, v, dout)
    assert_near([found.dq, found.dk, found.dv], expected)


ROWS_OF_DOCUMENTS = {
    "causal": Case(Documents((300, 21, 455, 13, 235)), Sharding.zigzag(1024, 2), (4, 2)),
    "causal, batch, contiguous": Case(Documents((1, 900, 127, 128, 3, 41)), Sharding.contiguous(1200, 3), (2, 2), (128, 128), batch=2),
    "full": Case(Documents((700, 324), causal=False), Sharding.zigzag(1024, 4), (2, 1), (192, 192)),
    "full, gangs": Case(Documents((2200, 80, 1720), causal=False), Sharding.contiguous(4000, 2), (1, 1)),
    "full, a group in parts": Case(Documents((2304, 96), causal=False), Sharding.contiguous(2400, 2), (3, 1)),
    "short": Case(Documents((23, 17, 5, 19) * 6), Sharding.zigzag(384, 3), (2, 1), (256, 256)),
}


SLOW_ROWS = ("causal, batch, contiguous", "full, gangs")


@pytest.mark.usefixtures("plain_forward")
@pytest.mark.parametrize(
    "case",
    [pytest.param(row, id=name, marks=pytest.mark.exhaustive if name in SLOW_ROWS else ()) for name, row in ROWS_OF_DOCUMENTS.items()],
)
def test_processes_drive_ranks_of_documents(case: Case) -> None:
    (dout, q, k, v, *_), expected, _ = inputs_of(case)
    assert isinstance(case.mask, Documents)
    row = SharedCall.of((q, k, v), of_a_document(case.options), case.sharding, case.mask.lengths, backend="hopper")
    found = play_all_ranks(row, q, k, v, dout)
    assert_near([found.dq, found.dk, found.dv], expected)


# One device with too few SMs


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.exhaustive), 2, pytest.param(4, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(("lengths", "heads"), [((2304, 2304), (2, 2)), ((2304, 1200), (3, 1))], ids=str)
def test_in_legs_on_few_workers(
    memory: Memory, monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, int], heads: tuple[int, int], workers: int
) -> None:
    """The order of `auto` on a full mask has gangs. Its legs need none, and keys may be of another length than queries."""
    torch.manual_seed(0)
    monkeypatch.setattr(calls, "sm_count", lambda index: workers)
    (q_len, kv_len), (q_heads, kv_heads) = lengths, heads
    q, dout = (torch.randn(1, q_len, q_heads, 64).bfloat16() for _ in range(2))
    k, v = (torch.randn(1, kv_len, kv_heads, 64).bfloat16() for _ in range(2))
    q32, k32, v32 = (x.float().requires_grad_() for x in (q, k, v))
    out, lse = flash_attn_func(q32, k32, v32, return_lse=True)
    out.backward(dout.float())
    monkeypatch.setattr(setups, "sm_count", lambda index: workers)
    asked = Call(*(x.to("meta") for x in (q, k, v)), options_for(Choices(mask=Full()), 64))
    made = setups.backward_setup(asked)
    assert made.gang > workers
    new_state = calls.RankBackward.new_state
    monkeypatch.setattr(calls.RankBackward, "new_state", lambda *of: memory.add_tensor("states", new_state(*of)))
    call = calls.BackwardInLegs(made, torch.device("cpu"))
    lse = memory.add_tensor("rows", lse.detach().contiguous())
    dq, dk, dv, dsinks = call.run((q, k, v, dout, out.detach().bfloat16()), asked, lse, None)
    assert_near([dq, dk, dv], [q32.grad, k32.grad, v32.grad])
    assert dsinks is None


def test_the_machine_code_has_a_name() -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings")
    assert of_hopper.machine_code() == of_hopper.machine_code()
    assert "NVRTC" in of_hopper.machine_code()
