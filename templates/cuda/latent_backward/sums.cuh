// Adding tiles of a product to rows of float32 in global memory, in no fixed order (PTX ISA, "red").
#pragma once

#include "types.cuh"

// Waits until all copies of this thread have landed (copy.cuh).
__device__ __forceinline__ void wait_all_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ void add_four(float* to, float x0, float x1, float x2, float x3) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x0), "f"(x1), "f"(x2), "f"(x3) : "memory");
#else
  const float x[4] = {x0, x1, x2, x3};
#pragma unroll
  for (int i = 0; i < 4; ++i) asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to + i), "f"(x[i]) : "memory");
#endif
}

// Adds two rows of an accumulator, as the four lanes of an MMA have them, to rows in memory, null for none. Lanes exchange
// halves of two blocks of 8 columns, so that each has four columns side by side.
template <int kCount>
__device__ __forceinline__ void add_rows(float* const (&rows)[2], int column, const float (&acc)[kCount], int lane) {
  const bool odd = lane % 2;
#pragma unroll
  for (int block = 0; block < kCount / 4; block += 2) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int low = 4 * block + 2 * row, high = low + 4;
      const float got0 = __shfl_xor_sync(~0u, odd ? acc[low] : acc[high], 1);
      const float got1 = __shfl_xor_sync(~0u, odd ? acc[low + 1] : acc[high + 1], 1);
      float* const to = rows[row] + column + 8 * (block + odd) + 4 * (lane % 4 / 2);
      if (rows[row] == nullptr) continue;
      if (odd) {
        add_four(to, got0, got1, acc[high], acc[high + 1]);
      } else {
        add_four(to, acc[low], acc[low + 1], got0, got1);
      }
    }
  }
}
