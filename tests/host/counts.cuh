// Counts in global memory, as templates/cuda/include/counts.cuh has them.
#pragma once

#include "types.cuh"

inline void count_one(uint32_t* count) {
  ++*count;
  moved = true;
}
inline void await_count(const uint32_t* count, uint32_t wanted) {
  while (*count < wanted) yield();
}
