// After the backward: the dQ accumulator, in fragment order, becomes dQ in the caller's layout and type.
#pragma once
#include "backward/config.cuh"
#include "common/tile_place.cuh"

// Row and column of element e of float4 `i` of an accumulator tile.
template <int D> DEVICE int2 place_in_tile(int i, int e) {
  using C = BackwardConfig<D>;
  constexpr int SIZE = C::Q_ROWS * C::WIDTH / 8;  // float4s of a warpgroup
  const int wg = i / SIZE, rest = i % SIZE, group = rest / 128, warp = rest % 128 / 32, lane = rest % 32;
  const int m = 16 * warp + (lane >> 2) + 8 * (e >> 1), n = 8 * group + 2 * (lane & 3) + (e & 1);
  if constexpr (D > 128)
    return make_int2(m, n < 64 ? C::own_column(wg) + n : C::inner_column(wg) + n - 64);
  else if constexpr (C::DQ_TRANSPOSED)
    return make_int2(wg * (C::Q_ROWS / 2) + n, m);
  else
    return make_int2(m, wg * 64 + n);
}

// Blocks start where CTAs of the attention kernel have ended, while others still run: each waits for its tile only, until all
// ranks have landed. Unordered, for the whole kernel. False: nothing was added, the accumulator was never written.
DEVICE bool await_sum(const PostprocessParams& p, int tile) {
  if (p.q_ranks == nullptr) {
    await_kernel_before();
    return true;
  }
  const int ranks = p.q_ranks[tile % p.tiles.head_tiles];
  if (threadIdx.x == 0) await_semaphore<true>(p, tile, ranks);
  __syncthreads();
  return ranks > 0;
}

template <typename Half, int D, bool PACKED> __global__ void __launch_bounds__(256)
    backward_postprocess(const __grid_constant__ PostprocessParams p) {
  using C = BackwardConfig<D>;
  constexpr int PITCH = C::WIDTH + 8;  // padded rows: no bank conflicts
  __shared__ alignas(16) unsigned short rows[C::Q_ROWS * PITCH];
  const float4* tile = (const float4*)(p.dq_accumulator + (i64)blockIdx.x * (C::Q_ROWS * C::WIDTH));
  const bool visited = await_sum(p, blockIdx.x);
  for (int i = threadIdx.x; i < C::Q_ROWS * C::WIDTH / 4; i += 256) {
    const float4 v = visited ? __ldcg(tile + i) : make_float4(0.f, 0.f, 0.f, 0.f);
    const float x[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int2 at = place_in_tile<D>(i, e);
      rows[at.x * PITCH + at.y] = (unsigned short)(pack<Half>(x[e] * p.scale, 0.f) & 0xffff);
    }
  }
  __syncthreads();
  constexpr int CHUNKS = C::WIDTH / 8;  // of 16 bytes
  const TilePlace place = locate<C::Q_ROWS, PACKED>(p.tiles, blockIdx.x);
  const int chunk = threadIdx.x % CHUNKS;
  for (int row = threadIdx.x / CHUNKS; row < (chunk * 8 < p.dim ? min(C::Q_ROWS, place.rows) : 0); row += 256 / CHUNKS)
    *(uint4*)((unsigned short*)p.dq + place.offset(p.strides, row) + chunk * 8) = *(const uint4*)&rows[row * PITCH + chunk * 8];
  if (blockIdx.x == 0) await_kernel_before();  // so that this kernel does not end first: dK and dV may still be on their way
}
