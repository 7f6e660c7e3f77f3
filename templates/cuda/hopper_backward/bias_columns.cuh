// Tiles of biases over queries and keys, as `biases.cuh` has them, read by keys: for products whose rows are keys.
#pragma once

#include "biases.cuh"

// A tile of `kRows` queries and the 64 keys of a consumer, in one or two boxes with swizzled rows. A warp reads 16 of the keys
// in the order of an accumulator of S^T, in which a lane has two neighbouring queries of two keys that are 8 apart.
template <typename Element, int kRows, int kBytes = sizeof(Element)>
struct BiasColumns {
  static constexpr int kBoxBytes = kBytes == 1 ? 64 : 128;

  uint32_t first;  // address of the lane's first query in the box of its keys
  uint32_t place;  // bytes from there to its first key, swizzled

  __device__ __forceinline__ BiasColumns(uint32_t tile, int warp, int lane)
      : first(tile + 16 * kBytes * warp / kBoxBytes * kRows * kBoxBytes + 2 * (lane % 4) * kBoxBytes),
        place(kBytes * (16 * warp + lane / 4) % kBoxBytes ^ (kBytes == 1 ? 16 : 32) * (lane % 4)) {
    static_assert(kBytes == 1 || kBytes == 4);
  }

  // Reads the lane's elements of 16 queries: for both keys those of the first 8 queries, then those of the last 8.
  __device__ __forceinline__ void read(uint32_t (&elements)[8], int query) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t row = first + (query + i / 4 * 8 + i % 2) * kBoxBytes;
      if constexpr (kBytes == 1) {
        elements[i] = load_shared_8(row + place + i / 2 % 2 * 8);
      } else {
        elements[i] = load_shared_32(row + (place ^ i / 2 % 2 * 32 ^ i % 2 * 16));
      }
    }
  }
};

// The same for elements of 16 bits, which `ldmatrix` transposes and loads in pairs of queries.
template <typename Element, int kRows>
struct BiasColumns<Element, kRows, 2> {
  static constexpr int kBoxBytes = 128;

  uint32_t first;  // address of a lane's block of 8 keys, in the first rows

  __device__ __forceinline__ BiasColumns(uint32_t tile, int warp, int lane)
      : first(tile + (lane / 16 * 8 + lane % 8) * kBoxBytes + 16 * (2 * warp + lane / 8 % 2 ^ lane % 8)) {}

  // Of 16 queries: pairs of the first 8 of either key, then of the others.
  __device__ __forceinline__ void read(uint32_t (&pairs)[4], int query) const {
    load_blocks_transposed(pairs, first + query * kBoxBytes);
  }
};

// The next stage of one reader, where those of others lie between.
template <int kReaders, typename Ring>
__device__ __forceinline__ void advance_by(Ring& ring) {
  static_assert(Ring::kStages % kReaders == 0);
  if ((ring.stage += kReaders) >= Ring::kStages) {
    ring.stage -= Ring::kStages;
    ring.phase ^= 1;
  }
}
