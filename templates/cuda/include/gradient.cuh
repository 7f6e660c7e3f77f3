// Parts of backward kernels besides the softmax and the products.
#pragma once

#include "types.cuh"

// Four 8 x 8 blocks of a product to shared memory, each transposed: lane l gives the address of column l % 8 of block
// l / 8 (PTX ISA, "stmatrix").
__device__ __forceinline__ void store_transposed(uint32_t to, uint32_t b0, uint32_t b1, uint32_t b2, uint32_t b3) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
      ::"r"(to), "r"(b0), "r"(b1), "r"(b2), "r"(b3)
      : "memory");
}

// The same value, hidden from the compiler: what is computed from it is computed where it stands, not hoisted out of the
// loop, where it would take registers.
__device__ __forceinline__ uint32_t not_hoisted(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

// The lane of a thread, read again here, so that what is computed from it takes no registers before.
__device__ __forceinline__ int lane_of_warp() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// Floats of shared memory, by their address: a constant that is added to it takes no instruction.
__device__ __forceinline__ float4 load_float4(uint32_t from) {
  float4 x;
  asm volatile(
      "ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
      : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
      : "r"(from)
      : "memory");
  return x;
}

__device__ __forceinline__ void store_float4(uint32_t to, float x, float y, float z, float w) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}

// Place of the LSE or D of a row among those of a tile: a lane reads four of each 16 rows, by one load.
__device__ __forceinline__ int row_place(int row) { return row & ~15 | row / 2 % 4 * 4 | row / 8 % 2 * 2 | row % 2; }

// Adds floats of shared memory to global memory, in no fixed order (PTX ISA, "cp.reduce.async.bulk").
__device__ __forceinline__ void add_floats(float* to, uint32_t from, uint32_t bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
      : "memory");
}

// The same for those that are the first there: a store.
__device__ __forceinline__ void store_floats(float* to, uint32_t from, uint32_t bytes) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
      : "memory");
}

// Floats of global memory to shared memory.
__device__ __forceinline__ void load_floats(uint32_t to, const float* from, uint32_t bytes, uint32_t full) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      ::"r"(to), "l"(from), "r"(bytes), "r"(full)
      : "memory");
}

__device__ __forceinline__ void wait_stores_written() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// The products of two pairs, added.
template <typename Element>
__device__ __forceinline__ float dot(uint32_t a, uint32_t b) {
  const float2 x = unpack<Element>(a), y = unpack<Element>(b);
  return fmaf(x.x, y.x, x.y * y.y);
}

// Transposes the 4 x 4 values that four neighbouring lanes hold: lane l gets value l % 4 of each.
__device__ __forceinline__ void transpose(uint32_t (&x)[4], int lane) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t other = __shfl_xor_sync(~0u, lane & 1 ? x[i] : x[i + 1], 1);
    (lane & 1 ? x[i] : x[i + 1]) = other;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t other = __shfl_xor_sync(~0u, lane & 2 ? x[i] : x[i + 2], 2);
    (lane & 2 ? x[i] : x[i + 2]) = other;
  }
}

// Rounds a part of the dQ accumulator, in the order of registers: four neighbouring lanes hold the columns of four blocks of 8 in turns, of
// two rows, 8 apart. Each gets a block of both.
template <typename Element>
__device__ __forceinline__ void round_sums(const float4 (&sums)[4], float factor, int lane, uint4& upper, uint4& lower) {
  static_assert(sizeof(Element) == 2);  // a block of 8 columns is 16 bytes
  uint32_t of_upper[4], of_lower[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    of_upper[i] = pack<Element>(sums[i].x * factor, sums[i].y * factor);
    of_lower[i] = pack<Element>(sums[i].z * factor, sums[i].w * factor);
  }
  transpose(of_upper, lane);
  transpose(of_lower, lane);
  upper = {of_upper[0], of_upper[1], of_upper[2], of_upper[3]};
  lower = {of_lower[0], of_lower[1], of_lower[2], of_lower[3]};
}

// Writes zeros to `columns` of each row from `first` to `end`, 16 bytes at a time; `thread` of `threads` that share this.
template <typename Element>
__device__ __forceinline__ void clear_rows(
    Element* rows, long long stride, int columns, int first, int end, int thread, int threads) {
  constexpr int kChunk = 16 / sizeof(Element);
  const int chunks = columns / kChunk;
  for (int i = thread; i < (end - first) * chunks; i += threads) {
    *reinterpret_cast<int4*>(rows + (first + i / chunks) * stride + i % chunks * kChunk) = {};
  }
}
