"""context_parallel_attention on real processes (gloo, CPU): the bits of one process on any number of them; the control differs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import context_workers
from processes import Group, run_processes
from shared_cases import CASES, RANKS, SEQUENCE_DIM, Case, on_one_process, rows_of
from shared_problems import wide_cases

Found = list[dict[str, Any]]
GROUP = Group(context_workers.grid, RANKS)


@pytest.fixture(scope="module")
def found() -> Found:
    """By rank."""
    return GROUP.found


def of_case(found: Found, name: str) -> list[dict[str, Any]]:
    """What the ranks of its group found, by rank."""
    return sorted((one[name] for one in found if name in one), key=lambda one: one["rank"])


def check_results(case: Case, of_ranks: list[dict[str, Any]]) -> None:
    truth = on_one_process(case)
    assert len(of_ranks) == case.ranks
    for rank, one in enumerate(of_ranks):
        assert one["results"].keys() == truth.keys()
        for name, dim in SEQUENCE_DIM.items():
            part = truth[name].index_select(dim, rows_of(case, rank))
            assert one["results"][name].dtype == part.dtype
            assert torch.equal(one["results"][name], part), f"{name} of rank {rank}"
        if case.sinks:
            expected = truth["dsinks"] if rank == 0 else torch.zeros_like(truth["dsinks"])
            assert torch.equal(one["results"]["dsinks"], expected)
    check_control(of_ranks)


def check_control(of_ranks: list[dict[str, Any]]) -> None:
    """Sums of each rank, all-reduced in float32: dQ, which a rank sums alone, is the same; dK or dV of the sequence is not."""
    if of_ranks[0]["control"] is None:
        return
    equal = {name: all(torch.equal(one["control"][name], one["results"][name]) for one in of_ranks) for name in ("dq", "dk", "dv")}
    assert equal["dq"]
    assert not equal["dk"]
    assert not equal["dv"]


@pytest.mark.parametrize("name", CASES)
def test_ranks_have_the_bits_of_one_process(found: Found, name: str) -> None:
    check_results(CASES[name], of_case(found, name))


def test_the_grid_has_a_control_for_each_number_of_ranks(found: Found) -> None:
    controlled = {case.ranks for name, case in CASES.items() if of_case(found, name)[0]["control"] is not None}
    assert controlled == {2, 3, 4}


@pytest.mark.exhaustive
def test_a_wide_grid_has_the_bits_of_one_process() -> None:
    found = run_processes(context_workers.wide_grid, RANKS, limit=1800)
    for name, case in wide_cases().items():
        check_results(case, of_case(found, name))
