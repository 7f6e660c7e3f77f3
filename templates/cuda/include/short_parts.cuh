// Partial results of rows in 16 bits: half as many bytes to store and to read as those in float32.
#pragma once

#include "quad.cuh"
#include "split.cuh"
#include "types.cuh"

// A row has O of kWidth columns, not yet divided by the row sum, then eight scales, the row max and the row sum. Each lane of a quad has
// a scale for its columns of each half of the row, a power of two by which they are below 2^15, so that fp16 keeps 11 bits of the largest one.
// Of 32 columns those of a lane lie side by side.
template <int kWidth>
struct ShortPart {
  static constexpr int kBytes = 2 * kWidth + 64;
  static constexpr int kScalesAt = 2 * kWidth, kSumAt = kScalesAt + 8 * sizeof(float);

  float acc[8];  // four pairs of columns, which are 8 apart
  float row_max, sum;

  // One half of the columns of two rows, `row` and 8 rows on, as the four lanes of an MMA have them.
  static __device__ __forceinline__ void store_half(
      char* to, int row, int rows, int half, int lane, const float (&acc)[kWidth / 4], const float (&row_max)[2], const float (&sum)[2]) {
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      float largest = 0.0f;
#pragma unroll
      for (int i = 0; i < kWidth / 16; ++i) {
        largest = fmaxf(largest, fmaxf(fabsf(acc[4 * i + 2 * upper]), fabsf(acc[4 * i + 2 * upper + 1])));
      }
      const int exponent = max(static_cast<int>(__float_as_uint(largest) >> 23), 15);
      const float shrink = __uint_as_float(127 + 14 + 127 - exponent << 23);
      char* const at = to + (row + 8 * upper) * kBytes;
      if (row + 8 * upper < rows) {
#pragma unroll
        for (int i = 0; i < kWidth / 16; i += 4) {
          uint32_t pairs[4];
#pragma unroll
          for (int pair = 0; pair < 4; ++pair) {
            const int of = 4 * (i + pair) + 2 * upper;
            pairs[pair] = pack<fp16>(acc[of] * shrink, acc[of + 1] * shrink);
          }
          store_block(at + half * kWidth + 16 * (i + lane % 4), pairs);
        }
        *reinterpret_cast<float*>(at + kScalesAt + 4 * (4 * half + lane % 4)) = __uint_as_float(exponent - 14 << 23);
        if (half == 0 && lane % 4 == 0) *reinterpret_cast<float2*>(at + kSumAt) = {row_max[upper], sum[upper]};
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
        scales[i] = *reinterpret_cast<const float*>(from + ShortPart<kWidth>::kScalesAt + 4 * (place / (kWidth / 16) * 4 + place % 4));
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
