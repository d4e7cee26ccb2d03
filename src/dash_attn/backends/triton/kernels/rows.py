"""Numbers per row: what the backward needs of each before it starts, and the sums that give the gradient of the sinks."""

import triton
import triton.language as tl

from .tiles import LOG2_E, load_rows, start_of

NO_OFFSETS = tl.constexpr(-2)  # as in call/offsets.py


@triton.jit(do_not_specialize=("out_batch", "out_row", "out_head", "do_batch", "do_row", "do_head", "heads", "q_len", "row_units"))
def row_statistics(
    out, dout, lse, dlse, minus_lse, delta, out_batch, out_row, out_head, do_batch, do_row, do_head, heads, q_len, row_units,
    VALUE_DIM: tl.constexpr, BLOCK_VALUE: tl.constexpr, BLOCK_Q: tl.constexpr, WITH_DLSE: tl.constexpr,
):  # fmt: skip
    """The LSE in base 2, negated, because what is added to scores costs nothing and what is subtracted does; and delta: the row sum of
    dO * O less the gradient of the LSE. Packed sequences are one."""
    number = tl.program_id(0)
    tiles = tl.cdiv(q_len, BLOCK_Q)
    start = (number % tiles) * BLOCK_Q
    head = (number // tiles) % heads
    sequence = number // tiles // heads
    out_at = start_of(out, sequence, start, head, out_batch, out_row, out_head)
    do_at = start_of(dout, sequence, start, head, do_batch, do_row, do_head)
    outs = load_rows(out_at, start * 0, out_row, q_len - start, VALUE_DIM, BLOCK_Q, BLOCK_VALUE, True).to(tl.float32)
    douts = load_rows(do_at, start * 0, do_row, q_len - start, VALUE_DIM, BLOCK_Q, BLOCK_VALUE, True).to(tl.float32)
    sums = tl.sum(outs * douts, 1)
    row = start + tl.arange(0, BLOCK_Q)
    place = (sequence * heads + head).to(tl.int64) * q_len + row
    lses = tl.load(lse + place, mask=row < q_len, other=0.0)
    nothing = lses == float("-inf")
    if WITH_DLSE:
        sums -= tl.where(nothing, 0.0, tl.load(dlse + place, mask=row < q_len, other=0.0))
    # -inf makes the weights of rows that attend nothing exp2(-inf) = 0.
    place = (sequence * heads + head).to(tl.int64) * (row_units * 8) + row
    tl.store(minus_lse + place, tl.where(nothing, float("-inf"), lses * -LOG2_E), mask=row < q_len)
    tl.store(delta + place, sums, mask=row < q_len)


@triton.jit(do_not_specialize=("heads", "q_len", "row_units", "count"))
def sink_gradient(minus_lse, delta, sinks, dsinks, heads, q_len, row_units, count, BLOCK: tl.constexpr):
    """Of one query head: -sum of exp(sink - LSE) * delta over all rows of all sequences, BLOCK rows after BLOCK rows."""
    head = tl.program_id(0)
    sink = tl.load(sinks + head) * LOG2_E
    sums = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, count, BLOCK):
        row = start + tl.arange(0, BLOCK)
        place = ((row // q_len) * heads + head).to(tl.int64) * (row_units * 8) + row % q_len
        lses = tl.load(minus_lse + place, mask=row < count, other=float("-inf"))
        share = tl.exp2(sink + lses)
        sums += share * tl.load(delta + place, mask=row < count, other=0.0)
    tl.store(dsinks + head, -tl.sum(sums, 0))


@triton.jit(debug=True, do_not_specialize=("entries", "q_tokens", "kv_tokens", "q_longest", "kv_longest"))
def check_offsets(q_ends, kv_ends, entries, q_tokens, kv_tokens, q_longest, kv_longest, BLOCK: tl.constexpr):
    """Nobody else looks at offsets that are on a GPU: a wrong one stops the CUDA context with a message."""
    check_ends(q_ends, entries, q_tokens, q_longest, BLOCK)
    check_ends(kv_ends, entries, kv_tokens, kv_longest, BLOCK)


@triton.jit
def check_ends(ends, entries, tokens, longest, BLOCK: tl.constexpr):
    tl.device_assert(tl.load(ends) != NO_OFFSETS, "dash-attn needs an attention_mask that keeps one stretch of each row, without holes")
    tl.device_assert(tl.load(ends) == 0, "dash-attn: cu_seqlens must start at 0")
    tl.device_assert(tl.load(ends + entries - 1) == tokens, "dash-attn: cu_seqlens must end at the number of tokens")
    for start in tl.range(0, entries - 1, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < entries - 1
        length = tl.load(ends + at + 1, mask=inside, other=0) - tl.load(ends + at, mask=inside, other=0)
        tl.device_assert(length >= 0, "dash-attn: cu_seqlens must not decrease")
        tl.device_assert(length <= longest, "dash-attn: cu_seqlens hold a sequence longer than max_seqlen")
