// The largest numbers of columns whose rows lie in eight lanes of a warp, which are four apart.
#pragma once

#include "types.cuh"

enum class Named { kMaxima = 1 };  // named barriers: one for each warpgroup, when its warps have written theirs

// Maxima of `kCount` columns over these lanes. Each lane keeps an eighth of them, at the front: it sends those of the other
// half of lanes and gets its own from there, three times.
template <int kCount>
__device__ __forceinline__ void max_of_rows(float (&values)[kCount]) {
  static_assert(kCount % 8 == 0);
#pragma unroll
  for (int apart = 16; apart >= 4; apart /= 2) {
    const int half = kCount * apart / 32;
    const bool upper = threadIdx.x & apart;
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      if (i >= half) break;
      const float sent = upper ? values[i] : values[half + i], kept = upper ? values[half + i] : values[i];
      values[i] = fmaxf(kept, __shfl_xor_sync(~0u, sent, apart));
    }
  }
}

// The first of the columns that a lane keeps.
template <int kCount>
__device__ __forceinline__ int first_of_rows() {
  const int lane = threadIdx.x % 32;
  return (lane / 16 * 4 + lane / 8 % 2 * 2 + lane / 4 % 2) * (kCount / 8);
}
