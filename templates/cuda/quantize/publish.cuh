// Blocks that run at the same time publish maxima in global memory. A word is 0 until its maximum is there: value and flag
// are one word, so that no order of two stores matters.
#pragma once

#include "types.cuh"

// Magnitudes as bits are less than 2^32 - 1.
__device__ __forceinline__ void publish(uint32_t* place, uint32_t magnitude) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(place), "r"(magnitude + 1) : "memory");
}

__device__ __forceinline__ uint32_t published(const uint32_t* place) {
  uint32_t word;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(place) : "memory");
  return word;
}
