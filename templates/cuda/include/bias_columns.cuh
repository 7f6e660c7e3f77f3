// Tiles of biases over queries and keys, as `biases.cuh` has them, read by keys: for products whose rows are keys.
#pragma once

#include "biases.cuh"

// The 64 keys of a consumer, of which a row takes 128 bytes, swizzled, as the lanes of a warp read 16 of these: in the
// order of an accumulator of S^T, in which a lane has two neighbouring queries of two keys, 8 apart.
struct BiasColumns {
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
