"""Problems: tile counts, tasks, names, JSON, refusals."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dash_attn import Causal, Full
from dash_attn.scheduling import Problem, Task
from strategies import examples, problems

SIZES = ("q_len", "kv_len", "tile_q", "tile_kv", "heads", "group", "batch")


def test_tile_counts_round_up() -> None:
    problem = Problem(Full(), 100, 129, 64, 128)
    assert (problem.q_tiles, problem.kv_tiles) == (2, 2)
    assert problem.kept.shape == (2, 2)


def test_tasks_count_groups_heads_and_sequences() -> None:
    problem = Problem(Causal(), 512, 512, 128, 128, heads=3, group=2, batch=5)
    assert problem.chain_lengths.tolist() == [4, 3, 2, 1]
    assert problem.turns_per_q_tile.tolist() == [1, 2, 3, 4]
    assert problem.tasks == 10 * 3 * 2 * 5
    assert problem.chains == 4 * 3 * 5


@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (5, 7), (256, 128), (3, 64), (127, 61)], ids=str)
def test_from_tiles_gives_these_tile_counts(shape: tuple[int, int]) -> None:
    problem = Problem.from_tiles("full", *shape)
    assert (problem.q_tiles, problem.kv_tiles) == shape
    assert min(problem.tile_q, problem.tile_kv) >= 64


def test_from_tiles_takes_a_map_and_mask_lengths_in_kv_tiles() -> None:
    kept = np.random.default_rng(0).random((6, 4)) < 0.5
    assert np.array_equal(Problem.from_tiles(kept, 6, 4).kept, kept)
    assert Problem.from_tiles("documents-full:1,3", 8, 4).kept.sum() == 2 * 1 + 6 * 3


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "8", None])
@pytest.mark.parametrize("name", SIZES)
def test_bad_sizes(name: str, value: object) -> None:
    sizes: dict[str, object] = {"q_len": 64, "kv_len": 64, name: value}
    with pytest.raises(ValueError, match=f"{name} must be a whole number >= 1"):
        Problem(Full(), **sizes)  # type: ignore[arg-type]


def test_bad_offset_mask_and_tile_counts() -> None:
    with pytest.raises(ValueError, match="head_offset must be a whole number >= 0"):
        Problem(Full(), 64, 64, head_offset=-1)
    with pytest.raises(TypeError, match="mask must be a dash_attn mask"):
        Problem("causal", 64, 64)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kv_tiles must be a whole number >= 1"):
        Problem.from_tiles("full", 4, 0)
    with pytest.raises(ValueError, match=r"needs shape \(4, 3\)"):
        Problem.from_tiles(np.ones((3, 4), dtype=bool), 4, 3)


@given(st.integers(0, 999), st.integers(0, 999), st.integers(0, 999), st.integers(0, 99))
@examples(50)
def test_task_names_parse_back(head: int, q_tile: int, kv_tile: int, sequence: int) -> None:
    task = Task(head, q_tile, kv_tile, sequence)
    assert Task.parse(str(task)) == task


def test_task_names() -> None:
    assert str(Task(0, 3, 1)) == "h0.q3.kv1"
    assert str(Task(0, 3, 1, 2)) == "b2.h0.q3.kv1"


@pytest.mark.parametrize("text", ["", "h0.q3", "q3.h0.kv1", "h0.q3.kv1 ", "h-1.q3.kv1", "x2.h0.q3.kv1", "h0.q3.kv1.b2"])
def test_bad_task_names(text: str) -> None:
    with pytest.raises(ValueError, match=r"a task is written like h0\.q3\.kv1"):
        Task.parse(text)


@given(problems())
@examples(60)
def test_json_round_trip(problem: Problem) -> None:
    assert Problem.from_json(json.loads(json.dumps(problem.to_json()))) == problem


def test_json_takes_numpy_sizes() -> None:
    kept = np.ones((3, 2), dtype=bool)
    problem = Problem.from_tiles(kept, np.int64(3), np.int64(2), heads=np.int32(4))
    assert Problem.from_json(json.loads(json.dumps(problem.to_json()))) == problem


@pytest.mark.parametrize("name", ["tile_map", "kept", "partial", "chain_lengths", "turns_per_q_tile"])
def test_arrays_are_read_only(name: str) -> None:
    with pytest.raises(ValueError, match="read-only"):
        getattr(Problem.from_tiles("causal", 4, 4), name)[0] = 1
