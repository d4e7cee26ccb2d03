"""Documents in a row that ranks share, without tensors: cuts move to borders of tiles, and no rank waits for ever."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import numpy as np
import pytest

from dash_attn import Causal, Full, Mask, Window
from dash_attn.scheduling import Problem, generate
from dash_attn.scheduling.ranks.sharding import Sharding, SharedDocument, deal_documents, in_turn
from dash_attn.scheduling.ranks.share import in_legs, share
from dash_attn.scheduling.ranks.units import SharedSchedule, Unit
from document_cases import own_sharding, random_lengths
from unit_walks import run

UNIT = 128


def random_row(seed: int) -> tuple[Sharding, tuple[int, ...]]:
    random = Random(seed)
    ranks = random.choice([1, 2, 3, 4, 8])
    rows = 2 * ranks * random.randint(10, 2400 // (2 * ranks))
    sharding = random.choice([Sharding.zigzag(rows, ranks), Sharding.contiguous(rows, ranks), own_sharding(random, rows, ranks)])
    return sharding, random_lengths(random, rows)


@pytest.mark.parametrize("seed", range(40))
def test_every_row_is_worked_on_by_one_rank(seed: int) -> None:
    row, lengths = random_row(seed)
    documents = deal_documents(row, lengths, UNIT)
    assert [len(document.rows) for document in documents] == list(lengths)
    worked_on = np.concatenate([document.rows_of(rank) for rank in range(row.ranks) for document in documents])
    assert sorted(worked_on.tolist()) == list(range(row.rows))
    owner = np.repeat(row.owners, row.lengths)
    for document in documents:
        assert all(length % UNIT == 0 for length in document.sharding.lengths[:-1])
        assert all(one != other for one, other in pairwise(document.sharding.owners))
        assert document.ranks == tuple(sorted(set(document.ranks)))
        cuts = sum(document.rows.start < end < document.rows.stop for end in row.ends)
        moved = sum((owner[document.rows_of(rank)] != rank).sum() for rank in document.ranks)
        assert moved <= cuts * UNIT // 2
        if not cuts:
            assert moved == 0
            assert len(document.ranks) == 1


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ((512,), [((256, 256), (0, 1))]),
        ((500, 12), [((256, 244), (0, 1)), ((12,), (1,))]),
        ((10, 502), [((10,), (0,)), ((256, 246), (0, 1))]),  # the cut at row 256 goes to row 266
        ((100, 412), [((100,), (0,)), ((128, 284), (0, 1))]),  # to row 228
        ((200, 100, 212), [((200,), (0,)), ((100,), (1,)), ((212,), (1,))]),  # no tile is as short as 56 rows
        ((200, 70, 242), [((200,), (0,)), ((70,), (1,)), ((242,), (1,))]),
        ((191, 321), [((191,), (0,)), ((128, 193), (0, 1))]),  # 65 rows in: to the end of the first tile
        ((193, 319), [((193,), (0,)), ((319,), (1,))]),  # 63 rows in: to its beginning
    ],
)
def test_cuts_move_to_the_nearest_border_of_a_tile(
    lengths: tuple[int, ...], expected: list[tuple[tuple[int, ...], tuple[int, ...]]]
) -> None:
    documents = deal_documents(Sharding.contiguous(512, 2), lengths, UNIT)
    found = [(one.sharding.lengths, tuple(one.ranks[owner] for owner in one.sharding.owners)) for one in documents]
    assert found == expected


def test_documents_fill_the_row() -> None:
    with pytest.raises(ValueError, match="the documents of a row have all its 512 rows together; got 500"):
        deal_documents(Sharding.contiguous(512, 2), (500,), UNIT)
    with pytest.raises(ValueError, match="the length of a document must be a whole number >= 1; got 0"):
        deal_documents(Sharding.contiguous(512, 2), (512, 0), UNIT)


@pytest.mark.parametrize("seed", range(40))
def test_neighbours_take_turns(seed: int) -> None:
    """Each document once, those of one rank last."""
    row, lengths = random_row(seed)
    documents = deal_documents(row, lengths, UNIT)
    order = in_turn(documents)
    assert sorted(order) == list(range(len(documents)))
    ranks = [len(documents[place].ranks) for place in order]
    alone = ranks.count(1)
    assert all(count > 1 for count in ranks[: len(ranks) - alone])


def test_borders_of_contiguous_chunks_need_two_rounds() -> None:
    """Else the ranks would work one after the other: each would wait at its first border for the one before."""
    documents = deal_documents(Sharding.contiguous(8 * 512, 8), (256, *(512,) * 7, 256), UNIT)
    assert [document.ranks for document in documents[1:-1]] == [(rank, rank + 1) for rank in range(7)]
    assert in_turn(documents) == [1, 3, 5, 7, 2, 4, 6, 0, 8]


@pytest.mark.parametrize("seed", range(40))
def test_dealt_by_document(seed: int) -> None:
    random = Random(seed)
    ranks = random.choice([1, 2, 3, 4, 8])
    lengths = random_lengths(random, ranks * random.randint(2500, 5000))
    row = Sharding.by_document(lengths, ranks)
    assert (row.rows, row.ranks) == (sum(lengths), ranks)
    documents, owner = deal_documents(row, lengths, UNIT), np.repeat(row.owners, row.lengths)
    for document in documents:  # no row changes hands
        assert all((owner[document.rows_of(rank)] == rank).all() for rank in document.ranks)
    rows = [len(row.rows_of(rank)) for rank in range(ranks)]
    assert max(rows) - min(rows) <= max(1024, max(lengths, default=0) // ranks + 256)


@pytest.mark.parametrize(
    ("lengths", "ranks", "chunks"),
    [
        ((4096,), 2, [(1024, 0), (1024, 1), (1024, 1), (1024, 0)]),
        ((2000,), 2, [(512, 0), (512, 1), (512, 1), (464, 0)]),  # more than its share
        ((300, 200, 100, 200), 2, [(300, 0), (200, 1), (100, 0), (200, 1)]),
        ((5000, 300, 200), 2, [(1280, 0), (1280, 1), (1280, 1), (1160, 0), (300, 0), (200, 1)]),
        ((64,), 1, [(64, 0)]),
    ],
)
def test_long_documents_are_cut_and_short_ones_are_not(lengths: tuple[int, ...], ranks: int, chunks: list[tuple[int, int]]) -> None:
    row = Sharding.by_document(lengths, ranks)
    assert list(zip(row.lengths, row.owners, strict=True)) == chunks


def test_documents_that_are_too_few_are_not_dealt() -> None:
    with pytest.raises(ValueError, match="2 documents of 300 rows cannot be dealt to 4 ranks in whole tiles of 128 rows: rank 1"):
        Sharding.by_document((100, 200), 4)


def plans(seed: int) -> tuple[int, list[tuple[SharedDocument, SharedSchedule]]]:
    row, lengths = random_row(seed)
    random = Random(seed)
    mask: Mask = random.choice(
        [Causal(), Full(), Window(random.randint(0, 600), 0), Window(random.randint(0, 300), random.randint(0, 300))]
    )
    heads, group = random.randint(1, 3), random.choice([1, 2, 4])
    found, documents = [], deal_documents(row, lengths, UNIT)
    for document in (documents[place] for place in in_turn(documents)):
        schedule = generate("auto", Problem(mask, len(document.rows), len(document.rows), 64, 128, heads, group), 132)
        together = random.randint(1, 2)
        shared = share(schedule, document.sharding, together) if len(document.ranks) > 1 else in_legs(schedule, together)
        found.append((document, shared))
    return row.ranks, found


def left_waiting(ranks: int, documents: list[tuple[SharedDocument, SharedSchedule]], random: Random) -> int:
    """Ranks that each run their own units, document by document, with any timing: how many units nobody could start."""
    queues: list[list[tuple[int, Unit]]] = [[] for _ in range(ranks)]
    for number, (document, shared) in enumerate(documents):
        for unit in shared.units:
            queues[document.ranks[unit.rank]].append((number, unit))
    return left_in(queues, documents, random)


def left_in(queues: list[list[tuple[int, Unit]]], documents: list[tuple[SharedDocument, SharedSchedule]], random: Random) -> int:
    ended: set[tuple[int, int]] = set()
    while True:
        able = [q for q in queues if q and all((q[0][0], other) in ended for other in documents[q[0][0]][1].waits[q[0][1].number])]
        if not able:
            return sum(map(len, queues))
        number, unit = random.choice(able).pop(0)
        ended.add((number, unit.number))


@pytest.mark.parametrize("seed", range(25))
def test_ranks_wait_in_no_circle(seed: int) -> None:
    ranks, documents = plans(seed)
    for _, shared in documents:
        assert run(shared, shared.units) == shared.problem.tasks
    assert left_waiting(ranks, documents, Random(seed)) == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(100, 500))
def test_many_rows_wait_in_no_circle(seed: int) -> None:
    ranks, documents = plans(seed)
    for _, shared in documents:
        assert run(shared, shared.units) == shared.problem.tasks
    assert left_waiting(ranks, documents, Random(seed)) == 0


def test_documents_in_different_orders_would_wait_for_ever() -> None:
    """The control: two ranks share two documents, and one of them begins with the second."""
    row, lengths = Sharding((300, 300, 300, 300), (0, 1, 0, 1)), (600, 600)
    documents = deal_documents(row, lengths, UNIT)
    both = [(one, share(generate("auto", Problem(Causal(), 600, 600, 64, 128, 2), 132), one.sharding)) for one in documents]
    assert left_waiting(2, both, Random(0)) == 0
    orders = [(0, 1), (1, 0)]
    queues = [[(number, unit) for number in order for unit in both[number][1].by_rank[rank]] for rank, order in enumerate(orders)]
    assert left_in(queues, both, Random(0)) > 0
