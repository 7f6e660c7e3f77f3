// Counts in global memory, by which blocks tell each other what they have written.
#pragma once

#include "types.cuh"

// One more: what this thread has written before is seen by those who await the count.
__device__ __forceinline__ void count_one(uint32_t* count) {
  __threadfence();
  atomicAdd(count, 1u);
}

__device__ __forceinline__ void await_count(const uint32_t* count, uint32_t wanted) {
  uint32_t there;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(there) : "l"(count) : "memory");
  } while (there < wanted);
}
