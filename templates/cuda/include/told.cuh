// Maxima that blocks which run at the same time tell each other through global memory. A word is 0 until its maximum is
// known: value and flag are one, so that nothing has to be ordered.
#pragma once

#include "types.cuh"

// Magnitudes as bits are less than 2^32 - 1.
__device__ __forceinline__ void tell(uint32_t* place, uint32_t magnitude) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(place), "r"(magnitude + 1) : "memory");
}

__device__ __forceinline__ uint32_t told(const uint32_t* place) {
  uint32_t word;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(place) : "memory");
  return word;
}
