// The largest probability of each row so far, of the keys of a lane, from which the largest logit follows.
#pragma once

#include "softmax.cuh"

// As `exponentiate`; also keeps the largest P, relative to the row max like all of them, as bits: those of numbers that are
// not negative have their order, and one instruction compares three integers, but only two floats.
template <typename Element, int kCount>
__device__ __forceinline__ void exponentiate_largest(
    const float (&s)[kCount], float scale, const float (&row_max)[2], uint32_t (&p)[kCount / 2], float (&sum)[2],
    int (&largest_p)[2]) {
  static_assert(sizeof(Element) == 2);
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    const float low = exp2_approx(fmaf(s[i], scale, -row_max[row_of(i)]));
    const float high = exp2_approx(fmaf(s[i + 1], scale, -row_max[row_of(i)]));
    sum[row_of(i)] += low + high;
    largest_p[row_of(i)] = max(max(largest_p[row_of(i)], __float_as_int(low)), __float_as_int(high));
    p[i / 2] = pack<Element>(low, high);
  }
}

// The same number once the row max has changed, whose own P is 1.
__device__ __forceinline__ int rescaled_p(int largest_p, float alpha) {
  return __float_as_int(fmaxf(__int_as_float(largest_p) * alpha, 1.0f));
}

// The largest logit of each row, in units of log2, from the lanes' largest P.
__device__ __forceinline__ void largest_of_p(const int (&largest_p)[2], const float (&row_max)[2], float (&largest)[2]) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    int of_row = max(largest_p[row], __shfl_xor_sync(~0u, largest_p[row], 1));
    of_row = max(of_row, __shfl_xor_sync(~0u, of_row, 2));
    largest[row] = row_max[row] + log2f(__int_as_float(of_row));
  }
}
