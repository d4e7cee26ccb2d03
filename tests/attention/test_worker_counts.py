"""Any number of workers gives the same bits on the CPU; a schedule of whole chains says how many it needs at once."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from torch import Tensor

from cases import NAMES
from dash_attn import Causal, Documents, Full, Mask, Prefix, ScheduleError, TileMap, Window
from dash_attn.call.planning import plan_for
from dash_attn.cli.main import main
from dash_attn.execution.interleaving import interleaving
from dash_attn.scheduling import Problem, generate, lower
from dash_attn.scheduling.order import ALL_GUARANTEES, WORKER_INVARIANT, promises
from dash_attn.scheduling.validate import TooFewWorkers
from dense import assert_same_bits, random_inputs, repeated, run_ours

WORKERS = (1, 2, 7, 16, 33)
LENGTH = 17 * 128  # of keys: on a full mask auto has two circles of nine and eight chains
MASKS: dict[str, Mask] = {
    "full": Full(),
    "causal": Causal(),
    "window": Window(300, 40),
    "documents": Documents((900, 76, 1200)),
    "prefix": Prefix(500),
    "blocks": TileMap(np.random.default_rng(0).random((17, 17)) < 0.4, 128, 128),
}
SAID = (
    r"needs \d+ workers at once \(SMs of a GPU, simulated or recorded workers\).*; there are \d+\."
    r" schedule='alternating' runs on any number of workers"
)


@pytest.fixture(scope="module")
def inputs() -> tuple[Tensor, ...]:
    return random_inputs(LENGTH, LENGTH, (1, 1), 8)


LIKE_OTHERS = ("documents", "prefix")  # to an order they are other tiles of the same kinds
SOME = [pytest.param(mask, id=name, marks=pytest.mark.exhaustive if name in LIKE_OTHERS else ()) for name, mask in MASKS.items()]


@pytest.mark.parametrize("mask", SOME)
@pytest.mark.parametrize("name", NAMES)
def test_equal_bits(name: str, mask: Mask, inputs: tuple[Tensor, ...]) -> None:
    """None is refused. `shift`, the control, is another order on every number of workers."""
    try:
        run = repeated(inputs, mask, schedule=name)
        expected = run()
    except ScheduleError:
        pytest.skip(f"{name} does not serve {mask}")
    for workers in WORKERS:
        with interleaving(workers, workers=workers):
            found = run()
        if name != "shift":
            assert_same_bits(found, expected, f"{name}, {workers} workers")
        elif workers < 17:
            with pytest.raises(AssertionError, match="elements differ"):
                assert_same_bits(found, expected)


def test_what_the_error_advises_works_and_has_other_bits(inputs: tuple[Tensor, ...]) -> None:
    run = repeated(inputs, Full(), schedule="alternating")
    expected = run()
    for workers in WORKERS:
        with interleaving(workers, workers=workers):
            assert_same_bits(run(), expected)
    with pytest.raises(AssertionError, match="elements differ"):
        assert_same_bits(run_ours(inputs, Full()), expected)


def test_a_gang_is_part_of_the_guarantee() -> None:
    problem = Problem(Full(), LENGTH, LENGTH)
    ring, free = generate("auto", problem, 132), generate("alternating", problem, 132)
    assert (ring.name, ring.gang) == ("shift_blocks", 9)
    assert ring.guarantees == lower(ring).guarantees == (*ALL_GUARANTEES[:2], "worker-count-invariant (9 workers or more)")
    assert free.guarantees == lower(free).guarantees == ALL_GUARANTEES
    assert promises(ring.guarantees, WORKER_INVARIANT)
    assert not promises(generate("shift", problem, 132).guarantees, WORKER_INVARIANT)
    assert generate("auto", replace(problem, q_len=64 * 64 * 2, kv_len=64 * 128), 16).guarantees[2].endswith("(16 workers or more)")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_from_its_gang_on_every_number_of_workers_will_do(name: str, mask: Mask) -> None:
    problem = Problem(mask, LENGTH, LENGTH, heads=2)
    try:
        first = generate(name, problem, 200)
    except ScheduleError:
        pytest.skip(f"{name} does not serve {mask}")
    for workers in range(first.gang, first.gang + 20):
        found = generate(name, problem, workers)
        assert name == "shift" or found.order.same_bits(first.order)


def test_no_order_hides_behind_the_number_of_workers() -> None:
    """A schedule of whole chains is refused, whichever way it is asked for, on one worker less than its gang needs."""
    problem = Problem(Full(), LENGTH, LENGTH)
    for name in ("auto", "shift_blocks"):
        assert generate(name, problem, 9).gang == 9
        for ask in (generate, lambda n, p, w: plan_for(p, n, w)):
            with pytest.raises(TooFewWorkers, match=SAID):
                ask(name, problem, 8)


def test_plan_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    full = ["plan", "--mask", "full", "--q-tiles", "34", "--kv-tiles", "17", "--workers", "8"]
    assert main([*full, "--schedule", "auto"]) == 2
    assert re.search(r"error: auto \(here shift_blocks\) " + SAID, capsys.readouterr().err)
    assert main(full) == 0, "others can serve it"
    assert re.search(r"shift_blocks: " + SAID, capsys.readouterr().out)
    assert main([*full, "--schedule", "alternating"]) == 0


def test_measured_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--mask", "full", "--seqlen", str(LENGTH), "--measured", "--device", "cpu", "--threads", "2", "--head-dim", "64"]
    assert main([*words, "--schedule", "auto"]) == 2
    assert re.search(r"error: auto \(here shift_blocks\) needs 9 .* there are 2\.", capsys.readouterr().err)
