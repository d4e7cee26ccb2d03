"""FlashAttention's published test grid as parameters: lengths, head dims, head groups, windows, softcaps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from dash_attn import Causal, Full, Mask, Window
from devices import Case

Lengths = tuple[int, int]

LENGTHS: tuple[Lengths, ...] = (
    (1, 1),
    (1, 239),
    (3, 799),
    (64, 128),
    (113, 203),
    (128, 217),
    (113, 211),
    (108, 256),
    (256, 512),
    (384, 256),
    (512, 256),
    (640, 128),
    (1023, 1024),
    (1024, 1023),
    (1024, 1024),
    (2048, 2048),
    (4096, 4096),
)
HEADS = ((6, 6), (6, 2), (6, 1))  # one KV head a query head, grouped, one for all
DIMS = (64, 96, 128, 192, 256)
PADDED_DIMS = (8, 32, 40, 59, 80, 111, 160, 224)  # a kernel pads these
VALUE_DIMS = ((192, 128), (64, 256), (128, 64), (111, 59))  # of q and k, of v
DTYPES = (torch.bfloat16, torch.float16)
SOFTCAPS = (15.0, 50.0)

MASKS: dict[str, Callable[[Lengths], Mask]] = {
    "full": lambda lengths: Full(),
    "causal": lambda lengths: Causal(),
    "local": lambda lengths: Window(lengths[1] // 3, lengths[1] // 5),
    "causal local": lambda lengths: Window(lengths[1] // 4, 0),
    "no left limit": lambda lengths: Window(-1, lengths[1] // 7),
}


def dtype_of(dim: int, turn: int) -> torch.dtype:
    """float16 takes turns where it shares kernels: of 64, 128 and 256. A kernel takes seconds to compile."""
    padded = next(served for served in DIMS if served >= dim)
    return DTYPES[turn % 2 if padded in (64, 128, 256) else 0]


def batch_of(lengths: Lengths) -> int:
    """Many sequences where each has few rows: the largest error of a handful of numbers is a matter of luck."""
    return 16 if lengths[0] <= 3 else 1 if max(lengths) >= 1024 else 2


def length_cases() -> list[Case]:
    """Every pair of lengths with every head dim and three masks; heads and dtypes take turns."""
    cases = []
    for i, lengths in enumerate(LENGTHS):
        for j, name in enumerate(("full", "causal", "local")):
            for n, dim in enumerate(DIMS):
                heads, dtype = HEADS[(i + j + n) % 3], dtype_of(dim, i + j)
                cases.append(Case(lengths, MASKS[name](lengths), heads, dim, dtype=dtype, batch=batch_of(lengths)))
    return cases


def dim_cases() -> list[Case]:
    """Every head dim, padded or not, with every mask; lengths, heads and dtypes take turns."""
    dims = [*((dim, 0) for dim in DIMS + PADDED_DIMS), *VALUE_DIMS]
    lengths = ((113, 203), (384, 256), (300, 128), (239, 799))
    cases = []
    for i, (dim, v_dim) in enumerate(dims):
        for j, make_mask in enumerate(MASKS.values()):
            pair = lengths[(i + j) % 4]
            cases.append(Case(pair, make_mask(pair), HEADS[(i // 2 + j) % 3], dim, v_dim, dtype_of(max(dim, v_dim), i + j // 2)))
    return cases


def softcap_cases() -> list[Case]:
    kernels = ((64, DTYPES[0]), (128, DTYPES[0]), (256, DTYPES[0]), (128, DTYPES[1]))
    cases = []
    for i, lengths in enumerate(((113, 203), (384, 256), (1, 239), (1024, 1023))):
        for j, make_mask in enumerate(MASKS.values()):
            dim, dtype = kernels[(i + j) % 4]
            heads, softcap = HEADS[(i + 2 * j) % 3], SOFTCAPS[(i + j) % 2]
            cases.append(Case(lengths, make_mask(lengths), heads, dim, dtype=dtype, batch=batch_of(lengths), softcap=softcap))
    return cases


def some_for_the_cpu(cases: list[Case], every: int) -> list[Case]:
    """A part of the cases where dense attention is quick, with one sequence each unless that is a single row."""
    chosen = (case if case.lengths == (1, 1) else replace(case, batch=1) for case in cases[::every])
    return [case for case in chosen if case.lengths[0] * case.lengths[1] * case.dim < 2**25]
