"""Both passes of the backward in one launch, for bands: what the first pass leaves idle at its end, programs of the second take.

Each program does exactly what it does in the kernel of its pass, so the bits are the same.
"""

import triton
import triton.language as tl

from .backward import key_gradients, query_gradients
from .visits import BAND

NUMBERS = (
    *("q_batch", "q_row", "q_head", "k_batch", "k_row", "k_head", "v_batch", "v_row", "v_head", "do_batch", "do_row", "do_head"),
    *("heads", "group", "key_tiles", "query_tiles", "sequences", "q_len", "kv_len", "row_units", "left", "right"),
)


# One argument per line would take pages.
# fmt: off
@triton.jit(do_not_specialize=NUMBERS)
def gradients(
    q, k, v, dout, minus_lse, delta, dq, dk, dv, q_ends, kv_ends,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, do_batch, do_row, do_head,
    heads, group, key_tiles, query_tiles, sequences, q_len, kv_len, row_units, left, right, scale, scale_log2, cap_scale,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    KEYS_Q: tl.constexpr, KEYS_KV: tl.constexpr, KEYS_PARTIAL: tl.constexpr,
    QUERIES_Q: tl.constexpr, QUERIES_KV: tl.constexpr, QUERIES_PARTIAL: tl.constexpr,
    PACKED: tl.constexpr, SOFTCAP: tl.constexpr, GROUPED: tl.constexpr,
):
    """KV head by KV head, whose tensors the cache then holds: its KV tiles, then the Q tiles of its query heads. `heads` are KV heads."""
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
