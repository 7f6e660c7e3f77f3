// Scales of latents that go into a cache in 8 bits.
#pragma once

#include "row_scales.cuh"

// Largest magnitude of kLanes lanes side by side.
template <int kLanes>
__device__ __forceinline__ uint32_t largest_of_lanes(uint32_t largest) {
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, step));
  return largest;
}

// The biased exponent of the power of two that is not below a normal number, and that power; 255 is NaN.
__device__ __forceinline__ uint32_t exponent_above(float scale) {
  const uint32_t bits = __float_as_uint(scale) & 0x7fffffff;
  return min((bits >> 23) + ((bits & 0x7fffff) != 0), 255u);
}
__device__ __forceinline__ float power_of(uint32_t exponent) {
  return __uint_as_float(exponent == 255 ? 0x7fffffff : exponent << 23);
}
