"""Documents in a row that real processes share (gloo, CPU): each has the bits that it has alone, on any number of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import context_workers
from document_cases import ROWS, RowCase, each_alone, packed, wide_rows
from processes import Group, run_processes
from shared_cases import RANKS, SEQUENCE_DIM, Inputs, rows_of

Found = list[dict[str, Any]]
GROUP = Group(context_workers.documents_grid, RANKS)


@pytest.fixture(scope="module")
def found() -> Found:
    """By rank."""
    return GROUP.found


def check(given: RowCase, name: str, found: Found) -> None:
    case, truth = given.case, each_alone(given)
    of_ranks = sorted((one[name] for one in found if name in one), key=lambda one: one["rank"])
    assert len(of_ranks) == case.ranks
    for rank, one in enumerate(of_ranks):
        assert one["results"].keys() == truth.keys()
        for tensor, dim in SEQUENCE_DIM.items():
            part = truth[tensor].index_select(dim, rows_of(case, rank))
            assert one["results"][tensor].dtype == part.dtype
            assert torch.equal(one["results"][tensor], part), f"{tensor} of rank {rank}"
        if case.sinks:
            expected = truth["dsinks"] if rank == 0 else torch.zeros_like(truth["dsinks"])
            assert torch.equal(one["results"]["dsinks"], expected)


@pytest.mark.parametrize("name", ROWS)
def test_a_document_has_the_bits_that_it_has_alone(found: Found, name: str) -> None:
    check(ROWS[name], name, found)


@pytest.mark.parametrize("name", ["2 ranks", "3 ranks, window", "2 ranks, full"])
def test_packed_sequences_have_these_bits_too(name: str) -> None:
    alone = each_alone(ROWS[name])
    assert all(torch.equal(alone[tensor], found) for tensor, found in packed(ROWS[name]).items())


@pytest.mark.parametrize("name", ["2 ranks", "3 ranks, window", "2 ranks, full"])
def test_sums_of_ranks_that_are_added_up_differ(name: str) -> None:
    """The control: each rank sums dK and dV over its own queries, and these sums are added."""
    given, truth = ROWS[name], packed(ROWS[name])
    added = {tensor: torch.zeros_like(truth[tensor]) for tensor in ("dk", "dv")}
    for rank in range(given.case.ranks):
        mine = rows_of(given.case, rank)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Inputs, "of", classmethod(lambda cls, case, mine=mine: of_rank(case, mine)))
            found = packed(given)
        for tensor, total in added.items():
            total += found[tensor]
    assert not torch.equal(added["dk"], truth["dk"])
    assert torch.allclose(added["dk"], truth["dk"], rtol=1e-3, atol=1e-4)


make_inputs = Inputs.of


def of_rank(case: Any, mine: torch.Tensor) -> Inputs:
    """The gradients of other ranks' rows are zero."""
    whole = make_inputs(case)
    dout, dlse = torch.zeros_like(whole.dout), torch.zeros_like(whole.dlse)
    dout[:, mine], dlse[:, :, mine] = whole.dout[:, mine], whole.dlse[:, :, mine]
    return Inputs(whole.q, whole.k, whole.v, dout, dlse, whole.sinks)


@pytest.mark.exhaustive
def test_a_wide_grid_of_documents() -> None:
    found = run_processes(context_workers.wide_documents_grid, RANKS, limit=1800)
    for name, given in wide_rows().items():
        check(given, name, found)
