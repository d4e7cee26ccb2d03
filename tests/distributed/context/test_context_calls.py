"""Calls of ranks that share a sequence: what they refuse, what autograd keeps, and where rows go (gloo processes, one run)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import context_misuse
from context_misuse import DIFFERENCES, ODD, REFUSED, ROWS, SMALL, WRONG
from dash_attn import flash_attn_func
from processes import Group
from shared_cases import RANKS, Case, Inputs, on_one_process, rows_of

Found = list[dict[str, Any]]
GROUP = Group(context_misuse.everything, RANKS)


@pytest.fixture(scope="module")
def found() -> Found:
    """By rank."""
    return GROUP.found


@pytest.mark.parametrize("fact", DIFFERENCES)
def test_ranks_that_differ_are_told_in_what(found: Found, fact: str) -> None:
    for rank, words in enumerate(one["differ"][fact] for one in found):
        assert words.startswith(
            "RuntimeError: ranks that share a sequence must be asked for the same;"
            f" rank 0 and rank {ODD} differ in {fact.strip()}. Here, on rank {rank}, it is "
        )
        assert words.endswith("(as on 1 of 4 ranks)" if rank == ODD else "(as on 3 of 4 ranks)")


@pytest.mark.parametrize("reason", WRONG)
def test_where_one_rank_refuses_the_others_are_told_which(found: Found, reason: str) -> None:
    for rank, words in enumerate(one["one refuses"][reason] for one in found):
        if rank == ODD:
            assert reason in words
        else:
            assert words == f"RuntimeError: rank {ODD} refused this call, so rank {rank} cannot go on: see the error of rank {ODD}"


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_shared_is_refused_on_every_rank(found: Found, reason: str) -> None:
    for rank, words in enumerate(one["all refuse"][reason] for one in found):
        assert reason.replace("rank 0", f"rank {rank}") in words
        assert words.startswith(("ValueError: ", "TypeError: ", "ScheduleError: "))


def test_every_kind_of_group_works(found: Found) -> None:
    for rank, groups in enumerate(one["groups"] for one in found):
        assert groups["mesh"] == groups["part of a mesh"] == groups["a backend per device"] == (1, ROWS, 4, 8)
        assert groups["mesh of two dimensions"].startswith("ValueError: group must be a mesh of one dimension; got 2 dimensions")
        assert groups["no group"].startswith("TypeError: group must be a ProcessGroup, a DeviceMesh of one dimension or None; got int")
        if rank > 1:
            assert groups["not a member"] == f"ValueError: only members of a group may use it; this process, global rank {rank}, is none"


def test_ranks_that_call_different_functions_are_told(found: Found) -> None:
    for groups in (one["groups"] for one in found):
        words = f"must call the same functions in the same order; rank 0 is in context_parallel_attention and rank {ODD} in unshard (call "
        assert words in groups["another function"]


def test_what_one_rank_refuses_at_the_door_the_others_are_told(found: Found) -> None:
    for rank, words in enumerate(one["groups"]["the door refuses"] for one in found):
        assert ("take no attn_mask" if rank == ODD else f"rank {ODD} refused this call, so rank {rank} cannot go on") in words


def own_rows(tensors: list[Tensor], rank: int) -> list[Tensor]:
    """Of out, lse, dq, dk and dv of the whole sequence."""
    mine = rows_of(SMALL, rank)
    return [x[:, :, mine] if x.ndim == 3 else x[:, mine] for x in tensors]


def all_equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def test_every_way_to_the_gradients_has_the_same_bits(found: Found) -> None:
    """Also after all those errors: they leave nothing behind."""
    truth = list(on_one_process(SMALL).values())
    for rank, ways in enumerate(one["autograd"] for one in found):
        for way in ("once", "twice", "checkpointed", "checkpointed, ulysses", "checkpointed, one document", "traced, one document"):
            assert all_equal(ways[way], own_rows(truth, rank)), (rank, way)


def test_a_rank_may_leave_its_lse_alone(found: Found) -> None:
    inputs = Inputs.of(SMALL)
    q, k, v = (x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    out, lse = flash_attn_func(q, k, v, return_lse=True, **SMALL.call)
    dlse = torch.zeros_like(lse)
    dlse[:, :, rows_of(SMALL, ODD)] = inputs.dlse[:, :, rows_of(SMALL, ODD)]
    truth = list(torch.autograd.grad((out, lse), (q, k, v), (inputs.dout, dlse)))
    for rank, ways in enumerate(one["autograd"] for one in found):
        assert all_equal(ways["one rank uses its LSE"], own_rows(truth, rank))
        assert all_equal(ways["one rank uses its LSE, ulysses"], own_rows(truth, rank))
        assert all_equal(ways["one rank uses its LSE, one document"], own_rows(truth, rank))


def test_a_batch_of_no_sequence_is_answered_as_alone(found: Found) -> None:
    q, k, v = (torch.zeros(0, 8, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    sinks = torch.ones(4, requires_grad=True)
    out, lse = flash_attn_func(q, k, v, causal=True, sinks=sinks, return_lse=True)
    *alone, dsinks = out, lse, *torch.autograd.grad(out.sum() + lse.sum(), (q, k, v, sinks))
    for rank, ways in enumerate(one["no sequence"] for one in found):
        for way, (*results, gradient) in ways.items():
            assert [len(x) for x in results] == [len(x) for x in alone] == [0] * 5, (rank, way)
            assert torch.equal(gradient, dsinks), (rank, way)


def test_a_traced_program_takes_offsets_as_numbers(found: Found) -> None:
    for ways in (one["autograd"] for one in found):
        assert "a traced program takes cu_seqlens as whole numbers: pass cu_seqlens.tolist()" in ways["a traced tensor of offsets"]


def test_autograd_keeps_local_tensors_only(found: Found) -> None:
    for kept, own in (one["autograd"]["saved bytes"] for one in found):
        assert kept == own == ROWS * 4 * 4 * (4 * 8 + 1)  # rows, heads, bytes; q, k, v and out of 8 numbers, one LSE
    assert not any(one["autograd"]["nothing needs gradients"] for one in found)


def test_what_autograd_cannot_do_raises(found: Found) -> None:
    for rank, words in enumerate(one["autograd"] for one in found):
        assert words["double backward"].startswith("RuntimeError: dash_attn attention has first gradients only")
        changed = "one of the variables needed for gradient computation has been modified"
        assert (changed if rank == ODD else f"rank {ODD} refused this call, so rank {rank} cannot go on") in words["changed in place"]


def test_rows_go_to_their_ranks_and_back(found: Found) -> None:
    case = Case(RANKS, 24)
    for rank, layout in enumerate(one["layout"] for one in found):
        assert torch.equal(layout["zigzag"], rows_of(case, rank))
        assert torch.equal(layout["shard"], rows_of(case, rank))
        assert torch.equal(layout["contiguous"], rows_of(replace(case, sharding="contiguous"), rank))
        assert layout["own"].tolist() == [[3, 4, 5, 6, 7], [0, 1, 2], [9, 10], [8]][rank]
        assert layout["there and back"]
        assert layout["there and back, own"]
        assert torch.equal(layout["gradient"], torch.zeros(24).index_fill(0, rows_of(case, rank), 1.0))


def test_ranks_that_unshard_differently_are_told_in_what(found: Found) -> None:
    for rank, errors in enumerate(one["layout"]["errors"] for one in found):
        for name, fact in {"dtype of one": "the dtype", "rows of one": "sharding", "shape of one": "the sizes of other dimensions"}.items():
            assert f"rank 0 and rank {ODD} differ in {fact}" in errors[name]
        refused = {"one refuses": "unshard has no gradient", "sparse on one": "x must be dense", "no values on one": "x must have values"}
        for name, words in refused.items():
            assert (words if rank == ODD else f"rank {ODD} refused this call") in errors[name]


def test_threads_with_a_group_each_do_not_wait_for_each_other(found: Found) -> None:
    assert [one["groups"]["two threads"] for one in found] == [["no error: torch.Size([1, 32])"] * 2] * RANKS


def test_rows_that_cannot_be_dealt_are_refused(found: Found) -> None:
    for rank, (layout, groups) in enumerate((one["layout"], one["groups"]) for one in found):
        errors = layout["errors"]
        assert "20 rows cannot be dealt so (but 16 or 24 can)" in errors["does not fit"]
        assert errors["positions"] == errors["does not fit"]
        assert errors["dim"] == "ValueError: dim must be one of the 2 dimensions of x; got 2"
        assert errors["tensor"] == "TypeError: x must be a tensor; got list"
        assert errors["own rows"] == f"ValueError: rank {rank} has {[5, 3, 2, 1][rank]} of 11 rows; got 4 in dimension 1 of (2, 4)"
        assert groups["unshard with gradient"].startswith("RuntimeError: unshard has no gradient, and this tensor requires one")
        assert groups["unshard without"] == (1, 32)
