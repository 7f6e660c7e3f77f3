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

// A warp turns `kColumns` columns of a box of `kKeys` rows of `kFrom` bytes, its first or second `part`. They leave as rows
// of `kTo` keys, box after box of `kRows` rows. Loads of a batch of 16 keys x 32 columns each are in flight together, since
// one takes as long as many.
template <int kKeys, int kColumns, int kFrom, int kTo, int kRows, int kBatch>
__device__ __forceinline__ void transpose(uint32_t from, int part, uint32_t to, int lane) {
  static_assert(kKeys % kTo == 0 && kTo % (16 * kBatch) == 0 && 2 * kColumns == kFrom && kColumns % 32 == 0);
  const int key_of_lane = lane % 16;
#pragma unroll 1
  for (int column = 0; column < kColumns; column += 32) {
    const int chunk = (kColumns * part + column) / 16 + lane / 16, row = kColumns * part + column + lane;
    uint32_t load = from + key_of_lane * kFrom + 16 * swizzled<kFrom>(key_of_lane, chunk);
#pragma unroll 1
    for (int key = 0; key < kKeys; key += 16 * kBatch, load += 16 * kBatch * kFrom) {
      const uint32_t store = to + key / kTo * kTo * kRows + row * kTo;
      const int place = swizzled<kTo>(row, key % kTo / 16);
      uint32_t pairs[kBatch][4];  // two columns of two keys in each register
#pragma unroll
      for (int i = 0; i < kBatch; ++i) load_blocks_transposed(pairs[i], load + 16 * i * kFrom);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        store_blocks(store + 16 * (place ^ i),
                     __byte_perm(pairs[i][0], pairs[i][1], 0x6420), __byte_perm(pairs[i][0], pairs[i][1], 0x7531),
                     __byte_perm(pairs[i][2], pairs[i][3], 0x6420), __byte_perm(pairs[i][2], pairs[i][3], 0x7531));
      }
    }
  }
}
