"""What docs/long-sequences.md shows runs on two ranks, and its lengths and costs are those of the plans."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from dash_attn import Causal, explain
from dash_attn.distributed import Sharding, context_parallel_attention
from dash_attn.scheduling import Problem, generate
from dash_attn.scheduling.ranks.share import share
from dash_attn.scheduling.ranks.units import SharedSchedule
from doc_pages import DOCS, rows, run_long_sequences
from processes import Group

PAGE = (DOCS / "long-sequences.md").read_text()
GROUP = Group(run_long_sequences, 2)
HEAD_DIM = 16
STATE_OF_A_KEY = 8 * HEAD_DIM  # bytes: a row of dK and one of dV, in float32


def test_the_blocks_run_on_two_ranks() -> None:
    assert GROUP.found == [True, True]


def test_lengths_fit_that_are_said_to_fit() -> None:
    said = [tuple(map(int, cells)) for cells in rows(PAGE, 3) if all(cell.isdecimal() for cell in cells)]
    assert [ranks for ranks, *_ in said] == [2, 4, 8, 16]
    for ranks, *lengths in said:
        for name, length in zip(("zigzag", "contiguous"), lengths, strict=True):
            fitting = [rows for rows in range(2 * ranks, 2 * length + 1, 2 * ranks) if _fits(name, rows, ranks)]
            assert fitting == [length, 2 * length]


def _fits(name: str, rows: int, ranks: int) -> bool:
    try:
        Sharding.named(name, rows, ranks).check(Problem(Causal(), rows, rows))
    except ValueError:
        return False
    return True


def planned(rows: int, ranks: int, q_heads: int, kv_heads: int) -> SharedSchedule:
    problem = Problem(Causal(), rows, rows, heads=kv_heads, group=q_heads // kv_heads)
    return share(generate("auto", problem, 132), Sharding.zigzag(rows, ranks))


@pytest.mark.parametrize(("rows", "ranks", "q_heads", "kv_heads"), [(4096, 2, 8, 2), (8192, 4, 4, 4), (6144, 3, 6, 2), (8192, 8, 4, 1)])
def test_states_take_the_bytes_and_the_memory_of_the_page(rows: int, ranks: int, q_heads: int, kv_heads: int) -> None:
    plan = planned(rows, ranks, q_heads, kv_heads)
    sent, waiting, most = [0] * ranks, [0] * ranks, 0
    for unit in plan.units:
        size = plan.state_tiles(unit) * plan.problem.tile_kv * STATE_OF_A_KEY
        waiting[unit.rank] -= size if unit.before is not None else 0
        if unit.after is not None:
            waiting[plan.units[unit.after].rank] += size
        sent[unit.rank] += size if plan.hops(unit) else 0
        most = max(most, *waiting)
    assert sum(sent) / ranks == pytest.approx(STATE_OF_A_KEY * rows * q_heads * (ranks - 1) / ranks * (1 + 1 / (2 * ranks)))
    assert max(sent) <= STATE_OF_A_KEY * rows * q_heads
    assert most <= 5 * STATE_OF_A_KEY * rows / (2 * ranks)


def test_the_figures_of_the_page_follow_from_its_formulas() -> None:
    tokens, q_heads, kv_heads, dim, ranks, width = 131072, 32, 8, 128, 8, 2
    keys = 2 * width * tokens * kv_heads * dim * (ranks - 1) / ranks
    states = 8 * tokens * q_heads * dim
    found = [keys, keys, states * (ranks - 1) / ranks * (1 + 1 / (2 * ranks)), states, 8 * tokens * kv_heads * dim]
    assert [cells[2] for cells in rows(PAGE, 3) if cells[2].endswith(" GB")] == [f"{size / 1e9:.2f} GB" for size in found]


def lengths_of(tokens: int, every: int) -> list[int]:
    """Of 200 to 3000 tokens; of those whose number is a multiple of `every`, 8000 to 40000."""
    found: list[int] = []
    while sum(found) < tokens:
        number = len(found)
        long = every and number % every == every - 1
        length = 8000 + 7919 * number % 32001 if long else 200 + 1009 * number % 2801
        found.append(min(length, tokens - sum(found)))
    return found


def test_documents_are_as_efficient_as_the_page_says() -> None:
    said = [cells for cells in rows(PAGE, 5) if cells[0].isdecimal()]
    assert len(said) == 4
    for tokens, ranks, words, *efficiencies in said:
        lengths = lengths_of(int(tokens), every=0 if words.endswith("of 200 to 3000 tokens") else 5)
        assert words.startswith(f"{len(lengths)}, ")
        assert str(max(lengths)) in words or max(lengths) in range(2800, 3001) or max(lengths) in range(38000, 40001)
        found = [_efficiency(lengths, int(ranks), name) for name in ("zigzag", Sharding.by_document(lengths, int(ranks)))]
        assert [f"{one:.2f}" for one in found] == efficiencies


def _efficiency(lengths: list[int], ranks: int, sharding: str | Sharding) -> float:
    mine = len(sharding.rows_of(0)) if isinstance(sharding, Sharding) else sum(lengths) // ranks
    q, k = (torch.empty(1, mine, heads, 128, dtype=torch.bfloat16, device="meta") for heads in (32, 8))
    ends = [0, *accumulate(lengths)]
    found = explain(context_parallel_attention, q, k, k, ranks, causal=True, cu_seqlens=ends, sharding=sharding, backend="hopper")
    return found.predicted_efficiency
