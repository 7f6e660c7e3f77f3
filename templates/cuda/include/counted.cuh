// Election of the last of several blocks to be done.
#pragma once

#include "types.cuh"

// Whether `count` blocks are done, for which this waits so many clocks; what they have released can be read then.
__device__ __forceinline__ bool await_count(const uint32_t* counter, uint32_t count, long long clocks) {
  for (const long long start = clock64();;) {
    uint32_t done;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(done) : "l"(counter) : "memory");
    if (done == count) return true;
    if (clock64() - start > clocks) return false;
  }
}

// Counts this block as done, releasing what it has written, and returns how many were done before.
__device__ __forceinline__ uint32_t arrive_counted(uint32_t* counter, uint32_t times = 1) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(times) : "memory");
  return before;
}
