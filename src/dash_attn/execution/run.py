"""Runs every chain of a plan under the rules of its semaphores.

At most `plan.workers` chains are resident, they start in ticket order, and a reduce waits until every lower turn of
its dQ tile has landed. Which resident chain moves next is the interleaving: the oldest that can (the default), a
random one, or real threads. In ordered mode the bits are the same under all of them; unordered mode adds in order of
arrival and is the control.
"""

from __future__ import annotations

from random import Random

from ..scheduling.plan import Plan
from .coroutines import run_coroutines
from .interleaving import Interleaving
from .rules import Ledger, Starts, TileArithmetic, whole_chains
from .threads import run_threads


def run_plan(plan: Plan, arithmetic: TileArithmetic, ordered: bool = True, chosen: Interleaving | None = None) -> None:
    """Run every chain of the plan to its end, or raise ExecutionError."""
    ledger = Ledger(plan, ordered)
    run_chains(plan, arithmetic, ledger, whole_chains(plan, arithmetic), Interleaving() if chosen is None else chosen)
    ledger.finish()


def run_chains(plan: Plan, arithmetic: TileArithmetic, ledger: Ledger, starts: Starts, chosen: Interleaving) -> None:
    """Run chains of a plan, or stretches of them, to their end. They start in this order."""
    if chosen.threads:
        run_threads(plan, arithmetic, ledger, starts, chosen.seed, chosen.record)
    else:
        run_coroutines(plan, arithmetic, ledger, starts, None if chosen.seed is None else Random(chosen.seed))
