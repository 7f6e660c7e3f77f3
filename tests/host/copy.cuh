// Copies by threads, which land at once.
#pragma once

#include "barrier.cuh"

#if RACES
inline int copies_of_warp() { return races::actor_of(current->warp->copies, "copies of warp", threadIdx.x / 32, current->block->slot); }
struct CopyingAsync {
  races::As as;
  CopyingAsync() : as(copies_of_warp(), current->copies + 1) {}
};
#else
struct CopyingAsync {};
#endif
inline void copy_async(uint32_t to, const void* from, bool exists) {
  const CopyingAsync copying;
  if (exists) std::memcpy(place_of_address(to), from, 16);
  else std::memset(place_of_address(to), 0, 16);
}
template <int kTo, int kFrom>
inline void copy_async_at(uint32_t to, const void* from, bool exists) {
  copy_async(to + kTo, static_cast<const char*>(from) + kFrom, exists);
}
inline void copy_number_async(uint32_t to, const void* from) {
  const CopyingAsync copying;
  std::memcpy(place_of_address(to), from, 4);
}
inline void copy_number_async_if(bool condition, uint32_t to, const void* from) {
  if (condition) copy_number_async(to, from);
}
inline void commit_copies() { ++current->copies; }
template <int kLeft>
inline void wait_copies() {
#if RACES
  if (current->copies > kLeft) races::finish(copies_of_warp(), current->copies - kLeft);
#endif
}
inline void arrive_when_copied(uint32_t barrier) {
#if RACES
  ++current->copies;
  races::arrive_later(barrier_at(barrier).signal, block_of(barrier), copies_of_warp(), current->copies);
#endif
  arrive(barrier);
}
template <int kBoxBytes>
inline int swizzled(int row, int chunk) {
  static_assert(kBoxBytes == 128 || kBoxBytes == 64);
  return chunk ^ (kBoxBytes == 128 ? row % 8 : row / 2 % 4);
}
inline void store_number(uint32_t to, uint32_t number) { std::memcpy(place_of_address(to), &number, 4); }
inline void store_number_if(bool condition, uint32_t to, float number) {
  if (condition) std::memcpy(place_of_address(to), &number, 4);
}
inline void add_to(float* to, float number) { races::add(to, number); }
