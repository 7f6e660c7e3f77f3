// Blocks that wait for each other through global memory. One thread runs at a time, until it waits.
#pragma once

#include "types.cuh"

inline uint32_t atomicInc(uint32_t* place, uint32_t last) {
  const uint32_t before = __atomic_load_n(place, __ATOMIC_RELAXED);
  return __atomic_exchange_n(place, before < last ? before + 1 : 0, __ATOMIC_RELAXED);
}
inline uint32_t atomicAdd(uint32_t* place, uint32_t value) { return __atomic_fetch_add(place, value, __ATOMIC_RELAXED); }
inline uint32_t atomicOr(uint32_t* place, uint32_t value) { return __atomic_fetch_or(place, value, __ATOMIC_RELAXED); }
inline uint32_t load_acquire(const uint32_t* from) {
  polled = true;
  yield();
  return __atomic_load_n(from, __ATOMIC_ACQUIRE);
}
inline void store_release(uint32_t* to, uint32_t value) {
  __atomic_store_n(to, value, __ATOMIC_RELEASE);
  ++publications;
}
inline void store_relaxed(uint32_t* to, uint32_t value) {
  __atomic_store_n(to, value, __ATOMIC_RELAXED);
  ++publications;
}
inline void add_release(uint32_t* to, uint32_t value) {
  __atomic_fetch_add(to, value, __ATOMIC_RELEASE);
  ++publications;
}
// Takes a word in its first state; else the state that it has.
inline uint32_t take_state(uint32_t* word, uint32_t first, uint32_t taken) {
  __atomic_compare_exchange_n(word, &first, taken, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED);
  ++publications;
  return first;
}
inline void fence_async_global() {}
inline void __nanosleep(int) {}
inline int take_number(uint32_t* counter, int lane) { return __shfl_sync(~0u, lane == 0 ? static_cast<int>(atomicAdd(counter, 1)) : 0, 0); }
inline int take_in_order(uint32_t* counter, int tiles, int lane) {
  return __shfl_sync(~0u, lane == 0 ? static_cast<int>(atomicInc(counter, tiles + gridDim.x - 1)) : 0, 0);
}
