// Enough of CUDA for the kernels without PTX to run on the host: one thread after the other, as far as the next __syncthreads.
#pragma once
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <vector>
#define __device__
#define __forceinline__ inline
#define __global__
#define __shared__ static
#define __launch_bounds__(...)
#define __grid_constant__
#define __host__
struct int2 {
  int x, y;
};
struct int3 {
  int x, y, z;
};
struct int4 {
  int x, y, z, w;
};
struct uint2 {
  unsigned x, y;
};
struct ulonglong2 {
  unsigned long long x, y;
};
static inline ulonglong2 make_ulonglong2(unsigned long long x, unsigned long long y) { return {x, y}; }
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline int2 make_int2(int x, int y) { return {x, y}; }
static inline int3 make_int3(int x, int y, int z) { return {x, y, z}; }
static inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
struct Index {
  int x;
};
extern Index blockIdx, threadIdx;
template <class T> static inline T min(T a, T b) { return a < b ? a : b; }
template <class T> static inline T max(T a, T b) { return a > b ? a : b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __int_as_float(int x) {
  float y;
  memcpy(&y, &x, 4);
  return y;
}
static inline int __float_as_int(float x) {
  int y;
  memcpy(&y, &x, 4);
  return y;
}
void __syncthreads();
// A device refuses an address that is no multiple of what is loaded.
template <class T> static inline T __ldg(const T* at) {
  if ((unsigned long long)at % sizeof(T)) abort();
  T value;
  memcpy(&value, at, sizeof(T));
  return value;
}
template <class T> static inline T atomicAdd(T* at, T value) {
  const T before = *at;
  *at += value;
  return before;
}
