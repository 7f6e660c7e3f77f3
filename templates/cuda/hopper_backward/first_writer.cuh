// Sums in memory that nothing clears: the first writer stores, later writers wait for it and add.
#pragma once

#include "blocks.cuh"

// State of a part of the dQ accumulator: untouched, taken by its first writer, stored by it.
constexpr uint32_t kUntouched = 0, kTaken = 1, kStored = 2;

// Whether this thread is the first writer. If not, waits until the first one has stored.
__device__ __forceinline__ bool take_first(uint32_t* state) {
  uint32_t now;
  asm volatile(
      "atom.acquire.gpu.global.cas.b32 %0, [%1], %2, %3;" : "=r"(now) : "l"(state), "n"(kUntouched), "n"(kTaken) : "memory");
  if (now == kUntouched) return true;
  while (now != kStored) now = load_acquire(state);
  return false;
}
