// The largest logit of each row so far, of the keys of a lane.
#pragma once

#include "softmax.cuh"

// In two chains for each row, which do not wait for each other.
template <int kCount, typename Scale>
__device__ __forceinline__ void track_largest(const float (&s)[kCount], const Scale& scale, float (&largest)[2]) {
  static_assert(kCount % 8 == 0);
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    float of_lane[2];
#pragma unroll
    for (int chain = 0; chain < 2; ++chain) of_lane[chain] = fmaxf(s[4 * chain + 2 * row], s[4 * chain + 2 * row + 1]);
#pragma unroll
    for (int i = 8; i < kCount; ++i) {
      if (row_of(i) == row) of_lane[i / 4 % 2] = fmaxf(of_lane[i / 4 % 2], s[i]);
    }
    largest[row] = fmaxf(largest[row], of_row(scale, row) * fmaxf(of_lane[0], of_lane[1]));
  }
}
