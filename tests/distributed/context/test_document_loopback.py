"""One process plays all ranks that share a row of documents: up to 16 of them, and planted faults."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dash_attn import Documents, explain, flash_attn_func
from dash_attn.backends.cpu import ranks as cpu_ranks
from dash_attn.call.options import Choices, options_for
from dash_attn.distributed import Sharding, context_parallel_attention
from dash_attn.distributed.context import loopback, shared_call
from dash_attn.distributed.context.loopback import Mailbox, Results, play_all_ranks
from dash_attn.distributed.context.mail import RankMail
from dash_attn.distributed.context.moves import Movement, moves_of
from dash_attn.distributed.context.rows import documents_in, sharding_for
from dash_attn.distributed.context.shared_call import Document, SharedCall
from dash_attn.distributed.peers import Peers
from dash_attn.scheduling.ranks import sharding as dealing
from dash_attn.scheduling.ranks.sharding import CutTile
from dash_attn.scheduling.ranks.units import Unit
from document_cases import FEW, RowCase, each_alone, random_row, row
from shared_cases import CAUSAL, Inputs

RANDOM = [(seed, ranks) for seed, ranks in enumerate([2, 3, 5, 8, 16, 4, 7, 12, 2, 6])]
SMALL = row(3, (40, 20, 700, 60, 140, 110, 70, 12), (4, 4), (8, 8), sinks=True, lse_gradient=True, call=CAUSAL)

NOTHING = slice(820, 960)  # one of its documents


def shared(given: RowCase) -> SharedCall:
    inputs, case = Inputs.of(given.case), given.shared
    call = dict(case.call)
    ends = call.pop("cu_seqlens", None)
    options, lengths = documents_in(options_for(Choices(**call), case.dims[0]), ends, case.rows)
    assert lengths is not None
    return SharedCall.of((inputs.q, inputs.k, inputs.v), options, sharding_for(case.sharding, case.rows, case.ranks), lengths)


def play(given: RowCase, mailbox: Mailbox | None = None) -> Results:
    inputs = Inputs.of(given.case)
    dlse = inputs.dlse if given.case.lse_gradient else None
    sinks = None if inputs.sinks is None else inputs.sinks.detach()
    return play_all_ranks(shared(given), inputs.q, inputs.k, inputs.v, inputs.dout, mailbox, sinks=sinks, dlse=dlse)


def differing(given: RowCase, found: Results) -> set[str]:
    return {name for name, truth in each_alone(given).items() if not torch.equal(getattr(found, name), truth)}


@pytest.mark.parametrize(("seed", "ranks"), RANDOM)
def test_any_number_of_ranks_has_the_bits_of_each_document(seed: int, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one or several heads side by side. States are NaN where they were sent from."""
    monkeypatch.setattr(cpu_ranks, "heads_together", lambda *_: 1 + seed % 3)
    given = random_row(seed, ranks)
    assert differing(given, play(given)) == set()


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(100, 160))
def test_many_numbers_of_ranks_have_the_bits_of_each_document(seed: int) -> None:
    given = random_row(seed, Random(seed).randint(2, 16))
    assert differing(given, play(given)) == set()


def test_what_is_in_other_documents_reaches_none() -> None:
    """Not even a NaN."""
    inputs, called = Inputs.of(SMALL.case), shared(SMALL)
    for x in (inputs.q, inputs.k, inputs.v, inputs.dout):
        x[:, NOTHING] = torch.nan
    found = play_all_ranks(called, inputs.q, inputs.k, inputs.v, inputs.dout)
    for x in (found.out, found.dq, found.dk, found.dv):
        assert x[:, NOTHING].isnan().all()
        assert not torch.cat([x[:, : NOTHING.start], x[:, NOTHING.stop :]], dim=1).isnan().any()


def test_rows_of_any_shape_and_dtype_travel_together() -> None:
    movement = Movement([np.array([0, 2, 4]), np.array([1, 3])], [np.array([4, 0]), np.array([1, 2, 3])])
    for batch, heads, dim in ((1, 1, 1), (1, 3, 1), (2, 1, 5)):
        whole = [torch.randn(batch, heads, 5, dim).to(dtype).transpose(1, 2) for dtype in (torch.bfloat16, torch.float64, torch.float32)]
        found = loopback.exchange(movement, [[x[:, rows] for x in whole] for rows in movement.have])
        for rows, parts in zip(movement.want, found, strict=True):
            assert all(torch.equal(part, x[:, rows]) and part.is_contiguous() for part, x in zip(parts, whole, strict=True))


# Faults of states


class Faulty(Mailbox):
    """Does something to every state that is received."""

    received = 0

    def receive(self, document: Document, unit: Unit) -> Tensor:
        self.received += 1
        return self.change(super().receive(document, unit))

    def change(self, state: Tensor) -> Tensor:
        return state


class Rounded(Faulty):
    def change(self, state: Tensor) -> Tensor:
        return state.bfloat16().to(state.dtype)


class Dropped(Faulty):
    def change(self, state: Tensor) -> Tensor:
        return torch.zeros_like(state)


class ReadLate(Mailbox):
    """The state is read after the sender has used its memory again."""

    def send(self, document: Document, unit: Unit, state: Tensor) -> None:
        super().send(document, unit, state)
        self.states[unit.number] = state


def test_states_travel() -> None:
    mailbox = Faulty()
    assert differing(SMALL, play(SMALL, mailbox)) == set()
    assert mailbox.received > 10


@pytest.mark.parametrize("fault", [Rounded, Dropped, ReadLate])
def test_a_fault_of_a_state_changes_bits(fault: type[Mailbox]) -> None:
    assert differing(SMALL, play(SMALL, fault())) == {"dk", "dv"}  # the others do not travel


# Faults of rows


class Shifted(Movement):
    """Rows that change hands arrive one place further on."""

    def put_together(self, rank: int, pieces: Any) -> Tensor:
        return super().put_together(rank, [piece if other == rank else piece.roll(1, 0) for other, piece in enumerate(pieces)])


class Lost(Movement):
    """They do not arrive."""

    def put_together(self, rank: int, pieces: Any) -> Tensor:
        return super().put_together(rank, [piece if other == rank else torch.zeros_like(piece) for other, piece in enumerate(pieces)])


EXPECTED = {
    "to_workers": {"out", "lse", "dq", "dk", "dv", "dsinks"},
    "keys": {"out", "lse", "dq", "dk", "dv", "dsinks"},
    "back": {"out", "lse", "dq", "dk", "dv"},
    "tiles": {"dsinks"},
    "sums": {"dsinks"},
}


FAULTS = [(which, Lost) for which in EXPECTED] + [(which, Shifted) for which in ("to_workers", "keys", "back")]


@pytest.mark.parametrize(("which", "fault"), FAULTS)
def test_a_fault_of_rows_changes_bits(which: str, fault: type[Movement], monkeypatch: pytest.MonkeyPatch) -> None:
    found = moves_of(shared(SMALL))
    exchange = loopback.exchange
    chosen = getattr(found, which)
    assert sum(chosen.sent(rank) for rank in chosen.ranks) > 0

    def faulty(movement: Movement, tensors: Any) -> Any:
        return exchange(fault(movement.have, movement.want) if movement is chosen else movement, tensors)

    monkeypatch.setattr(loopback, "exchange", faulty)
    assert differing(SMALL, play(SMALL)) == EXPECTED[which]


def test_documents_summed_in_another_order_change_the_gradient_of_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    real = loopback.sum_of_sinks
    monkeypatch.setattr(loopback, "sum_of_sinks", lambda sums, sinks: real(sums.flip(1), sinks))
    assert differing(SMALL, play(SMALL)) == {"dsinks"}


# Faults of cuts


@pytest.fixture
def without_plans() -> Any:
    shared_call._planned.cache_clear()
    yield
    shared_call._planned.cache_clear()


@pytest.mark.usefixtures("without_plans")
@pytest.mark.parametrize("further", [0, 64])
def test_a_cut_through_a_tile_is_refused(further: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts that stay where the row has them, or that go elsewhere."""
    monkeypatch.setattr(dealing, "_moved", lambda cut, unit, length: min(cut + further, length))
    with pytest.raises(CutTile, match="chunks must be multiples of 128 rows"):
        shared(SMALL)


def test_tiles_that_count_from_the_first_row_of_all_change_bits() -> None:
    """The control: a schedule by name plans the row as a whole."""
    inputs, mask = Inputs.of(SMALL.case), Documents(SMALL.lengths)
    q, k, v = (x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    out = flash_attn_func(q, k, v, mask=mask, sinks=inputs.sinks, schedule="alternating")
    dk = torch.autograd.grad(out, k, inputs.dout)[0]
    truth = each_alone(replace(SMALL, case=replace(SMALL.case, lse_gradient=False)))["dk"]
    assert not torch.equal(dk, truth)
    assert torch.allclose(dk, truth, rtol=1e-3, atol=1e-4)


# Calls


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((0, 500), "must begin with 0 and end with the 1024 rows of all ranks together; got [0, 500]"),
        ((1, 1024), "must begin with 0"),
        ((0,), "must begin with 0"),
        ((0, 600, 500, 1024), "must not decrease; got 600 followed by 500 at entry 2"),
        (torch.tensor([0.0, 1024.0]), "must be 1-d, of whole numbers; got torch.float32 of shape (2,)"),
        (torch.zeros(2, 2, dtype=torch.int32), "must be 1-d"),
        (torch.zeros(2, dtype=torch.int32, device="meta"), "must be on the host, because the ranks plan by it; got a tensor on meta"),
        ((0, 3.5, 1024), "must be a tensor, or a tuple or list of whole numbers; got (0, 3.5, 1024)"),
        ("0,1024", "must be a tensor, or a tuple or list of whole numbers"),
    ],
    ids=str,
)
def test_offsets_that_fit_no_row_are_refused(given: Any, said: str) -> None:
    q = torch.zeros(1, 1024, 1, 8)
    with pytest.raises((ValueError, TypeError)) as error:
        context_parallel_attention(q, q, q, cu_seqlens=given)
    assert f"cu_seqlens {said}" in str(error.value)


def test_offsets_may_be_a_tensor() -> None:
    q = torch.randn(1, 1024, 1, 8)
    ends = torch.tensor([0, *torch.tensor(FEW).cumsum(0)])
    found = [context_parallel_attention(q, q, q, cu_seqlens=given, causal=True) for given in (ends, ends.int(), tuple(ends.tolist()))]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], context_parallel_attention(q, q, q, causal=True))


def test_it_is_described_by_the_bits_of_each_document() -> None:
    found = json.loads(json.dumps(shared(SMALL).described(1)))
    assert (found["rank"], found["ranks"], found["documents"]) == (1, 3, list(SMALL.lengths))
    q = torch.empty(1, SMALL.case.rows, 4, 8, device="meta")
    assert found["order_hash"] == explain(flash_attn_func, q, q, q, mask=Documents(SMALL.lengths), backend="cpu").order_hash


def test_a_rank_may_have_nothing_to_work_on() -> None:
    given = row(4, (90, 10, 300), (1, 1), sharding=Sharding((10, 10, 10, 370), (0, 1, 2, 3)), call=CAUSAL)
    worked_on = moves_of(shared(given)).to_workers.want
    assert [len(rows) for rows in worked_on] == [0, 0, 0, 400]
    assert differing(given, play(given)) == set()


# Messages


class Slow:
    """A message whose end nobody tells, as gloo's."""

    def __init__(self) -> None:
        self.waited = 0

    def wait(self) -> None:
        self.waited += 1

    def is_completed(self) -> bool:
        return False


@dataclass(frozen=True)
class SlowPeers(Peers):
    sent: list[tuple[int, int, Slow]] = field(default_factory=list)
    received: list[tuple[int, int]] = field(default_factory=list)

    def send(self, flat: Tensor, to: int, tag: int) -> Any:
        self.sent.append((to, tag, Slow()))
        return self.sent[-1][2]

    def receive(self, flat: Tensor, source: int, tag: int) -> Any:
        self.received.append((source, tag))
        return Slow()


def test_states_of_documents_are_kept_until_they_have_arrived() -> None:
    """A rank that sends states of a document has taken all of the documents before: their memory is free."""
    called = shared(row(2, (600, 600, 600), (2, 2), (8, 8), sharding=Sharding((300,) * 6, (0, 1) * 3), call=CAUSAL))
    peers, most = SlowPeers(None, 0, 2), 0
    mail = RankMail(peers, called, torch.zeros(1))
    for document in called.in_turn:
        assert document.ranks == (0, 1)
        plan = document.shared
        for unit in plan.by_rank[0]:
            if unit.before is not None and plan.units[unit.before].rank == 1:
                mail.receive(document, unit)
            if plan.hops(unit):
                mail.send(document, unit, torch.zeros(1))
            most = max(most, len(mail.leaving))
    mail.finish()
    assert all(letter.waited == 1 for _, _, letter in peers.sent)
    assert most < len(peers.sent) / 2
    tags = [tag for _, tag, _ in peers.sent] + [tag for _, tag in peers.received]
    assert len(set(tags)) == len(tags)
