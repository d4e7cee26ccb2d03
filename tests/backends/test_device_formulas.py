"""The device's start orders and walks, compiled for the host and compared with the scheduling core's."""

from __future__ import annotations

import ctypes
import shutil
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import pytest

from dash_attn import Causal, Full, Mask, ScheduleError, Window
from dash_attn.backends.hopper.calls.tables import band_of, placement_fields
from dash_attn.backends.hopper.driver.compile import sources
from dash_attn.backends.hopper.driver.parameters import GroupSplit, PlanTables
from dash_attn.integrations._layer_mask import Padding
from dash_attn.scheduling import Placement, Problem, generate, lower
from dash_attn.scheduling.order import Sum
from dash_attn.scheduling.problem import parts_of
from host_kernels import ON_HOST, host_library, write_sources
from padded_rows import SelfAttention, padding_mask
from reference import dealt
from start_orders import Chain, laid_end_to_end, starts_alone

HEADERS = (
    "common/mask.cuh",
    "planning/start_order.cuh",
    "planning/chains.cuh",
    "planning/walk.cuh",
    "common/plan_tables.cuh",
    "common/sequence.cuh",
    "common/shared_with_python.cuh",
    "common/types.cuh",
)
GLOBAL_LOAD = 'asm volatile("ld.global.s32 %0, [%1];" : "=r"(v) : "l"(&field));'
TILES = [(64, 128), (128, 128), (64, 64)]


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("device")
    assert [name for name in HEADERS if GLOBAL_LOAD in sources()[name]] == ["common/plan_tables.cuh"]
    write_sources(folder, HEADERS, (GLOBAL_LOAD, "v = field;"))
    shutil.copy(ON_HOST / "common/ptx.cuh", folder / "common/ptx.cuh")
    return host_library(folder, "library.cpp")


def address(array: np.ndarray) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_int))


@pytest.mark.parametrize("seed", range(300))
def test_tickets_of_a_plan(device: ctypes.CDLL, seed: int) -> None:
    rng = np.random.default_rng(seed)
    kinds, kv_tiles, heads, batch = (int(rng.integers(1, most)) for most in (3, 20, 10, 6))
    starts = tuple(rng.permutation(kv_tiles) for _ in range(kinds))
    cuts = np.sort(rng.choice(kv_tiles, size=int(rng.integers(0, min(kv_tiles, 4))), replace=False))
    segments = tuple(np.diff(np.unique([0, *cuts, kv_tiles])).tolist())
    placement = Placement(int(rng.integers(1, 50)), int(rng.integers(1, 12)), starts, segments, int(rng.integers(0, 6)))
    group, offset = int(rng.integers(1, 6)), int(rng.integers(0, 4))
    parts = int(rng.integers(1, group + 1))
    problem = Problem.from_tiles("full", 3, kv_tiles, heads=heads, group=group, batch=batch, head_offset=offset, group_parts=parts)
    found = np.empty((problem.chains, 3), dtype=np.int32)
    starts, ends = np.stack(placement.starts).astype(np.int32), np.cumsum([0, *segments]).astype(np.int32)
    tables = PlanTables(starts=starts.ctypes.data, segments=ends.ctypes.data, **placement_fields(placement, problem))
    sums, first_sum, pieces = Sum.how_many(problem, kinds), 1000, 4
    tables.split = GroupSplit(group, parts, kinds, sums, pieces, first_sum)
    device.expand(ctypes.byref(tables), address(found))
    assert np.array_equal(found, placement.tickets(problem))
    fields = np.empty(5, dtype=np.int32)
    for sequence, part, kv_tile in found[:: max(1, len(found) // 50)].tolist():
        device.part_of_chain(ctypes.byref(tables), heads, sequence, part, kv_tile, address(fields))
        kv_head, members, (number, turn) = part // parts, problem.members(part), Sum.of_part(problem, part, kinds)
        place = (((sequence * heads + kv_head) * kv_tiles + kv_tile) * sums + number) * pieces + first_sum
        assert fields.tolist() == [kv_head, members.start, len(members), place, turn]


def test_parts_of_a_group(device: ctypes.CDLL) -> None:
    lengths = [*range(1, 4200), 8192, 100_000]
    for group in (1, 2, 3, 7, 8, 16, 71):
        assert [device.parts_of_group(group, length) for length in lengths] == [parts_of(group, length) for length in lengths]
    assert device.parts_of_group(8, 0) == 1, "a sequence without queries"


@dataclass
class Batch:
    """Packed sequences, and what the device makes of them."""

    mask: Mask
    tiles: tuple[int, int]
    q_lengths: list[int]
    kv_lengths: list[int]
    heads: int
    group: int
    head_offset: int
    workers: int

    def plan(self, device: ctypes.CDLL) -> list[Chain]:
        """All chains, in the order they start: part, sequence, KV tile."""
        return [chain for chain, _ in self.plan_with_records(device)]

    def plan_with_records(self, device: ctypes.CDLL) -> list[tuple[Chain, list[int]]]:
        """... and of each its query heads, whether the last one comes first, where it adds dK and dV, and when."""
        cu_q, cu_k = (np.array([0, *np.cumsum(n)], dtype=np.int32) for n in (self.q_lengths, self.kv_lengths))
        assert self.mask.sides is not None
        right, width = band_of(self.mask.sides)
        shape = len(self.q_lengths), self.heads, self.group, self.head_offset, self.workers
        count = device.plan(*self.tiles, address(cu_q), address(cu_k), *shape, right, ctypes.c_uint32(width))
        found = np.empty((count, 8), dtype=np.int32)
        device.read_tickets(address(found))
        sequence_of = {int(end): i for i, end in enumerate(cu_k[1:]) if self.kv_lengths[i]}
        part_of = [{members[0]: part for part, members in enumerate(self.parts(i))} for i in range(len(self.q_lengths))]
        chains = []
        for _, end, keys, q_head, *rest in found.tolist():
            sequence = sequence_of[end]
            part = part_of[sequence][q_head]
            chains.append(((part, sequence, (self.kv_lengths[sequence] - keys) // self.tiles[1]), [q_head, *rest]))
        return chains

    def parts(self, sequence: int) -> list[list[int]]:
        """The query heads of all parts of a sequence."""
        of_group = dealt(self.group, parts_of(self.group, max(1, self.q_lengths[sequence])))
        return [[head * self.group + member for member in members] for head in range(self.heads) for members in of_group]

    def kv_tiles(self, sequence: int) -> int:
        return -(-self.kv_lengths[sequence] // self.tiles[1])

    @property
    def chain_rows(self) -> int:
        return sum(self.kv_lengths) // self.tiles[1] + len(self.kv_lengths)

    def problem(self, sequence: int) -> Problem:
        lengths = self.q_lengths[sequence], self.kv_lengths[sequence]
        return Problem(self.mask, *lengths, *self.tiles, self.heads, self.group, head_offset=self.head_offset)

    def start_order(self) -> list[int]:
        """Sequences, most tiles first."""
        q_tiles, kv_tiles = (
            [-(-n // rows) for n in lengths] for lengths, rows in zip((self.q_lengths, self.kv_lengths), self.tiles, strict=True)
        )
        return sorted(range(len(q_tiles)), key=lambda i: -q_tiles[i] * kv_tiles[i])


def random_batch(seed: int, empty: bool) -> Batch:
    """With sequences that have no queries or no keys, if `empty`."""
    rng = np.random.default_rng(seed)
    tiles = TILES[int(rng.integers(3))]
    count, longest = int(rng.choice([1, 2, 3, 5, 8, 20])), int(rng.choice([200, 1500, 3000]))
    kv_lengths = [int(n) for n in rng.integers(1, longest, size=count)]
    kv_lengths[0] = int(rng.choice([kv_lengths[0], 8 * tiles[1], 8 * tiles[1] + 1, 17 * tiles[1], 9000 if count < 4 else 129]))
    q_lengths = list(kv_lengths) if rng.random() < 0.6 else [int(n) for n in rng.integers(1, longest, size=count)]
    if empty:
        for lengths in (q_lengths, kv_lengths):
            lengths[int(rng.integers(count))] = 0
    masks = Full(), Causal(), Window(int(rng.choice([0, 50, 300, 1000])), int(rng.choice([0, 5, 200])))
    shape = (int(rng.integers(low, high)) for low, high in ((1, 6), (1, 10), (0, 2), (64, 200)))
    return Batch(masks[int(rng.integers(3))], tiles, q_lengths, kv_lengths, *shape)


@pytest.mark.parametrize("seed", range(150))
def test_packed_sequences_start_and_walk_as_each_would_alone(device: ctypes.CDLL, seed: int) -> None:
    batch = random_batch(seed, empty=False)
    chains = batch.plan(device)
    try:
        schedules = {i: generate("auto", batch.problem(i), batch.workers) for i in batch.start_order()}
    except ScheduleError as error:
        pytest.skip(f"refused on the host: {error}")
    assert chains == laid_end_to_end([starts_alone(i, schedule) for i, schedule in schedules.items()])
    walk = np.empty((20_000, 2), dtype=np.int32)
    for ticket, (part, sequence, kv_tile) in enumerate(chains):
        order = schedules[sequence].order_of(part)
        steps = device.read_walk(*batch.tiles, ticket, address(walk))
        assert walk[:steps, 0].tolist() == order.walk(kv_tile).tolist()
        assert walk[:steps, 1].tolist() == order.turns(kv_tile).tolist()


@pytest.mark.parametrize("tiles", TILES)
def test_packed_sequences_that_the_cache_does_not_hold_start_in_fillings(device: ctypes.CDLL, tiles: tuple[int, int]) -> None:
    """Those of tiles that need no classes. The second would leave workers idle, the third is too short."""
    lengths = [8 * 128 * 64 + 1, 73_000, 8 * 128 * 64 - 64]
    batch = Batch(Causal(), tiles, lengths, lengths, heads=2, group=1, head_offset=0, workers=132)
    schedules = {i: generate("auto", batch.problem(i), batch.workers) for i in batch.start_order()}
    cut = {i for i, schedule in schedules.items() if len(schedule.placement.segments) > 2}
    assert cut == ({0} if tiles == (64, 128) else set())
    assert batch.plan(device) == laid_end_to_end([starts_alone(i, schedule) for i, schedule in schedules.items()])


@pytest.mark.parametrize("seed", range(100))
def test_packed_sequences_add_as_each_would_alone(device: ctypes.CDLL, seed: int) -> None:
    """Query heads, sums and turns of every chain, and how many parts the postprocess finds in every sum."""
    batch = random_batch(seed, empty=False)
    records = batch.plan_with_records(device)
    try:
        plans = [lower(generate("auto", batch.problem(i), batch.workers)) for i in range(len(batch.q_lengths))]
    except ScheduleError as error:
        pytest.skip(f"refused on the host: {error}")
    first_row = [0, *accumulate(batch.kv_tiles(i) for i in range(len(plans)))]
    sums, waited = 2 if batch.group > 1 else 0, dict[int, int]()
    parts = [batch.parts(i) for i in range(len(plans))]
    for (part, sequence, kv_tile), (q_head, members, last_first, place, turn) in records:
        plan, of_part = plans[sequence], parts[sequence][part]
        assert (q_head, members) == (of_part[0], len(of_part))
        assert plan.members(part) == ([*range(members)][::-1] if last_first else [*range(members)])
        number, turn = plan.sum_of(part)
        kv_head = part // plan.problem.parts
        assert (place, turn) == (((kv_head * batch.chain_rows + first_row[sequence] + kv_tile) * sums + number) * 4, turn)
        if sums:
            assert turn == waited.get(place, 0), "a part waits for parts with earlier tickets"
            waited[place] = turn + 1
    places = np.empty((batch.chain_rows, 4), dtype=np.int32)
    assert device.read_sum_places(address(places)) == batch.chain_rows
    expected = [[i, kv, *(*plan.parts_of_sums, 0)[:2]] for i, plan in enumerate(plans) for kv in range(batch.kv_tiles(i))]
    assert places[: len(expected)].tolist() == expected
    assert (places[len(expected) :, 0] == -1).all(), "no such tiles"


@pytest.mark.parametrize("seed", range(60))
def test_packed_sequences_some_of_which_are_empty(device: ctypes.CDLL, seed: int) -> None:
    """Every chain once; every turn once, and each waits for an earlier start (Full() has circles, which the test above compares)."""
    batch = random_batch(seed, empty=True)
    batch.mask = Causal() if isinstance(batch.mask, Full) else batch.mask
    chains = batch.plan(device)
    kv_tiles = [-(-n // batch.tiles[1]) for n in batch.kv_lengths]
    assert sorted(chains) == sorted((part, i, kv) for i, n in enumerate(kv_tiles) for kv in range(n) for part in range(len(batch.parts(i))))
    walk = np.empty((20_000, 2), dtype=np.int32)
    turns: dict[tuple[int, int, int], list[int]] = {}
    for ticket, (part, sequence, _) in enumerate(chains):
        for q_tile, turn in walk[: device.read_walk(*batch.tiles, ticket, address(walk))].tolist():
            turns.setdefault((part, sequence, q_tile), []).append(turn)
    for (_, sequence, q_tile), found in turns.items():
        of_tiles = np.empty(-(-batch.q_lengths[sequence] // batch.tiles[0]), dtype=np.int32)
        device.read_turns(sequence, len(of_tiles), address(of_tiles))
        assert found == list(range(of_tiles[q_tile]))


@pytest.mark.parametrize("seed", range(30))
def test_padded_rows_walk_as_each_sequence_would_alone(device: ctypes.CDLL, seed: int) -> None:
    """What is between them, queries without keys and keys without queries, has chains without steps."""
    batch, length = random_batch(seed, empty=False), 1200
    rng = np.random.default_rng(seed)
    rows = tuple(int(n) for n in rng.choice([0, 1, 64, 300, 1000, 1200], size=6))
    kept = padding_mask(["left", "right", "both"][seed % 3], rows, length).bool()
    offsets = Padding(kept, length, Causal()).offsets(SelfAttention)
    batch.q_lengths, batch.kv_lengths = offsets.cu_seqlens_q.diff().tolist(), offsets.cu_seqlens_k.diff().tolist()
    chains = batch.plan(device)
    expected = [
        (part, i, kv) for i in range(len(batch.kv_lengths)) for kv in range(batch.kv_tiles(i)) for part in range(len(batch.parts(i)))
    ]
    assert sorted(chains) == sorted(expected)
    walk = np.empty((20_000, 2), dtype=np.int32)
    schedules = {i: generate("auto", batch.problem(i), batch.workers) for i, n in enumerate(batch.q_lengths) if n and batch.kv_lengths[i]}
    assert len(schedules) == np.count_nonzero(rows)
    for ticket, (part, sequence, kv_tile) in enumerate(chains):
        found = walk[: device.read_walk(*batch.tiles, ticket, address(walk))]
        if sequence in schedules:
            order = schedules[sequence].order_of(part)
            assert (found[:, 0].tolist(), found[:, 1].tolist()) == (order.walk(kv_tile).tolist(), order.turns(kv_tile).tolist())
        else:
            assert len(found) == 0


@pytest.mark.exhaustive
def test_packed_sequences_of_very_many_chains(device: ctypes.CDLL) -> None:
    """More than are shuffled: every chain has one ticket all the same."""
    batch = Batch(Window(300, 0), (64, 64), [64, 64, 64], [70_000 * 64, 70_000 * 64, 64], heads=4, group=4, head_offset=0, workers=132)
    assert len(set(batch.plan(device))) == 4 * 140_001
