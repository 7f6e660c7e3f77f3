// Tiles of biases: elements of 16 bits over queries and keys, as copies bring them, box after box of keys.
#pragma once

#include "ldmatrix.cuh"
#include "types.cuh"

// A tile of `kRows` queries, in boxes whose rows are `kBoxBytes` long and swizzled, as the lanes of a warp read 16 of its
// rows: in the order of an accumulator, in which a lane has two neighbouring keys of two rows, 8 apart.
template <int kRows, int kBoxBytes>
struct BiasTile {
  uint32_t row;    // address of a lane's row of the first box
  uint32_t chunk;  // bytes from there to its first chunk

  __device__ __forceinline__ BiasTile(uint32_t tile, int first_row, int lane)
      : row(tile + (first_row + lane % 16) * kBoxBytes),
        chunk(16 * (lane / 16 ^ (kBoxBytes == 128 ? lane % 8 : lane / 2 % 4))) {
    static_assert(kBoxBytes == 128 || kBoxBytes == 64);
  }

  // Of 16 keys: pairs of the first 8 of either row, then of the others.
  __device__ __forceinline__ void read(uint32_t (&pairs)[4], int key) const {
    const int bytes = 2 * key;
    load_blocks(pairs, row + bytes / kBoxBytes * kRows * kBoxBytes + (bytes % kBoxBytes ^ chunk));
  }
};

// Element `i` of a row, of those that a lane has in such pairs: i % 2 of pair i / 2 % 2.
template <typename Element>
__device__ __forceinline__ float element_of(const uint32_t (&pairs)[4], int i, int row) {
  const uint32_t both = pairs[i / 2 % 2 * 2 + row];
  return to_float(Element{static_cast<uint16_t>(i % 2 == 0 ? both : both >> 16)});
}
