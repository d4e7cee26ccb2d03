// Small types every kernel uses. No host headers: the kernels are compiled by NVRTC.
#pragma once

typedef unsigned u32;
typedef unsigned long long u64;
typedef long long i64;

// A TMA descriptor (CUtensorMap), passed by value as a kernel parameter.
struct alignas(64) TensorMap {
  u64 words[16];
};

// The two element types, as tags: wgmma and conversions are chosen by them.
struct bf16 {
  static constexpr bool is_bf16 = true;
};
struct f16 {
  static constexpr bool is_bf16 = false;
};

#define DEVICE __device__ __forceinline__

// Where a member is in a structure. Not every NVRTC knows __builtin_offsetof, and no host compiler __INTADDR__.
#ifdef __CUDACC_RTC__
#define OFFSET_OF(type, member) ((u32)__INTADDR__(&(((type*)0)->member)))
#else
#define OFFSET_OF(type, member) ((u32) __builtin_offsetof(type, member))
#endif

constexpr int WARP = 32;
constexpr int WARPGROUP = 128;
constexpr int MOST_SHARED_BYTES = 232448;  // of a CTA
// Tiles lie in panels of 64 columns: rows of 128 bytes, swizzled. Matrix descriptors count in units of 16 bytes.
constexpr int PANEL_ROW = 128, DESCRIPTOR_UNIT = 16;
constexpr int SIXTEEN_ROWS = 16 * PANEL_ROW;                     // of a panel: the depth of one product
constexpr int HALF_PANEL = 64 * PANEL_ROW;                       // the rows of one warpgroup
constexpr int SIXTEEN_COLUMNS = 32;                              // bytes in a row
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;
// LSE of rows that attend nothing or lie beyond the sequence: exp2(score - FAR) is 0 for every score.
constexpr float FAR = 1e30f;
#define MINUS_INFINITY (-__int_as_float(0x7f800000))
