// Transposing a tile of 8-bit elements, rows of keys, so that keys lie along the rows: products take such operands K-major
// alone. Both tiles are swizzled, as copies write them and wgmma reads them.
//
// What a lane has of S goes into the registers of P as it is (softmax.cuh), so that the sum over keys runs in another
// order: place 16a + 4t + 2b + c of a row has key 16a + 8b + 2t + c. Columns change their order, too, so that
// neighbouring rows are written together: row 16m + 8b + c has column 16m + 2c + b.
#pragma once

#include "ldmatrix.cuh"
#include "tma.cuh"

// The 16-byte chunk of a row at which chunk `chunk` of it lies, for rows of `kBytes`.
template <int kBytes>
__device__ __forceinline__ int swizzled(int row, int chunk) {
  static_assert(kBytes == 128 || kBytes == 64);
  return chunk ^ (kBytes == 128 ? row % 8 : row / 2 % 4);
}

// A warp turns `kKeys` rows of `kColumns` bytes. Columns come in boxes of `kFrom` bytes, and leave as rows in boxes of
// `kTo` keys.
template <int kKeys, int kColumns, int kFrom, int kTo>
__device__ __forceinline__ void transpose(uint32_t from, uint32_t to, int lane) {
  static_assert(kKeys % kTo == 0 && kColumns % kFrom == 0);
  const int key_of_lane = lane % 16;
  for (int column = 0; column < kColumns; column += 32) {
    const int chunk = swizzled<kFrom>(key_of_lane, column % kFrom / 16 + lane / 16), row = column + lane;
    const uint32_t load = from + column / kFrom * kFrom * kKeys + key_of_lane * kFrom + 16 * chunk;
    const uint32_t store = to + row * kTo;
#pragma unroll 4
    for (int key = 0; key < kKeys; key += 16) {
      // 16 keys x 32 columns. A register has two columns of two keys: those of either column are put together.
      uint32_t pairs[4];
      load_blocks_transposed(pairs, load + key * kFrom);
      store_blocks(store + key / kTo * kTo * kColumns + 16 * swizzled<kTo>(row, key % kTo / 16),
                   __byte_perm(pairs[0], pairs[1], 0x6420), __byte_perm(pairs[0], pairs[1], 0x7531),
                   __byte_perm(pairs[2], pairs[3], 0x6420), __byte_perm(pairs[2], pairs[3], 0x7531));
    }
  }
}
