// Blocks that wait for each other through global memory. One thread runs at a time, until it waits.
#pragma once

#include <utility>

#include "types.cuh"

inline uint32_t atomicInc(uint32_t* place, uint32_t last) { return std::exchange(*place, *place < last ? *place + 1 : 0); }
inline uint32_t atomicAdd(uint32_t* place, uint32_t value) { return std::exchange(*place, *place + value); }
inline uint32_t load_acquire(const uint32_t* from) {
  polled = true;
  yield();
  return *from;
}
inline void publish(uint32_t* to, uint32_t value) {
  *to = value;
  ++publications;
}
inline void store_release(uint32_t* to, uint32_t value) { publish(to, value); }
inline void store_relaxed(uint32_t* to, uint32_t value) { store_release(to, value); }
inline void add_release(uint32_t* to, uint32_t value) { publish(to, *to + value); }
inline void fence_async_global() {}
inline void __nanosleep(int) {}
inline int take_number(uint32_t* counter, int lane) { return __shfl_sync(~0u, lane == 0 ? static_cast<int>(atomicAdd(counter, 1)) : 0, 0); }
inline int take_in_order(uint32_t* counter, int tiles, int lane) {
  return __shfl_sync(~0u, lane == 0 ? static_cast<int>(atomicInc(counter, tiles + gridDim.x - 1)) : 0, 0);
}
