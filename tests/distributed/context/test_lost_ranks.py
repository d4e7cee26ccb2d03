"""A rank that dies, or comes too late: the others end with a clear error, within the group's time limit."""

from __future__ import annotations

import re
from typing import Any

import pytest

import context_misuse
from context_misuse import LATE_LIMIT, LIMIT
from processes import Group, run_processes

Found = list[dict[str, Any]]
GROUP = Group(context_misuse.lost_ranks, 4, limit=120)


@pytest.fixture(scope="module")
def found() -> Found:
    """By rank. That the processes end is part of the promise: `limit` is not reached."""
    return GROUP.found


def test_a_rank_that_dies_in_the_forward(found: Found) -> None:
    assert found[1] is None
    words, seconds = found[0]["forward"].values()
    assert "rank 0 of 2 could not gather keys 0 to 511 of KV heads 0 to 0 for its queries 0 to 127 (chunk 0) and 384 to 511" in words
    assert words.endswith("Nothing was heard of rank 1")
    assert seconds < 2 * LIMIT


def test_a_rank_that_comes_late(found: Found) -> None:
    """It is told that others have given it up."""
    words, seconds = found[0]["late"].values()
    assert words.startswith("RuntimeError: rank 0 of 2 could not reach the others: another rank has ended, has not come within the group's")
    assert words.endswith("Nothing was heard of rank 1")
    assert LATE_LIMIT - 1 < seconds < 2 * LATE_LIMIT
    words = found[2]["late"]["words"]
    assert words.startswith("RuntimeError: rank 1 of 2 could not ")
    assert "Rank 0 stopped, too, and says: rank 0 of 2 could not reach the others" in words


STATES = r"could not (send|receive) the states of queries .* \(chunk .* on keys .* (to|from) rank "


def test_a_rank_that_dies_in_the_backward(found: Found) -> None:
    """Its neighbour names it. The third rank waits for the neighbour, which says that it waits, too: nobody blames who waits."""
    assert found[3] is None
    for rank, global_rank in enumerate((0, 2)):
        words, seconds = found[global_rank]["backward"].values()
        assert re.match(f"RuntimeError: rank {rank} of 3 ({STATES}|could not gather keys )", words)  # whichever is under way
        blamed = re.search(r"Nothing was heard of rank (.*)$", words)
        assert blamed[1] == "2" if blamed else re.search(f"Rank {1 - rank} stopped, too, and says: rank {1 - rank} of 3 {STATES}2", words)
        assert seconds < 2 * LIMIT
    assert any(found[global_rank]["backward"]["words"].endswith("Nothing was heard of rank 2") for global_rank in (0, 2))


@pytest.mark.exhaustive
def test_a_rank_that_dies_in_the_backward_of_documents() -> None:
    found = run_processes(context_misuse.lost_among_documents, 3, limit=120)
    assert found[2] is None
    for rank in range(2):
        words, seconds = found[rank].values()
        assert re.match(f"RuntimeError: rank {rank} of 3 could not (send|receive) the states of queries ", words)  # whichever is under way
        assert re.search(r" of document 1 \(rows 50 to 767 of all\) (to|from) rank ", words)
        assert seconds < 2 * LIMIT
