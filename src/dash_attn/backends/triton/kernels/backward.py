"""The backward in two passes without any hand-over: dK and dV by KV tile, dQ by Q tile. Each sum is one program's alone.

Each pass is a kernel, and part of the kernel that runs both in one launch (`gradients`), which gives it its number.
"""

import triton
import triton.language as tl

from .tiles import capped, load_columns, load_numbers, load_rows, start_of, store_rows
from .visits import BAND, BITS, full_tile, is_kept, matrix_of, partial_tile, place_of, row_bounds, visits_of

OF_BOTH = (
    *("q_batch", "q_row", "q_head", "k_batch", "k_row", "k_head", "v_batch", "v_row", "v_head", "do_batch", "do_row", "do_head"),
    *("heads", "group", "sequences", "q_len", "kv_len", "row_units", "left", "right"),
)
NUMBERS = (*OF_BOTH, "tiles", "block_q", "block_kv", "block_columns", "matrix_batch", "matrix_head", "matrix_blocks")


# One argument per line would take pages.
# fmt: off
@triton.jit(do_not_specialize=NUMBERS)
def key_gradients(
    number, q, k, v, dout, minus_lse, delta, dk, dv, q_ends, kv_ends, rows, bounds, visits, blocks, places, matrices,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, do_batch, do_row, do_head,
    heads, group, tiles, sequences, q_len, kv_len, row_units, left, right, block_q, block_kv, block_columns,
    matrix_batch, matrix_head, matrix_blocks, scale, scale_log2, cap_scale,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, PARTIAL_STAGES: tl.constexpr,
    MASK: tl.constexpr, PACKED: tl.constexpr, SOFTCAP: tl.constexpr, GROUPED: tl.constexpr,
):
    """dK and dV of a KV tile of one KV head: query head by query head of its group, each Q tile by Q tile. `heads` are KV heads."""
    kv_tokens = kv_len
    tile, kv_head, sequence, q_first, q_len, kv_first, kv_len = place_of(
        tl.program_id(0) if number is None else number, q_ends, kv_ends, sequences, q_len, kv_len, tiles, heads, BLOCK_KV, True, PACKED
    )
    start = tile * BLOCK_KV
    k_at = start_of(k, sequence, kv_first, kv_head, k_batch, k_row, k_head)
    v_at = start_of(v, sequence, kv_first, kv_head, v_batch, v_row, v_head)
    keys = load_rows(k_at, start, k_row, kv_len, HEAD_DIM, BLOCK_KV, BLOCK_DIM, True)
    values = load_rows(v_at, start, v_row, kv_len, VALUE_DIM, BLOCK_KV, BLOCK_VALUE, True)
    column = start + tl.arange(0, BLOCK_KV)
    dk_sum = tl.zeros([BLOCK_KV, BLOCK_DIM], tl.float32)
    dv_sum = tl.zeros([BLOCK_KV, BLOCK_VALUE], tl.float32)
    matrix = kv_head * 0
    a, b, c, d = visits_of(tile, tile, bounds, kv_len, q_len, right, left, BLOCK_KV, BLOCK_Q, MASK)
    for member in tl.range(0, group if GROUPED else 1):  # a loop of one is none to the compiler, and takes no registers
        head = kv_head * group + member
        if MASK == BITS:  # query heads of a group may differ
            matrix = matrix_of(matrices, sequence, head, matrix_batch, matrix_head, MASK)
            a, b, c, d = visits_of(tile, matrix * tiles + tile, bounds, kv_len, q_len, right, left, BLOCK_KV, BLOCK_Q, MASK)
        q_at = start_of(q, sequence, q_first, head, q_batch, q_row, q_head)
        do_at = start_of(dout, sequence, q_first, head, do_batch, do_row, do_head)
        of_rows = (sequence * (heads * group) + head).to(tl.int64) * (row_units * 8) + q_first
        for i in tl.range(0, b - a + d - c, num_stages=PARTIAL_STAGES):
            q_start = partial_tile(i, a, b, c, visits, MASK) * BLOCK_Q
            row = q_start + tl.arange(0, BLOCK_Q)
            first, end = row_bounds(row, rows, q_len, kv_len, left, right, MASK)
            keep = is_kept(
                row[None, :], column[:, None], first[None, :], end[None, :], start, q_len, kv_len,
                blocks, places, matrix.to(tl.int64) * matrix_blocks, block_q, block_kv, block_columns, BLOCK_KV, MASK,
            )
            dk_sum, dv_sum = add_queries(
                dk_sum, dv_sum, keys, values, keep, q_at, do_at, minus_lse + of_rows, delta + of_rows, q_start, q_row, do_row, q_len,
                scale_log2, cap_scale, HEAD_DIM, VALUE_DIM, BLOCK_DIM, BLOCK_VALUE, BLOCK_Q, SOFTCAP, True,
            )
        for i in tl.range(0, c - b):
            q_start = full_tile(i, b, visits, MASK) * BLOCK_Q
            dk_sum, dv_sum = add_queries(
                dk_sum, dv_sum, keys, values, None, q_at, do_at, minus_lse + of_rows, delta + of_rows, q_start, q_row, do_row, q_len,
                scale_log2, cap_scale, HEAD_DIM, VALUE_DIM, BLOCK_DIM, BLOCK_VALUE, BLOCK_Q, SOFTCAP, False,
            )
    dk_row, dv_row = heads * (HEAD_DIM // 8), heads * (VALUE_DIM // 8)
    dk_at = start_of(dk, sequence, kv_first, kv_head, kv_tokens.to(tl.int64) * dk_row, dk_row, HEAD_DIM // 8)
    dv_at = start_of(dv, sequence, kv_first, kv_head, kv_tokens.to(tl.int64) * dv_row, dv_row, VALUE_DIM // 8)
    store_rows(dk_at, start, dk_row, kv_len, dk_sum * scale, HEAD_DIM, BLOCK_KV, BLOCK_DIM)
    store_rows(dv_at, start, dv_row, kv_len, dv_sum, VALUE_DIM, BLOCK_KV, BLOCK_VALUE)


@triton.jit
def add_queries(
    dk_sum, dv_sum, keys, values, keep, q_at, do_at, minus_lse, delta, q_start, q_row, do_row, q_len, scale_log2, cap_scale,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    BLOCK_Q: tl.constexpr, SOFTCAP: tl.constexpr, PARTIAL: tl.constexpr,
):
    """dK and dV with a Q tile added. Scores are transposed: keys by queries."""
    queries = load_columns(q_at, q_start, q_row, q_len, HEAD_DIM, BLOCK_Q, BLOCK_DIM, PARTIAL)
    of_rows = load_numbers(minus_lse, q_start, q_len, float("-inf"), BLOCK_Q, PARTIAL)
    scores = capped(tl.dot(keys, queries, input_precision="ieee"), cap_scale, SOFTCAP)
    weights = tl.exp2(tl.fma(scores, scale_log2, of_rows[None, :]))
    if PARTIAL:
        weights = tl.where(keep, weights, 0.0)
    douts = load_rows(do_at, q_start, do_row, q_len, VALUE_DIM, BLOCK_Q, BLOCK_VALUE, PARTIAL)
    dv_sum = tl.dot(weights.to(douts.dtype), douts, dv_sum, input_precision="ieee")
    deltas = load_numbers(delta, q_start, q_len, 0.0, BLOCK_Q, PARTIAL)
    dweights = tl.dot(values, tl.trans(douts), input_precision="ieee")
    dscores = weights * (dweights - deltas[None, :])
    if SOFTCAP:
        dscores *= 1.0 - scores * scores
    return tl.dot(dscores.to(queries.dtype), tl.trans(queries), dk_sum, input_precision="ieee"), dv_sum


@triton.jit(do_not_specialize=NUMBERS)
def query_gradients(
    number, q, k, v, dout, minus_lse, delta, dq, q_ends, kv_ends, rows, bounds, visits, blocks, places, matrices,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, do_batch, do_row, do_head,
    heads, group, tiles, sequences, q_len, kv_len, row_units, left, right, block_q, block_kv, block_columns,
    matrix_batch, matrix_head, matrix_blocks, scale, scale_log2, cap_scale,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, PARTIAL_STAGES: tl.constexpr,
    MASK: tl.constexpr, PACKED: tl.constexpr, SOFTCAP: tl.constexpr,
):
    """dQ of a Q tile of one query head, KV tile by KV tile. `heads` are query heads."""
    tokens = q_len
    tile, head, sequence, q_first, q_len, kv_first, kv_len = place_of(
        tl.program_id(0) if number is None else number, q_ends, kv_ends, sequences, q_len, kv_len, tiles, heads, BLOCK_Q, False, PACKED
    )
    start = tile * BLOCK_Q
    q_at = start_of(q, sequence, q_first, head, q_batch, q_row, q_head)
    do_at = start_of(dout, sequence, q_first, head, do_batch, do_row, do_head)
    k_at = start_of(k, sequence, kv_first, head // group, k_batch, k_row, k_head)
    v_at = start_of(v, sequence, kv_first, head // group, v_batch, v_row, v_head)
    of_rows = (sequence * heads + head).to(tl.int64) * (row_units * 8) + q_first
    queries = load_rows(q_at, start, q_row, q_len, HEAD_DIM, BLOCK_Q, BLOCK_DIM, True)
    douts = load_rows(do_at, start, do_row, q_len, VALUE_DIM, BLOCK_Q, BLOCK_VALUE, True)
    lses = load_numbers(minus_lse + of_rows, start, q_len, float("-inf"), BLOCK_Q, True)
    deltas = load_numbers(delta + of_rows, start, q_len, 0.0, BLOCK_Q, True)
    row = start + tl.arange(0, BLOCK_Q)
    first, end = row_bounds(row, rows, q_len, kv_len, left, right, MASK)
    dq_sum = tl.zeros([BLOCK_Q, BLOCK_DIM], tl.float32)
    matrix = matrix_of(matrices, sequence, head, matrix_batch, matrix_head, MASK)
    a, b, c, d = visits_of(tile, matrix * tiles + tile, bounds, q_len, kv_len, left, right, BLOCK_Q, BLOCK_KV, MASK)
    for i in tl.range(0, b - a + d - c, num_stages=PARTIAL_STAGES):
        kv_start = partial_tile(i, a, b, c, visits, MASK) * BLOCK_KV
        column = kv_start + tl.arange(0, BLOCK_KV)
        keep = is_kept(
            row[:, None], column[None, :], first[:, None], end[:, None], kv_start, q_len, kv_len,
            blocks, places, matrix.to(tl.int64) * matrix_blocks, block_q, block_kv, block_columns, BLOCK_KV, MASK,
        )
        dq_sum = add_keys(
            dq_sum, queries, douts, lses, deltas, keep, k_at, v_at, kv_start, k_row, v_row, kv_len, scale_log2, cap_scale,
            HEAD_DIM, VALUE_DIM, BLOCK_DIM, BLOCK_VALUE, BLOCK_KV, SOFTCAP, True,
        )
    for i in tl.range(0, c - b):
        kv_start = full_tile(i, b, visits, MASK) * BLOCK_KV
        dq_sum = add_keys(
            dq_sum, queries, douts, lses, deltas, None, k_at, v_at, kv_start, k_row, v_row, kv_len, scale_log2, cap_scale,
            HEAD_DIM, VALUE_DIM, BLOCK_DIM, BLOCK_VALUE, BLOCK_KV, SOFTCAP, False,
        )
    stride = heads * (HEAD_DIM // 8)
    dq_at = start_of(dq, sequence, q_first, head, tokens.to(tl.int64) * stride, stride, HEAD_DIM // 8)
    store_rows(dq_at, start, stride, q_len, dq_sum * scale, HEAD_DIM, BLOCK_Q, BLOCK_DIM)


@triton.jit
def add_keys(
    dq_sum, queries, douts, lses, deltas, keep, k_at, v_at, kv_start, k_row, v_row, kv_len, scale_log2, cap_scale,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    BLOCK_KV: tl.constexpr, SOFTCAP: tl.constexpr, PARTIAL: tl.constexpr,
):
    """dQ with a KV tile added."""
    keys = load_columns(k_at, kv_start, k_row, kv_len, HEAD_DIM, BLOCK_KV, BLOCK_DIM, PARTIAL)
    scores = capped(tl.dot(queries, keys, input_precision="ieee"), cap_scale, SOFTCAP)
    weights = tl.exp2(tl.fma(scores, scale_log2, lses[:, None]))
    if PARTIAL:
        weights = tl.where(keep, weights, 0.0)
    values = load_columns(v_at, kv_start, v_row, kv_len, VALUE_DIM, BLOCK_KV, BLOCK_VALUE, PARTIAL)
    dweights = tl.dot(douts, values, input_precision="ieee")
    dscores = weights * (dweights - deltas[:, None])
    if SOFTCAP:
        dscores *= 1.0 - scores * scores
    return tl.dot(dscores.to(keys.dtype), tl.trans(keys), dq_sum, input_precision="ieee")


@triton.jit(do_not_specialize=(*OF_BOTH, "key_tiles", "query_tiles"))
def gradients(
    q, k, v, dout, minus_lse, delta, dq, dk, dv, q_ends, kv_ends,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, do_batch, do_row, do_head,
    heads, group, key_tiles, query_tiles, sequences, q_len, kv_len, row_units, left, right, scale, scale_log2, cap_scale,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    KEYS_Q: tl.constexpr, KEYS_KV: tl.constexpr, KEYS_PARTIAL: tl.constexpr,
    QUERIES_Q: tl.constexpr, QUERIES_KV: tl.constexpr, QUERIES_PARTIAL: tl.constexpr,
    PACKED: tl.constexpr, SOFTCAP: tl.constexpr, GROUPED: tl.constexpr,
):
    """Both passes in one launch, for bands: what the first pass leaves idle at its end, programs of the second take. Each program does
    exactly what it does in the kernel of its pass, so the bits are the same.

    KV head by KV head, whose tensors the cache then holds: its KV tiles, then the Q tiles of its query heads. `heads` are KV heads.
    """
    of_head = key_tiles + group * query_tiles
    kv_head = tl.program_id(0) // of_head
    slot = tl.program_id(0) % of_head
    if slot < key_tiles:
        key_gradients(
            kv_head * key_tiles + slot, q, k, v, dout, minus_lse, delta, dk, dv, q_ends, kv_ends, None, None, None, None, None, None,
            q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, do_batch, do_row, do_head,
            heads, group, key_tiles, sequences, q_len, kv_len, row_units, left, right, 1, 1, 1, 0, 0, 0, scale, scale_log2, cap_scale,
            HEAD_DIM, VALUE_DIM, BLOCK_DIM, BLOCK_VALUE, KEYS_Q, KEYS_KV, KEYS_PARTIAL, BAND, PACKED, SOFTCAP, GROUPED,
        )
    else:
        query_gradients(
            kv_head * group * query_tiles + slot - key_tiles, q, k, v, dout, minus_lse, delta, dq, q_ends, kv_ends,
            None, None, None, None, None, None,
            q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, do_batch, do_row, do_head,
            heads * group, group, query_tiles, sequences, q_len, kv_len, row_units, left, right, 1, 1, 1, 0, 0, 0,
            scale, scale_log2, cap_scale,
            HEAD_DIM, VALUE_DIM, BLOCK_DIM, BLOCK_VALUE, QUERIES_Q, QUERIES_KV, QUERIES_PARTIAL, BAND, PACKED, SOFTCAP,
        )
