// After the backward: the dQ accumulator, in fragment order, becomes dQ in the caller's layout and type; and sums of dK and dV, where
// parts of a group made them, become dK and dV.
#pragma once
#include "backward/config.cuh"
#include "common/sequence.cuh"

// Row and column of element e of float4 `i` of 64 rows of dV or dK: the registers of a warpgroup.
DEVICE int2 place_in_sum(int i, int e) {
  const int group = i / 128, warp = i % 128 / 32, lane = i % 32;
  return make_int2(16 * warp + (lane >> 2) + 8 * (e >> 1), 8 * group + 2 * (lane & 3) + (e & 1));
}

// The same of an accumulator tile.
template <int D, int DV> DEVICE int2 place_in_tile(int i, int e) {
  using C = BackwardConfig<D, DV>;
  constexpr int SIZE = C::Q_ROWS * C::WIDTH / 8;  // float4s of a warpgroup
  const int2 in_part = place_in_sum(i % SIZE, e);
  const int wg = i / SIZE, m = in_part.x, n = in_part.y;
  if constexpr (!is_tall(DV))
    return make_int2(m, n < 64 ? C::own_column(wg) + n : C::inner_column(wg) + n - 64);
  else if constexpr (C::DQ_TRANSPOSED)
    return make_int2(wg * (C::Q_ROWS / 2) + n, m);
  else
    return make_int2(m, C::dq_column(wg, n));
}

// Blocks start where CTAs of the attention kernel have ended, while others still run: each waits for its tile only, until all
// turns have landed. Unordered, for the whole kernel. False: nothing was added, the accumulator was never written.
DEVICE bool await_sum(const PostprocessParams& p, int tile) {
  if (p.q_turns == nullptr) {
    await_kernel_before();
    return true;
  }
  const int turns = p.q_turns[tile % p.tiles.head_tiles];
  if (threadIdx.x == 0) await_semaphore<true>(p, tile, turns);
  __syncthreads();
  return turns > 0;
}

// A finished tile, padded rows so that there are no bank conflicts, on its way from fragments to rows.
template <typename Half, int D, int DV> struct FinishedRows {
  using C = BackwardConfig<D, DV>;
  static constexpr int PITCH = C::WIDTH + 8, CHUNKS = C::WIDTH / 8;  // of 16 bytes
  unsigned short* rows;

  DEVICE void put(int2 at, float x) { rows[at.x * PITCH + at.y] = (unsigned short)(pack<Half>(x, 0.f) & 0xffff); }
  // `count` rows of `dim` columns to where `offset` says that each begins.
  template <typename Offset> DEVICE void store(void* to, int count, int dim, Offset offset) const {
    const int chunk = threadIdx.x % CHUNKS;
    for (int row = threadIdx.x / CHUNKS; row < (chunk * 8 < dim ? count : 0); row += 256 / CHUNKS)
      *(uint4*)((unsigned short*)to + offset(row) + chunk * 8) = *(const uint4*)&rows[row * PITCH + chunk * 8];
  }
};

template <typename Half, int D, int DV, bool PACKED>
DEVICE void finish_dq(const PostprocessParams& p, FinishedRows<Half, D, DV> out, int block) {
  using C = BackwardConfig<D, DV>;
  const float4* tile = (const float4*)(p.dq_accumulator + (i64)block * (C::Q_ROWS * C::WIDTH));
  const bool visited = await_sum(p, block);
  for (int i = threadIdx.x; i < C::Q_ROWS * C::WIDTH / 4; i += 256) {
    const float4 v = visited ? __ldcg(tile + i) : make_float4(0.f, 0.f, 0.f, 0.f);
    const float x[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int e = 0; e < 4; e++) out.put(place_in_tile<D, DV>(i, e), x[e] * p.scale);
  }
  __syncthreads();
  const TilePlace place = locate<C::Q_ROWS, PACKED>(p.tiles, block);
  out.store(p.dq, min(C::Q_ROWS, place.rows), p.dim, [&](int row) { return place.offset(p.strides, row); });
}

// 64 rows of dV or of dK: the sums of both kinds added up, that of the first part first.
template <typename Half, int D, int DV, bool PACKED> struct SumFinisher {
  using C = BackwardConfig<D, DV>;
  static constexpr int HALVES = C::KV_ROWS / 64;
  const PostprocessParams& p;
  const SumPlaces& s;
  int tile, half, of_dk;  // half: which 64 rows

  DEVICE SumFinisher(const PostprocessParams& params, int block)
      : p(params), s(params.sums), tile(block / (2 * HALVES)), half(block / 2 % HALVES), of_dk(block % 2) {}

  DEVICE void run(FinishedRows<Half, D, DV> out) const {
    const int head = tile / s.head_chains, row_of_head = tile - head * s.head_chains;
    int4 place = make_int4(0, row_of_head, s.parts[0], s.parts[1]);
    if constexpr (PACKED) place = s.places[row_of_head];
    if (place.x < 0) return;
    await(place.z, place.w);
    for (int i = threadIdx.x; i < 64 * (of_dk ? D : DV) / 4; i += 256) {
      float4 v = read(0, i);
      if (place.w != 0) {
        const float4 w = read(1, i);
        v = make_float4(v.x + w.x, v.y + w.y, v.z + w.z, v.w + w.w);
      }
      const float x[4] = {v.x, v.y, v.z, v.w}, scale = of_dk ? p.scale : 1.f;
#pragma unroll
      for (int e = 0; e < 4; e++) out.put(place_in_sum(i, e), x[e] * scale);
    }
    __syncthreads();
    i64 first_row;  // in the caller's tensor, whose rows are `stride` apart
    int rows, kv_head;
    const int first = place.y * C::KV_ROWS + 64 * half;
    if constexpr (PACKED) {
      const Sequence& sequence = p.tiles.sequences[place.x];
      first_row = (i64)sequence.kv_plane - sequence.kv_len + first, rows = sequence.kv_len - first, kv_head = head;
    } else {
      first_row = (i64)(head / s.kv_heads) * s.kv_len + first, rows = s.kv_len - first, kv_head = head % s.kv_heads;
    }
    const int dim = of_dk ? s.dk_dim : s.dv_dim;
    out.store(of_dk ? s.dk : s.dv, min(64, rows), dim, [&](int row) { return ((first_row + row) * s.kv_heads + kv_head) * dim; });
  }

 private:
  DEVICE int first_piece(int sum) const { return (tile * s.count + sum) * C::SUM_PIECES; }
  // float4 `i` of these rows. A piece holds registers of the first warpgroup, then of the second. A warpgroup of tall heads has dK
  // behind dV; of wide heads, one of them.
  DEVICE float4 read(int sum, int i) const {
    constexpr int IN_PIECE = C::SUM_FLOATS / 8;
    const int wg = is_tall(DV) ? half : of_dk, quad = i + (is_tall(DV) ? of_dk * (64 * DV / 4) : 0);
    const float4* from = (const float4*)(s.sums + (i64)(first_piece(sum) + quad / IN_PIECE) * C::SUM_FLOATS);
    return __ldcg(from + wg * IN_PIECE + quad % IN_PIECE);
  }
  DEVICE void await(int first_parts, int second_parts) const {
    if (p.q_turns == nullptr) return await_kernel_before();  // unordered
    if (threadIdx.x < 2 * C::SUM_PIECES) {
      const int sum = threadIdx.x / C::SUM_PIECES, parts = sum ? second_parts : first_parts;
      if (parts > 0) await_semaphore<true>(p, s.first_sum + first_piece(sum) + threadIdx.x % C::SUM_PIECES, parts);
    }
    __syncthreads();
  }
};

template <typename Half, int D, int DV, bool PACKED> __global__ void __launch_bounds__(256)
    backward_postprocess(const __grid_constant__ PostprocessParams p) {
  using C = BackwardConfig<D, DV>;
  constexpr int ROWS = C::Q_ROWS > 64 ? C::Q_ROWS : 64;
  __shared__ alignas(16) unsigned short rows[ROWS * FinishedRows<Half, D, DV>::PITCH];
  const int dq_tiles = tile_count(p.tiles);
  if (blockIdx.x < dq_tiles)
    finish_dq<Half, D, DV, PACKED>(p, {rows}, blockIdx.x);
  else
    SumFinisher<Half, D, DV, PACKED>(p, blockIdx.x - dq_tiles).run({rows});
  if (blockIdx.x == 0) await_kernel_before();  // so that this kernel does not end first: dK and dV may still be on their way
}
