// A row max that seldom changes: the four lanes of a row compare their own columns with it, and exchange maxima only where
// one of them asks for a new one.
#pragma once

#include "softmax.cuh"

// The largest S of each row among the columns of a lane.
template <int kCount>
__device__ __forceinline__ void find_lane_maximum(const float (&s)[kCount], float (&largest)[2]) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    largest[row] = s[2 * row];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (row_of(i) == row) largest[row] = fmaxf(largest[row], s[i]);
    }
  }
}

// The largest of the four lanes of each row, in units of log2.
template <typename Scale>
__device__ __forceinline__ void join_lane_maxima(float (&maximum)[2], const Scale& scale) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const float largest = fmaxf(maximum[row], __shfl_xor_sync(~0u, maximum[row], 1));
    maximum[row] = of_row(scale, row) * fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
  }
}
