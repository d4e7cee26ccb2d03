// Sums over the bits of many tensors in one launch. ledgers/bit_sums.py defines them, and has them for any device.
// Integer sums have no order, so CTAs add to them with atomics. Each has a stretch of all chunks, so that it adds to few sums.
#pragma once
#include "ledger/shared_with_python.cuh"

constexpr int UNIT = 16;  // bytes: two words, one load
constexpr int UNIT_STEP = SUM_THREADS * UNIT;
constexpr int UNITS = CHUNK_BYTES / UNIT_STEP;  // of a thread in a chunk
static_assert(UNITS * UNIT_STEP == CHUNK_BYTES, "a chunk is the same number of units for every thread");

using Address = const unsigned char*;

DEVICE u64 mixed(u64 word) {
  word = (word ^ (word >> MIX_SHIFT_1)) * MIX_FACTOR_1;
  word = (word ^ (word >> MIX_SHIFT_2)) * MIX_FACTOR_2;
  return word ^ (word >> MIX_SHIFT_3);
}

// `term`: the index of the first word times INDEX_FACTOR.
DEVICE u64 mixed(ulonglong2 words, u64 term) { return mixed(words.x + term) + mixed(words.y + term + INDEX_FACTOR); }

// `at` is a multiple of the bytes of a Part.
template <typename Part> DEVICE ulonglong2 unit_at(Address at) {
  constexpr int PARTS = 8 / sizeof(Part);
  u64 words[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < 2 * PARTS; i++) words[i / PARTS] |= (u64)__ldg((const Part*)at + i) << (8 * sizeof(Part) * (i % PARTS));
  return make_ulonglong2(words[0], words[1]);
}
template <> DEVICE ulonglong2 unit_at<ulonglong2>(Address at) { return __ldg((const ulonglong2*)at); }

DEVICE u64 word_of(Address at, int bytes) {
  u64 word = 0;
#pragma unroll 1
  for (int i = 0; i < bytes; i++) word |= (u64)__ldg(at + i) << (8 * i);
  return word;
}

// The last word of a tensor is filled up with zeros; a word without any byte of the tensor does not count.
DEVICE u64 ending(Address at, int bytes, u64 term) {
  if (bytes <= 8) return mixed(word_of(at, bytes) + term);
  return mixed(make_ulonglong2(word_of(at, 8), word_of(at + 8, bytes - 8)), term);
}

template <typename Part> DEVICE u64 sum_of_chunks(Address tensor, u64 bytes, u32 chunk, u32 end) {
  u64 sum = 0;
#pragma unroll 1
  for (; chunk < end; chunk++) {
    const u64 first = (u64)chunk * CHUNK_BYTES + threadIdx.x * UNIT, term = first / 8 * INDEX_FACTOR;
    constexpr u64 STEP_TERM = UNIT_STEP / 8 * INDEX_FACTOR;
    if (sizeof(Part) == UNIT && (u64)(chunk + 1) * CHUNK_BYTES <= bytes) {
      ulonglong2 units[UNITS];  // all loads before the first use
#pragma unroll
      for (int i = 0; i < UNITS; i++) units[i] = unit_at<Part>(tensor + first + i * UNIT_STEP);
#pragma unroll
      for (int i = 0; i < UNITS; i++) sum += mixed(units[i], term + i * STEP_TERM);
      continue;
    }
#pragma unroll 1
    for (int i = 0; i < UNITS; i++) {
      const u64 at = first + i * UNIT_STEP;
      if (at + UNIT <= bytes)
        sum += mixed(unit_at<Part>(tensor + at), term + i * STEP_TERM);
      else if (at < bytes)
        sum += ending(tensor + at, (int)(bytes - at), term + i * STEP_TERM);
    }
  }
  return sum;
}

DEVICE u64 sum_of_stretch(Address tensor, u64 bytes, u32 chunk, u32 end) {
  const u64 address = (u64)tensor;
  if (address % UNIT == 0) return sum_of_chunks<ulonglong2>(tensor, bytes, chunk, end);
  if (address % 4 == 0) return sum_of_chunks<unsigned>(tensor, bytes, chunk, end);
  return sum_of_chunks<unsigned char>(tensor, bytes, chunk, end);
}

DEVICE void add_from_all_threads(u64 sum, u64* total) {
  constexpr int COLUMNS = 16;
  __shared__ u64 sums[SUM_THREADS];
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x < COLUMNS) {
    for (int i = threadIdx.x + COLUMNS; i < SUM_THREADS; i += COLUMNS) sum += sums[i];
    sums[threadIdx.x] = sum;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 1; i < COLUMNS; i++) sum += sums[i];
    atomicAdd(total, sum);
  }
  __syncthreads();
}

// The last tensor that begins at this chunk or before: one without chunks has the same beginning as the next.
DEVICE int tensor_with(const BitSumsParams& p, u32 chunk) {
  int low = 0, high = p.count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (p.first_chunks[middle] <= chunk ? low : high) = middle;
  }
  return low;
}

__global__ void __launch_bounds__(SUM_THREADS, SUM_CTAS_PER_SM) bit_sums(const __grid_constant__ BitSumsParams p) {
  const u64 chunks = p.first_chunks[p.count];
  u32 chunk = (u32)(chunks * blockIdx.x / p.ctas);
  const u32 end = (u32)(chunks * (blockIdx.x + 1) / p.ctas);
  for (int tensor = tensor_with(p, chunk); chunk < end; tensor++) {
    const u32 first = p.first_chunks[tensor], next = min(end, p.first_chunks[tensor + 1]);
    if (chunk == next) continue;
    add_from_all_threads(sum_of_stretch((Address)p.tensors[tensor], p.sizes[tensor], chunk - first, next - first), p.sums + tensor);
    chunk = next;
  }
}
