// Scales of latents that go into a cache in 8 bits.
#pragma once

#include "rounded.cuh"

// Largest magnitude of the lane's numbers, as bits, which compare as the numbers do; those of NaN are larger.
template <typename Element>
__device__ __forceinline__ uint32_t largest_magnitude(const Vector<Element>& vector) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < Vector<Element>::kElements; ++i) {
    largest = max(largest, __float_as_uint(to_float(vector.elements[i])) & 0x7fffffff);
  }
  return largest;
}

// The same of kLanes lanes side by side.
template <int kLanes>
__device__ __forceinline__ uint32_t largest_of_lanes(uint32_t largest) {
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, step));
  return largest;
}

// The scale that brings a magnitude to the largest number of e4m3; 1 where all numbers are 0.
__device__ __forceinline__ float scale_of_largest(uint32_t largest) {
  const float magnitude = __uint_as_float(largest);
  if (magnitude != magnitude) return __uint_as_float(0x7fc00000);
  return largest == 0 ? 1.0f : fmaxf(__fdiv_rn(magnitude, 448.0f), 1.17549435e-38f);
}

// The biased exponent of the power of two that is not below a normal number, and that power; 255 is NaN.
__device__ __forceinline__ uint32_t exponent_above(float scale) {
  const uint32_t bits = __float_as_uint(scale) & 0x7fffffff;
  return min((bits >> 23) + ((bits & 0x7fffff) != 0), 255u);
}
__device__ __forceinline__ float power_of(uint32_t exponent) {
  return __uint_as_float(exponent == 255 ? 0x7fffffff : exponent << 23);
}
