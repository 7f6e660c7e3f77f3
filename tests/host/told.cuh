// Maxima that blocks tell each other: threads take turns while they wait.
#pragma once

#include "types.cuh"

inline void tell(uint32_t* place, uint32_t magnitude) {
  *place = magnitude + 1;
  moved = true;
}
inline uint32_t told(const uint32_t* place) {
  if (*place == 0) yield();
  return *place;
}
