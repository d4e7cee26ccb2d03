// What the three kinds of consumers have in common. `Self` is one of them: it says which warpgroup a thread is of (`wg`), its own_lane(),
// whether it elects(), as the first of the warpgroup, and where finished tiles leave: out().
//
// Masks, dS and tiles that leave are written out in each, with members of its own: taken through functions of this one, the compiler
// keeps what follows from warp and lane in registers, and those of narrow values spill.
#pragma once
#include "backward/config.cuh"
#include "backward/elementwise.cuh"
#include "common/product.cuh"
#include "common/softmax.cuh"

template <typename V, typename Self> struct ConsumerBase : Role<V> {
  using R = Role<V>;
  using C = typename V::C;
  using Half = typename V::Half;
  using R::bars, R::more, R::notes, R::p, R::shared;
  static constexpr MaskKind MASK = V::MASK;
  static constexpr bool SOFTCAP = V::SOFTCAP, LEGS = V::LEGS, DROPOUT = V::DROPOUT, ALIBI = V::ALIBI, MODIFIED = DROPOUT || ALIBI;

  DEVICE ConsumerBase(const Role<V>& role) : R(role) {}

 protected:
  DEVICE const Self& self() const { return *static_cast<const Self*>(this); }
  // Which 64 keys of a tile: tall heads have a half for each warpgroup.
  DEVICE int half() const {
    if constexpr (is_tall(V::DV)) return self().wg;
    return 0;
  }
  DEVICE void arrive(Barrier barrier) const { arrive_as_warp(barrier, self().own_lane()); }
  // What this warp has stored may be read by wgmma and TMA. The fence waits until the stores have landed, so it comes a while
  // after them, behind the next products.
  DEVICE void publish(Barrier barrier) const {
    fence_async_shared();
    arrive(barrier);
  }
  DEVICE void sync_warpgroup() const {
    self().wg == 0 ? named_barrier_sync<FIRST_HALF>(WARPGROUP) : named_barrier_sync<SECOND_HALF>(WARPGROUP);
  }
  // Sums leave through the buffers of dS, or of P: nobody may write there before the last store has read them. No store of tall heads
  // before both warpgroups are done with dS.
  DEVICE void await_stored() const {
    if (self().elects()) bulk_wait_read();
    if constexpr (is_tall(V::DV))
      named_barrier_sync<BOTH>(2 * WARPGROUP);
    else
      sync_warpgroup();
  }

  // ---- element-wise work (backward/elementwise.cuh)
  // LSE or delta, from byte `rows` on, of the rows of a group.
  DEVICE float2 row_pair(int rows, int g) const { return load_shared_f32x2(shared + rows + (self().own_lane() & 3) * 8 + g * 32); }
  // Those of the first groups, loaded while the product before them still runs.
  template <int EARLY> DEVICE void load_early(float2 (&early)[EARLY], int rows) const {
#pragma unroll
    for (int g = 0; g < EARLY; g++) early[g] = row_pair(rows, g);
  }
  template <int EARLY> DEVICE float2 row_pair(const float2 (&early)[EARLY], int rows, int g) const {
    return g < EARLY ? early[g < EARLY ? g : 0] : row_pair(rows, g);
  }
  DEVICE int rows_of_step(u32 number) const { return load_shared_i32(notes.step_at(number)); }

  // ---- what leaves the registers, and comes back
  // 2 N columns of a tile in fragment order. Of dQ the postprocess kernel unscrambles them.
  template <int N> DEVICE void put_fragments(const float (&tile)[N], u32 at, float factor = 1.f) const {
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
      const float* r = tile + 4 * i;
      store_shared_f32x4(at + i * (WARPGROUP * 16), r[0] * factor, r[1] * factor, r[2] * factor, r[3] * factor);
    }
  }
  // A piece of a chain's dV and dK (TallConfig::SUM_PIECES) in the same order.
  template <int PIECE, int N, int M> DEVICE void put_piece(const float (&dv)[N], const float (&dk)[M], u32 at, float dv_factor) const {
#pragma unroll
    for (int i = 0; i < C::SUM_REGISTERS / 4; i++) {
      const int first = PIECE * C::SUM_REGISTERS + 4 * i;
      const float *r = first < N ? dv + first : dk + first - N, factor = first < N ? dv_factor : 1.f;
      store_shared_f32x4(at + i * (WARPGROUP * 16), r[0] * factor, r[1] * factor, r[2] * factor, r[3] * factor);
    }
  }
  // What finished dV must be multiplied by.
  DEVICE float dv_factor() const {
    if constexpr (DROPOUT) return C::DV_FACTOR * more->rescale;
    return C::DV_FACTOR;
  }
  // Columns of a finished tile of dV or dK, which are in shared memory at out().
  template <int COLUMN, int END> DEVICE void store_columns(const TensorMap* map, const ChainNote& chain) const {
    for (int i = 0; i < (END - COLUMN + 63) / 64; i++)
      tma_store<V::PACKED>(map, self().out() + i * HALF_PANEL, COLUMN + i * 64, chain.kv_head, chain.kv_row + half() * 64, chain.kv_plane);
    bulk_commit();
  }
};
