// Scales of rows that go into a cache in 8 bits, from their largest magnitudes.
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

// The same of 2^lane_bits threads side by side, which have a row; all threads of the block call this.
template <int kWarps>
__device__ __forceinline__ uint32_t largest_of_row(uint32_t largest, int lane_bits) {
  for (int bit = 0; bit < min(lane_bits, 5); ++bit) largest = max(largest, __shfl_xor_sync(~0u, largest, 1 << bit));
  if (lane_bits > 5) {  // a row of several warps
    __shared__ uint32_t of_warps[kWarps];
    const int warp = threadIdx.x / 32, first = warp >> lane_bits - 5 << lane_bits - 5;
    if (threadIdx.x % 32 == 0) of_warps[warp] = largest;
    __syncthreads();
    for (int i = 0; i < 1 << lane_bits - 5; ++i) largest = max(largest, of_warps[first + i]);
  }
  return largest;
}

// The scale that brings a magnitude to the largest number of e4m3; 1 where all numbers are 0.
__device__ __forceinline__ float scale_of_largest(uint32_t largest) {
  const float magnitude = __uint_as_float(largest);
  if (magnitude != magnitude) return __uint_as_float(0x7fc00000);
  return largest == 0 ? 1.0f : fmaxf(__fdiv_rn(magnitude, 448.0f), 1.17549435e-38f);
}
