// Split-KV: partial results of rows, and the last block to finish. How keys are divided is in work_list.cuh.
#pragma once

#include "counted.cuh"
#include "softmax.cuh"

// Partial results of a row from some of its keys: O of kWidth columns, not yet divided by the row sum, the row max, and
// the row sum. In memory the columns come first, then the row max and the sum; the padding keeps rows that lie one after the
// other out of each other's banks, and has room for the row max and sum of a block beside those of a warp.
template <int kWidth>
struct PartialRow {
  static constexpr int kFloats = kWidth + 8;
  static constexpr int kOfWarp = 0, kOfBlock = 2;

  float4 acc;  // of four of the columns
  float row_max, sum;

  // Two rows of an accumulator, `row` and 8 rows on, as the four lanes of an MMA have them, each with its part of the sum.
  static __device__ __forceinline__ void store(
      float* to, int row, int rows, int lane, const float (&acc)[kWidth / 2], const float (&row_max)[2], const float (&sum)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float whole = sum[half] + __shfl_xor_sync(~0u, sum[half], 1);
      whole += __shfl_xor_sync(~0u, whole, 2);
      if (row + 8 * half < rows) {
        float* const at = to + (row + 8 * half) * kFloats;
#pragma unroll
        for (int i = 0; i < kWidth / 8; ++i) {
          *reinterpret_cast<float2*>(at + 8 * i + 2 * (lane % 4)) = {acc[4 * i + 2 * half], acc[4 * i + 2 * half + 1]};
        }
        if (lane % 4 == 0) *reinterpret_cast<float2*>(at + kWidth) = {row_max[half], whole};
      }
    }
  }

  // Four columns of a row, added from `count` places in their order; `at` says where a place has row max and sum.
  template <typename PlaceOf>
  static __device__ __forceinline__ PartialRow added(int count, int column, int at, const PlaceOf& place_of) {
    PartialRow all = {{}, kUnseen, 0.0f};
#pragma unroll 8
    for (int i = 0; i < count; ++i) {
      const float* const from = place_of(i);
      const float2 other = *reinterpret_cast<const float2*>(from + kWidth + at);
      const float4 x = *reinterpret_cast<const float4*>(from + column);
      const float raised = fmaxf(all.row_max, other.x);
      const float alpha = exp2_approx(all.row_max - raised), beta = exp2_approx(other.x - raised);
      all.row_max = raised;
      all.sum = all.sum * alpha + other.y * beta;
      all.acc = {all.acc.x * alpha + x.x * beta, all.acc.y * alpha + x.y * beta, all.acc.z * alpha + x.z * beta,
                 all.acc.w * alpha + x.w * beta};
    }
    return all;
  }

  __device__ __forceinline__ void store(float* to, int column, int at) const {
    *reinterpret_cast<float4*>(to + column) = acc;
    if (column == 0) *reinterpret_cast<float2*>(to + kWidth + at) = {row_max, sum};
  }

  // Adds what other keys of the row have.
  __device__ __forceinline__ void add(const PartialRow& other) {
    const float raised = fmaxf(row_max, other.row_max);
    const float alpha = exp2_approx(row_max - raised), beta = exp2_approx(other.row_max - raised);
    row_max = raised;
    sum = sum * alpha + other.sum * beta;
    acc = {acc.x * alpha + other.acc.x * beta, acc.y * alpha + other.acc.y * beta, acc.z * alpha + other.acc.z * beta,
           acc.w * alpha + other.acc.w * beta};
  }

  // Takes a sink into the sum: a logit without a value, in units of log2, which may raise the row max.
  __device__ __forceinline__ void add_sink(float sink) {
    const float raised = fmaxf(row_max, sink), alpha = exp2_approx(row_max - raised);
    sum = fmaf(sum, alpha, exp2_approx(sink - raised));
    row_max = raised;
    acc = {acc.x * alpha, acc.y * alpha, acc.z * alpha, acc.w * alpha};
  }
};

// Four columns of a row from up to kMost places. All are read before any is added, so that the latencies overlap.
template <int kWidth, int kMost>
struct PartialRows {
  float4 columns[kMost];
  float2 weights[kMost];  // row maxima and sums

  template <typename PlaceOf>
  __device__ __forceinline__ void load(int count, int column, int at, const PlaceOf& place_of) {
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      columns[i] = {};
      weights[i] = {kUnseen, 0.0f};
      if (i < count) {
        const float* const from = place_of(i);
        weights[i] = *reinterpret_cast<const float2*>(from + kWidth + at);
        columns[i] = *reinterpret_cast<const float4*>(from + column);
      }
    }
  }

  __device__ __forceinline__ PartialRow<kWidth> added() const {
    PartialRow<kWidth> all = {{}, kUnseen, 0.0f};
#pragma unroll
    for (int i = 0; i < kMost; ++i) all.row_max = fmaxf(all.row_max, weights[i].x);
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      const float weight = exp2_approx(weights[i].x - all.row_max);
      all.sum += weights[i].y * weight;
      all.acc = {all.acc.x + columns[i].x * weight, all.acc.y + columns[i].y * weight, all.acc.z + columns[i].z * weight,
                 all.acc.w + columns[i].w * weight};
    }
    return all;
  }
};
