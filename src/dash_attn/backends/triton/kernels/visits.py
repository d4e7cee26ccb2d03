"""Where a program works, and which tiles it visits. Partial tiles come first, then full ones; each group goes upward.

A tile visits what four numbers (a, b, c, d) say: [a, b) and [c, d) are partial, [b, c) is full. They are numbers of tiles where the
mask is a band, else places in a list of tiles.
"""

import triton
import triton.language as tl

BAND, ROWS, BLOCKS, BITS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
BIT_BLOCK = tl.constexpr(64)  # rows and columns of a block of a boolean matrix: masks/boolean_mask.py


@triton.jit
def place_of(
    number, q_ends, kv_ends, sequences, q_len, kv_len, tiles, heads, TILE: tl.constexpr, OF_KEYS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """(tile, head, sequence, first query, queries, first key, keys) of a program, by its number. Of packed sequences the first ones are
    tokens, and a tile may lie beyond its sequence: then it visits nothing, and nothing is stored."""
    slot = number % tiles
    if not OF_KEYS:
        slot = tiles - 1 - slot  # where the mask is causal, the longest rows start first
    head = (number // tiles) % heads
    sequence = number // tiles // heads
    q_first = number * 0
    kv_first = number * 0
    tile = slot
    if PACKED:
        index, tile = sequence_of(slot, kv_ends if OF_KEYS else q_ends, sequences, TILE)
        q_first = tl.load(q_ends + index)
        kv_first = tl.load(kv_ends + index)
        q_len = tl.load(q_ends + index + 1) - q_first
        kv_len = tl.load(kv_ends + index + 1) - kv_first
    return tile, head, sequence, q_first, q_len, kv_first, kv_len


@triton.jit
def sequence_of(slot, ends, sequences, TILE: tl.constexpr):
    """The packed sequence that a slot belongs to, and which of its tiles. Sequence i has the slots from ends[i] // TILE + i on, which
    are as many as its tiles, or one more."""
    low = sequences * 0
    high = sequences - 1
    while low < high:
        middle = (low + high + 1) // 2
        before = tl.load(ends + middle) // TILE + middle <= slot
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle - 1)
    return low, slot - tl.load(ends + low) // TILE - low


@triton.jit
def visits_of(tile, listed, bounds, own_len, other_len, left, right, OWN: tl.constexpr, OTHER: tl.constexpr, MASK: tl.constexpr):
    """Of a Q tile: KV tiles; of a KV tile, with lengths, sides and sizes the other way round: Q tiles. listed: its row of `bounds`."""
    if MASK == BAND:
        first = tile * OWN + other_len - own_len
        last = tl.minimum(tile * OWN + OWN, own_len) - 1 + other_len - own_len
        start = tl.maximum(first - left, 0)
        stop = tl.where(tile * OWN < own_len, tl.minimum(last + right + 1, other_len), 0)
        full_start = tl.maximum(last - left, 0)
        full_stop = tl.minimum(first + right + 1, other_len)
        a, b, c, d = four_bounds(start, full_start, full_stop, stop, OTHER)
    else:
        at = bounds + 4 * listed
        a, b, c, d = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    return a, b, c, d


@triton.jit
def four_bounds(start, full_start, full_stop, stop, SIZE: tl.constexpr):
    """Tiles of rows [start, stop), of which those inside [full_start, full_stop) are full. All but `start` may be out of order."""
    stop = tl.maximum(stop, start)
    a = start // SIZE
    d = tl.where(stop > start, (stop + SIZE - 1) // SIZE, a)
    b = tl.minimum(tl.maximum((full_start + SIZE - 1) // SIZE, a), d)
    c = tl.minimum(tl.maximum(tl.maximum(full_stop, 0) // SIZE, b), d)
    return a, b, c, d


@triton.jit
def partial_tile(i, a, b, c, visits, MASK: tl.constexpr):
    """The i-th partial tile."""
    tile = tl.where(i < b - a, a + i, c + i - (b - a))
    if MASK != BAND:
        tile = tl.load(visits + tile)
    return tile


@triton.jit
def full_tile(i, b, visits, MASK: tl.constexpr):
    tile = b + i
    if MASK != BAND:
        tile = tl.load(visits + tile)
    return tile


@triton.jit
def matrix_of(matrices, sequence, head, matrix_batch, matrix_head, MASK: tl.constexpr):
    """Which boolean matrix a query head has."""
    matrix = sequence * 0
    if MASK == BITS:
        matrix = tl.load(matrices + sequence * matrix_batch + head * matrix_head)
    return matrix


@triton.jit
def is_kept(
    row, column, first, end, kv_start, q_len, kv_len, blocks, places, first_place, block_q, block_kv, block_columns,
    BLOCK_KV: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Which elements attend. Rows and columns are (n, 1) and (1, m) or the other way round; [first, end) are a row's keys. Columns
    begin at kv_start. Of a boolean matrix `blocks` are words, and `places`, from first_place on, say where the words of each block are."""
    if MASK <= ROWS:  # a band, too
        kept = (column >= first) & (column < end)  # whether row and column are there, too: see row_bounds
    else:
        inside = (row < q_len) & (column < kv_len)
        if MASK == BLOCKS:
            place = (row // block_q).to(tl.int64) * block_columns + column // block_kv
            kept = tl.load(blocks + place, mask=inside, other=0) != 0
        else:
            block = kv_start // BIT_BLOCK
            word = words_of(row, block, blocks, places + first_place, block_columns, q_len, kv_len)
            if BLOCK_KV > BIT_BLOCK:  # a tile has one block of columns, or two
                after = words_of(row, block + 1, blocks, places + first_place, block_columns, q_len, kv_len)
                word = tl.where(column // BIT_BLOCK == block, word, after)
            kept = inside & ((word >> (column % BIT_BLOCK)) & 1 != 0)
    return kept


@triton.jit
def words_of(row, block, words, places, block_columns, q_len, kv_len):
    """Of each row, the 64 elements of a block of columns; bit j is column j."""
    inside = row < tl.where(block * BIT_BLOCK < kv_len, q_len, 0)  # `&` of a tile and a number: no mask to the interpreter of Triton 3.9
    place = tl.load(places + (row // BIT_BLOCK).to(tl.int64) * block_columns + block, mask=inside, other=0)
    return tl.load(words + place.to(tl.int64) * BIT_BLOCK + row % BIT_BLOCK, mask=inside, other=0)


@triton.jit
def row_bounds(row, rows, q_len, kv_len, left, right, MASK: tl.constexpr):
    """First kept key and end of the kept keys, by row, none beyond the last key and none of rows beyond the last; of other kinds of
    mask anything. Two numbers per row leave two comparisons per element."""
    if MASK == BAND:
        middle = row + (kv_len - q_len)
        first = tl.maximum(middle - left, 0)
        end = tl.where(row < q_len, tl.minimum(middle + right + 1, kv_len), 0)
    elif MASK == ROWS:
        first = tl.load(rows + 2 * row, mask=row < q_len, other=0)
        end = tl.load(rows + 2 * row + 1, mask=row < q_len, other=0)
    else:
        first, end = row, row
    return first, end
