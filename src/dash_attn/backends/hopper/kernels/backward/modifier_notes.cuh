// Before a backward with dropout or ALiBi: what its consumers must know of the sequence and query head of each dQ tile. Keys of the
// generator come from seeds on the device.
#pragma once
#include "common/modifiers.cuh"
#include "common/sequence.cuh"

// One thread per dQ tile.
template <bool PACKED> __global__ void __launch_bounds__(256) modifier_notes(const __grid_constant__ ModifierNotesParams p) {
  const int tile = blockIdx.x * 256 + threadIdx.x;
  if (tile >= tile_count(p.tiles)) return;
  const int head_of_batch = tile / p.tiles.head_tiles, head = head_of_batch % p.tiles.q_heads;
  int sequence = head_of_batch / p.tiles.q_heads, keys = p.kv_len;
  if constexpr (PACKED) {
    sequence = p.tiles.tile_places[tile % p.tiles.head_tiles].x;
    if (sequence < 0) return;
    keys = p.tiles.sequences[sequence].kv_len;
  }
  const u64 key = p.modifiers.seeds == nullptr ? 0 : dropout_key(p.modifiers, sequence, head);
  p.notes[tile] = make_int4((int)(u32)key, (int)(u32)(key >> 32), __float_as_int(slope_of(p.modifiers, sequence, head)), keys);
}
