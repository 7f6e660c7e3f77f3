// Transposing a tile of 8-bit elements, rows of keys, so that keys lie along the rows: products take such operands K-major
// alone. Both tiles are swizzled, as copies write them and wgmma reads them.
//
// A lane's elements of S go into the registers of P as they are (softmax.cuh), so that the sum over keys runs in another
// order: place 16a + 4t + 2b + c of a row has key 16a + 8b + 2t + c. Columns change their order, too, so that
// neighbouring rows are written together: row 16m + 8b + c has column 16m + 2c + b.
#pragma once

#include "ldmatrix.cuh"
#include "tma.cuh"

// The 16-byte chunk of a row at which chunk `chunk` of it lies, for rows of `kBytes`.
template <int kBytes>
__device__ __forceinline__ uint32_t swizzled(uint32_t row, uint32_t chunk) {
  static_assert(kBytes == 128 || kBytes == 64 || kBytes == 32);
  return chunk ^ (kBytes == 128 ? row % 8 : kBytes == 64 ? row / 2 % 4 : row / 4 % 2);
}

// A warp turns a strip of 32 columns of a box of `kKeys` rows of `kFrom` bytes into 32 rows, which are `kTo` keys long: there
// is one such box after the other, of `kRows` rows each. A lane gives the address of a row of the fragments that it loads,
// and of one that it stores. `kAhead` fragments of 16 keys are in flight together, since one takes as long as several.
template <int kKeys, int kFrom, int kTo, int kRows, int kAhead>
__device__ __forceinline__ void transpose_strip(uint32_t load, uint32_t store) {
  constexpr int kBoxes = kTo < 64 ? kKeys / kTo : 1;  // at once: a narrow one has few fragments
  constexpr int kRow = kTo / 16, kCount = kBoxes * kRow;  // fragments along a row, and in all
  static_assert(kKeys % kTo == 0 && kAhead <= kCount);
#pragma unroll 1
  for (int key = 0; key < kKeys; key += kBoxes * kTo, load += kBoxes * kTo * kFrom, store += kBoxes * kTo * kRows) {
    uint32_t pairs[kAhead][4];  // two columns of two keys in each register
#pragma unroll
    for (int i = 0; i < kCount + kAhead - 1; ++i) {
      if (i < kCount) load_blocks_transposed(pairs[i % kAhead], load + 16 * i * kFrom);
      const int last = i - (kAhead - 1);
      if (last < 0) continue;
      const uint32_t(&ready)[4] = pairs[last % kAhead];
      store_blocks((store ^ 16 * (last % kRow)) + last / kRow * kTo * kRows,  // these bits tell chunks of a row apart
                   __byte_perm(ready[0], ready[1], 0x6420), __byte_perm(ready[0], ready[1], 0x7531),
                   __byte_perm(ready[2], ready[3], 0x6420), __byte_perm(ready[2], ready[3], 0x7531));
    }
  }
}
