"""Tile maps and tiles against an element-by-element construction; printing, parsing, JSON; refusals."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reference
from dash_attn.masks import Causal, Documents, Full, Mask, Prefix, TileMap, Window, parse_mask
from dash_attn.masks.encoding import FORMS, mask_to_json
from dash_attn.scheduling.json_fields import as_mask
from strategies import examples, sized_masks

SIMPLE = [
    Full(),
    Causal(),
    Window(5, 0),
    Window(0, 0),
    Window(0, 7),
    Window(13, 4),
    Window(-1, 0),
    Window(3, -1),
    Window(-1, -1),
    Prefix(0),
    Prefix(9),
    Prefix(23),
]
PACKED = [Documents((7, 1, 12, 9)), Documents((7, 1, 12, 9), causal=False), Documents((29,)), Documents((1,) * 29)]
TILES = [(4, 8), (8, 4), (5, 7), (1, 1), (64, 64)]


@pytest.mark.parametrize("tiles", TILES, ids=str)
@pytest.mark.parametrize("lengths", [(29, 29), (32, 32), (23, 40), (40, 23), (1, 31), (31, 23)], ids=str)
@pytest.mark.parametrize("mask", SIMPLE, ids=str)
def test_tile_map_equals_elements(mask: Mask, lengths: tuple[int, int], tiles: tuple[int, int]) -> None:
    assert np.array_equal(mask.tile_map(*lengths, *tiles), reference.tile_map(mask, *lengths, *tiles))


@pytest.mark.parametrize("tiles", TILES, ids=str)
@pytest.mark.parametrize("mask", PACKED, ids=str)
def test_documents_tile_map_equals_elements(mask: Mask, tiles: tuple[int, int]) -> None:
    assert np.array_equal(mask.tile_map(29, 29, *tiles), reference.tile_map(mask, 29, 29, *tiles))


@pytest.mark.parametrize("tiles", TILES, ids=str)
@pytest.mark.parametrize("blocks", [(4, 8), (3, 5), (10, 2)], ids=str)
def test_block_map_equals_elements_when_tiles_straddle_blocks(blocks: tuple[int, int], tiles: tuple[int, int]) -> None:
    q_len, kv_len = 29, 23
    shape = (-(-q_len // blocks[0]), -(-kv_len // blocks[1]))
    mask = TileMap(np.random.default_rng(1).random(shape) < 0.6, *blocks)
    assert np.array_equal(mask.tile_map(q_len, kv_len, *tiles), reference.tile_map(mask, q_len, kv_len, *tiles))


@given(sized_masks(), st.integers(1, 17), st.integers(1, 17))
@examples(150)
def test_any_mask_equals_elements(sized: tuple[Mask, int, int], tile_q: int, tile_kv: int) -> None:
    mask, q_len, kv_len = sized
    assert np.array_equal(mask.tile_map(q_len, kv_len, tile_q, tile_kv), reference.tile_map(mask, q_len, kv_len, tile_q, tile_kv))


@given(sized_masks(), st.data())
@examples(100)
def test_keep_equals_elements(sized: tuple[Mask, int, int], data: st.DataObject) -> None:
    mask, q_len, kv_len = sized
    q, kv = (_slice(data, length) for length in (q_len, kv_len))
    assert np.array_equal(mask.keep(q, kv, q_len, kv_len), reference.elements(mask, q_len, kv_len)[q, kv])


def _slice(data: st.DataObject, length: int) -> slice:
    first = data.draw(st.integers(0, length - 1))
    return slice(first, data.draw(st.integers(first + 1, length)))


def test_causal_is_aligned_bottom_right() -> None:
    assert Causal().keep(slice(0, 2), slice(0, 4), 2, 4).tolist() == [[True, True, True, False], [True] * 4]
    assert Causal().keep(slice(0, 4), slice(0, 2), 4, 2).tolist() == [[False, False], [False, False], [True, False], [True, True]]


def test_windows_without_limits_are_full_and_causal() -> None:
    assert Window(-1, -1).is_full
    assert Window(-1, 0).is_causal
    assert not Window(0, -1).is_full
    assert not Window(-1, 1).is_causal


@pytest.mark.parametrize("mask", [*SIMPLE, *PACKED], ids=str)
def test_masks_parse_as_they_print(mask: Mask) -> None:
    assert parse_mask(str(mask)) == mask


def test_parse_scales_lengths_but_not_no_limit() -> None:
    assert parse_mask("window:-1,2", unit=64) == Window(-1, 128)
    assert parse_mask("documents:1,3", unit=10) == Documents((10, 30))
    assert parse_mask("prefix:2", unit=10) == Prefix(20)


@pytest.mark.parametrize(
    ("text", "meant"), [("", ""), ("fuller", "full"), ("Causl", "causal"), ("windows:1,2", "window"), ("tiles:2x2", "")]
)
def test_unknown_masks_list_the_forms(text: str, meant: str) -> None:
    with pytest.raises(ValueError, match="masks are written full, causal, window:LEFT,RIGHT") as raised:
        parse_mask(text)
    assert str(raised.value).partition("; did you mean ")[2] == (f"{meant}?" if meant else "")


@pytest.mark.parametrize("text", ["full:1", "causal:1", "window", "window:1", "window:1,2,3", "documents", "prefix:1,2"])
def test_known_masks_with_other_numbers_say_their_form(text: str) -> None:
    word = text.partition(":")[0]
    with pytest.raises(ValueError, match=f"mask '{text}' is written {word}{FORMS[word].usage}$"):
        parse_mask(text)


@pytest.mark.parametrize("text", ["window:a,b", "prefix:1.5", "documents:3,,4"])
def test_lengths_that_are_no_numbers(text: str) -> None:
    with pytest.raises(ValueError, match="lengths must be whole numbers"):
        parse_mask(text)


@pytest.mark.parametrize("left", [-2, 1.5, True, "3", 10**30])
def test_bad_windows(left: object) -> None:
    with pytest.raises(ValueError, match=r"window left must be a whole number >= 0 and below 2\^31, or -1 for no limit"):
        Window(left, 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="window right must be"):
        Window(0, left)  # type: ignore[arg-type]


@pytest.mark.parametrize("lengths", [(), (0,), (4, -1), (2.5,)])
def test_bad_documents(lengths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="document lengths must be whole numbers >= 1"):
        Documents(lengths)


@pytest.mark.parametrize("lengths", [(10, 10), (8, 9), (9, 8)])
def test_documents_must_fill_the_sequence(lengths: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"as many queries as keys, the sum of the document lengths \(9\)"):
        Documents((4, 5)).tile_map(*lengths, 4, 4)


def test_bad_prefixes() -> None:
    with pytest.raises(ValueError, match="prefix length must be a whole number >= 0"):
        Prefix(-1)
    with pytest.raises(ValueError, match="prefix length must be at most the number of keys, 8; got 9"):
        Prefix(9).tile_map(8, 8, 4, 4)


@pytest.mark.parametrize("blocks", [[[1, 0]], [True, False], np.zeros((0, 3), dtype=bool), np.ones((2, 2), dtype=int)])
def test_bad_tile_maps(blocks: object) -> None:
    with pytest.raises(ValueError, match="must be a non-empty 2-d boolean array"):
        TileMap(blocks, 4, 4)


def test_bad_blocks_and_shapes() -> None:
    with pytest.raises(ValueError, match="block_kv must be a whole number >= 1"):
        TileMap([[True]], 4, 0)
    with pytest.raises(ValueError, match=r"needs shape \(2, 3\); got \(1, 2\)"):
        TileMap([[True, True]], 4, 4).tile_map(8, 12, 4, 4)


@pytest.mark.parametrize("mask", [*SIMPLE, *PACKED, TileMap([[True, False], [False, True], [True, True]], 16, np.int64(8))], ids=str)
def test_json_round_trip(mask: Mask) -> None:
    assert as_mask(json.loads(json.dumps(mask_to_json(mask))), "mask") == mask


def test_tile_maps_compare_by_content() -> None:
    mask = TileMap([[True, False]], 8, 8)
    assert mask == TileMap(np.array([[True, False]]), 8, 8)
    assert hash(mask) == hash(TileMap([[True, False]], 8, 8))
    assert mask not in (TileMap([[True, True]], 8, 8), TileMap([[True, False]], 8, 4), TileMap([[True], [False]], 8, 8), Full())
    assert not mask.blocks.flags.writeable
