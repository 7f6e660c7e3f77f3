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

// Stores 16 bytes by one instruction. For an ordinary store the compiler may choose four, of registers that are not side by side.
__device__ __forceinline__ void store_block(void* to, const uint32_t (&block)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(block[0]), "r"(block[1]), "r"(block[2]), "r"(block[3]) : "memory");
}

// One of two numbers. For an ordinary choice among the elements of arrays the compiler may put these into local memory.
__device__ __forceinline__ float select_number(bool condition, float first, float second) {
  float chosen;
  asm("{\n"
      ".reg .pred holds;\n"
      "setp.ne.b32 holds, %3, 0;\n"
      "selp.f32 %0, %1, %2, holds;\n"
      "}"
      : "=f"(chosen)
      : "f"(first), "f"(second), "r"(static_cast<int>(condition)));
  return chosen;
}
