// Numbers of a thread in pieces of 16 that lie side by side in a row.
#pragma once

#include "hadamard.cuh"

constexpr int kPieces = kSlots / 2;

// The largest finite magnitude of each piece; 0 if there is none.
__device__ __forceinline__ void find_largest_of_pieces(const float (&x)[kSlots][kNumbers], float (&largest)[kPieces]) {
  float most = 0.0f;
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
    float& own = largest[slot / 2];
    if (slot % 2 == 0) own = 0.0f;
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) own = fmaxf(own, fabsf(x[slot][i]));  // drops NaN
    most = fmaxf(most, own);
  }
  const float infinity = __uint_as_float(0x7f800000);
  if (most < infinity) return;
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
    float& own = largest[slot / 2];
    if (slot % 2 == 0) own = 0.0f;
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) {
      const float magnitude = fabsf(x[slot][i]);
      if (magnitude < infinity) own = fmaxf(own, magnitude);
    }
  }
}

// Two lanes that differ in one bit have maxima of the same two rows: the lane with the bit gets the second one.
template <int kBit>
__device__ __forceinline__ float exchanged_maximum(float first, float second) {
  const bool gets_second = threadIdx.x & kBit;
  const float other = __shfl_xor_sync(~0u, gets_second ? first : second, kBit);
  return fmaxf(gets_second ? second : first, other);
}
