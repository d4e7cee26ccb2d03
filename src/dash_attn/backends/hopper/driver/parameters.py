"""The structures that Python and the kernels share, as C. `shared_header` writes the header of them; Python imports each by its name."""

from ctypes import c_int, c_int64
from enum import IntEnum
from typing import Any

from .structures import structures_in

RAGGED = 2**30  # where the row axis of a packed tensor ends (kernels/common/sequence.cuh)
# Why a kernel gave up (trouble.py). Kernels have the same names.
Trouble = IntEnum("Trouble", "Hang BadLengths CacheLength CachePadding CacheRow CachePage CacheShared CachePosition")
Pair = c_int * 2
Strides = c_int64 * 3

STRUCTURES = structures_in("""
struct CacheParams {
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
};

struct DecodeParams {
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
};

struct AppendParams {
  const void *k, *v;  // (batch, new, kv_heads, dim), last dimension contiguous
  void *k_cache, *v_cache;
  i64 k_strides[3], v_strides[3], k_cache_strides[3], v_cache_strides[3];  // elements: batch or page, row, head
  int kv_heads, entries;  // entries: of a sequence in the page table
  int dims[2];  // of k and v
  int* owners;  // [rows or pages] who appends to it, plus 1; 0: nobody. Null: every sequence has a row of its own
  CacheParams cache;
};

struct MaskParams {
  int q_len, kv_len;  // of every sequence, in a batch of equal lengths
  int band_right;  // Band: key - query <= band_top, which is band_right and the offset that aligns the last query and key ...
  u32 band_width;  // ... and band_top - (key - query) <= band_width
  union { const int2* rows; const int* tile_numbers; };  // Rows: first kept key and end of the kept keys of each query. Bits: BitTables
  union { const unsigned char* blocks; const u32* tile_bits; };  // Blocks: a byte for each, of block_q x block_kv. Bits: of partial tiles
  union { int block_q; int head_numbers; };  // Bits: where numbers per head begin among tile_numbers; 0: there are none
  union { int block_kv; int numbered_heads; };  // Bits: query heads
  union { int block_columns; int row_tiles; };  // Bits: tiles in a row
};

struct MaskBitsParams {
  // A boolean matrix (masks/boolean_mask.py), and the partial tiles of which bits are wanted.
  const u64* words;  // [block][64] rows
  const int* places;  // [block of queries][block of keys] which of them it is
  const int2* tiles;  // [count] Q tile, KV tile
  u32* bits;  // [count][thread][words of a thread]
  int count, q_len, kv_len, block_columns;
};

struct alignas(16) Sequence {
  // Where the rows of a sequence lie (common/sequence.cuh).
  int q_len, kv_len;
  int q_shift, q_plane, kv_shift, kv_plane;
  int first_tile;  // first dQ tile of the first query head
  int band_top;  // of MaskKind::Band: key - query <= band_top
};

struct TilePlaces {
  // In a batch tiles are numbered [sequence][query head][Q tile]; packed, [query head][Q tile of all sequences].
  int batch, q_heads, group, q_len;
  int tokens;  // packed queries
  int head_tiles;  // tiles between a query head and the next
  const Sequence* sequences;  // packed only
  const int2* tile_places;  // packed only: [head_tiles] sequence, Q tile inside it; -1: no such tile
};

struct Run {
  // A stretch of a walk: a row of the plan's run table (RUN_FIELDS in scheduling/plan.py).
  int q_first, q_stride, length, turn_mul, turn_add, turn_div, partial, entries;
};

// One entry of an irregular walk.
struct Step {
  int q_tile, turn, partial;
};

struct GroupSplit {
  // How the query heads of a group are dealt to parts, and where those add their dK and dV (scheduling/order.py).
  int group, parts;
  int kinds;  // parts of one kind share a sum
  int sums;  // per KV tile; 0: chains finish dK and dV themselves
  int pieces;  // of a sum: each has a semaphore of its own
  int first_sum;  // dQ tiles: pieces of sums are numbered behind them
};

struct PlanTables {
  // The lowered plan (scheduling/plan.py) and its placement.
  const int* starts;  // [kinds][kv_tiles] start order of a head's KV tiles
  const int* chain_runs;  // [kinds * kv_tiles + 1] first run of each chain
  const int* chain_steps;  // [kinds * kv_tiles] Q tiles each chain visits
  const Run* runs;
  const Step* entries;
  const int* segments;  // [segment_count + 1] first start position of each segment
  int kinds, kv_tiles, lanes, tickets, has_gangs;
  int rounds;  // heads are dealt to them evenly
  int instances[2];  // heads of each kind over the whole batch
  int last_member_first[2];  // per kind
  int kv_heads, groups;  // of a sequence, of the whole batch
  int groups_with_more[2], first_with_more[2];  // per kind: groups of a sequence with one part more of it, every second one
  GroupSplit split;
};

struct alignas(16) ChainRecord {
  // The chain that a ticket starts. Its first eight words are the chain's note to all roles (ChainNote).
  int kv_head, kv_row, kv_plane;  // kv_row: first key, shift included
  int steps;  // of all query heads of the part; in a note, -1 if no more chains come
  int q_shift, q_plane;
  int keys;  // how many of the sequence begin with the first one
  int band_top;  // see MaskParams; from the first key on
  int first_run;  // packed sequences: the chain's row of PackedChain
  int first_dq_tile;
  int gang_end;  // ticket after the last chain that may wait for this one in a circle; 0 without gangs
  int walk;  // steps of one query head, times two; plus 1 if the last query head of the part is walked first
  int q_head, members;  // first query head of the part, and how many it has
  int first_sum, turn;  // where dK and dV are added, in pieces, and how many parts add before; not read where chains finish them
};

struct alignas(16) PackedChain {
  // The walk of a chain of a packed sequence (planning/walk.cuh).
  int q_first, q_stride, ring;  // Q tile of the first step, then q_stride further; modulo `ring` if that is not 0
  int full_first, full_end;  // Q tiles all of whose elements attend
  int kv_tile, kv_tiles, classes;
  int high, low;  // band: last key that Q tile 0 attends, and first key (may be negative)
  int place, spacing, members;  // ring: place among the members of its block, 1 or 2 tiles apart
  int turn_first;  // ring: turns of the blocks before
};

struct alignas(16) SequenceStarts {
  // Where a sequence begins in the tables of all sequences.
  int first_tile, first_chain, first_ticket;
  int shuffled_before, shuffled_behind;  // chains of the neighbours in start order that are shuffled with this one's
};

struct alignas(16) PackedTile {
  // What a Q tile of a packed sequence visits. One entry per Q tile, longest first.
  int sequence, q_tile, visits;
  int kv_first;  // KV tile of the first visit; KV tiles go downward
  int full_first, full_end;  // KV tiles all of whose elements attend
};

struct alignas(16) StepRecord {
  // What the drains of a recording kernel write, in cycles of the SM: dQ ready, turn come, landed; which CTA.
  u32 ready, turn, landed, cta;
};

struct alignas(16) ClockRecord {
  // The clock all SMs share (ns) beside the SM's own.
  u64 shared_ns;
  u32 cycles, sm;
};

struct BackwardParams {
  const float* lse;  // [dQ tile][Q_ROWS], times log2(e); FAR where a row attends nothing or does not exist
  const float* delta;  // same layout: rowsum(dO * O) - dLSE
  float* dq;  // [dQ tile][Q_ROWS * WIDTH], in accumulator-fragment order
  int* semaphores;  // [dQ tile], then [piece of a sum]: reduces that have landed
  float* sums;  // of dK and dV: [piece][SUM_FLOATS], in accumulator-fragment order; null: chains finish dK and dV
  int first_sum;  // dQ tiles: pieces of sums are numbered behind them
  int* next_ticket;  // ... and, after it, how many there are
  const ChainRecord* tickets;
  int* report;  // host memory: what went wrong, where, in which call
  u32 most_polls;  // of a semaphore before the wait is called a hang
  int call;
  int head_tiles;  // dQ tiles between a query head and the next
  float scale_log2, scale, masked_score;
  float cap_scale;  // with softcap: 2 log2(e) scale / cap; scale_log2 is cap * log2(e) then
  MaskParams mask;
  const Run* runs;
  const Step* entries;
  const PackedChain* chains;  // instead of runs and entries, for packed sequences
  StepRecord* record;  // [dQ tile][record_turns]; only a kernel that records has it
  ClockRecord* clocks;  // [2][CTAs]: at a CTA's start, at its end
  u32 record_turns;
};

struct LegParams {
  // Of a launch that walks legs (backward/attention.cuh): `sums` of BackwardParams are the states of its chains.
  const float* states;  // the same memory; null: the chains begin here
  int first_kv_head;  // whose keys and values are the first ones there are
  int overlaps;  // 1: the launch before may still run; only dQ tiles and states are waited for
  int awaited;  // semaphores of the states that come, where a launch that still runs may store them; -1: they are there
};

struct EndingRecord {
  // States that are added to one sum of a KV tile, one after the other.
  int sum;  // among those of all KV tiles of the device
  int turn;  // how many parts were added before
  int first, count, stride;  // states: `count` of them, `stride` apart
};

struct EndingParams {
  const EndingRecord* endings;
  const float* states;
  float* sums;  // as in SumPlaces
  int* semaphores;  // of the sums: [sum][piece]
};

struct PreprocessParams {
  const void *out, *grad_out;  // (batch, q_len, q_heads, v_dim) or packed (tokens, q_heads, v_dim), last dimension contiguous
  i64 out_strides[3], grad_strides[3];  // elements: batch, row, head
  const float* lse;  // [batch][q_heads][q_len] or packed [q_heads][tokens], natural log
  const float* grad_lse;  // same layout; no gradient: null
  float *lse_log2, *delta;  // [dQ tile][Q_ROWS]
  float* dq_to_zero;  // the dQ accumulator, and behind it the sums of dK and dV, in unordered mode, else null
  i64 floats_to_zero;
  int* semaphores;
  int semaphore_count;
  int* next_ticket;  // [2] the next and how many there are
  ChainRecord* tickets;
  int v_dim, kv_rows;
  TilePlaces tiles;
  MaskParams mask;
  PlanTables plan;
};

struct SumPlaces {
  // Where sums of dK and dV become dK and dV. KV tiles are numbered [sequence][KV head][KV tile]; packed, [KV head][chain row].
  const float* sums;  // as in BackwardParams
  void *dk, *dv;  // (batch, kv_len, kv_heads, dim) or packed (tokens, kv_heads, dim), contiguous
  int dk_dim, dv_dim, kv_heads, kv_len;
  int head_chains;  // KV tiles of a head of a sequence; packed, of a head
  int count;  // sums per KV tile
  int first_sum;  // as in BackwardParams
  int parts[2];  // that add to each of them
  const int4* places;  // packed only: [head_chains] sequence, KV tile, and parts instead of the above; sequence -1: no such tile
};

struct PostprocessParams {
  const float* dq_accumulator;
  const int* q_turns;  // [head_tiles] turns of each dQ tile of a head; null: unordered
  const int* semaphores;  // turns of a tile that have landed
  void* dq;  // (batch, q_len, q_heads, dim) or packed (tokens, q_heads, dim)
  i64 strides[3];  // elements: batch, row, head
  int dim;
  float scale;
  int* report;  // as in BackwardParams
  u32 most_polls;
  int call;
  TilePlaces tiles;
  SumPlaces sums;
};

struct SinkGradientParams {
  const float *sinks, *lse_log2, *delta;
  float* gradient;  // [q_heads]
  int sequences;
  TilePlaces tiles;
};

struct PackedParams {
  const int *cu_q, *cu_k;  // [count + 1] where sequences start and end
  int count, q_tokens, k_tokens, q_longest, k_longest;
  int heads, head_offset, head_tiles;
  GroupSplit split;  // parts: not read, each sequence has its own
  int chain_rows;  // room for chains of one kind
  int workers;
  MaskParams mask;
  Sequence* sequences;  // [count]
  SequenceStarts* starts;  // [count]
  int2* tile_places;  // [head_tiles]
  int* q_turns;  // [head_tiles] KV tiles each of them meets
  PackedChain* chains;  // [2][chain_rows]
  int4* sum_places;  // [chain_rows] for SumPlaces
  ChainRecord* tickets;
  int* ticket_count;
  int* report;  // host memory: what is wrong with cu_seqlens, in which call
  int call;
};

struct PackedTilesParams {
  int count;
  int tile_room;  // entries of tiles
  MaskParams mask;
  const Sequence* sequences;
  const SequenceStarts* starts;
  PackedTile* tiles;
  int* next_ticket;  // reset here
};

struct VisitTables {
  // Which KV tiles each Q tile visits, and in which order Q tiles are taken (scheduling/forward_visits.py).
  const int* q_order;  // Q tiles that visit anything, longest first
  const int* first_runs;  // [q_tiles + 1]
  const int2* runs;  // first KV tile, 2 * length + partial; KV tiles go downward
  const int* visits;  // [q_tiles] KV tiles each Q tile visits
};

struct ForwardParams {
  float* lse;  // [batch][q_heads][q_len] or packed [q_heads][tokens], natural log
  const float* sinks;  // [q_heads] a logit that joins every row's softmax, or null
  u32* next_ticket;  // packed: ... and, after it, how many there are
  u32 last_ticket;  // the one that some CTA takes last; after it the next is 0 again, as the following launch needs it
  int batch, q_heads, group;
  int places;  // Q tiles per head
  int tokens;  // packed queries
  int heads_side_by_side, last_heads;  // heads whose K and V fit the L2 cache together; heads that end side by side
  float scale_log2, cap_scale;  // with softcap: cap * log2(e) and 2 log2(e) scale / cap
  MaskParams mask;
  VisitTables visits;
  const Sequence* sequences;  // packed only
  const PackedTile* tiles;  // packed only
};

struct ModifierParams {
  // Of dropout and ALiBi (common/modifiers.cuh), beside the parameters of a pass.
  const u64* seeds;  // [sequences]; null: no dropout
  const float* slopes;  // [sequences or 1][q_heads]; null: no ALiBi
  i64 first_head;  // the query head, in the unsharded model, of the call's first one
  const int4* notes;  // backward only: [dQ tile] as ModifierNotesParams has them
  int slope_stride;  // from the slopes of a sequence to those of the next
  float slope_factor;  // from slopes to what scores (forward) or exponents (backward) are counted in
  u32 threshold;  // of numbers that keep a pair, in the high half
  float rescale;  // of weights that are kept
};

struct ModifierNotesParams {
  ModifierParams modifiers;
  TilePlaces tiles;
  int kv_len;  // of every sequence, in a batch of equal lengths
  int4* notes;  // [dQ tile] the generator's key, low and high word; slope; keys of the sequence
};
""")


def __getattr__(name: str) -> Any:
    """A structure: `from .parameters import MaskParams`."""
    if name not in STRUCTURES:
        raise AttributeError(f"there is no structure {name}")
    return STRUCTURES[name]
