"""One process plays all ranks: up to 16 of them, units in any legal order, and planted faults."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import Tensor

from dash_attn.backends.cpu import ranks as cpu_ranks
from dash_attn.call.options import Choices, options_for
from dash_attn.distributed import Sharding
from dash_attn.distributed.context.loopback import Mailbox, Results, play_all_ranks
from dash_attn.distributed.context.rows import sharding_for
from dash_attn.distributed.context.shared_call import Document, SharedCall
from dash_attn.errors import ExecutionError
from dash_attn.execution.interleaving import interleaving
from dash_attn.execution.rules import Deadlock
from dash_attn.scheduling.ranks.units import Unit
from shared_cases import CAUSAL, Case, Inputs, on_one_process
from shared_problems import random_case
from unit_walks import any_order

RANDOM = [(seed, ranks) for seed, ranks in enumerate([2, 3, 5, 8, 16, 4, 7, 12, 2, 6, 3, 16])]
SMALL = Case(3, 768, (2, 2), (8, 8), call=CAUSAL)


def shared_call(case: Case) -> SharedCall:
    inputs = Inputs.of(case)
    options = options_for(Choices(**case.call), case.dims[0])
    return SharedCall.of((inputs.q, inputs.k, inputs.v), options, sharding_for(case.sharding, case.rows, case.ranks))


def play(case: Case, mailbox: Mailbox | None = None, units: list[Unit] | None = None) -> Results:
    inputs = Inputs.of(case)
    return play_all_ranks(shared_call(case), inputs.q, inputs.k, inputs.v, inputs.dout, mailbox, units=units)


def is_truth(case: Case, found: Results) -> bool:
    return all(torch.equal(getattr(found, name), truth) for name, truth in on_one_process(case).items())


@pytest.mark.parametrize(("seed", "ranks"), RANDOM)
def test_any_number_of_ranks_has_the_bits_of_one(seed: int, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any legal order of the units, with one or several heads side by side. States are NaN where they were sent from."""
    case, random = random_case(seed, ranks), Random(seed)
    monkeypatch.setattr(cpu_ranks, "heads_together", lambda *_: 1 + seed % 3)
    shared = shared_call(case).documents[0].shared
    assert shared.heads_together == 1 + seed % 3
    assert is_truth(case, play(case, units=any_order(shared, random)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(100, 160))
def test_many_numbers_of_ranks_have_the_bits_of_one(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random = Random(seed)
    case = random_case(seed, random.randint(2, 16))
    monkeypatch.setattr(cpu_ranks, "heads_together", lambda *_: random.choice([1]) if seed % 2 else 3)
    for units in (None, any_order(shared_call(case).documents[0].shared, random)):
        assert is_truth(case, play(case, units=units))


@pytest.mark.parametrize("threads", [False, True])
def test_chains_of_a_unit_may_move_in_any_order(threads: bool) -> None:
    with interleaving(seed=3, threads=threads, workers=3 if threads else None):
        assert is_truth(SMALL, play(SMALL))


class Faulty(Mailbox):
    """Does something to the state that is received as the `which`-th."""

    def __init__(self, which: int = 2) -> None:
        super().__init__()
        self.which, self.received = which, 0
        self.last = torch.empty(0)

    def receive(self, document: Document, unit: Unit) -> Tensor:
        state = super().receive(document, unit)
        self.received += 1
        changed = self.change(state) if self.received == self.which else state
        self.last = state.clone()
        return changed

    def change(self, state: Tensor) -> Tensor:
        return state


class Rounded(Faulty):
    def change(self, state: Tensor) -> Tensor:
        return state.bfloat16().to(state.dtype)


class Dropped(Faulty):
    def change(self, state: Tensor) -> Tensor:
        return torch.zeros_like(state)


class Duplicated(Faulty):
    """The state before comes again."""

    def change(self, state: Tensor) -> Tensor:
        assert self.last.shape == state.shape
        return self.last.clone()


class ReadLate(Mailbox):
    """The state is read after the sender has used its memory again."""

    def send(self, document: Document, unit: Unit, state: Tensor) -> None:
        super().send(document, unit, state)
        self.states[unit.number] = state


@pytest.mark.parametrize("fault", [Rounded, Dropped, Duplicated, ReadLate])
def test_a_fault_on_the_way_changes_bits(fault: type[Mailbox]) -> None:
    assert is_truth(SMALL, play(SMALL, Faulty()))
    found = play(SMALL, fault())
    truth = on_one_process(SMALL)
    assert not (torch.equal(found.dk, truth["dk"]) and torch.equal(found.dv, truth["dv"]))
    assert torch.equal(found.dq, truth["dq"])  # it does not travel


def swapped(units: tuple[Unit, ...], waits: tuple[tuple[int, ...], ...]) -> list[list[Unit]]:
    """Orders in which a unit runs right before one whose turns it waits for. All else that it waits for has run."""
    found = []
    for unit in units:
        for earlier in waits[unit.number]:
            others = [other for other in waits[unit.number] if other != earlier]
            if earlier != unit.before and all(other < earlier for other in others):
                rest = [one for one in units if one is not unit]
                found.append([*rest[:earlier], unit, *rest[earlier:]])
    return found


def test_two_units_swapped_raise() -> None:
    """A turn that has not come is missed at once: no unit waits for another one that runs later."""
    shared = shared_call(SMALL).documents[0].shared
    orders = swapped(shared.units, shared.waits)
    assert len(orders) > 10
    for units in orders[::4]:
        with pytest.raises(Deadlock, match="waits for turn"):
            play(SMALL, units=units)


def test_a_unit_before_its_state_raises() -> None:
    shared = shared_call(SMALL).documents[0].shared
    unit = next(unit for unit in shared.units if unit.before is not None and shared.units[unit.before].rank != unit.rank)
    rest = [one for one in shared.units if one is not unit]
    with pytest.raises(KeyError):
        play(SMALL, units=[*rest[: unit.before], unit, *rest[unit.before :]])


def test_units_left_out_or_run_twice_raise() -> None:
    units = list(shared_call(SMALL).documents[0].shared.units)
    ending = next(unit for unit in units if unit.leg is None)
    with pytest.raises(ExecutionError, match="landed their dK and dV"):
        play(SMALL, units=[unit for unit in units if unit is not ending])
    with pytest.raises(ExecutionError, match="has already landed"):
        play(SMALL, units=[units[0], *units])
    with pytest.raises((ExecutionError, KeyError)):
        play(SMALL, units=units[1:])


def test_hops_left_out_change_bits_or_raise() -> None:
    """A leg that is not walked: whoever waits for its turns, or counts them, finds out."""
    shared = shared_call(SMALL).documents[0].shared
    for hop in [unit for unit in shared.units if unit.leg is not None and shared.hops(unit)][::3]:
        mailbox = Mailbox()
        units = [unit for unit in shared.units if unit is not hop]
        mailbox.states[hop.number] = torch.zeros(shared.state_tiles(hop) * cpu_ranks.tile_size(8, 8))
        with pytest.raises(ExecutionError):
            play(SMALL, mailbox, units)


def test_a_call_for_one_rank_needs_no_mail() -> None:
    case = Case(1, 300, sharding=Sharding((300,), (0,)), call=CAUSAL)
    mailbox = Faulty()
    assert is_truth(case, play(case, mailbox))
    assert mailbox.received == 0
