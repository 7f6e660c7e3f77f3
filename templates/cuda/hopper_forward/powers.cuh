// Probabilities by a polynomial, where a score is bounded: exp2 and the functions of the score share the MUFU.
#pragma once

#include "softmax.cuh"

// P = terms[0] + terms[1] x + ..., of each x in place of its logit, in 16 bits, as the A operand of the next product; adds to
// the sums of its rows.
template <typename Element, int kCount, int kTermCount>
__device__ __forceinline__ void raise_to_powers(
    const float (&x)[kCount], const float (&terms)[kTermCount], uint32_t (&p)[kCount / 2], float (&sum)[2]) {
  static_assert(sizeof(Element) == 2);
  const auto power = [&](float value) {
    float result = terms[kTermCount - 1];
#pragma unroll
    for (int i = kTermCount - 2; i >= 0; --i) result = fmaf(result, value, terms[i]);
    return result;
  };
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    const float low = power(x[i]), high = power(x[i + 1]);
    sum[row_of(i)] += low + high;
    p[i / 2] = pack<Element>(low, high);
  }
}
