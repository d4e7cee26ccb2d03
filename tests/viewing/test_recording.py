"""Measured runs: records of the kernel and of threads become spans; made-up records with known answers, real ones of threads."""

from __future__ import annotations

from importlib import import_module
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from dash_attn import Causal, Full
from dash_attn.backends.cpu import passes as cpu
from dash_attn.backends.cpu import recorder as cpu_record
from dash_attn.call.call import Call, Grads
from dash_attn.call.options import AttentionOptions
from dash_attn.errors import RecordError
from dash_attn.execution.interleaving import Interleaving, TaskTime, interleaving
from dash_attn.scheduling import Problem, Schedule, generate
from dash_attn.scheduling.problem import Task
from dash_attn.simulation import Machine, simulate
from dash_attn.viewing.task_times import (
    Clocks,
    Cycles,
    Noted,
    TaskTimes,
    noted_by_drains,
    task_table,
    times_from,
    times_of,
    to_microseconds,
)
from dense import random_inputs, same_bits

record = import_module("dash_attn.backends.hopper.calls.recorder")

GHZ = 1.7
FREE = Machine(compute=2.0, reduce=0.5, overlap=2, latency=0.5)


def schedule_of(name: str = "alternating", **shape: int) -> Schedule:
    return generate(name, Problem(Causal(), 512, 512, 64, 128, **{"heads": 4, **shape}), 6)


def clocks_of(workers: int, lasted_us: float, seed: int = 0) -> Clocks:
    """CTAs that start within a microsecond, on SMs whose own clocks show anything, some about to wrap around."""
    rng = np.random.default_rng(seed)
    start_ns = 10**18 + rng.integers(0, 1000, workers)
    start_cycles = rng.integers(0, 2**32, workers)
    start_cycles[::2] = 2**32 - 500
    end_ns = start_ns + int(lasted_us * 1000)
    return Clocks(start_ns, start_cycles, end_ns, (start_cycles + ((end_ns - start_ns) * GHZ).round().astype(np.int64)) % 2**32)


def cycles_at(us: np.ndarray, cta: np.ndarray, clocks: Clocks) -> np.ndarray:
    ns = us * 1000 - (clocks.start_ns - clocks.start_ns.min())[cta]
    return (clocks.start_cycles[cta] + (ns * GHZ).round().astype(np.int64)) % 2**32


def made_up_record(schedule: Schedule, spans: TaskTimes, clocks: Clocks) -> np.ndarray:
    """The memory of a recording kernel that ran as `spans` says, a microsecond after its CTAs started."""
    table = task_table(schedule)
    memory = np.full((record.entries(schedule.problem), 4), record.UNWRITTEN, dtype=np.int32)
    times = (spans.compute_end, spans.reduce_start, spans.reduce_end)
    columns = [cycles_at(x + 1, spans.worker_of_task, clocks) for x in times] + [spans.worker_of_task]
    memory[record.entry_of(schedule.problem, table)] = np.stack(columns, axis=1).astype(np.uint32).view(np.int32)
    return memory


def encoded(clocks: Clocks) -> np.ndarray:
    """struct ClockRecord: ns, then cycles in the low half and the SM in the high half of a word."""
    sm = np.arange(len(clocks.start_ns)) << 32
    pairs = ((clocks.start_ns, clocks.start_cycles | sm), (clocks.end_ns, clocks.end_cycles | sm))
    return np.stack([np.stack(pair, axis=1) for pair in pairs])


def test_clocks_are_aligned_across_sms_and_wrap_around() -> None:
    clocks = clocks_of(5, 400.0)
    cta = np.repeat(np.arange(5), 50)
    us = np.tile(np.linspace(0.5, 399, 50), 5)
    assert np.abs(to_microseconds(cycles_at(us, cta, clocks), cta, clocks) - us).max() < 0.01


@pytest.mark.parametrize("lasted", [0.0, 2e6])
def test_clocks_that_cannot_be_are_refused(lasted: float) -> None:
    with pytest.raises(RecordError, match="must last"):
        to_microseconds(np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64), clocks_of(1, lasted))


@pytest.mark.parametrize("shape", [{}, {"batch": 2}, {"group": 2, "heads": 2}], ids=str)
def test_a_run_without_waits_comes_back_as_it_was(shape: dict[str, int]) -> None:
    schedule = schedule_of(**shape)
    expected = times_of(simulate(schedule, FREE))
    clocks = clocks_of(6, expected.makespan + 5)
    found = record.read_record(schedule, made_up_record(schedule, expected, clocks), encoded(clocks))
    assert found.name == "alternating, measured"
    assert (found.drains, found.time_label, found.workers) == (2, "microseconds", 6)
    assert np.array_equal(found.worker, expected.worker)
    for name in ("compute_start", "compute_end", "reduce_start", "reduce_end"):
        assert np.abs(getattr(found, name) - getattr(expected, name)).max() < 0.02, name
    assert found.makespan == pytest.approx(expected.makespan, abs=0.02)
    start, end = found.waits
    assert np.maximum(end - start, 0).sum() == pytest.approx(np.subtract(*expected.waits[::-1]).sum(), abs=1.0)


def test_a_task_that_was_not_noted_is_named() -> None:
    schedule = schedule_of()
    spans = times_of(simulate(schedule, FREE))
    clocks = clocks_of(6, 500.0)
    memory = made_up_record(schedule, spans, clocks)
    table = task_table(schedule)
    memory[record.entry_of(schedule.problem, table)[[3, 7]]] = record.UNWRITTEN
    name = Task(*(int(x[3]) for x in (table.head, table.q_tile, table.kv_tile, table.sequence)))
    with pytest.raises(RecordError, match=rf"nothing of 2 of {len(table.head)} tasks, first {name}"):
        record.read_record(schedule, memory, encoded(clocks))


def test_a_chain_on_two_workers_is_refused() -> None:
    schedule = schedule_of()
    spans = times_of(simulate(schedule, FREE))
    worker = spans.worker_of_task.copy()
    worker[1] = (worker[1] + 1) % 6
    with pytest.raises(RecordError, match="task 1 was noted on another worker"):
        times_from(schedule, Noted(worker, spans.compute_start, spans.compute_end, spans.reduce_start, spans.reduce_end), 2)


def one_chain(ready: list[float], turn: list[float], landed: list[float]) -> Noted:
    """One head, one KV tile: one chain of as many tasks."""
    schedule = generate("ascending", Problem(Full(), 64 * len(ready), 64, 64, 64), 1)
    clocks = clocks_of(1, 1000.0)
    cta = np.zeros(len(ready), dtype=np.int64)
    cycles = Cycles(cta, *(cycles_at(np.array(x, dtype=np.float64), cta, clocks) for x in (ready, turn, landed)))
    return noted_by_drains(schedule, cycles, clocks, 2)


def test_a_stall_ends_when_the_buffer_has_had_its_turn() -> None:
    """Steps of 2. Task 1 gets its turn at 13 instead of at 4; task 3, which needs its buffer, is ready at 15 instead of at 8."""
    ready = [2.0, 4.0, 6.0, 15.0, 17.0, 19.0]
    turn = [2.0, 13.0, 6.0, 15.0, 17.0, 19.0]
    noted = one_chain(ready, turn, [t + 0.5 for t in turn])
    assert noted.compute_end == pytest.approx(ready, abs=0.01)
    assert noted.compute_start == pytest.approx([0.0, 2.0, 4.0, 13.0, 15.0, 17.0], abs=0.01)  # 6 to 13 is a stall


def test_a_slow_step_that_waited_for_nobody_is_no_stall() -> None:
    ready = [2.0, 4.0, 6.0, 15.0, 17.0, 19.0]
    noted = one_chain(ready, ready, [t + 0.5 for t in ready])
    assert noted.compute_start == pytest.approx([0.0, 2.0, 4.0, 6.0, 15.0, 17.0], abs=0.01)


def test_a_chain_that_starts_before_the_last_one_has_landed_ends_its_wait() -> None:
    """TaskTimes of one worker never overlap, or a picture would show more time than there was."""
    spans = TaskTimes(
        "x", 1, 2, np.array([0, 2, 3]), np.array([0, 0]), np.array([0, 1, 0]),
        compute_start=np.array([0.0, 1.0, 2.2]), compute_end=np.array([1.0, 2.0, 3.2]),
        reduce_start=np.array([1.0, 2.0, 3.2]), reduce_end=np.array([1.5, 2.9, 3.6]), drains=2,
    )  # fmt: skip
    assert spans.waits[1] == pytest.approx([1.0, 2.2, 3.6])


def cpu_options(schedule: str) -> AttentionOptions:
    return AttentionOptions(Causal(), 0.2, 0.0, schedule)


def recorded(schedule: str, workers: int) -> tuple[TaskTimes, torch.Tensor]:
    q, k, v, dout = random_inputs(300, 300, (2, 1), batch=2)
    options = cpu_options(schedule)
    call = Call(q, k, v, options)
    saved = cpu.forward(call)
    spans = cpu_record.record_backward(call, saved, Grads(dout), workers)
    return spans, cpu.backward(call, saved, Grads(dout)).q


@pytest.mark.parametrize("workers", [1, 3])
def test_threads_note_every_task_in_its_turn(workers: int) -> None:
    spans, _ = recorded("ascending", workers)
    problem = Problem(Causal(), 300, 300, 64, 128, heads=1, group=2, batch=2)
    schedule = generate("ascending", problem, workers)
    assert len(spans.q_tile) == problem.tasks
    assert (spans.compute_start.min(), spans.drains, spans.name) == (0.0, 0, "ascending, measured")
    assert (spans.compute_start <= spans.compute_end).all()
    assert (spans.compute_end <= spans.reduce_start).all()
    assert (spans.reduce_start <= spans.reduce_end).all()
    for worker in range(workers):
        mine = np.flatnonzero(spans.worker_of_task == worker)
        in_time = mine[np.argsort(spans.compute_start[mine])]
        assert all(spans.reduce_end[a] <= spans.compute_start[b] for a, b in pairwise(in_time))
    table = task_table(schedule)
    for sequence, head, q_tile in {*zip(table.sequence.tolist(), table.head.tolist(), table.q_tile.tolist(), strict=True)}:
        rivals = np.flatnonzero((table.sequence == sequence) & (table.head == head) & (table.q_tile == q_tile))
        by_turn = rivals[np.argsort(table.turn[rivals])]
        assert all(spans.reduce_start[a] < spans.reduce_start[b] for a, b in pairwise(by_turn)), "turns land in order"


def test_recording_changes_no_bit() -> None:
    q, k, v, dout = random_inputs(300, 300)
    call = Call(q, k, v, cpu_options("alternating"))
    saved = cpu.forward(call)
    rows: list[TaskTime] = []
    expected = cpu.backward(call, saved, Grads(dout))
    with interleaving(1, threads=True, workers=3, record=rows):
        found = cpu.backward(call, saved, Grads(dout))
    assert len(rows) == Problem(Causal(), 300, 300, 64, 128, heads=2).tasks
    assert all(same_bits(a, b) for a, b in zip(found[:3], expected[:3], strict=True))


def test_an_incomplete_record_of_threads_is_refused() -> None:
    schedule = schedule_of()
    row = TaskTime(0, Task(0, 0, 0), 0.0, 1.0, 1.0, 2.0)
    for rows in ([row], [row, row]):
        with pytest.raises(RecordError, match="tasks were noted"):
            cpu_record.read_record(schedule, rows)


def test_only_threads_record() -> None:
    with pytest.raises(ValueError, match="only threads record"):
        Interleaving(record=[])


def test_a_measured_run_draws_beside_a_simulated_one(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from dash_attn.viewing.gantt import gantt

    schedule = schedule_of("ascending")
    simulated = simulate(schedule, Machine(2.0, 0.5, 2, 3.0))
    clocks = clocks_of(6, simulated.makespan + 5)
    measured = record.read_record(schedule, made_up_record(schedule, times_of(simulated), clocks), encoded(clocks))
    slower = simulate(schedule, Machine(8.0, 0.5, 2, 3.0))
    gantt([simulated, slower, measured], tmp_path / "both.svg")
    svg = (tmp_path / "both.svg").read_text()
    assert "ascending, measured" in svg
    assert svg.count("as fast") == 1, "simulated runs are compared with simulated ones only"


def test_too_large_a_problem_is_refused() -> None:
    with pytest.raises(ValueError, match="too many"):
        record.check_size(Problem(Causal(), 2**20, 2**20, 64, 128, heads=16))
