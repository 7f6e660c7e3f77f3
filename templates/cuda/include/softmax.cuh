// The softmax of one tile, on the registers of a warpgroup: a thread holds two rows, each shared by four lanes.
//
// Logits come as `s * scale` in units of log2. A row keeps its row max in those units, which exponents are relative to, and
// the sum of its probabilities so far; each lane sums its own columns. Masked logits are -inf. The row max need not be the
// running max: it may be an older one, as long as P stays in range.
#pragma once

#include "types.cuh"

// Row max of a row that has seen no key yet: any visible logit is far above it, and a masked one gives exp2(-inf) = 0.
constexpr float kUnseen = -3.4028234663852886e38f;

constexpr float kMasked = __builtin_bit_cast(float, 0xff800000u);  // -inf

// One instruction, relative error 2^-22 (PTX ISA, ex2.approx.ftz.f32).
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Row of the element i of a thread: 0 is the upper one, 1 lies 8 rows below.
constexpr int row_of(int i) { return i / 2 % 2; }

// Offset of logits that already are exponents: the row max, or 0 for a row that has seen no key.
struct CountedFrom {
  const float (&row_max)[2];
  __device__ __forceinline__ float operator[](int row) const { return row_max[row] == kUnseen ? 0.0f : row_max[row]; }
};

// A scale that all rows share, or that of one of two.
__device__ __forceinline__ float of_row(float scale, int) { return scale; }
__device__ __forceinline__ float of_row(const float (&scale)[2], int row) { return scale[row]; }

// The largest logit of each row, in units of log2.
template <int kCount, typename Scale>
__device__ __forceinline__ void find_maximum(const float (&s)[kCount], const Scale& scale, float (&maximum)[2]) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    float largest = s[2 * row];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (row_of(i) == row) largest = fmaxf(largest, s[i]);
    }
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    maximum[row] = of_row(scale, row) * fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
  }
}

// The same of a lane's own elements, in chains that do not wait for each other, and then of all four lanes of a row.
template <int kCount, typename Scale>
__device__ __forceinline__ void find_lane_maximum(const float (&s)[kCount], const Scale& scale, float (&maximum)[2]) {
  static_assert(kCount % 16 == 0);
  constexpr int kChains = 4;  // of each row
  float largest[2][kChains];
#pragma unroll
  for (int i = 0; i < 4 * kChains; ++i) {
    if (i % 2 == 0) largest[row_of(i)][i / 4] = fmaxf(s[i], s[i + 1]);
  }
#pragma unroll
  for (int i = 4 * kChains; i < kCount; ++i) largest[row_of(i)][i / 4 % kChains] = fmaxf(largest[row_of(i)][i / 4 % kChains], s[i]);
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    maximum[row] = of_row(scale, row) * fmaxf(fmaxf(largest[row][0], largest[row][1]), fmaxf(largest[row][2], largest[row][3]));
  }
}

__device__ __forceinline__ void share_maximum(float (&maximum)[2]) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    maximum[row] = fmaxf(maximum[row], __shfl_xor_sync(~0u, maximum[row], 1));
    maximum[row] = fmaxf(maximum[row], __shfl_xor_sync(~0u, maximum[row], 2));
  }
}

// Raises row maxima to the running max. `alpha` = exp2(old - new) rescales O and the row sum.
// With `kPeak` they stay that much below it: P of the largest logit is 2^kPeak.
template <int kPeak = 0>
__device__ __forceinline__ void raise_row_max(const float (&maximum)[2], float (&row_max)[2], float (&alpha)[2]) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const float raised = fmaxf(row_max[row], kPeak == 0 ? maximum[row] : maximum[row] - kPeak);
    alpha[row] = exp2_approx(row_max[row] - raised);
    row_max[row] = raised;
  }
}

// Many equal logits make a lane's sum too large by their number: raises the maximum of a row until the sums of its lanes,
// relative to it, are 2^kAbove at most.
template <int kAbove>
__device__ __forceinline__ void raise_by_sum(
    const float (&sum)[2], const float (&row_max)[2], float (&maximum)[2]) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    float largest = fmaxf(sum[row], __shfl_xor_sync(~0u, sum[row], 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    float exponent;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(exponent) : "f"(largest));
    // By whole powers of two, so that values with few bits keep them. A huge sum says nothing: no key had set the row max.
    if (largest < 0x1p64f) maximum[row] = fmaxf(maximum[row], row_max[row] + ceilf(exponent) - kAbove);
  }
}

// Puts the old row max in place of the maximum for each row (all four lanes of it) that needs no new one. A warp raises row
// maxima together, but the bits of a row must not depend on its neighbors.
__device__ __forceinline__ void keep_row_max(
    const bool (&kept)[2], const float (&row_max)[2], float (&maximum)[2]) {
  const unsigned row_lanes = 0xfu << (threadIdx.x % 32 & ~3u);
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const unsigned asking = __ballot_sync(~0u, !kept[row]);
    if ((asking & row_lanes) == 0) maximum[row] = row_max[row];
  }
}

// P = exp2(S * scale - row max) in 16 bits, as the A operand of the next product; adds to the sums of its rows.
template <typename Element, int kCount>
__device__ __forceinline__ void exponentiate(
    const float (&s)[kCount], float scale, const float (&row_max)[2], uint32_t (&p)[kCount / 2], float (&sum)[2]) {
  static_assert(sizeof(Element) == 2);  // pairs of an accumulator lie as the A operand wants them
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    const float low = exp2_approx(fmaf(s[i], scale, -row_max[row_of(i)]));
    const float high = exp2_approx(fmaf(s[i + 1], scale, -row_max[row_of(i)]));
    sum[row_of(i)] += low + high;
    p[i / 2] = pack<Element>(low, high);
  }
}

// The same for logits in units of log2 that are relative to the row max already.
template <typename Element, int kCount>
__device__ __forceinline__ void exponentiate(const float (&s)[kCount], uint32_t (&p)[kCount / 2], float (&sum)[2]) {
  static_assert(sizeof(Element) == 2);
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    const float low = exp2_approx(s[i]), high = exp2_approx(s[i + 1]);
    sum[row_of(i)] += low + high;
    p[i / 2] = pack<Element>(low, high);
  }
}

// P = exp2(exponent(i)) in 8 bits, for each element i; adds to the sums of its rows. A register holds the two columns of a
// lane in one block of 8, and those in the next: V has its keys in that order (transpose.cuh).
template <typename Element, int kCount, typename Exponent>
__device__ __forceinline__ void exponentiate_each(
    const Exponent& exponent, uint32_t (&p)[kCount / 4], float (&sum)[2]) {
  static_assert(sizeof(Element) == 1);
#pragma unroll
  for (int i = 0; i < kCount; i += 8) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float x[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j] = exp2_approx(exponent(i + 2 * row + j % 2 + j / 2 * 4));
      sum[row] += (x[0] + x[1]) + (x[2] + x[3]);
      p[i / 4 + row] = pack<Element>(x[0], x[1], x[2], x[3]);
    }
  }
}

// The two forms above, in 8 bits.
template <typename Element, int kCount, typename Scale>
__device__ __forceinline__ void exponentiate(
    const float (&s)[kCount], const Scale& scale, const float (&row_max)[2], uint32_t (&p)[kCount / 4],
    float (&sum)[2]) {
  exponentiate_each<Element, kCount>(
      [&](int i) { return fmaf(s[i], of_row(scale, row_of(i)), -row_max[row_of(i)]); }, p, sum);
}

template <typename Element, int kCount>
__device__ __forceinline__ void exponentiate(const float (&s)[kCount], uint32_t (&p)[kCount / 4], float (&sum)[2]) {
  exponentiate_each<Element, kCount>([&](int i) { return s[i]; }, p, sum);
}

// Multiplies the rows of an accumulator: O *= alpha.
template <int kCount>
__device__ __forceinline__ void rescale(float (&acc)[kCount], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) acc[i] *= factor[row_of(i)];
}

// The whole sums of the rows from their four lanes, and their inverses, which are 0 for rows that saw no key.
__device__ __forceinline__ void finish_sum(float (&sum)[2], float (&inverse)[2]) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    sum[row] += __shfl_xor_sync(~0u, sum[row], 1);
    sum[row] += __shfl_xor_sync(~0u, sum[row], 2);
    float quotient;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(quotient) : "f"(sum[row]));  // relative error 2^-23
    inverse[row] = sum[row] == 0.0f ? 0.0f : quotient;
  }
}

// The same where each row has a sink: a logit without a value, in units of log2, that takes part in the sum and may
// raise the row max. The inverses then also rescale outputs to the new row max.
__device__ __forceinline__ void finish_sum(
    const float (&sink)[2], float (&row_max)[2], float (&sum)[2], float (&inverse)[2]) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    sum[row] += __shfl_xor_sync(~0u, sum[row], 1);
    sum[row] += __shfl_xor_sync(~0u, sum[row], 2);
    const float raised = fmaxf(row_max[row], sink[row]);
    const float alpha = exp2_approx(row_max[row] - raised);
    sum[row] = fmaf(sum[row], alpha, exp2_approx(sink[row] - raised));
    row_max[row] = raised;
    float quotient;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(quotient) : "f"(sum[row]));  // relative error 2^-23
    inverse[row] = sum[row] == 0.0f ? 0.0f : alpha * quotient;
  }
}

// Logarithm of the sum of exponentials of a row, natural; -inf for a row that saw no key.
__device__ __forceinline__ float log_sum_exp(float row_max, float sum) {
  return sum == 0.0f ? kMasked : (row_max + log2f(sum)) * kLn2;
}
