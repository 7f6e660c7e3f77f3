// Scales of 8-bit numbers: what they are of, and what the largest magnitude gives.
#pragma once

#include "hadamard.cuh"

// What has a scale of its own.
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

// A vector times `factor`, in 8 bits.
template <typename Rounded>
__device__ __forceinline__ uint2 in_8_bits(const float (&x)[kNumbers], float factor) {
  return {pack<Rounded>(x[0] * factor, x[1] * factor, x[2] * factor, x[3] * factor),
          pack<Rounded>(x[4] * factor, x[5] * factor, x[6] * factor, x[7] * factor)};
}
