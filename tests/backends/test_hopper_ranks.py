"""One of several ranks on a Hopper GPU, without one: its tables and launches drive kernels that are emulated in numpy.

What the kernels themselves compute is tested on a GPU (tests/gpu/test_gpu_played_ranks.py). Here every address, record, run, rank, mask and
turn is used as they would use it, and memory that was not made for it is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dash_attn import Causal, Documents, Full, TileMap, Window, flash_attn_func
from dash_attn.call.call import Call, Saved
from dash_attn.call.options import AttentionOptions, Choices, options_for
from dash_attn.call.parts import of_a_document
from dash_attn.call.planning import plan_for, schedule_for
from dash_attn.distributed.context.loopback import play_all_ranks
from dash_attn.distributed.context.shared_call import SharedCall
from dash_attn.scheduling import Problem
from dash_attn.scheduling.plan import Plan
from dash_attn.scheduling.ranks.sharding import Sharding
from dash_attn.scheduling.ranks.share import in_legs
from dash_attn.scheduling.ranks.units import SharedSchedule
from emulated_kernels import Memory
from emulated_ranks import calls, emulated_memory, leg_tables, of_hopper, setups
from played_ranks import Case, Played, in_random_order, play_ranks
from rank_cases import CASES, assert_near, inputs_of


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:
    yield from emulated_memory(monkeypatch)


each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def play(case: Case, memory: Memory, inputs: tuple[Tensor, ...], **rest: Any) -> Played:
    """On emulated kernels, which know what memory there is."""
    return play_ranks(case, inputs, made=memory.add_tensor, **rest)


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
