// Sums that nothing clears: who is the first stores, others wait for that and add.
#pragma once

#include "blocks.cuh"

// The state of a part of the dQ accumulator: of nobody, taken by the first who has something for it, stored by that one.
constexpr uint32_t kUntouched = 0, kTaken = 1, kStored = 2;

// Whether this thread is the first there. If not, waits until that one has stored.
__device__ __forceinline__ bool take_first(uint32_t* state) {
  uint32_t found;
  asm volatile(
      "atom.acquire.gpu.global.cas.b32 %0, [%1], %2, %3;" : "=r"(found) : "l"(state), "n"(kUntouched), "n"(kTaken) : "memory");
  if (found == kUntouched) return true;
  while (found != kStored) found = load_acquire(state);
  return false;
}
