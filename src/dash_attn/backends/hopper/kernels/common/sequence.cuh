// Where the rows of a sequence lie, and what its mask needs to know of its lengths.
//
// Row r of a sequence is read and written at TMA coordinates (r + shift, plane). In a batch of equal lengths shift is 0 and
// plane is the sequence. Packed sequences lie end to end, and nothing may be read or written beyond an end. Their tensor map
// has two axes over the same rows, row = shift axis + plane axis - RAGGED, and the shift axis ends at RAGGED: with
// shift = RAGGED - length and plane = start + length, coordinate r + shift leaves the axis just where the sequence ends, so
// the TMA unit fills in zeros behind it and drops stores there, as it does at the end of a batch. (The subtraction is a fifth
// axis whose stride takes the address once around 2^64; a base address before the tensor faults.)
#pragma once
#include "common/mask.cuh"

DEVICE Sequence sequence_of_batch(const MaskParams& mask, int sequence, int first_tile) {
  return {mask.q_len, mask.kv_len, 0, sequence, 0, sequence, first_tile, band_top(mask, mask.q_len, mask.kv_len)};
}
