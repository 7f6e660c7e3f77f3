// A tile map, in its order: for each row of tiles the words of full tiles, then those of partial ones, a bit for each tile; the
// order in which blocks take rows, and how many of its first ones are long; a slot for each tile, which says where the bits of
// its visible pairs are (-1: nowhere); and these bits.
#pragma once

#include "types.cuh"

constexpr int kSlotsOfWord = 16;  // 32 slots for the two words of 32 tiles

// The number with all its bits spread over the result (Steele, Lea and Flood 2014, SplitMix64).
__device__ __forceinline__ unsigned long long mixed(unsigned long long x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

// The sum of the values of all lanes.
__device__ __forceinline__ unsigned long long sum_of_lanes(unsigned long long value) {
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) value += __shfl_xor_sync(~0u, value, apart);
  return value;
}

// Whether none of four bytes is 0.
__device__ __forceinline__ bool has_no_zero(uint32_t bytes) {
  return ((bytes - 0x01010101) & ~bytes & 0x80808080) == 0;
}

// The least and the greatest of some values, and whether none of them is NaN. Without a value, least > greatest.
template <class T>
struct Range {
  T least, greatest;
  bool numbers;

  __device__ __forceinline__ void take(T value) {
    least = min(least, value), greatest = max(greatest, value);  // of floats, these pass over NaN
    numbers = numbers && value == value;
  }

  // The range of the values that any lane took.
  __device__ __forceinline__ void join_lanes() {
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) {
      least = min(least, __shfl_xor_sync(~0u, least, apart));
      greatest = max(greatest, __shfl_xor_sync(~0u, greatest, apart));
    }
    numbers = __all_sync(~0u, numbers);
  }
};

template <class T>
__device__ __forceinline__ Range<T> no_values();
template <>
__device__ __forceinline__ Range<int> no_values() {
  return {0x7fffffff, -0x7fffffff - 1, true};
}
template <>
__device__ __forceinline__ Range<long long> no_values() {
  return {0x7fffffffffffffff, -0x7fffffffffffffff - 1, true};
}
template <>
__device__ __forceinline__ Range<float> no_values() {
  return {__int_as_float(0x7f800000), __int_as_float(0xff800000), true};
}
