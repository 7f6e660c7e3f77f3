// Small tables in shared memory, of which each pair of a query and a key reads an entry.
#pragma once

#include "types.cuh"

// The entry `place` bytes behind the first one. The sum is one that only the load makes: as part of a longer one, the compiler
// would add what is the same for all entries to each of them.
__device__ __forceinline__ float entry_at(uint32_t table, int place) {
  float entry;
  asm volatile("{.reg .u32 at; add.u32 at, %1, %2; ld.shared.f32 %0, [at];}" : "=f"(entry) : "r"(table), "r"(place) : "memory");
  return entry;
}
