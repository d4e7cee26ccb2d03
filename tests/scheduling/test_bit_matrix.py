"""Boolean matrices without attention: packed and read back, cut into tiles, compared, written as JSON."""

from __future__ import annotations

import json

import numpy as np
import pytest
from numpy.typing import NDArray

from dash_attn import TileMap
from dash_attn.masks import EMPTY, FULL, PARTIAL, BooleanMask, TilePattern
from dash_attn.masks.boolean_mask import BitMatrix, PatternPerHead
from dash_attn.masks.encoding import mask_to_json
from dash_attn.scheduling import Problem, generate, lower
from dash_attn.scheduling.json_fields import as_mask

Matrix = NDArray[np.bool_]


def random_matrix(seed: int) -> Matrix:
    """Blocks that are empty, full or scattered, at lengths that fill no block, or do."""
    source = np.random.default_rng(seed)
    q_len, kv_len = source.integers(1, 300, 2) if seed % 3 else source.integers(1, 5, 2) * 64
    choice = np.kron(source.integers(0, 3, (5, 5)), np.ones((64, 64), dtype=np.int64))[:q_len, :kv_len]
    return np.where(choice == 2, source.random((q_len, kv_len)) < 0.5, choice == 1)


def tiles_of(matrix: Matrix, tile_q: int, tile_kv: int) -> NDArray[np.uint8]:
    """By the definition, element by element."""
    rows, columns = (range(0, length, tile) for length, tile in zip(matrix.shape, (tile_q, tile_kv), strict=True))
    tiles = [[matrix[i : i + tile_q, j : j + tile_kv] for j in columns] for i in rows]
    found = [[EMPTY if not t.any() else FULL if t.all() and t.shape == (tile_q, tile_kv) else PARTIAL for t in row] for row in tiles]
    return np.array(found, dtype=np.uint8)


@pytest.mark.parametrize("seed", range(30))
def test_elements_are_read_back(seed: int) -> None:
    matrix, source = random_matrix(seed), np.random.default_rng(seed)
    packed = BitMatrix.of(matrix)
    for _ in range(10):
        (top, bottom), (left, right) = (np.sort(source.choice(length + 1, 2, replace=False)) for length in matrix.shape)
        assert np.array_equal(packed.keep(slice(top, bottom), slice(left, right)), matrix[top:bottom, left:right])
    partial = int((tiles_of(matrix, 64, 64) == PARTIAL).sum())
    assert packed.words.nbytes <= 512 * (partial + 2)


@pytest.mark.parametrize("shape", [(64, 64), (300, 257), (5, 200)])
def test_blocks_are_packed_without_their_elements(shape: tuple[int, int]) -> None:
    kept = np.random.default_rng(0).random((-(-shape[0] // 64), -(-shape[1] // 64))) < 0.5
    elements = np.kron(kept, np.ones((64, 64)))[: shape[0], : shape[1]] > 0
    here, there = BitMatrix.of_blocks(kept, shape), BitMatrix.of(elements)
    assert (here.digest, here.places.tolist()) == (there.digest, there.places.tolist())


@pytest.mark.parametrize("tiles", [(64, 64), (64, 128), (128, 128), (192, 64)], ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_tiles_of_whole_blocks_are_those_of_the_elements(seed: int, tiles: tuple[int, int]) -> None:
    matrix = random_matrix(seed)
    assert np.array_equal(BooleanMask(matrix).pattern.tile_map(*matrix.shape, *tiles), tiles_of(matrix, *tiles))


@pytest.mark.parametrize("tiles", [(64, 112), (64, 80), (100, 36)], ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_other_tiles_are_never_less_than_the_elements(seed: int, tiles: tuple[int, int]) -> None:
    """One that touches a partial block counts as partial, though it may have none of its elements, or all."""
    matrix = random_matrix(seed)
    found, truth = BooleanMask(matrix).pattern.tile_map(*matrix.shape, *tiles), tiles_of(matrix, *tiles)
    assert (found[truth == PARTIAL] == PARTIAL).all()
    assert (found[truth == FULL] != EMPTY).all()
    assert (truth[found == FULL] == FULL).all()
    assert (truth[found == EMPTY] == EMPTY).all()


def test_equal_patterns_are_equal() -> None:
    source = np.random.default_rng(0)
    one, other = (BooleanMask(source.random((130, 200)) < 0.5).pattern for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    emptied = source.random((130, 200)) < 0.5
    emptied[:64] = False
    assert one not in (BooleanMask(emptied).pattern, TileMap([[True]], 64, 64), None)


def test_equal_matrices_are_kept_once() -> None:
    source = np.random.default_rng(0)
    one, other = (source.random((70, 90)) < 0.5 for _ in range(2))
    mask = BooleanMask(np.stack([np.stack([one, other]), np.stack([other, one])]))
    assert len(mask.matrices) == 2
    assert mask.numbers.tolist() == [[0, 1], [1, 0]]
    assert mask.some(slice(1, 2), slice(0, 1)).of(0, 0) is mask.of(1, 0)
    assert "2" in repr(mask)


def test_a_pattern_is_planned_like_a_map_with_the_same_tiles() -> None:
    matrix = np.kron(np.random.default_rng(1).random((8, 5)) < 0.5, np.ones((64, 128))) > 0
    holes = matrix.copy()
    holes[5::64, 7::128] = False
    plans = [lower(generate("auto", Problem(BooleanMask(x).pattern, 512, 640, 64, 128), 8)) for x in (matrix, holes)]
    assert plans[0].order_hash == plans[1].order_hash
    assert not plans[0].problem.partial.any()
    assert np.array_equal(plans[1].problem.partial, plans[1].problem.kept)


def test_json_has_the_pattern() -> None:
    pattern = TilePattern(np.array([[0, 1, 2], [2, 2, 0]], dtype=np.uint8))
    text = json.dumps(mask_to_json(pattern))
    assert text == '{"pattern": [".+#", "##."]}'
    assert as_mask(json.loads(text), "mask") == pattern
    for wrong in ({"pattern": [".x"]}, {"pattern": []}, {"pattern": ["."], "block_q": 64}, {"pattern": [".", "##"]}, {"pattern": [""]}):
        with pytest.raises(ValueError, match=r"mask"):
            as_mask(wrong, "mask")


@pytest.mark.parametrize(
    "blocks", [np.zeros((2, 2)), np.array([[3]], dtype=np.uint8), np.zeros(2, dtype=np.uint8), np.zeros((0, 1), np.uint8)]
)
def test_a_pattern_is_made_of_three_numbers(blocks: NDArray[np.uint8]) -> None:
    with pytest.raises(ValueError, match="a pattern must be a non-empty 2-d array of uint8, 0 to 2"):
        TilePattern(blocks)


def test_patterns_have_no_elements_and_fit_their_lengths() -> None:
    pattern = TilePattern(np.ones((2, 3), dtype=np.uint8))
    with pytest.raises(TypeError, match="its elements come with a call"):
        pattern.keep(slice(0, 1), slice(0, 1), 128, 192)
    with pytest.raises(ValueError, match=r"a pattern for q_len=129, kv_len=192 with blocks of 64 x 64 needs shape \(3, 3\); got \(2, 3\)"):
        Problem(pattern, 129, 192)
    other = TilePattern(np.full((2, 3), 2, dtype=np.uint8) - np.eye(2, 3, dtype=np.uint8))
    several = PatternPerHead((pattern, other), np.array([[0, 1]]))
    assert several == PatternPerHead((pattern, other), np.array([[0, 1]]))
    assert several != PatternPerHead((pattern, other), np.array([[1, 0]]))
    with pytest.raises(ValueError, match="masks that differ between sequences or heads have no tile map in common"):
        _ = Problem(several, 128, 192).tile_map
