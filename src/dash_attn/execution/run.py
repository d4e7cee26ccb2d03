"""Runs every chain of a plan under the rules of its semaphores.

At most `plan.workers` chains are resident, they start in ticket order, and a reduce waits until every lower turn of
its dQ tile has landed. Which resident chain moves next is the interleaving: the oldest that can (the default), a
random one, or real threads. In ordered mode the bits are the same under all of them; unordered mode adds in order of
arrival and is the control. On threads, one thread is one worker, and the operating system decides the interleaving.
"""

import threading
import time
from collections import deque
from random import Random

from ..errors import ExecutionError
from ..scheduling.plan import Plan
from .interleaving import Interleaving, TaskTime
from .rules import Chain, Landed, Starts, Target, TileArithmetic, whole_chains

LONGEST_SLEEP = 3e-4  # seconds; about one task on a CPU, so that chains overtake each other


def run_plan(plan: Plan, arithmetic: TileArithmetic, ordered: bool = True, chosen: Interleaving | None = None) -> None:
    """Run every chain of the plan to its end, or raise ExecutionError."""
    landed = Landed(plan, arithmetic, ordered)
    run_chains(landed, whole_chains(plan, arithmetic), Interleaving() if chosen is None else chosen)
    landed.finish()


def run_chains(landed: Landed, starts: Starts, chosen: Interleaving) -> None:
    """Run chains of a plan, or stretches of them, to their end. They start in this order."""
    if chosen.threads:
        _Team(landed, starts, chosen).run()
    else:
        _run_coroutines(landed, starts, None if chosen.seed is None else Random(chosen.seed))


def _run_coroutines(landed: Landed, starts: Starts, rng: Random | None) -> None:
    """One thread plays all workers. Without `rng` the oldest chain that can move does, and a start comes last."""
    upcoming, resident = deque(starts), list[Chain]()
    while resident or upcoming:
        startable = len(upcoming) > 0 and len(resident) < landed.plan.workers
        chain = _choose(resident, startable, landed, rng)
        if chain is None and not startable:
            raise landed.deadlock(resident)
        if chain is None:
            resident.append(upcoming.popleft()())
        elif chain.pending is not None:
            landed.land(chain)
        elif chain.compute():
            landed.check(chain)
        else:
            resident.remove(chain)


def _choose(resident: list[Chain], startable: bool, landed: Landed, rng: Random | None) -> Chain | None:
    """The chain that moves next; None: start another, or nothing can move."""
    movable = (chain for chain in resident if chain.pending is None or landed.may_land(chain))
    if rng is None:
        return next(movable, None)
    choices: list[Chain | None] = [*movable]
    if startable:
        choices.append(None)
    return rng.choice(choices) if choices else None


class _Abandoned(Exception):
    """Another worker has failed."""


class _Team:
    """Workers that share what has landed under one lock. A worker that must wait parks on the event of its dQ tile and turn.

    With a seed, workers sleep at random before they compute and before they land. The record gets a row for every task, in the order
    they land.
    """

    def __init__(self, landed: Landed, starts: Starts, chosen: Interleaving) -> None:
        self.landed, self.starts, self.seed, self.record = landed, starts, chosen.seed, chosen.record
        self.lock = threading.Lock()
        self.parked: dict[tuple[Target, int], tuple[Chain, threading.Event]] = {}
        self.size = min(landed.plan.workers, landed.plan.problem.chains)
        self.active = self.size
        self.failure: BaseException | None = None

    def run(self) -> None:
        workers = [threading.Thread(target=self._work, args=(index,), daemon=True) for index in range(self.size)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if self.failure is not None:
            raise self.failure

    def _work(self, index: int) -> None:
        sleeper = None if self.seed is None else Random(f"{self.seed}/{index}")
        try:
            while (chain := self._take()) is not None:
                start = time.perf_counter()
                _sleep(sleeper)
                while chain.compute():
                    computed, is_task = time.perf_counter(), not chain.is_ending
                    turn = self._reduce(chain, sleeper)
                    landed = time.perf_counter()
                    if self.record is not None and is_task:
                        self.record.append(TaskTime(index, chain.task, start, computed, turn, landed))
                    start = landed
                    _sleep(sleeper)
        except _Abandoned:
            pass
        except BaseException as error:
            with self.lock:
                self._fail(error)
        finally:
            with self.lock:
                self.active -= 1
                self._check_progress()

    def _take(self) -> Chain | None:
        with self.lock:
            start = None if self.failure is not None else next(self.starts, None)
            return None if start is None else start()

    def _reduce(self, chain: Chain, sleeper: Random | None) -> float:
        """Returns when its turn came."""
        _sleep(sleeper)
        with self.lock:
            released = self._park(chain)
        if released is not None:
            released.wait()
        with self.lock:
            if self.failure is not None:
                raise _Abandoned
            turn = time.perf_counter()
            _, event = self.parked.pop(self.landed.land(chain), (None, None))
            if event is not None:
                event.set()
        return turn

    def _park(self, chain: Chain) -> threading.Event | None:
        """Queue a chain behind the lower turns of its dQ tile; None if it may land now."""
        if self.failure is not None:
            raise _Abandoned
        self.landed.check(chain)
        if self.landed.may_land(chain):
            return None
        place = chain.target, chain.turn
        if place in self.parked:
            rival = self.parked[place][0]
            raise ExecutionError(f"{chain} has turn {place[1]}, which {rival} also has")
        event = threading.Event()
        self.parked[place] = (chain, event)
        self._check_progress()
        return event

    def _check_progress(self) -> None:
        """Fail if every worker that is left is parked: a released chain is no longer parked, so nobody will move."""
        if self.failure is None and self.parked and len(self.parked) == self.active:
            self._fail(self.landed.deadlock([chain for chain, _ in self.parked.values()]))

    def _fail(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error
        for _, event in self.parked.values():
            event.set()


def _sleep(sleeper: Random | None) -> None:
    if sleeper is not None:
        time.sleep(sleeper.random() * LONGEST_SLEEP)
