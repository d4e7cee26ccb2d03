"""Proof that a schedule is complete, deterministic and cannot hang. Every error names a task and shows its surroundings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..errors import ScheduleError
from .engine import Chain, Costs, Reduces, Stuck, run_in_model_time
from .order import HeadOrder, Ints, Order
from .problem import Problem, Task

if TYPE_CHECKING:
    from .schedule import Schedule


ANY_WORKERS = "alternating"  # serves every mask on any number of workers
NOTHING = Costs(0, 0, 0, 0)  # without times: what can run does
MOST_TASKS = 2**25  # that are run untimed for a proof, in about half a minute


class StuckOnWorkers(ScheduleError):
    """Its walks and turns are sound, but whole chains on so many workers would wait for each other for ever."""


class TooFewWorkers(StuckOnWorkers):
    """Chains wait for each other in a circle, and not all of them can be resident."""

    def __init__(self, name: str, needed: int, workers: int, details: str = "") -> None:
        self.name, self.needed, self.workers = name, needed, workers
        super().__init__(
            f"{name} needs {needed} workers at once (SMs of a GPU, simulated or recorded workers): that many chains of a head wait for each"
            f" other; there are {workers}. schedule={ANY_WORKERS!r} runs on any number of workers;"
            " its bits are different, so use it on every machine of a run" + (f"\n{details}" if details else "")
        )


def validate(schedule: Schedule) -> None:
    """Raise ScheduleError unless coverage, turns, contiguity and freedom from deadlock all hold."""
    problem, order, placement = schedule.problem, schedule.order, schedule.placement
    for kind, head_order in enumerate(order.kinds):
        part = (kind - problem.head_offset * problem.parts) % len(order.kinds)
        first_head = problem.members(part).start  # the first query head of this kind
        _check_shape(problem, head_order)
        _check_coverage(problem, head_order, first_head)
        _check_turns(problem, head_order, first_head)
    check_starts(problem, order, placement.starts)
    if sum(placement.segments) != problem.kv_tiles or min(placement.segments) < 1:
        raise ScheduleError(f"segments must be sizes >= 1 that add up to {problem.kv_tiles} KV tiles; got {placement.segments}")
    _check_progress(schedule)


def check_starts(problem: Problem, order: Order, starts: tuple[Ints, ...]) -> None:
    """Raise ScheduleError unless every kind of head has a start order, each a permutation of the KV tiles."""
    if not 1 <= len(order.kinds) == len(starts):
        raise ScheduleError(f"{len(order.kinds)} kinds of head need as many start orders, at least one; got {len(starts)}")
    for kind, start in enumerate(starts):
        if sorted(start.tolist()) != list(range(problem.kv_tiles)):
            raise ScheduleError(f"start order of kind {kind} must name each of the {problem.kv_tiles} KV tiles once; got {start.tolist()}")


def _check_shape(problem: Problem, order: HeadOrder) -> None:
    tasks = len(order.q_tile)
    sizes_fit = order.kv_tiles == problem.kv_tiles == len(order.first_step) and len(order.turn) == tasks
    if not sizes_fit or order.offsets[0] != 0 or order.offsets[-1] != tasks or np.any(np.diff(order.offsets) < 0):
        raise ScheduleError(f"an order for {problem.kv_tiles} KV tiles needs one contiguous walk and one first step for each")


def _check_coverage(problem: Problem, order: HeadOrder, head: int) -> None:
    outside = (order.q_tile < 0) | (order.q_tile >= problem.q_tiles)
    if not outside.any():
        visits = np.zeros(problem.kept.shape, dtype=np.int64)
        np.add.at(visits, (order.q_tile, order.chain), 1)
        if np.array_equal(visits, problem.kept.astype(np.int64)):
            return
        outside = ~problem.kept[order.q_tile, order.chain]
        repeated = visits[order.q_tile, order.chain] > 1
    if outside.any():
        index = int(np.argmax(outside))
        raise ScheduleError(_at(order, index, head, "is not kept by the mask but stands in a walk"))
    if repeated.any():
        index = len(repeated) - 1 - int(np.argmax(repeated[::-1]))
        raise ScheduleError(_at(order, index, head, "occurs twice in its walk"))
    q_tile, kv_tile = (int(i[0]) for i in np.nonzero(problem.kept & (visits == 0)))
    task = Task(head, q_tile, kv_tile)
    raise ScheduleError(f"{task} is kept by the mask but missing from the walk of kv{kv_tile}\n{_grid(order, 0, kv_tile)}")


def _check_turns(problem: Problem, order: HeadOrder, head: int) -> None:
    expected = problem.turns_per_q_tile
    outside = (order.turn < 0) | (order.turn >= expected[order.q_tile])
    if outside.any():
        index = int(np.argmax(outside))
        allowed = int(expected[order.q_tile[index]])
        raise ScheduleError(_at(order, index, head, f"has turn {order.turn[index]}; its Q tile has turns 0..{allowed - 1}"))
    earlier, later = order.hand_overs
    twice = order.turn[earlier] == order.turn[later]
    if twice.any():
        index = int(later[np.argmax(twice)])
        other = int(earlier[np.argmax(twice)])
        rival = Task(head, int(order.q_tile[other]), int(order.chain[other]))
        raise ScheduleError(_at(order, index, head, f"has turn {order.turn[index]}, which {rival} also has"))


def _check_progress(schedule: Schedule) -> None:
    """Freedom from deadlock, by the cheapest proof that applies (DESIGN.md, why no schedule can hang)."""
    if schedule.gang == 1:
        return  # chains wait only for earlier starts
    placement, kinds = schedule.placement, schedule.order.kinds
    cuts = np.cumsum(placement.segments) - 1
    torn = any(not np.isin(cuts, kind.piece_ends(start)).all() for kind, start in zip(kinds, placement.starts, strict=True))
    fits = schedule.gang * placement.lanes <= schedule.workers and not torn
    acyclic = all(map(_is_acyclic, kinds))
    if fits and acyclic:
        return  # every gang becomes resident and completes
    is_large, report = schedule.problem.tasks > MOST_TASKS, ""
    try:
        if not is_large:
            run_in_model_time(schedule, NOTHING)
            return
    except Stuck as stuck:
        report = _deadlock_report(schedule, stuck, acyclic)
    if acyclic and schedule.gang > schedule.workers:
        raise TooFewWorkers(schedule.name, schedule.gang, schedule.workers, report)
    if is_large:
        report = (
            f"{schedule.name}: that this placement cannot hang could only be shown by running it, and {schedule.problem.tasks} tasks are"
            f" too many for that (at most {MOST_TASKS}); use fewer lanes ({placement.lanes} heads of {schedule.gang} chains side by side)"
            f" or segments that keep chains together which wait for each other"
        )
    raise (StuckOnWorkers if acyclic else ScheduleError)(report)


def _is_acyclic(order: HeadOrder) -> bool:
    """Whether a head runs to its end with all its chains resident."""
    if order.slack is None or order.slack >= 0:
        return True  # steps grow along walks and never fall along turns; turns of one Q tile alone make no circle
    reduces = Reduces(int(order.q_tile.max()) + 1, NOTHING)
    chains = [Chain(kv, 0, 0, order.walk(kv).tolist(), order.turns(kv).tolist()) for kv in range(order.kv_tiles)]
    return sum(1 for chain in chains for _ in reduces.run(chain)) == len(chains)


def _deadlock_report(schedule: Schedule, stuck: Stuck, acyclic: bool) -> str:
    blocked, lanes = stuck.blocked, schedule.placement.lanes
    reason = "on any number of workers: its walks and turns wait for each other in a circle"
    if acyclic:
        reason = f"on {schedule.workers} workers: it needs {schedule.gang} chains of a head resident together, {lanes} heads side by side"
    lines = [f"{schedule.name} would deadlock {reason}; {len(blocked)} chains wait"]
    for worker, task, turn, awaited in blocked[:4]:
        lines.append(f"  worker {worker}: {task} (turn {turn}) waits for {awaited}")
    worker, task, _, _ = blocked[0]
    problem = schedule.problem
    order = schedule.order_of(next(part for part in range(problem.all_parts) if task.head in problem.members(part)))
    position = int(np.flatnonzero(order.walk(task.kv_tile) == task.q_tile)[0])
    return "\n".join(lines) + "\n" + _grid(order, position, task.kv_tile)


def _at(order: HeadOrder, index: int, head: int, what: str) -> str:
    kv_tile = int(order.chain[index])
    task = Task(head, int(order.q_tile[index]), kv_tile)
    return f"{task} {what}\n{_grid(order, index - int(order.offsets[kv_tile]), kv_tile)}"


def _grid(order: HeadOrder, position: int, kv_tile: int, reach: int = 3) -> str:
    """Steps x chains around one task, as q_tile:turn, with an arrow at the task. One worker runs one chain."""
    columns = range(max(0, kv_tile - reach), min(order.kv_tiles, kv_tile + reach + 1))
    here = int(order.first_step[kv_tile]) + position
    lines = ["step x worker (one chain each), cells are q_tile:turn", "  step  " + "".join(f"{'kv' + str(kv):>11}" for kv in columns)]
    for step in range(here - reach, here + reach + 1):
        cells = []
        for kv in columns:
            index = step - int(order.first_step[kv])
            walk, turns = order.walk(kv), order.turns(kv)
            cell = f"q{walk[index]}:{turns[index]}" if 0 <= index < len(walk) else "."
            cells.append(("-->" + cell if step == here and kv == kv_tile else cell).rjust(11))
        lines.append(f"{step:6d}  " + "".join(cells))
    return "\n".join(lines)
