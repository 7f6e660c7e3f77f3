// Copies of boxes, which land at once. What lies outside the tensor arrives as zeros.
#pragma once

#include "barrier.cuh"

struct TensorMap {
  const void* base;
  int size;  // bytes of an element
  int rank, swizzle;
  long long extent[5], stride[5];
  int box[5];
};

inline void prefetch_map(const TensorMap&) {}
inline void fence_async_proxy() {}
// Whether a map has rows twice, as place in a window, too: it begins before the tensor.
inline bool is_window(const TensorMap& map) {
  for (int axis = 1; axis + 1 < map.rank; ++axis) {
    if (map.stride[axis] == map.stride[axis + 1] && map.extent[axis] > 1 && map.extent[axis + 1] > 1) return true;
  }
  return false;
}
inline int elements_of(const TensorMap& map) {
  int elements = 1;
  for (int axis = 0; axis < map.rank; ++axis) elements *= map.box[axis];
  return elements;
}
template <typename... Coordinates>
inline void load_box_once(uint32_t to, const TensorMap& map, uint32_t full, Coordinates... coordinates) {
  const int first[] = {coordinates...};
  if (to % 128) fail("a copy does not begin at a multiple of 128 bytes", to);
  if (sizeof...(coordinates) != map.rank) fail("coordinates of another rank", map.rank);
  const int elements = elements_of(map);
  bool shows = false;
  {
    const Copying copying(full);
    for (int row = 0; row < elements; row += map.box[0]) {  // elements of the first axis, which are next to each other
      long long place = first[0];
      bool inside = true;
      for (int axis = 1, rest = row / map.box[0]; axis < map.rank; rest /= map.box[axis++]) {
        const long long at = first[axis] + rest % map.box[axis];
        inside = inside && at >= 0 && at < map.extent[axis];
        place += at * map.stride[axis];
      }
      for (int column = 0; column < map.box[0]; ++column) {
        const uint32_t address = to + map.size * (row + column);
        const uint32_t swizzled = map.swizzle == 128 ? (address >> 7 & 7) << 4 : (address >> 7 & 3) << 4;
        const bool there = inside && first[0] + column >= 0 && first[0] + column < map.extent[0];
        char* const at = place_of_address(address ^ swizzled);
        std::memset(at, 0, map.size);
        if (there) std::memcpy(at, static_cast<const char*>(map.base) + (place + column) * map.size, map.size);
        shows = shows || there;
      }
    }
  }
  if (!shows && is_window(map)) fail("a copy that shows nothing looks up where its map begins, before the tensor", to);
  land(full, map.size * elements);
}
template <typename... Coordinates>
inline void load_box(uint32_t to, const TensorMap& map, uint32_t full, Coordinates... coordinates) {
  load_box_once(to, map, full, coordinates...);
}
// The cache has no policy here.
constexpr uint64_t kEvictFirst = 0, kEvictNormal = 0;
template <typename... Coordinates>
inline void load_box_kept(uint32_t to, const TensorMap& map, uint32_t full, uint64_t, Coordinates... coordinates) {
  load_box_once(to, map, full, coordinates...);
}
// Four blocks of 8 rows of 16 bytes, each row to the address of a lane.
inline void store_blocks(uint32_t to, uint32_t b0, uint32_t b1, uint32_t b2, uint32_t b3) {
  const uint32_t own[4] = {b0, b1, b2, b3};
  const uint32_t* const blocks = own;
  const uint64_t(&addresses)[32] = exchange(to);
  uint32_t places[32];
  for (int lane = 0; lane < 32; ++lane) places[lane] = static_cast<uint32_t>(addresses[lane]);
  meet(blocks, [&](const uint64_t(&all)[32]) {
    for (int lane = 0; lane < 32; ++lane) {
      const uint32_t* const words = reinterpret_cast<const uint32_t*>(all[lane]);
      for (int block = 0; block < 4; ++block) {
        std::memcpy(place_of_address(places[8 * block + lane / 4]) + 4 * (lane % 4), &words[block], 4);
      }
    }
  });
}
inline void load_bytes(uint32_t to, const void* from, uint32_t full, int bytes) {
  if (to % 16 || bytes % 16 || reinterpret_cast<uintptr_t>(from) % 16) fail("bytes that are not in groups of 16", to);
  {
    const Copying copying(full);
    std::memcpy(place_of_address(to), from, bytes);
  }
  land(full, bytes);
}

// Stores read shared memory at any time until it is waited for; here at once.
#if RACES
inline int stores_of_warp() { return races::actor_of(current->warp->stores, "stores of warp", threadIdx.x / 32, current->block->slot, true); }
#endif
struct Storing {
#if RACES
  races::As as;
  Storing() : as(stores_of_warp(), current->stores + 1) {}
#endif
};
inline void commit_stores() { ++current->stores; }
inline void wait_stores_read() {
#if RACES
  races::finish(stores_of_warp(), current->stores);
#endif
}
inline void wait_stores_written() {
#if RACES
  races::finish_written(stores_of_warp(), current->stores);
#endif
}
template <typename... Coordinates>
inline void store_box(const TensorMap& map, uint32_t from, Coordinates... coordinates) {
  const int first[] = {coordinates...};
  if (sizeof...(coordinates) != map.rank) fail("coordinates of another rank", map.rank);
  const Storing storing;
  for (int i = 0; i < elements_of(map); ++i) {
    long long place = 0;
    bool inside = true;
    for (int axis = 0, rest = i; axis < map.rank; rest /= map.box[axis++]) {
      const long long at = first[axis] + rest % map.box[axis];
      inside = inside && at >= 0 && at < map.extent[axis];
      place += at * map.stride[axis];
    }
    const uint32_t address = from + map.size * i;
    const uint32_t swizzled = map.swizzle == 128 ? (address >> 7 & 7) << 4 : map.swizzle == 64 ? (address >> 7 & 3) << 4 : 0;
    char* const to = const_cast<char*>(static_cast<const char*>(map.base)) + place * map.size;
    if (inside) std::memcpy(to, place_of_address(address ^ swizzled), map.size);
  }
}
