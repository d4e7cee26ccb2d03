"""One backward whose drains note when each dQ tile was ready, had its turn and landed: the measured Gantt chart.

A kernel of its own does it (template parameter RECORD); the one that trains has no such instruction.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....call.call import Call, Grads, Saved
from ....call.options import AttentionOptions
from ....call.parts import runs_packed
from ....call.planning import schedule_for
from ....errors import RecordError
from ....scheduling.problem import Problem, Task
from ....scheduling.schedule import Schedule
from ....scheduling.validate import TooFewWorkers
from ....viewing.task_times import Clocks, Cycles, TaskTable, TaskTimes, noted_by_drains, task_table, times_from
from ..support import refuse_modifiers
from .backward import BackwardCall
from .backward_setup import setup_of
from .layout import CallCache, Layout

DRAINS = {True: 2, False: 1}  # dQ tiles that may be staged, up to head dim 128 and beyond (backward/config.cuh)
MOST_ENTRIES = 2**26  # of 16 bytes: a gigabyte
UNWRITTEN = -1
WARM_UP = 5  # runs: while a GPU wakes up, the clocks of its SMs drift apart


class RecordingCall(BackwardCall):
    """A backward call with the recording kernel and the memory it writes to."""

    records = True

    def __init__(self, layout: Layout, tensors: tuple[Tensor, ...], options: AttentionOptions) -> None:
        setup = setup_of(layout, options)
        assert setup.plan is not None  # record_backward takes no packed sequences, which are planned on the device
        if setup.legs is not None:
            raise TooFewWorkers(setup.plan.schedule_name, setup.gang, setup.plan.workers, " Only a plain backward runs there.")
        super().__init__(setup, tensors)
        self.plan, problem = setup.plan, setup.plan.problem
        check_size(problem)
        self.record = torch.full((entries(problem), 4), UNWRITTEN, dtype=torch.int32, device=self.device)  # struct StepRecord
        self.clocks = torch.zeros((2, self.workers, 2), dtype=torch.int64, device=self.device)  # struct ClockRecord
        self.main.record, self.main.clocks, self.main.record_turns = self.record.data_ptr(), self.clocks.data_ptr(), problem.kv_tiles


def record_backward(call: Call, saved: Saved, grads: Grads) -> TaskTimes:
    """Run one backward of dense tensors, after some to warm up, and tell when every task ran. Times are microseconds."""
    check_recordable(call.options)
    recording, tensors = CallCache(RecordingCall).find(call, grads.out, saved.out)  # kept for this call only
    plan = recording.plan
    with torch.cuda.device(call.q.device):
        for _ in range(WARM_UP + 1):
            recording.record.fill_(UNWRITTEN)
            recording.run(tensors, call, saved.lse, grads.lse)
        torch.cuda.synchronize()
    schedule = schedule_for(plan.problem, call.options.schedule, plan.workers)
    drains = DRAINS[recording.layout.dim <= 128]
    return read_record(schedule, recording.record.cpu().numpy(), recording.clocks.cpu().numpy(), drains)


def check_recordable(options: AttentionOptions) -> None:
    """What runs must be what the schedule says."""
    refuse_modifiers(options, "recordings")
    if runs_packed(options):
        raise ValueError(
            "documents run as packed sequences, which are planned on the device and not recorded; name a schedule to record it"
        )


def check_size(problem: Problem) -> None:
    if entries(problem) > MOST_ENTRIES:
        raise ValueError(f"a recording takes one entry per task; {entries(problem):,} are too many, at most {MOST_ENTRIES:,}")


def entries(problem: Problem) -> int:
    """One for each dQ tile and turn it could have."""
    return problem.batch * problem.heads * problem.group * problem.q_tiles * problem.kv_tiles


def read_record(schedule: Schedule, record: NDArray[Any], clocks: NDArray[Any], drains: int = 2) -> TaskTimes:
    """TaskTimes from what the kernel wrote: rows (ready, turn, landed, CTA) by dQ tile and turn; per CTA both clocks, twice."""
    table = task_table(schedule)
    rows = record[entry_of(schedule.problem, table)].astype(np.int64)
    missing = np.flatnonzero(rows[:, 3] == UNWRITTEN)
    if len(missing):
        task = Task(*(int(x[missing[0]]) for x in (table.head, table.q_tile, table.kv_tile, table.sequence)))
        raise RecordError(f"the kernel noted nothing of {len(missing)} of {len(rows)} tasks, first {task}")
    cycles = Cycles(rows[:, 3], *(rows[:, i] % 2**32 for i in range(3)))
    ns, packed = clocks[..., 0], clocks[..., 1]
    both = Clocks(ns[0], packed[0] & 0xFFFFFFFF, ns[1], packed[1] & 0xFFFFFFFF)
    return times_from(schedule, noted_by_drains(schedule, cycles, both, drains), drains)


def entry_of(problem: Problem, table: TaskTable) -> NDArray[Any]:
    """Where the kernel writes each task, as in backward/drain.cuh."""
    dq_tile = (table.sequence * problem.heads * problem.group + table.head) * problem.q_tiles + table.q_tile
    return dq_tile * problem.kv_tiles + table.turn
