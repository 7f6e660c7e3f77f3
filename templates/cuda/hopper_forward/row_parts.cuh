// Partial results of query rows in global memory: O that is not normalized, row maxima and row sums of some of their keys.
#pragma once

#include "parts.cuh"
#include "softmax.cuh"

// Whether any of `threads` threads says so; they wait for one another (PTX ISA, "barrier.red").
template <typename Name>
__device__ __forceinline__ bool named_any(Name first, int which, int threads, bool own) {
  int any;
  asm volatile(
      "{\n.reg .pred own, any;\nsetp.ne.s32 own, %1, 0;\nbarrier.cta.red.or.pred any, %2, %3, own;\nselp.s32 %0, 1, 0, any;\n}"
      : "=r"(any)
      : "r"(static_cast<int>(own)), "r"(static_cast<int>(first) + which), "r"(threads)
      : "memory");
  return any != 0;
}

// The partial results of 64 rows, in the order of registers: O, then the row maxima and sums of each thread's two rows.
template <int kWidth>
struct RowPart {
  static constexpr int kFloats = 64 * kWidth + 4 * 128;

  static __device__ __forceinline__ void store(
      float* to, const float (&acc)[kWidth / 2], const float (&row_max)[2], const float (&row_sum)[2], int thread) {
    store_part<128>(to, acc, thread);
    const float rows[4] = {row_max[0], row_max[1], row_sum[0], row_sum[1]};
    store_part<128>(to + 64 * kWidth, rows, thread);
  }

  // Adds `count` parts, which are adjacent, in their order, relative to their largest row max.
  static __device__ __forceinline__ void add(
      const float* from, int count, float (&acc)[kWidth / 2], float (&row_max)[2], float (&row_sum)[2], int thread) {
    const auto rows_of = [&](int part) { return __ldcg(reinterpret_cast<const float4*>(from + part * kFloats + 64 * kWidth) + thread); };
#pragma unroll 1
    for (int part = 0; part < count; ++part) {
      const float4 rows = rows_of(part);
      row_max[0] = fmaxf(row_max[0], rows.x);
      row_max[1] = fmaxf(row_max[1], rows.y);
    }
    row_sum[0] = row_sum[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) acc[i] = 0.0f;
#pragma unroll 1
    for (int part = 0; part < count; ++part) {
      const float4 rows = rows_of(part);
      const float weights[2] = {exp2_approx(rows.x - row_max[0]), exp2_approx(rows.y - row_max[1])};
      row_sum[0] = fmaf(rows.z, weights[0], row_sum[0]);
      row_sum[1] = fmaf(rows.w, weights[1], row_sum[1]);
#pragma unroll
      for (int i = 0; i < kWidth / 2; i += 4) {
        const float4 four = __ldcg(reinterpret_cast<const float4*>(from + part * kFloats) + 128 * i / 4 + thread);
        acc[i] = fmaf(four.x, weights[0], acc[i]);
        acc[i + 1] = fmaf(four.y, weights[0], acc[i + 1]);
        acc[i + 2] = fmaf(four.z, weights[1], acc[i + 2]);
        acc[i + 3] = fmaf(four.w, weights[1], acc[i + 3]);
      }
    }
  }
};
