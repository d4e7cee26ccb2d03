"""Structures of attention to a cache of keys and values, as C."""

from __future__ import annotations

from .structures import Structure, lay_out_all


class CacheParams(Structure):
    in_c = """
    // Where the keys of each sequence lie in a cache (call/kv_cache.py).
    const int* lengths;  // [sequences] slots in use before the call; null: `length` of each
    const int* left_padding;  // [sequences] slot of the first key; null: 0
    const int* positions;  // [sequences] position of the first key; null: `position` of each
    const int* rows;  // [sequences] row of a cache without pages; null: the sequence's own number
    const int* pages;  // [sequences][page_stride] pages of each sequence; null: a cache without pages
    i64 page_stride;
    int length, position, added;  // added: new keys of each sequence, already in the cache when it is attended to
    int capacity;  // slots of a sequence
    int page_size, count;  // count: rows or pages of the cache
    int* report;  // host memory: what is wrong, in which call
    int call;
    """


class DecodeParams(Structure):
    in_c = """
    const void* q;  // (batch, q_len, q_heads, dim) or packed (tokens, q_heads, dim), last dimension contiguous
    i64 q_strides[3];  // elements: batch, row, head
    void* out;  // laid out like q, contiguous
    float* lse;  // [batch][q_heads][q_len] or packed [q_heads][tokens], natural log
    const float* sinks;  // [q_heads] or null
    const int* cu_q;  // packed queries: [count + 1] where sequences start and end; else null
    int count, tokens;  // sequences, and their packed queries
    int q_len;  // of every sequence; of packed queries the most that one has
    int q_heads, kv_heads, group, q_dim, v_dim;
    int row_tiles;  // units of a sequence and KV head
    int box_rows;  // rows that one TMA box loads: all of a KV tile, or those it has of one page
    int window_left, window_right;  // keys before and after a query's position; -1: no limit
    float scale_log2, cap_scale;  // as in ForwardParams
    CacheParams cache;
    """


class AppendParams(Structure):
    in_c = """
    const void *k, *v;  // (batch, new, kv_heads, dim), last dimension contiguous
    void *k_cache, *v_cache;
    i64 k_strides[3], v_strides[3], k_cache_strides[3], v_cache_strides[3];  // elements: batch or page, row, head
    int kv_heads, entries;  // entries: of a sequence in the page table
    int dims[2];  // of k and v
    int* owners;  // [rows or pages] who appends to it, plus 1; 0: nobody. Null: every sequence has a row of its own
    CacheParams cache;
    """


lay_out_all(__name__)
