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

// Not 0 if any of four bytes is 0.
__device__ __forceinline__ uint32_t zeros(uint32_t bytes) { return (bytes - 0x01010101) & ~bytes & 0x80808080; }

// A word of shared memory as it is now; other warps may change it.
__device__ __forceinline__ uint32_t at_once(const uint32_t& word) { return *static_cast<const volatile uint32_t*>(&word); }

// The place of the bit of a word before which so many others are set; all lanes ask for the same.
__device__ __forceinline__ int place_of_bit(uint32_t word, int before) {
  const int lane = threadIdx.x % 32;
  return __ffs(__ballot_sync(~0u, word >> lane & 1 && __popc(word & (1u << lane) - 1) == before)) - 1;
}

// A warp reads a tile of bools, 16 of a row by each lane: its lanes go through as many bands of rows as there is room for.
template <int kRows, int kKeys>
struct Bands {
  static constexpr int kLanes = kKeys / 16, kCount = 32 / kLanes, kSteps = (kRows + kCount - 1) / kCount;
  static constexpr int kAtOnce = 8;  // steps whose loads are on their way at a time

  // The lane's row at a step, and its first key.
  static __device__ __forceinline__ int row(int step) {
    const int band = min(static_cast<int>(threadIdx.x % 32 / kLanes), kCount - 1);
    return min(band * kSteps + step, kRows - 1);
  }
  static __device__ __forceinline__ int key() { return 16 * (threadIdx.x % kLanes); }
};

// Words that are not 0 if some of the bools that a lane took are true, and if some are false.
struct Bools {
  uint32_t some_true = 0, some_false = 0;

  __device__ __forceinline__ void take(uint4 bytes) {
    some_true |= bytes.x | bytes.y | bytes.z | bytes.w;
    some_false |= zeros(bytes.x) | zeros(bytes.y) | zeros(bytes.z) | zeros(bytes.w);
  }

  // Adds the bit of a tile to words of shared memory, if that is so of any lane.
  __device__ __forceinline__ void note(int bit, uint32_t& tiles_true, uint32_t& tiles_false) const {
    const bool has_true = __any_sync(~0u, some_true != 0), has_false = __any_sync(~0u, some_false != 0);
    if (threadIdx.x % 32 == 0 && has_true) atomicOr(&tiles_true, 1u << bit);
    if (threadIdx.x % 32 == 0 && has_false) atomicOr(&tiles_false, 1u << bit);
  }
};

// The least and the greatest value of any lane.
__device__ __forceinline__ int least_of_lanes(int value) { return __reduce_min_sync(~0u, value); }
__device__ __forceinline__ int greatest_of_lanes(int value) { return __reduce_max_sync(~0u, value); }
template <class T>
__device__ __forceinline__ T least_of_lanes(T value) {
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) value = min(value, __shfl_xor_sync(~0u, value, apart));
  return value;
}
template <class T>
__device__ __forceinline__ T greatest_of_lanes(T value) {
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) value = max(value, __shfl_xor_sync(~0u, value, apart));
  return value;
}

// The least and the greatest of some values. Without a value, least > greatest.
template <class T>
struct Range {
  T least, greatest;

  __device__ __forceinline__ void take(T value) { least = min(least, value), greatest = max(greatest, value); }

  // The range of the values that any lane took.
  __device__ __forceinline__ void join_lanes() { least = least_of_lanes(least), greatest = greatest_of_lanes(greatest); }
};

// Of floats, the least and the greatest pass over NaN.
template <>
struct Range<float> {
  float least, greatest;
  bool numbers;  // none is NaN

  __device__ __forceinline__ void take(float value) {
    least = min(least, value), greatest = max(greatest, value);
    numbers = numbers && value == value;
  }
  __device__ __forceinline__ void join_lanes() {
    least = least_of_lanes(least), greatest = greatest_of_lanes(greatest);
    numbers = __all_sync(~0u, numbers);
  }
};

// The same, and a bit for each remainder by 32.
template <class T>
struct Values : Range<T> {
  int residues;

  __device__ __forceinline__ void take(T value) {
    Range<T>::take(value);
    residues |= 1 << static_cast<int>(value & 31);
  }
  __device__ __forceinline__ void join_lanes() {
    Range<T>::join_lanes();
    residues = __reduce_or_sync(~0u, residues);
  }
};

template <class Known>
__device__ __forceinline__ Known no_values();
template <>
__device__ __forceinline__ Range<int> no_values() {
  return {0x7fffffff, -0x7fffffff - 1};
}
template <>
__device__ __forceinline__ Range<long long> no_values() {
  return {0x7fffffffffffffff, -0x7fffffffffffffff - 1};
}
template <>
__device__ __forceinline__ Range<float> no_values() {
  return {__int_as_float(0x7f800000), __int_as_float(0xff800000), true};
}
template <>
__device__ __forceinline__ Values<int> no_values() {
  return {no_values<Range<int>>(), 0};
}
template <>
__device__ __forceinline__ Values<long long> no_values() {
  return {no_values<Range<long long>>(), 0};
}
