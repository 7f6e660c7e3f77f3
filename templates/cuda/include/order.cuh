// Sums in global memory that several blocks add to in a fixed order.
#pragma once

#include "blocks.cuh"

// The counter of a tile says how many turns have passed in it and in all before it. With this bit it says instead, of the
// tile alone, before which turn it has no step: from its start until its first addition, and after its last one.
constexpr uint32_t kNoneBefore = 1u << 31;
constexpr uint32_t kAllPassed = ~0u;

// The turns of the tiles before one, as far as a warp knows of them.
struct Earlier {
  const uint32_t* counters;
  int count;        // of tiles that may have steps left
  uint32_t passed;  // the turns that have passed in all of them
};

// The number of lanes before the first whose bit is set.
__device__ __forceinline__ int lanes_before(uint32_t lanes) { return lanes != 0 ? __ffs(lanes) - 1 : 32; }

// A warp waits until a turn has passed in all earlier tiles. Each lane asks one of them, the last ones first: those that
// have no step up to this turn are passed over, and the first of the others knows of all before it.
__device__ __forceinline__ void await_turn(Earlier& earlier, uint32_t turn, int lane) {
  for (int at = earlier.count; __any_sync(~0u, at > 0 && earlier.passed <= turn);) {
    const uint32_t state = lane < at ? load_acquire(earlier.counters + at - 1 - lane) : kAllPassed;
    const bool own = (state & kNoneBefore) != 0;
    const uint32_t asked = __ballot_sync(~0u, !own || (state & ~kNoneBefore) <= turn);
    const uint32_t left = __ballot_sync(~0u, state != kAllPassed);
    if (at == earlier.count) earlier.count -= lanes_before(left);  // for good
    at -= lanes_before(asked);
    const uint32_t counter = __shfl_sync(~0u, state, lanes_before(asked) % 32);
    if (__any_sync(~0u, asked != 0 && (counter & kNoneBefore) == 0 && counter > turn)) {
      if (at == earlier.count) earlier.passed = counter;
      break;
    }
  }
  __syncwarp();
}
