"""One thread plays all workers; a seed decides who moves next."""

from __future__ import annotations

from random import Random

from ..scheduling.plan import Plan
from .rules import Chain, Ledger, Starts, TileArithmetic, deadlock


def run_coroutines(plan: Plan, arithmetic: TileArithmetic, ledger: Ledger, starts: Starts, rng: Random | None) -> None:
    """One thread plays all workers. Without `rng` the oldest chain that can move does, and a start comes last."""
    upcoming = next(starts, None)
    resident: list[Chain] = []
    while resident or upcoming is not None:
        startable = upcoming is not None and len(resident) < plan.workers
        chain = _choose(resident, startable, ledger, rng)
        if chain is None and (not startable or upcoming is None):
            raise deadlock(plan, ledger, resident)
        if chain is None:
            assert upcoming is not None
            resident.append(upcoming())
            upcoming = next(starts, None)
        elif chain.pending is not None:
            ledger.land(chain, arithmetic)
        elif chain.compute():
            ledger.check(chain)
        else:
            resident.remove(chain)


def _choose(resident: list[Chain], startable: bool, ledger: Ledger, rng: Random | None) -> Chain | None:
    """The chain that moves next; None: start another, or nothing can move."""
    movable = (chain for chain in resident if chain.pending is None or ledger.may_land(chain))
    if rng is None:
        return next(movable, None)
    choices: list[Chain | None] = [*movable]
    if startable:
        choices.append(None)
    return rng.choice(choices) if choices else None
