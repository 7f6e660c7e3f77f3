// The bound of logits to which a float mask may add the least value of its dtype.
#pragma once

#include "expression.cuh"

// Raises finite elements to `least`; -inf and NaN stay what they are.
template <int kCount>
__device__ __forceinline__ void bound_below(float (&x)[kCount], float least) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] = x[i] * 0x1p-126f + nan_max(x[i], least);
}
