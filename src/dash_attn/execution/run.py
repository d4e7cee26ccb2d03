"""Runs every chain of a plan under the rules of its semaphores.

At most `plan.workers` chains are resident, they start in ticket order, and a reduce waits until every lower turn of
its dQ tile has landed. Which resident chain moves next is the interleaving: the oldest that can (the default), a
random one, or real threads. In ordered mode the bits are the same under all of them; unordered mode adds in order of
arrival and is the control.
"""

from __future__ import annotations

from random import Random

from ..scheduling.plan import Plan
from .interleaving import Interleaving
from .rules import Chain, Landed, Starts, TileArithmetic, whole_chains
from .threads import run_threads


def run_plan(plan: Plan, arithmetic: TileArithmetic, ordered: bool = True, chosen: Interleaving | None = None) -> None:
    """Run every chain of the plan to its end, or raise ExecutionError."""
    landed = Landed(plan, arithmetic, ordered)
    run_chains(landed, whole_chains(plan, arithmetic), Interleaving() if chosen is None else chosen)
    landed.finish()


def run_chains(landed: Landed, starts: Starts, chosen: Interleaving) -> None:
    """Run chains of a plan, or stretches of them, to their end. They start in this order."""
    if chosen.threads:
        run_threads(landed, starts, chosen)
    else:
        _run_coroutines(landed, starts, None if chosen.seed is None else Random(chosen.seed))


def _run_coroutines(landed: Landed, starts: Starts, rng: Random | None) -> None:
    """One thread plays all workers. Without `rng` the oldest chain that can move does, and a start comes last."""
    upcoming = next(starts, None)
    resident: list[Chain] = []
    while resident or upcoming is not None:
        startable = upcoming is not None and len(resident) < landed.plan.workers
        chain = _choose(resident, startable, landed, rng)
        if chain is None and (not startable or upcoming is None):
            raise landed.deadlock(resident)
        if chain is None:
            assert upcoming is not None
            resident.append(upcoming())
            upcoming = next(starts, None)
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
