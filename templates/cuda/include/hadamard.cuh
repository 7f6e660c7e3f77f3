// The Hadamard transform of rows that threads share: numbers in registers, some of each row in each of several lanes.
//
// A stage adds and subtracts numbers whose places differ in one bit. Stages go from the lowest bit to the highest, each
// sum is rounded to float32, so that all ways to share a row give the same bits.
#pragma once

#include "rotary.cuh"

constexpr int kSlots = 4;   // vectors of 16 bytes of a row that a thread has at most
constexpr int kNumbers = 8;  // of a vector: elements of 16 bits

// 16 bytes of a row, two elements in each word.
struct alignas(16) Words {
  uint32_t pairs[kNumbers / 2];

  static __device__ __forceinline__ Words load(const void* from) { return *static_cast<const Words*>(from); }
};

// Eight elements as floats; element i changes its sign if bit i of `flips` is set.
template <typename Element>
__device__ __forceinline__ void to_floats(float (&to)[kNumbers], const Words& words, uint32_t flips) {
#pragma unroll
  for (int i = 0; i < kNumbers / 2; ++i) {
    // Bits 2 i and 2 i + 1 of the flips go to the signs of the two elements, bits 15 and 31 of a word.
    const float2 both = unpack<Element>(words.pairs[i] ^ flips * (0x40008000u >> 2 * i) & 0x80008000u);
    to[2 * i] = both.x;
    to[2 * i + 1] = both.y;
  }
}

__device__ __forceinline__ void flip(float (&x)[kNumbers], uint32_t flips) {
#pragma unroll
  for (int i = 0; i < kNumbers; ++i) x[i] = __uint_as_float(__float_as_uint(x[i]) ^ flips << 31 - i & 0x80000000u);
}

__device__ __forceinline__ void add_and_subtract(float& a, float& b) {
  const float sum = a + b;
  b = a - b;
  a = sum;
}

__device__ __forceinline__ void add_and_subtract(float (&a)[kNumbers], float (&b)[kNumbers]) {
#pragma unroll
  for (int i = 0; i < kNumbers; ++i) add_and_subtract(a[i], b[i]);
}

// All stages. A thread has four vectors: two neighbours, and two more that come after those of all 2^lane_bits lanes which
// share a transform; of transforms of one vector or two it has several. 2^slot_bits: its vectors of one transform.
__device__ __forceinline__ void hadamard_transform(float (&x)[kSlots][kNumbers], int slot_bits, int lane_bits) {
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
#pragma unroll
    for (int step = 1; step < kNumbers; step *= 2) {
#pragma unroll
      for (int i = 0; i < kNumbers; ++i) {
        if ((i & step) == 0) add_and_subtract(x[slot][i], x[slot][i + step]);
      }
    }
  }
  if (slot_bits > 0) {
    add_and_subtract(x[0], x[1]);
    add_and_subtract(x[2], x[3]);
  }
  for (int bit = 1; bit < 1 << lane_bits; bit *= 2) {
    const float sign = threadIdx.x & bit ? -1.0f : 1.0f;
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
#pragma unroll
      for (int i = 0; i < kNumbers; ++i) {
        x[slot][i] = fmaf(sign, x[slot][i], __shfl_xor_sync(~0u, x[slot][i], bit));  // the product is exact
      }
    }
  }
  if (slot_bits > 1) {
    add_and_subtract(x[0], x[2]);
    add_and_subtract(x[1], x[3]);
  }
}

// The largest finite magnitude; 0 if there is none.
__device__ __forceinline__ float largest_of(const float (&x)[kSlots][kNumbers]) {
  float largest = 0.0f;
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) largest = fmaxf(largest, fabsf(x[slot][i]));  // drops NaN
  }
  const float infinity = __uint_as_float(0x7f800000);
  if (largest < infinity) return largest;
  largest = 0.0f;
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) {
      const float magnitude = fabsf(x[slot][i]);
      if (magnitude < infinity) largest = fmaxf(largest, magnitude);
    }
  }
  return largest;
}
