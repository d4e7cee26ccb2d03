"""FlashAttention's test grid on packed batches: every sequence within the error budget, and with the bits it has alone."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from budget import assert_near
from dash_attn import Causal, Full, Mask, Window
from dense import assert_same_bits, run_ours
from devices import dim_features, on_devices, on_each_device, require
from packed_batches import Lengths, make_parts, run_packed

SELF: tuple[Lengths, ...] = (
    ((1, 1),),
    ((113, 113), (128, 128), (1, 1), (64, 64), (203, 203)),
    ((0, 0), (239, 239), (0, 0), (65, 65), (0, 0)),
)
CROSS: tuple[Lengths, ...] = (
    ((1, 239), (3, 799), (64, 128)),
    ((384, 256), (113, 203), (512, 256), (108, 256)),
    ((640, 128), (0, 77), (128, 217), (33, 0), (1, 1)),  # queries without keys, keys without queries
)
LONG: tuple[Lengths, ...] = (
    ((512, 512), (3, 3), (799, 799)),
    ((1024, 1024), (1023, 1024), (1024, 1023), (2048, 2048)),
    ((4096, 4096), (7, 7), (129, 129)),
)
MASKS = (Full(), Causal(), Window(77, 31), Window(130, 0))
BF16, FP16 = torch.bfloat16, torch.float16
# Heads, head dim and dtype.
SHAPES = (((6, 6), 128, BF16), ((6, 2), 64, BF16), ((6, 1), 128, FP16), ((4, 2), 256, BF16), ((6, 3), 111, BF16), ((8, 2), 64, BF16))


class Packed(NamedTuple):
    lengths: Lengths
    mask: Mask
    heads: tuple[int, int]
    dim: int
    dtype: torch.dtype = BF16

    def __str__(self) -> str:
        lengths = "+".join(f"{q}x{kv}" for q, kv in self.lengths)
        return f"{lengths}-{self.mask}-{self.heads[0]}of{self.heads[1]}-d{self.dim}-{str(self.dtype)[6:]}"


def cases(batches: tuple[Lengths, ...]) -> list[Packed]:
    """Every batch with every mask; heads and head dims take turns."""
    turns = ((lengths, mask, SHAPES[(i + 2 * j) % 5]) for i, lengths in enumerate(batches) for j, mask in enumerate(MASKS))
    return [Packed(lengths, mask, *shape) for lengths, mask, shape in turns]


def assert_packed(device: str, case: Packed, softcap: float = 0.0) -> None:
    require(device, "varlen", *dim_features(case.dim), *(["softcap"] if softcap else []))
    parts = make_parts(device, case.lengths, case.heads, case.dim, dtype=case.dtype)
    for part, ours in zip(parts, run_packed(parts, case.mask, softcap=softcap), strict=True):
        what = f"sequence of {part[0].shape[1]} queries and {part[1].shape[1]} keys"
        assert_same_bits(ours, run_ours(part, case.mask, softcap=softcap), what)
        if part[0].shape[1] >= 64 and part[1].numel():  # the largest error of fewer rows is luck; test_grid_dense has many such
            assert_near(ours, part, case.mask, softcap=softcap)


# Long enough for circles of chains, of equal and unequal blocks, with fewer queries than keys too.
CIRCLES = [
    Packed(((2200, 2200), (300, 4500), (2049, 2048), (64, 2300)), Full(), heads, dim) for heads, dim in (((4, 4), 64), ((4, 2), 128))
]


@pytest.mark.parametrize(("device", "case"), on_devices(cases(SELF + CROSS), [*cases(SELF + CROSS + LONG), *CIRCLES]))
def test_packed_batches(device: str, case: Packed) -> None:
    assert_packed(device, case)


@on_each_device
def test_softcap(device: str) -> None:
    assert_packed(device, Packed(CROSS[1], Causal(), (4, 2), 128), softcap=3.0)


@on_each_device
def test_queries_without_keys_and_keys_without_queries(device: str) -> None:
    require(device, "varlen")
    parts = make_parts(device, ((40, 0), (70, 70), (0, 90), (300, 100)))
    no_keys, whole, no_queries, more_queries = run_packed(parts, Causal())
    assert not any(x.any() for x in (no_keys.out, no_keys.dq))
    assert (no_keys.lse == -torch.inf).all()
    assert not any(x.any() for x in (no_queries.dk, no_queries.dv))
    assert not any(x[:, :200].any() for x in (more_queries.out, more_queries.dq))
    assert (more_queries.lse[:, :, :200] == -torch.inf).all()
    assert all(x[:, 1:].any() for x in (whole.out, whole.dq, whole.dk, whole.dv)), "the control: the others have values"
    assert more_queries.lse[:, :, 200:].isfinite().all()
