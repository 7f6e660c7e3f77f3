// Two warpgroups with half of the columns of O each, in a block, or in each of two blocks that load keys for each other.
#pragma once

#include "cluster.cuh"
#include "split.cuh"

// The multicast copy of cluster.cuh for a tensor of three axes.
__device__ __forceinline__ void load_box_to(
    uint32_t blocks, uint32_t to, const TensorMap& map, uint32_t full, int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%4, %5, %6}], [%2], %3;"
      ::"r"(to), "l"(&map), "r"(full), "h"(static_cast<uint16_t>(blocks)), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}

// Whether this lane is the one of its warp, whose lanes are together, that does something once (PTX ISA, "elect.sync").
__device__ __forceinline__ bool elected() {
  uint32_t own;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(own));
  return own != 0;
}

// Prefetches `bytes` consecutive bytes, a multiple of 16, to L2 (PTX ISA, "cp.async.bulk.prefetch").
__device__ __forceinline__ void prefetch_bytes(const void* from, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// Releases 2^kCountBits stages whose barriers begin at `first_barrier` in each block, each by one lane. Barriers expect two
// arrivals of each warp: from the warps of both blocks, or twice from those of a single one.
template <int kCountBits>
__device__ __forceinline__ void release_stages(uint32_t first_barrier, int blocks, int lane) {
  constexpr int kCount = 1 << kCountBits;
  const uint32_t barrier = first_barrier + 8 * (lane & kCount - 1);
  if (blocks > 1) {
    if (lane < 2 * kCount) arrive_at(barrier, lane >> kCountBits);
  } else if (lane < kCount) {
    arrive(barrier, 2);
  }
}

// Half of the columns of a partial result, from those that begin at `column`: two rows of an accumulator, `row` and 8 rows
// on, as the four lanes of an MMA have them; `place_of` says where a row lies. `sum` is that of all lanes.
template <int kWidth, typename PlaceOf>
__device__ __forceinline__ void store_half_at(
    const PlaceOf& place_of, int row, int rows, int column, int lane, const float (&acc)[kWidth / 4], const float (&row_max)[2],
    const float (&sum)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (row + 8 * half < rows) {
      float* const at = place_of(row + 8 * half);
#pragma unroll
      for (int i = 0; i < kWidth / 16; ++i) {
        *reinterpret_cast<float2*>(at + column + 8 * i + 2 * (lane % 4)) = {acc[4 * i + 2 * half], acc[4 * i + 2 * half + 1]};
      }
      if (column == 0 && lane % 4 == 0) *reinterpret_cast<float2*>(at + kWidth) = {row_max[half], sum[half]};
    }
  }
}

// The same of rows that lie one after the other.
template <int kWidth>
__device__ __forceinline__ void store_half(
    float* to, int row, int rows, int column, int lane, const float (&acc)[kWidth / 4], const float (&row_max)[2],
    const float (&sum)[2]) {
  store_half_at<kWidth>([&](int of_part) { return to + of_part * PartialRow<kWidth>::kFloats; }, row, rows, column, lane, acc, row_max, sum);
}
