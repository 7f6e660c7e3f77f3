// Copies by threads, which land at once.
#pragma once

#include "barrier.cuh"

inline void copy_async(uint32_t to, const void* from, bool exists) {
  if (exists) std::memcpy(place_of_address(to), from, 16);
  else std::memset(place_of_address(to), 0, 16);
}
template <int kTo, int kFrom>
inline void copy_async_at(uint32_t to, const void* from, bool exists) {
  copy_async(to + kTo, static_cast<const char*>(from) + kFrom, exists);
}
inline void copy_number_async(uint32_t to, const void* from) { std::memcpy(place_of_address(to), from, 4); }
inline void copy_number_async_if(bool condition, uint32_t to, const void* from) {
  if (condition) copy_number_async(to, from);
}
inline void commit_copies() {}
template <int kLeft>
inline void wait_copies() {}
inline void arrive_when_copied(uint32_t barrier) { arrive(barrier); }
template <int kBoxBytes>
inline int swizzled(int row, int chunk) {
  static_assert(kBoxBytes == 128);
  return chunk ^ row % 8;
}
