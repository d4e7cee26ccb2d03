"""The problems of the golden files. Only public names are used, so that an older version can be asked for its orders too.

SMALL ones are written out in tests/golden/<schedule>.json. MANY are kept as one hash per schedule in
tests/golden/order_hashes.txt; they are a fixed list, in which tiles, groups and head offsets take turns.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

import numpy as np

from dash_attn import Causal, Documents, Full, Mask, Prefix, TileMap, Window
from dash_attn.scheduling import Problem

SMALL = {
    "full 8x4": Problem.from_tiles("full", 8, 4, heads=2),
    "full 5x7": Problem.from_tiles("full", 5, 7, heads=2),
    "full 10x16, group 2": Problem.from_tiles("full", 10, 16, group=2),
    "full 10x8, group 2": Problem.from_tiles("full", 10, 8, group=2),  # the last that auto alternates
    "full 10x17, group 2": Problem.from_tiles("full", 10, 17, group=2),  # auto's shift_blocks: four blocks
    "causal 8x4": Problem.from_tiles("causal", 8, 4, heads=2),
    "causal 7x7": Problem.from_tiles("causal", 7, 7, heads=2),
    "causal 4x9": Problem.from_tiles("causal", 4, 9, heads=2),
    "causal 6x3, group 4": Problem.from_tiles("causal", 6, 3, heads=2, group=4),
    "causal 9x9, group 3, batch 2": Problem.from_tiles("causal", 9, 9, heads=3, group=3, batch=2),
    "window 12x12, group 3, batch 2": Problem.from_tiles("window:8,0", 12, 12, heads=3, group=3, batch=2),  # two classes
    "causal 9x9, group 4": Problem.from_tiles("causal", 9, 9, heads=2, group=4),  # one class
    "causal 6x4, head offset 1": Problem.from_tiles("causal", 6, 4, heads=3, group=2, head_offset=1),
    "causal 8x8, group 3 in 3 parts": Problem(Causal(), 4096, 4096, 512, 512, heads=2, group=3),
    "causal 4x4, group 5 in 3 parts, head offset 1": Problem(Causal(), 2048, 2048, 512, 512, heads=2, group=5, head_offset=1),
    "full 10x17, group 2 in 2 parts": Problem(Full(), 2560, 4352, 256, 256, heads=2, group=2),  # shift_blocks: one kind
    "causal, few queries": Problem(Causal(), 150, 1000, 64, 128, heads=2),
    "causal, few keys": Problem(Causal(), 600, 300, 64, 128, heads=2),  # rows without a key
    "window 12x6": Problem.from_tiles("window:2,1", 12, 6, heads=2),
    "window on the past": Problem(Window(130, 0), 700, 700, 64, 128, heads=2, group=2),
    "window on the future": Problem(Window(0, 130), 700, 700, 64, 128, heads=2),
    "window open to the left": Problem(Window(-1, 70), 700, 700, 64, 128, heads=2),
    "window open to the right": Problem(Window(70, -1), 700, 700, 64, 128, heads=2),
    "window, few queries": Problem(Window(200, 60), 200, 900, 64, 128, heads=2),
    "documents 10x10": Problem.from_tiles("documents:3,5,2", 10, 10, heads=2),
    "documents, not causal": Problem(Documents((100, 300, 33, 267), causal=False), 700, 700, 64, 128, heads=2, group=2),
    "prefix 8x8": Problem.from_tiles("prefix:3", 8, 8, heads=2),
    "prefix, few queries": Problem(Prefix(500), 300, 800, 64, 128, heads=2),
    "random 9x7": Problem.from_tiles(np.random.default_rng(7).random((9, 7)) < 0.5, 9, 7, heads=2),
    "dense column 40x40": Problem.from_tiles(np.eye(40, dtype=bool) | (np.arange(40) == 3), 40, 40),
}
LENGTHS = ((1, 1), (129, 129), (500, 500), (1000, 1000), (2304, 2304), (4096, 4096), (300, 2500), (2500, 300))
LONG_LENGTHS = ((9000, 9000), (16384, 16384))  # full masks only: shift_blocks with blocks of the largest size
TILES = ((64, 128), (128, 128), (64, 64), (128, 64))
GROUPS, HEAD_OFFSETS = (1, 2, 8, 3, 4), (0, 1, 0)


def many() -> Iterator[tuple[str, Problem]]:
    """(how it is written, problem), always the same."""
    turns = zip(cycle(TILES), cycle(GROUPS), cycle(HEAD_OFFSETS), strict=False)  # 4, 5 and 3 have no common factor
    for q_len, kv_len in LENGTHS:
        for name, mask in _masks(q_len, kv_len):
            yield _problem(name, mask, (q_len, kv_len), *next(turns))
    for lengths in LONG_LENGTHS:
        for tiles in TILES[:2]:
            yield _problem("full", Full(), lengths, tiles, 2, 0)


def _problem(name: str, mask: Mask, lengths: tuple[int, int], tiles: tuple[int, int], group: int, offset: int) -> tuple[str, Problem]:
    text = f"{name} q={lengths[0]} kv={lengths[1]} tiles={tiles[0]}x{tiles[1]} group={group} head_offset={offset}"
    return text, Problem(mask, *lengths, *tiles, heads=3, group=group, batch=2, head_offset=offset)


def _masks(q_len: int, kv_len: int) -> Iterator[tuple[str, Mask]]:
    windows = ((300, 0), (0, 300), (150, 90), (-1, 100), (100, -1))
    for mask in (Full(), Causal(), *(Window(*sides) for sides in windows), Prefix(min(400, kv_len))):
        yield str(mask), mask
    if q_len == kv_len:
        yield "documents", Documents(_document_lengths(q_len))
        yield "documents-full", Documents(_document_lengths(q_len), causal=False)
    for seed, percent in ((1, 15), (2, 60)):
        shape = -(-q_len // 64), -(-kv_len // 64)
        blocks = np.random.RandomState(seed).randint(0, 100, shape) < percent  # a frozen stream: the same with every numpy
        yield f"blocks:seed={seed},percent={percent}", TileMap(blocks, 64, 64)


def _document_lengths(tokens: int) -> tuple[int, ...]:
    """Short and long ones in turns, none a multiple of a tile."""
    lengths = list[int]()
    for length in cycle((150, 33, 610, 7, 1201)):
        if sum(lengths) + length >= tokens:
            return (*lengths, tokens - sum(lengths))
        lengths.append(length)
    raise AssertionError("a cycle has no end")
