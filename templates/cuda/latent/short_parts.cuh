// Partial results of rows in 16 bits: half as many bytes to store and to read as those in float32.
#pragma once

#include "split.cuh"
#include "types.cuh"

// A row has O of kWidth columns, not yet divided by the row sum, then a scale of each half of them, the row max and the row sum. A scale is a power of two by
// which numbers are below 2^15, so that fp16 keeps 11 bits of the largest one.
template <int kWidth>
struct ShortPart {
  static constexpr int kBytes = 2 * kWidth + 16;
  static constexpr int kScalesAt = 2 * kWidth, kSumAt = kScalesAt + 2 * sizeof(float);

  float acc[8];
  float row_max, sum;

  // Finds the factors of one half of the columns of two rows, `row` and 8 rows on, as the four lanes of an MMA have them, and stores all but the columns.
  static __device__ __forceinline__ void shrink_half(
      char* to, int row, int rows, int half, int lane, const float (&acc)[kWidth / 4], const float (&row_max)[2], const float (&sum)[2],
      float (&factor)[2]) {
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      float largest = 0.0f;
#pragma unroll
      for (int i = 0; i < kWidth / 16; ++i) {
        largest = fmaxf(largest, fmaxf(fabsf(acc[4 * i + 2 * upper]), fabsf(acc[4 * i + 2 * upper + 1])));
      }
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
      const int exponent = max(static_cast<int>(__float_as_uint(largest) >> 23), 15);
      factor[upper] = __uint_as_float(127 + 14 + 127 - exponent << 23);
      if (lane % 4 == 0 && row + 8 * upper < rows) {
        char* const at = to + (row + 8 * upper) * kBytes;
        *reinterpret_cast<float*>(at + kScalesAt + 4 * half) = __uint_as_float(exponent - 14 << 23);
        if (half == 0) *reinterpret_cast<float2*>(at + kSumAt) = {row_max[upper], sum[upper]};
      }
    }
  }

  __device__ __forceinline__ void add(const ShortPart& other) {
    const float raised = fmaxf(row_max, other.row_max);
    const float alpha = exp2_approx(row_max - raised), beta = exp2_approx(other.row_max - raised);
    row_max = raised;
    sum = sum * alpha + other.sum * beta;
#pragma unroll
    for (int i = 0; i < 8; ++i) acc[i] = acc[i] * alpha + other.acc[i] * beta;
  }

  // Takes a sink into the sum: a logit without a value, in units of log2, which may raise the row max.
  __device__ __forceinline__ void add_sink(float sink) {
    const float raised = fmaxf(row_max, sink), alpha = exp2_approx(row_max - raised);
    sum = fmaf(sum, alpha, exp2_approx(sink - raised));
    row_max = raised;
#pragma unroll
    for (int i = 0; i < 8; ++i) acc[i] *= alpha;
  }
};

// What thread number `place` of kWidth / 8 has of a row, from up to kMost places. All are read before any is added, so that the latencies overlap.
template <int kWidth, int kMost>
struct ShortParts {
  uint4 pairs[kMost];
  float scales[kMost];
  float2 weights[kMost];  // row maxima and sums

  template <typename PlaceOf>
  __device__ __forceinline__ void load(int count, int place, const PlaceOf& place_of) {
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      pairs[i] = {};
      scales[i] = 0.0f;
      weights[i] = {kUnseen, 0.0f};
      if (i < count) {
        const char* const from = place_of(i);
        weights[i] = *reinterpret_cast<const float2*>(from + ShortPart<kWidth>::kSumAt);
        scales[i] = *reinterpret_cast<const float*>(from + ShortPart<kWidth>::kScalesAt + 4 * (place / (kWidth / 16)));
        pairs[i] = *reinterpret_cast<const uint4*>(from + 16 * place);
      }
    }
  }

  __device__ __forceinline__ ShortPart<kWidth> added() const {
    ShortPart<kWidth> all = {{}, kUnseen, 0.0f};
#pragma unroll
    for (int i = 0; i < kMost; ++i) all.row_max = fmaxf(all.row_max, weights[i].x);
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      const float weight = exp2_approx(weights[i].x - all.row_max), scale = weight * scales[i];
      all.sum += weights[i].y * weight;
      const uint32_t of_pair[4] = {pairs[i].x, pairs[i].y, pairs[i].z, pairs[i].w};
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        const float2 two = unpack<fp16>(of_pair[pair]);
        all.acc[2 * pair] += two.x * scale;
        all.acc[2 * pair + 1] += two.y * scale;
      }
    }
    return all;
  }
};
