// Which of several blocks is the last one to be done.
#pragma once

#include "types.cuh"

// Counts this block as done, releasing what it has written, and returns how many were done before.
__device__ __forceinline__ uint32_t arrive_counted(uint32_t* counter) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}
