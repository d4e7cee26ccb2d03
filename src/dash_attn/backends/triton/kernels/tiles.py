"""Tiles of memory, and the scores of a tile."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def start_of(base, sequence, row, head, batch_stride, row_stride, head_stride):
    """The address of a row's first number."""
    return base + (sequence.to(tl.int64) * batch_stride + row.to(tl.int64) * row_stride + head.to(tl.int64) * head_stride) * 8


@triton.jit
def load_rows(at, first, stride, rows, DIM: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, CHECKED: tl.constexpr):
    """(SIZE, BLOCK): rows from `first` on, of which there are `rows`; zeros beyond. Not CHECKED: all rows are there."""
    return load_tile(at, first, stride, rows, tl.arange(0, SIZE)[:, None], tl.arange(0, BLOCK)[None, :], DIM, BLOCK, CHECKED)


@triton.jit
def load_columns(at, first, stride, rows, DIM: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, CHECKED: tl.constexpr):
    """The same rows as columns: (BLOCK, SIZE)."""
    return load_tile(at, first, stride, rows, tl.arange(0, SIZE)[None, :], tl.arange(0, BLOCK)[:, None], DIM, BLOCK, CHECKED)


@triton.jit
def load_tile(at, first, stride, rows, row, column, DIM: tl.constexpr, BLOCK: tl.constexpr, CHECKED: tl.constexpr):
    place = at + first.to(tl.int64) * (stride * 8) + (row * (stride * 8) + column)
    if CHECKED:
        tile = tl.load(place, mask=(first + row < rows) & (column < DIM), other=0.0)
    elif DIM != BLOCK:
        tile = tl.load(place, mask=column < DIM, other=0.0)
    else:
        tile = tl.load(place)
    return tile


@triton.jit
def load_numbers(at, first, rows, beyond, SIZE: tl.constexpr, CHECKED: tl.constexpr):
    """(SIZE): a number per row; `beyond` the last one."""
    row = first + tl.arange(0, SIZE)
    return tl.load(at + row, mask=row < rows, other=beyond) if CHECKED else tl.load(at + row)


@triton.jit
def store_rows(at, first, stride, rows, values, DIM: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.arange(0, SIZE)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    place = at + first.to(tl.int64) * (stride * 8) + (row * (stride * 8) + column)
    tl.store(place, values.to(at.dtype.element_ty), mask=(first + row < rows) & (column < DIM))


@triton.jit
def capped(scores, cap_scale, SOFTCAP: tl.constexpr):
    """Scores in the unit in which `scale_log2` makes them exponents of two: with softcap, their tanh."""
    if SOFTCAP:
        scores = 1.0 - 2.0 / (1.0 + tl.exp2(scores * cap_scale))
    return scores
