// Exchange among a quad: four neighbouring lanes of a warp, which hold the same row of a product.
#pragma once

#include "types.cuh"

// Lane t of a quad has the t-th register of each of four blocks; afterwards it has those of block t, in their order.
__device__ __forceinline__ void gather_block(uint32_t (&of_block)[4]) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = threadIdx.x & bit;
#pragma unroll
    for (int lower = 0; lower < 4; ++lower) {
      if (lower & bit) continue;
      uint32_t &low = of_block[lower], &high = of_block[lower + bit];
      const uint32_t got = __shfl_xor_sync(~0u, upper ? low : high, bit);
      (upper ? low : high) = got;
    }
  }
}
