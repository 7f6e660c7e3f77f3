// Synchronization of blocks through global memory.
#pragma once

#include "types.cuh"

// Acquires what another block has released, with all that it had seen before (PTX ISA, "Memory Consistency Model").
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

__device__ __forceinline__ void store_release(uint32_t* to, uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

// For a store that publishes no other writes.
__device__ __forceinline__ void store_relaxed(uint32_t* to, uint32_t value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

// Adds, and releases all that this thread has seen before.
__device__ __forceinline__ void add_release(uint32_t* to, uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

// Orders what this thread knows of global memory before bulk copies that it issues. Their own completion needs none.
__device__ __forceinline__ void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// The next number that no warp has taken.
__device__ __forceinline__ int take_number(uint32_t* counter, int lane) {
  int number = 0;
  if (lane == 0) number = atomicAdd(counter, 1);
  return __shfl_sync(~0u, number, 0);
}

// The next tile that no block has taken. The first one of a block is taken, too, so that all tiles before a tile that is
// taken belong to blocks that run: it is safe to wait for them. The counter wraps as that of take_tile does.
__device__ __forceinline__ int take_in_order(uint32_t* counter, int tiles, int lane) {
  int index = 0;
  if (lane == 0) index = atomicInc(counter, tiles + gridDim.x - 1);
  return __shfl_sync(~0u, index, 0);
}
