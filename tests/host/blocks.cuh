// Blocks run one after the other: what one waits for is done, or never comes.
#pragma once

#include "types.cuh"

inline uint32_t load_acquire(const uint32_t* from) {
  moved = true;
  return *from;
}
inline void add_release(uint32_t* to, uint32_t value) { *to += value; }
