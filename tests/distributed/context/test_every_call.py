"""Ranks compare each call, whatever they have called before, and each backward with its forward (gloo processes, one run)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import every_call
from dash_attn import flash_attn_func
from dash_attn.distributed.hosts import MOST, NUMBERS
from every_call import BACKWARDS, DIM, HEADS, KNOWN, LIMIT, ODD, RANKS, ROWS
from processes import Group

Found = list[dict[str, Any]]
GROUP = Group(every_call.everything, RANKS, group_limit=20, limit=120)


@pytest.fixture(scope="module")
def found() -> Found:
    """By rank."""
    return GROUP.found


@pytest.mark.parametrize("fact", KNOWN)
def test_kinds_that_all_ranks_know_are_compared(found: Found, fact: str) -> None:
    for rank, words in enumerate(one["known"][fact] for one in found):
        assert words.startswith(
            "RuntimeError: ranks that share a sequence must be asked for the same;"
            f" rank 0 and rank {ODD} differ in {fact}. Here, on rank {rank}, it is "
        )


def test_rows_of_another_size_are_compared(found: Found) -> None:
    for words in (one["unshard"] for one in found):
        assert f"rank 0 and rank {ODD} differ in the sizes of other dimensions" in words


@pytest.mark.parametrize("name", BACKWARDS)
def test_backwards_in_another_order_name_both_calls(found: Found, name: str) -> None:
    told = {one["swapped"][name] for one in found}
    assert len(told) == 1, "the same on every rank"
    words = told.pop()
    assert words.startswith("RuntimeError: ranks that share a sequence must run their backwards in one order; rank 0 is in that of call ")
    first, second = words.split("that of call ")[1:]
    assert int(second) == int(first.split(" ")[0]) + 1


def test_a_forward_is_no_backward(found: Found) -> None:
    words = f"rank 0 is in the backward of context_parallel_attention and rank {ODD} in context_parallel_attention (call "
    assert all(words in one["forward in a backward"] for one in found)


def test_hosts_compare_whatever_the_group_can_send(found: Found) -> None:
    assert all(f"rank 0 and rank {ODD} differ in softcap" in one["a group for GPUs"] for one in found)


def test_destroyed_groups_are_let_go(found: Found) -> None:
    assert [one["groups that are kept"] for one in found] == [0] * RANKS


def test_why_a_rank_failed_is_told_though_it_went_on(found: Found) -> None:
    for rank in set(range(RANKS)) - {ODD}:
        assert f"Rank {ODD} stopped, too, and says: MemoryError('planted')" in found[rank]["failed"]


def test_what_follows_is_right(found: Found) -> None:
    """The control: backwards in one order have the bits of one process, also after all these errors."""
    for number, place in ((1, 0), (2, 1)):
        source = torch.Generator().manual_seed(number)
        q, k, v = (torch.randn(1, ROWS, HEADS, DIM, generator=source).requires_grad_() for _ in range(3))
        flash_attn_func(q, k, v, causal=True).square().sum().backward()
        assert all(torch.equal(one["right afterwards"][place], k.grad) for one in found)


def test_the_message_is_as_small_as_the_page_says() -> None:
    size = 8 * (2 + NUMBERS + MOST)  # which function, whether it is refused, values, what the call tells
    assert f"The message has {size} bytes" in (Path(__file__).parents[3] / "docs/long-sequences.md").read_text()


def test_who_waits_is_not_who_is_missing(found: Found) -> None:
    for rank, (words, seconds) in enumerate(one["silent"].values() for one in found):
        assert words.startswith(f"RuntimeError: rank {rank} of 3 could not compare call 2 of the group, unshard, with the others. ")
        if rank == ODD:
            assert all(f"Rank {other} stopped, too, and says: rank {other} of 3 could not compare call 2" in words for other in (0, 2))
            assert "Nothing was heard" not in words
        else:
            assert words.endswith(f"Nothing was heard of rank {ODD}")
            assert LIMIT - 1 < seconds < 2 * LIMIT
