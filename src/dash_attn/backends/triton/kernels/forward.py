"""The forward. A program owns a Q tile of one query head and visits its KV tiles in a fixed order."""

import triton
import triton.language as tl

from .tiles import LN_2, LOG2_E, capped, load_columns, load_rows, start_of, store_rows
from .visits import full_tile, is_kept, matrix_of, partial_tile, place_of, row_bounds, visits_of

NUMBERS = (
    *("q_batch", "q_row", "q_head", "k_batch", "k_row", "k_head", "v_batch", "v_row", "v_head"),
    *("heads", "group", "tiles", "sequences", "q_len", "kv_len", "left", "right", "block_q", "block_kv", "block_columns"),
    *("matrix_batch", "matrix_head", "matrix_blocks"),
)


# One argument per line would take pages.
# fmt: off
@triton.jit(do_not_specialize=NUMBERS)
def attention_forward(
    q, k, v, out, lse, sinks, q_ends, kv_ends, rows, bounds, visits, blocks, places, matrices,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    heads, group, tiles, sequences, q_len, kv_len, left, right, block_q, block_kv, block_columns,
    matrix_batch, matrix_head, matrix_blocks, scale_log2, cap_scale,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, PARTIAL_STAGES: tl.constexpr,
    MASK: tl.constexpr, PACKED: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
):
    tokens = q_len
    tile, head, sequence, q_first, q_len, kv_first, kv_len = place_of(
        tl.program_id(0), q_ends, kv_ends, sequences, q_len, kv_len, tiles, heads, BLOCK_Q, False, PACKED
    )
    start = tile * BLOCK_Q
    q_at = start_of(q, sequence, q_first, head, q_batch, q_row, q_head)
    k_at = start_of(k, sequence, kv_first, head // group, k_batch, k_row, k_head)
    v_at = start_of(v, sequence, kv_first, head // group, v_batch, v_row, v_head)
    queries = load_rows(q_at, start, q_row, q_len, HEAD_DIM, BLOCK_Q, BLOCK_DIM, True)
    row = start + tl.arange(0, BLOCK_Q)
    first, end = row_bounds(row, rows, q_len, kv_len, left, right, MASK)
    highest = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    if SINKS:
        sink = tl.load(sinks + head)
        highest = tl.zeros([BLOCK_Q], tl.float32) + sink * LOG2_E
        total += tl.where(sink == float("-inf"), 0.0, 1.0)
    sums = tl.zeros([BLOCK_Q, BLOCK_VALUE], tl.float32)
    matrix = matrix_of(matrices, sequence, head, matrix_batch, matrix_head, MASK)
    a, b, c, d = visits_of(tile, matrix * tiles + tile, bounds, q_len, kv_len, left, right, BLOCK_Q, BLOCK_KV, MASK)
    for i in tl.range(0, b - a + d - c, num_stages=PARTIAL_STAGES):
        kv_start = partial_tile(i, a, b, c, visits, MASK) * BLOCK_KV
        keys = load_columns(k_at, kv_start, k_row, kv_len, HEAD_DIM, BLOCK_KV, BLOCK_DIM, True)
        scores = capped(tl.dot(queries, keys, input_precision="ieee"), cap_scale, SOFTCAP)
        column = kv_start + tl.arange(0, BLOCK_KV)
        keep = is_kept(
            row[:, None], column[None, :], first[:, None], end[:, None], kv_start, q_len, kv_len,
            blocks, places, matrix.to(tl.int64) * matrix_blocks, block_q, block_kv, block_columns, BLOCK_KV, MASK,
        )
        weights, fade, highest, total = soften(tl.where(keep, scores, float("-inf")), highest, total, scale_log2)
        values = load_rows(v_at, kv_start, v_row, kv_len, VALUE_DIM, BLOCK_KV, BLOCK_VALUE, True)
        sums = tl.dot(weights.to(values.dtype), values, sums * fade[:, None], input_precision="ieee")
    for i in tl.range(0, c - b):
        kv_start = full_tile(i, b, visits, MASK) * BLOCK_KV
        keys = load_columns(k_at, kv_start, k_row, kv_len, HEAD_DIM, BLOCK_KV, BLOCK_DIM, False)
        scores = capped(tl.dot(queries, keys, input_precision="ieee"), cap_scale, SOFTCAP)
        weights, fade, highest, total = soften(scores, highest, total, scale_log2)
        values = load_rows(v_at, kv_start, v_row, kv_len, VALUE_DIM, BLOCK_KV, BLOCK_VALUE, False)
        sums = tl.dot(weights.to(values.dtype), values, sums * fade[:, None], input_precision="ieee")
    nothing = total == 0.0
    divisor = tl.where(nothing, 1.0, total)
    of_rows = tl.where(nothing, float("-inf"), (highest + tl.log2(divisor)) * LN_2)
    tl.store(lse + (sequence * heads + head).to(tl.int64) * tokens + q_first + row, of_rows, mask=row < q_len)
    stride = heads * (VALUE_DIM // 8)
    out_at = start_of(out, sequence, q_first, head, tokens.to(tl.int64) * stride, stride, VALUE_DIM // 8)
    store_rows(out_at, start, stride, q_len, sums / divisor[:, None], VALUE_DIM, BLOCK_Q, BLOCK_VALUE)


@triton.jit
def soften(scores, highest, total, scale_log2):
    """One step of the online softmax, in base 2: weights, the factor for what was summed before, new maximum, new sum."""
    now = tl.maximum(highest, tl.max(scores, 1) * scale_log2)
    base = tl.where(now == float("-inf"), 0.0, now)  # a row that attends nothing yet: exp2(-inf - 0) is 0, not NaN
    weights = tl.exp2(tl.fma(scores, scale_log2, -base[:, None]))
    fade = tl.exp2(highest - base)
    return weights, fade, now, total * fade + tl.sum(weights, 1)
