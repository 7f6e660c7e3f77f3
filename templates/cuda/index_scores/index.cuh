// Sums over the heads of a query, of which the four lanes of a quad have a quarter each.
#pragma once

#include "relu.cuh"
#include "types.cuh"

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000); }

// Sums of `kCount` values over a quad, of which each lane keeps some, at the front: it sends those of the other half of
// lanes and gets its own from there, twice.
//
//   lane 0    lane 1    lane 2    lane 3
//   0 1 2 3   0 1 2 3   0 1 2 3   0 1 2 3
//   0 1       0 1           2 3       2 3     after an exchange with the lane 2 apart
//   0           1           2           3     after one with the lane 1 apart
template <int kCount>
__device__ __forceinline__ void sum_of_quad(float (&values)[kCount]) {
#pragma unroll
  for (int apart = 2; apart > 0; apart /= 2) {
    const int half = apart == 2 ? kCount / 2 : kCount / 4;
    const bool upper = threadIdx.x & apart;
    if (half == 0) values[0] += __shfl_xor_sync(~0u, values[0], apart);  // both lanes keep it
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      if (i >= half) break;
      const float sent = upper ? values[i] : values[half + i], kept = upper ? values[half + i] : values[i];
      values[i] = kept + __shfl_xor_sync(~0u, sent, apart);
    }
  }
}

// Number of sums that a lane keeps, and the number of the first.
template <int kCount>
__device__ __forceinline__ constexpr int own_of_quad() {
  return kCount < 4 ? 1 : kCount / 4;
}

template <int kCount>
__device__ __forceinline__ int first_of_quad() {
  return threadIdx.x % 4 * kCount / 4;
}
