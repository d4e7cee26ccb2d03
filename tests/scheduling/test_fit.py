"""A schedule made earlier serves other batches, heads and machines, is proven anew there, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dash_attn import Causal, Full, Mask, ScheduleError, TileMap, Window
from dash_attn.scheduling import Problem, Schedule, generate
from dash_attn.scheduling.order import ALL_GUARANTEES, RUN_TO_RUN, HeadOrder, Order, turn_within
from dash_attn.scheduling.schedule import DECIDE_TILES, fit
from dash_attn.scheduling.validate import TooFewWorkers

PROBLEM = Problem(Causal(), 1024, 1024, 64, 128, heads=3, group=2, batch=2)


def shuffled(problem: Problem, workers: int, seed: int = 0, name: str = "shuffled") -> Schedule:
    """Chains start and turn in an order of no generator: each waits only for earlier starts."""
    start = np.random.default_rng(seed).permutation(problem.kv_tiles)
    chain, q_tile = np.nonzero(problem.kept.T)
    kind = HeadOrder.build(chain, q_tile, turn_within(q_tile, np.argsort(start)[chain]), np.zeros(problem.kv_tiles, dtype=np.int64))
    return Schedule.build(problem, Order(name, (kind,), ALL_GUARANTEES), (start,), workers)


@pytest.mark.parametrize("name", ["ascending", "alternating", "weave", "symmetric_shift"])
def test_the_same_problem_gets_the_same_schedule(name: str) -> None:
    made = generate(name, PROBLEM, 16)
    fitted = fit(Schedule.from_json(made.to_json()), PROBLEM, 16)
    assert fitted.name == f"{name} (given)"
    assert fitted.order.same_bits(made.order)
    assert np.array_equal(fitted.tickets, made.tickets)
    assert fitted.guarantees == made.guarantees
    assert fitted.order.guarantees == ALL_GUARANTEES


@pytest.mark.parametrize("other", [{"batch": 5}, {"heads": 8}, {"group": 1}, {"head_offset": 7}, {"heads": 1, "head_offset": 1}], ids=str)
def test_batch_and_heads_may_differ(other: dict[str, int]) -> None:
    problem = replace(PROBLEM, **other)
    fitted = fit(generate("alternating", PROBLEM, 16), problem, 132)
    assert (fitted.problem, fitted.workers) == (problem, 132)
    assert fitted.order.same_bits(generate("alternating", problem, 132).order)
    assert len(fitted.tickets) == problem.chains
    assert fitted.guarantees == ALL_GUARANTEES


OTHERS: dict[str, tuple[Problem, str]] = {
    "mask": (replace(PROBLEM, mask=Window(300, 0)), r"for mask causal; the call has mask window:300,0\."),
    "q_len": (replace(PROBLEM, q_len=1023), r"for q_len 1024; the call has q_len 1023\."),
    "kv_len": (replace(PROBLEM, kv_len=1025), r"for kv_len 1024; the call has kv_len 1025\."),
    "tile_q": (replace(PROBLEM, tile_q=128), r"for tile_q 64; the call has tile_q 128\..*backward_tiles tells"),
    "tile_kv": (replace(PROBLEM, tile_kv=64, q_len=512), r"for q_len 1024, tile_kv 128; the call has q_len 512, tile_kv 64\."),
}


@pytest.mark.parametrize("field", DECIDE_TILES)
def test_other_tiles_are_refused(field: str) -> None:
    problem, said = OTHERS[field]
    with pytest.raises(ScheduleError, match=said):
        fit(generate("ascending", PROBLEM, 16), problem, 16)


def test_a_claim_is_not_a_proof() -> None:
    claims = shuffled(PROBLEM, 16, name="weave")
    assert claims.guarantees == ALL_GUARANTEES, "whoever builds a schedule may say what they like"
    assert fit(claims, PROBLEM, 16).guarantees == (RUN_TO_RUN,)
    full = replace(PROBLEM, mask=Full())
    paper = generate("shift", full, 6)
    assert fit(paper, full, 6).guarantees == paper.guarantees
    assert fit(paper, full, 8).guarantees == (RUN_TO_RUN,), "shift has another order on eight workers"


@pytest.mark.parametrize("mask", [Full(), Window(-1, 5000), TileMap(np.ones((8, 8), dtype=bool), 128, 128)], ids=str)
def test_a_gang_must_fit(mask: Mask) -> None:
    problem = replace(PROBLEM, mask=mask)
    generated = generate("shift_blocks", problem, 132)
    made = replace(generated, placement=replace(generated.placement, lanes=16))
    assert made.gang == 8
    fitted = fit(made, problem, 20)
    assert (fitted.placement.lanes, fitted.workers) == (2, 20)
    assert fit(made, problem, 8).placement.lanes == 1
    with pytest.raises(TooFewWorkers, match=r"shift_blocks \(given\) needs 8 workers at once .* there are 7\."):
        fit(made, problem, 7)


def test_the_text_is_made_once() -> None:
    made = generate("weave", PROBLEM, 16)
    assert made.to_json() is made.to_json()


def test_parts_that_were_asked_for_are_kept() -> None:
    problem = replace(PROBLEM, group=4)
    assert (problem.parts, fit(generate("ascending", problem, 16), problem, 16).problem.parts) == (1, 1)
    for parts in (1, 2, 3, 4):
        given = generate("ascending", replace(problem, group_parts=parts), 16)
        fitted = fit(Schedule.from_json(given.to_json()), replace(problem, batch=3), 16)
        assert fitted.problem.parts == parts
        assert fitted.guarantees == given.guarantees
    with pytest.raises(ScheduleError, match="deals a group to 4 parts; the call has groups of 2 query heads, so at most as many"):
        fit(given, PROBLEM, 16)
