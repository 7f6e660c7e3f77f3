// Gathering rows by `cp.async` (copy.cuh).
#pragma once

#include "types.cuh"

// The same address, which the compiler has to keep in registers instead of computing it again at each use.
template <typename Element>
__device__ __forceinline__ const Element* kept_in_registers(const Element* address) {
  asm volatile("" : "+l"(address));
  return address;
}
