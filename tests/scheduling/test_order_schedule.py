"""Orders, placements, schedules: JSON, immutability, and what may and may not reach the bits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cases import SERVED
from dash_attn import Causal, ScheduleError, Window
from dash_attn.scheduling import GENERATORS, Placement, Problem, Schedule, generate, lower
from dash_attn.scheduling.order import HeadOrder, Order, turn_within
from reference import mirrored
from strategies import examples, problems, seeds

LARGE_MASKS = ["full", "causal", "window:16,0", "documents:32,64,32", "prefix:40"]


def same_order(a: HeadOrder, b: HeadOrder) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ("offsets", "q_tile", "turn"))


@pytest.mark.parametrize(("name", "mask"), SERVED)
def test_json_round_trip(name: str, mask: str) -> None:
    schedule = generate(name, Problem.from_tiles(mask, 16, 8, heads=3, group=2, batch=2, head_offset=1), 8)
    again = Schedule.from_json(schedule.to_json())
    assert again.to_json() == schedule.to_json()
    assert again.order.same_bits(schedule.order)
    assert np.array_equal(again.tickets, schedule.tickets)


def test_json_round_trip_of_a_tile_map_that_keeps_nothing() -> None:
    schedule = generate("auto", Problem.from_tiles(np.zeros((3, 4), dtype=bool), 3, 4), 2)
    assert Schedule.from_json(schedule.to_json()).to_json() == schedule.to_json()


def test_json_is_validated_again() -> None:
    text = generate("ascending", Problem.from_tiles("causal", 3, 3), 3).to_json()
    assert '"workers": 3' in text
    with pytest.raises(ValueError, match=r"placement\.workers must be a whole number from 1 to"):
        Schedule.from_json(text.replace('"workers": 3', '"workers": 0'))


def test_arrays_are_read_only() -> None:
    schedule = generate("alternating", Problem.from_tiles("causal", 8, 4, heads=2), 4)
    plan = lower(schedule)
    kind = schedule.order.kinds[0]
    made_by_hand = HeadOrder(*(np.array(getattr(kind, f)) for f in ("offsets", "q_tile", "turn", "first_step")))
    arrays = [getattr(k, f) for k in (kind, made_by_hand) for f in ("offsets", "q_tile", "turn", "first_step", "chain", "step")]
    arrays += [*schedule.placement.starts, plan.starts, plan.chain_runs, plan.runs, plan.entries, plan.turns_per_q_tile]
    assert not any(array.flags.writeable for array in arrays)
    with pytest.raises(AttributeError):
        schedule.order = schedule.order  # type: ignore[misc]


def test_turn_within_sorts_by_the_first_key_first() -> None:
    q_tile = np.array([0, 1, 0, 1, 0])
    assert turn_within(q_tile, np.array([2, 1, 1, 0, 0])).tolist() == [2, 1, 1, 0, 0]
    assert turn_within(q_tile, np.zeros(5), -np.arange(5)).tolist() == [2, 1, 1, 0, 0]


def test_mirrored_twice_is_the_order_itself() -> None:
    kind = generate("weave", Problem.from_tiles(np.random.default_rng(0).random((9, 7)) < 0.6, 9, 7), 4).order.kinds[0]
    mirror = mirrored(kind)
    assert not same_order(mirror, kind)
    assert same_order(mirrored(mirror), kind)
    assert mirror.walk(3).tolist() == kind.walk(3)[::-1].tolist()


def test_slack_and_gang_of_the_textbook_cases() -> None:
    shift = generate("shift", Problem.from_tiles("full", 16, 8), 8)
    assert (shift.slack, shift.gang) == (2, 8)
    ascending = generate("ascending", Problem.from_tiles("full", 16, 8), 8)
    assert (ascending.slack, ascending.gang) == (0, 1)
    alone = generate("ascending", Problem.from_tiles("full", 4, 1), 8)
    assert (alone.slack, alone.gang) == (None, 1)


@given(problems(), st.integers(1, 6), st.integers(1, 3), seeds)
@examples(80)
def test_tickets_name_every_chain_once_and_keep_each_heads_start_order(problem: Problem, workers: int, lanes: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    starts = tuple(rng.permutation(problem.kv_tiles) for _ in range(rng.integers(1, 3)))
    cuts = np.sort(rng.choice(np.arange(1, problem.kv_tiles), rng.integers(0, problem.kv_tiles), replace=False))
    segments = tuple(np.diff([0, *cuts, problem.kv_tiles]).tolist())
    tickets = Placement(workers, lanes, starts, segments, int(rng.integers(0, 4))).tickets(problem).tolist()
    assert len({tuple(t) for t in tickets}) == len(tickets) == problem.chains
    for sequence in range(problem.batch):
        for head in range(problem.heads):
            own = [kv for s, h, kv in tickets if (s, h) == (sequence, head)]
            assert own == starts[(head + problem.head_offset) % len(starts)].tolist()


def test_segments_go_before_heads_and_kinds_take_turns() -> None:
    problem = Problem.from_tiles("full", 2, 4, heads=4)
    placement = Placement(8, 1, (np.arange(4), np.arange(4)[::-1]), (3, 1))
    tickets = placement.tickets(problem).tolist()
    assert [head for _, head, _ in tickets] == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3 + [0, 1, 2, 3]
    assert [kv for _, _, kv in tickets[:6]] == [0, 1, 2, 3, 2, 1]


def test_heads_are_dealt_evenly_to_turns() -> None:
    """Three heads of one kind and two of the other, at most two side by side: two turns."""
    problem = Problem.from_tiles("full", 2, 1, heads=5, head_offset=1)
    placement = Placement(8, 2, (np.arange(1), np.arange(1)), (1,))
    assert [head for _, head, _ in placement.tickets(problem).tolist()] == [1, 0, 2, 3, 4]


@pytest.mark.parametrize(
    ("kv_tiles", "shape", "lanes"),
    [
        (32, {"heads": 16, "batch": 4}, 4),  # 32 heads of a kind, four fill 128 of 132 workers
        (24, {"heads": 8, "group": 4, "batch": 4, "group_parts": 1}, 6),  # 16 heads, at least 5: turns of 6, 5 and 5
        (24, {"heads": 5, "group": 4, "batch": 4, "group_parts": 1}, 6),  # 12 and 8
        (24, {"heads": 5, "group": 4, "batch": 4, "group_parts": 4}, 5),  # 40 parts of each kind: 8 turns of 5
        (24, {"heads": 1, "group": 7, "batch": 1, "group_parts": 7}, 4),  # 4 parts that walk up and 3 that walk down
        (128, {"heads": 16}, 2),  # long chains of one query head: two fillings
        (128, {"heads": 16, "group": 2, "group_parts": 2}, 2),  # likewise
        (128, {"heads": 16, "group": 2, "group_parts": 1}, 1),
        (4, {"heads": 2}, 1),  # there are no more
    ],
)
def test_a_turn_is_as_few_heads_as_fill_the_workers(kv_tiles: int, shape: dict[str, int], lanes: int) -> None:
    problem = Problem.from_tiles("causal", 2 * kv_tiles, kv_tiles, **shape)
    assert generate("alternating", problem, 132).placement.lanes == lanes


def test_a_turn_of_classes_fills_the_workers_once() -> None:
    placement = generate("alternating", Problem.from_tiles("causal", 128, 128, heads=16), 132).placement
    assert (placement.segments, placement.lanes, placement.heads_in_round) == ((64, 64), 2, 2)


@pytest.mark.parametrize(
    ("q_tiles", "kv_tiles", "shape", "lanes"),
    [
        (16, 64, {"heads": 16, "batch": 2}, 16),  # at most 8 chains of a head run at the same time
        (16, 64, {"heads": 16, "batch": 8}, 16),  # no more than the cache holds
        (32, 128, {"heads": 8, "group": 4}, 8),  # two parts of two query heads each
        (64, 256, {"heads": 8, "group": 4}, 4),
        (128, 64, {"heads": 8}, 4),  # square, by contrast: all chains do
    ],
)
def test_a_turn_has_more_heads_where_queries_are_shorter_than_keys(q_tiles: int, kv_tiles: int, shape: dict[str, int], lanes: int) -> None:
    problem = Problem(Causal(), 64 * q_tiles, 128 * kv_tiles, 64, 128, **shape)
    assert generate("alternating", problem, 132).placement.lanes == lanes


def test_both_kinds_start_in_pieces_where_there_are_too_few_heads_of_one() -> None:
    """With 16 heads of each kind one kind alone keeps the workers busy."""
    few, many = (generate("alternating", Problem(Causal(), 1024, 8192, 64, 128, heads=16, batch=b), 132).placement for b in (1, 4))
    assert (few.segments, few.lanes, few.heads_in_round) == ((8,) * 8, 8, 8)
    assert (many.segments, many.heads_in_round) == ((64,), 0)


@pytest.mark.parametrize(
    ("mask", "tokens", "tiles", "workers", "segments"),
    [
        (Causal(), 65536, (64, 128), 132, (128,) * 4),
        (Causal(), 100_000, (64, 128), 132, (131,) * 5 + (127,)),
        (Causal(), 73728, (64, 128), 132, (576,)),  # five of 116 would leave workers idle
        (Causal(), 57344, (64, 128), 132, (448,)),  # the cache holds it
        (Causal(), 131072, (128, 128), 132, (512,) * 2),  # classes
        (Causal(), 65536, (64, 128), 512, (512,)),  # all chains run at the same time
        (Window(4096, 0), 65536, (64, 128), 132, (512,)),  # neighbours do not drift apart
    ],
)
def test_a_head_that_the_cache_does_not_hold_starts_in_fillings(
    mask: Causal | Window, tokens: int, tiles: tuple[int, int], workers: int, segments: tuple[int, ...]
) -> None:
    placement = generate("alternating", Problem(mask, tokens, tokens, *tiles, heads=4), workers).placement
    assert (placement.segments, placement.heads_in_round) == (segments, int(len(segments) > 1))


def test_the_chains_of_a_gang_start_together() -> None:
    problem = Problem.from_tiles("full", 32, 16, heads=3, batch=2)
    schedule = generate("shift_blocks", problem, 132)
    tickets = schedule.tickets.reshape(-1, schedule.gang, 3)
    assert schedule.gang > 1
    assert (tickets[:, :, :2] == tickets[:, :1, :2]).all(), "one head of one sequence at a time"


def test_gangs_of_two_kinds_fit_the_workers() -> None:
    """Two kinds of heads whose chains wait in a circle: more side by side would hang."""
    problem = Problem.from_tiles("full", 16, 8, heads=16)
    ring = generate("shift_blocks", problem, 20)
    starts = ring.placement.starts[0]
    twice = Schedule.build(problem, Order("rings", ring.order.kinds * 2), (starts, starts), 20, ring.placement.segments)
    assert (twice.gang, twice.placement.lanes) == (ring.gang, 1)


def test_a_round_of_heads_goes_through_all_segments() -> None:
    problem = Problem.from_tiles("full", 2, 4, heads=5)
    starts = np.arange(4), np.arange(4)[::-1]
    tickets = Placement(8, 1, starts, (3, 1), heads_in_round=1).tickets(problem).tolist()
    assert [head for _, head, _ in tickets] == [0] * 3 + [1] * 3 + [0, 1] + [2] * 3 + [3] * 3 + [2, 3] + [4] * 4
    assert Placement(8, 1, starts, (3, 1), heads_in_round=2).rounds([3, 2]) == 2
    with pytest.raises(ValueError, match="heads_in_round must be a whole number >= 0"):
        Placement(8, 1, starts, (3, 1), heads_in_round=-1)


def test_alternating_keeps_the_workers_busy_with_one_class_of_few_heads() -> None:
    problem = Problem.from_tiles("causal", 64, 64, heads=64)
    assert generate("alternating", problem, 128).placement.heads_in_round == 4  # of both kinds: 8 heads, 32 chains each
    assert generate("weave", problem, 128).placement.heads_in_round == 0


@pytest.mark.parametrize("value", [0, -3, 1.5, True, None, "4"])
def test_bad_worker_counts(value: object) -> None:
    problem = Problem.from_tiles("full", 8, 4)
    for name in ("auto", *GENERATORS):
        with pytest.raises(ValueError, match="workers must be a whole number >= 1"):
            generate(name, problem, value)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lanes must be a whole number >= 1"):
        Placement(4, value, (np.arange(4),), (4,))  # type: ignore[arg-type]


@pytest.mark.parametrize("mask", LARGE_MASKS)
def test_batch_and_workers_never_reach_the_order_of_auto(mask: str) -> None:
    problem = Problem.from_tiles(mask, 256, 128, heads=2)
    first = generate("auto", problem, 64)
    bits = lower(first).order_hash
    for workers in (65, 78, 100, 108, 114, 127, 128, 129, 132, 144, 160, 192, 200, 256, 300):
        other = generate("auto", replace(problem, batch=1 + workers % 3), workers)
        assert other.order.same_bits(first.order)
        assert lower(other).order_hash == bits
        assert other.order.guarantees[-1] == "worker-count-invariant"


def test_shift_says_when_its_bits_depend_on_the_workers() -> None:
    problem = Problem.from_tiles("full", 16, 16)
    small, large = generate("shift", problem, 8), generate("shift", problem, 16)
    assert not small.order.same_bits(large.order)
    assert "worker-count-invariant" not in small.guarantees + large.guarantees


@pytest.mark.parametrize("mask", ["full", "causal", "window:3,1"])
@pytest.mark.parametrize("name", ["auto", *GENERATORS])
def test_a_worker_invariant_schedule_is_one(name: str, mask: str) -> None:
    problem = Problem.from_tiles(mask, 32, 16, heads=3)
    orders = []
    for workers in (8, 16, 40, 132):
        try:
            orders.append(generate(name, problem, workers).order)
        except ScheduleError:
            continue  # too few workers for its gangs, or the wrong mask
    for order in orders:
        if "worker-count-invariant" in order.guarantees:
            assert order.same_bits(orders[0])


@pytest.mark.parametrize("name", ["auto", *GENERATORS])
def test_a_shard_of_the_heads_keeps_the_bits_of_the_whole_model(name: str) -> None:
    model = generate(name, Problem.from_tiles("full", 16, 8, heads=8), 8)
    for first, heads in ((0, 3), (3, 2), (5, 3)):
        shard = generate(name, replace(model.problem, heads=heads, head_offset=first), 8)
        assert all(same_order(shard.order_of(h), model.order_of(first + h)) for h in range(heads))


def test_without_the_offset_an_odd_shard_would_change_bits() -> None:
    model = generate("alternating", Problem.from_tiles("causal", 16, 8, heads=4), 8)
    shard = generate("alternating", replace(model.problem, heads=1), 8)
    assert not same_order(shard.order_of(0), model.order_of(1))


def test_same_bits_sees_a_swapped_turn() -> None:
    problem = Problem.from_tiles("full", 2, 2)
    kind = generate("ascending", problem, 2).order.kinds[0]
    swapped = Order("swapped", (HeadOrder.build(kind.chain, kind.q_tile, 1 - kind.turn, kind.first_step),))
    assert Order("same", (kind,)).same_bits(Order("other name", (kind,)))
    assert not swapped.same_bits(Order("ascending", (kind,)))
    assert not Order("one", (kind,)).same_bits(Order("two", (kind, kind)))
