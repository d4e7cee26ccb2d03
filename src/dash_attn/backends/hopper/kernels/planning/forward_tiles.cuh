// Packed sequences, forward: cu_seqlens become sequences and Q tiles. The host is not involved.
#pragma once
#include "forward/config.cuh"
#include "planning/chains.cuh"

// One thread per Q tile. Sequences come in the order of their first tickets (longest first), Q tiles of a sequence from the last.
template <int Q_ROWS, int KV_ROWS> __global__ void __launch_bounds__(256) packed_tiles(const __grid_constant__ PackedTilesParams p) {
  const int thread = blockIdx.x * 256 + threadIdx.x;
  if (thread == 0) p.next_ticket[0] = 0;
  if (thread >= p.tile_room) return;
  const int s = find_sequence(p.starts, p.count, thread, &SequenceStarts::first_tile), q_tile = thread - p.starts[s].first_tile;
  const Sequence& sequence = p.sequences[s];
  const int q_tiles = tiles_of(sequence.q_len, Q_ROWS);
  if (q_tile >= q_tiles) return;
  const int top = sequence.band_top, low = top - (int)p.mask.band_width, first_row = q_tile * Q_ROWS,
            end_row = min(first_row + Q_ROWS, sequence.q_len);
  const int first_key = max(0, first_row + low), end_key = min(sequence.kv_len, end_row + top);  // that any row attends
  const int full_from = max(0, end_row - 1 + low), full_to = min(sequence.kv_len, first_row + top + 1);  // that every row attends
  PackedTile tile = {s, q_tile, 0, 0, 0, 0};
  if (first_key < end_key) {
    tile.kv_first = (end_key - 1) / KV_ROWS;
    tile.visits = tile.kv_first - first_key / KV_ROWS + 1;
    tile.full_first = tiles_of(full_from, KV_ROWS);
    tile.full_end = first_row + Q_ROWS > sequence.q_len ? 0 : max(0, full_to) / KV_ROWS;
  }
  p.tiles[p.starts[s].first_ticket + q_tiles - 1 - q_tile] = tile;
}
