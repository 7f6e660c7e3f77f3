// Scales of 8-bit numbers: what they are of, and what the largest magnitude gives.
#pragma once

#include "hadamard.cuh"

// Extent of a scale.
enum Granularity { kTensor = 0, kHead = 1, kBlock = 2, kToken = 3 };

template <typename Rounded>
constexpr float kLargest = 448.0f;  // finite number
template <>
constexpr float kLargest<e5m2> = 57344.0f;

// The scale of numbers whose largest magnitude is `largest`: 1 where all are 0, and never so small that its reciprocal
// is none.
__device__ __forceinline__ float scale_of(float largest, float limit) {
  return largest == 0.0f ? 1.0f : fmaxf(__fdiv_rn(largest, limit), 1.17549435e-38f);
}

// Maxima of magnitudes as bits, which compare as the numbers do.
__device__ __forceinline__ void raise(uint32_t* largest, uint32_t magnitude) { atomicMax(largest, magnitude); }

// Two neighbouring vectors times `factor`, in 8 bits.
template <typename Rounded>
__device__ __forceinline__ uint4 in_8_bits(const float (&a)[kNumbers], const float (&b)[kNumbers], float factor) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* const four = (i < 2 ? a : b) + 4 * (i % 2);
    words[i] = pack<Rounded>(four[0] * factor, four[1] * factor, four[2] * factor, four[3] * factor);
  }
  return {words[0], words[1], words[2], words[3]};
}
