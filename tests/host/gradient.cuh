// Parts of backward kernels besides the softmax and the products.
#pragma once

#include "tma.cuh"

inline uint32_t not_hoisted(uint32_t value) { return value; }
inline int lane_of_warp() { return current->lane; }
// An instruction that reads shared memory of the block faults at addresses of any other.
inline float4 load_float4(uint32_t from) {
  if (static_cast<int>(from >> kRankBits) != current->block->rank) fail("a read of another block's shared memory", from);
  float4 x;
  std::memcpy(&x, place_of_address(from), sizeof(x));
  return x;
}
inline void store_float4(uint32_t to, float x, float y, float z, float w) {
  const float4 four = {x, y, z, w};
  std::memcpy(place_of_address(to), &four, sizeof(four));
}
inline int row_place(int row) { return row & ~15 | row / 2 % 4 * 4 | row / 8 % 2 * 2 | row % 2; }
inline void store_floats(float* to, uint32_t from, uint32_t bytes) {
  const Storing storing;
  std::memcpy(to, place_of_address(from), bytes);
}
inline void add_floats(float* to, uint32_t from, uint32_t bytes) {
  const Storing storing;
  for (uint32_t i = 0; i < bytes / 4; ++i) races::add(to + i, reinterpret_cast<const float*>(place_of_address(from))[i]);
}
inline void load_floats(uint32_t to, const float* from, uint32_t bytes, uint32_t full) { load_bytes(to, from, full, bytes); }
template <typename Element>
inline void clear_rows(Element* rows, long long stride, int columns, int first, int end, int thread, int threads) {
  for (int row = first + thread; row < end; row += threads) std::memset(rows + row * stride, 0, columns * sizeof(Element));
}
template <typename Element>
inline float dot(uint32_t a, uint32_t b) {
  const float2 x = unpack<Element>(a), y = unpack<Element>(b);
  return x.x * y.x + x.y * y.y;
}

// Four blocks of 8 rows of 16 bytes, each transposed: a row to the address of a lane.
inline void store_transposed(uint32_t to, uint32_t b0, uint32_t b1, uint32_t b2, uint32_t b3) {
  const uint32_t own[4] = {b0, b1, b2, b3};
  const uint32_t* const blocks = own;
  const uint64_t(&addresses)[32] = exchange(to);
  uint32_t places[32];
  for (int lane = 0; lane < 32; ++lane) places[lane] = static_cast<uint32_t>(addresses[lane]);
  meet(blocks, [&](const uint64_t(&all)[32]) {
    for (int lane = 0; lane < 32; ++lane) {
      const uint32_t* const words = reinterpret_cast<const uint32_t*>(all[lane]);
      for (int i = 0; i < 8; ++i) {
        const uint16_t element = words[i / 2] >> 16 * (i % 2);
        std::memcpy(place_of_address(places[8 * (i / 2) + 2 * (lane % 4) + i % 2]) + 2 * (lane / 4), &element, 2);
      }
    }
  });
}

// Four neighbouring lanes hold the columns of four blocks of 8 in turns, of two rows. Each gets a block of both.
template <typename Element>
inline void round_sums(const float4 (&sums)[4], float factor, int lane, uint4& upper, uint4& lower) {
  uint32_t of_upper[4], of_lower[4];
  for (int i = 0; i < 4; ++i) {
    const auto gather = [&](uint32_t own, uint32_t (&to)[4]) {
      const uint64_t(&all)[32] = exchange(own);
      for (int j = 0; i == lane % 4 && j < 4; ++j) to[j] = static_cast<uint32_t>(all[(lane & ~3) + j]);
    };
    gather(pack<Element>(sums[i].x * factor, sums[i].y * factor), of_upper);
    gather(pack<Element>(sums[i].z * factor, sums[i].w * factor), of_lower);
  }
  upper = {of_upper[0], of_upper[1], of_upper[2], of_upper[3]};
  lower = {of_lower[0], of_lower[1], of_lower[2], of_lower[3]};
}
