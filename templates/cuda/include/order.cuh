// Sums in global memory that several blocks add to in a fixed order.
#pragma once

#include "types.cuh"

// The counter of a tile says how many turns have passed in it and in all before it. With this bit it says instead, of the
// tile alone, before which turn it has no step: from its start on until its first addition, and behind its last one.
constexpr uint32_t kNoneBefore = 1u << 31;
constexpr uint32_t kAllPassed = ~0u;

// What another block has released, with all that it has seen before (PTX ISA, "Memory Consistency Model").
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

__device__ __forceinline__ void store_release(uint32_t* to, uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

// Where nothing was written that others are to see.
__device__ __forceinline__ void store_relaxed(uint32_t* to, uint32_t value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

// Orders what this thread knows of global memory before bulk copies that it issues. Their own completion needs none.
__device__ __forceinline__ void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// The turns of the tiles before one, as far as a warp knows of them.
struct Earlier {
  const uint32_t* counters;
  int count;        // of tiles that may have steps left
  uint32_t passed;  // the turns that have passed in all of them
};

// How many lanes stand before the first whose bit is set.
__device__ __forceinline__ int lanes_before(uint32_t lanes) { return lanes != 0 ? __ffs(lanes) - 1 : 32; }

// A warp waits until a turn has passed in all earlier tiles. Each lane asks one of them, the last ones first: those that
// have no step up to this turn are passed over, and the first of the others knows of all before it.
__device__ __forceinline__ void await_turn(Earlier& earlier, uint32_t turn, int lane) {
  for (int at = earlier.count; __any_sync(~0u, at > 0 && earlier.passed <= turn);) {
    const uint32_t found = lane < at ? load_acquire(earlier.counters + at - 1 - lane) : kAllPassed;
    const bool own = (found & kNoneBefore) != 0;
    const uint32_t asked = __ballot_sync(~0u, !own || (found & ~kNoneBefore) <= turn);
    const uint32_t left = __ballot_sync(~0u, found != kAllPassed);
    if (at == earlier.count) earlier.count -= lanes_before(left);  // for good
    at -= lanes_before(asked);
    const uint32_t counter = __shfl_sync(~0u, found, lanes_before(asked) % 32);
    if (__any_sync(~0u, asked != 0 && (counter & kNoneBefore) == 0 && counter > turn)) {
      if (at == earlier.count) earlier.passed = counter;
      break;
    }
  }
  __syncwarp();
}

// The next tile that no block has taken. The first one of a block is taken, too, so that all tiles before a tile that is
// taken belong to blocks that run: these may be waited for. The counter wraps as that of take_tile does.
__device__ __forceinline__ int take_in_order(uint32_t* counter, int tiles, int lane) {
  int index = 0;
  if (lane == 0) index = atomicInc(counter, tiles + gridDim.x - 1);
  return __shfl_sync(~0u, index, 0);
}
