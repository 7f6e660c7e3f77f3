// The softmax of one tile, on the registers of a warpgroup: a thread holds two rows, each shared by four lanes.
//
// Logits come as `s * scale` in units of log2. A row keeps a reference in those units, from which exponents are
// measured, and the sum of its probabilities so far; each lane sums its own columns. Masked logits are -inf.
#pragma once

#include "types.cuh"

// Reference of a row that has seen no key yet: any visible logit is far above it, and a masked one gives exp2(-inf) = 0.
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

// What logits that come as exponents are relative to: the reference of a row, or 0 where it has seen no key.
struct CountedFrom {
  const float (&reference)[2];
  __device__ __forceinline__ float operator[](int row) const { return reference[row] == kUnseen ? 0.0f : reference[row]; }
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

// Raises the references to the running max, and returns in `alpha` = exp2(old - new) what rescales O and the row sum.
// With `kPeak` they stay that much below it: P of the largest logit is 2^kPeak.
template <int kPeak = 0>
__device__ __forceinline__ void raise_reference(const float (&maximum)[2], float (&reference)[2], float (&alpha)[2]) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const float raised = fmaxf(reference[row], kPeak == 0 ? maximum[row] : maximum[row] - kPeak);
    alpha[row] = exp2_approx(reference[row] - raised);
    reference[row] = raised;
  }
}

// Where many logits are alike, it is their number that makes a lane's sum too large: raises the maximum of a row until
// the sums of its lanes are 2^kAbove at most, measured from there.
template <int kAbove>
__device__ __forceinline__ void lift_by_sum(
    const float (&sum)[2], const float (&reference)[2], float (&maximum)[2]) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    float largest = fmaxf(sum[row], __shfl_xor_sync(~0u, sum[row], 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    float exponent;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(exponent) : "f"(largest));
    // By whole powers of two, so that what had few bits keeps them. A sum beyond all bounds says nothing: no key had set
    // the reference.
    if (largest < 0x1p64f) maximum[row] = fmaxf(maximum[row], reference[row] + ceilf(exponent) - kAbove);
  }
}

// Where a row (all four lanes of it) asks for no new reference, puts its old one in place of its maximum: a warp raises
// references together, but no row's bits may depend on the rows beside it.
__device__ __forceinline__ void keep_references(
    const bool (&kept)[2], const float (&reference)[2], float (&maximum)[2]) {
  const unsigned row_lanes = 0xfu << (threadIdx.x % 32 & ~3u);
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const unsigned asking = __ballot_sync(~0u, !kept[row]);
    if ((asking & row_lanes) == 0) maximum[row] = reference[row];
  }
}

// P = exp2(S * scale - reference) in 16 bits, as the A operand of the next product; adds to the sums of its rows.
template <typename Element, int kCount>
__device__ __forceinline__ void exponentiate(
    const float (&s)[kCount], float scale, const float (&reference)[2], uint32_t (&p)[kCount / 2], float (&sum)[2]) {
  static_assert(sizeof(Element) == 2);  // pairs of an accumulator lie as the A operand wants them
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    const float low = exp2_approx(fmaf(s[i], scale, -reference[row_of(i)]));
    const float high = exp2_approx(fmaf(s[i + 1], scale, -reference[row_of(i)]));
    sum[row_of(i)] += low + high;
    p[i / 2] = pack<Element>(low, high);
  }
}

// The same of logits in units of log2 that are counted from the reference.
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
    const float (&s)[kCount], const Scale& scale, const float (&reference)[2], uint32_t (&p)[kCount / 4],
    float (&sum)[2]) {
  exponentiate_each<Element, kCount>(
      [&](int i) { return fmaf(s[i], of_row(scale, row_of(i)), -reference[row_of(i)]); }, p, sum);
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
// raise the reference. The inverses then also bring outputs to the new references.
__device__ __forceinline__ void finish_sum(
    const float (&sink)[2], float (&reference)[2], float (&sum)[2], float (&inverse)[2]) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    sum[row] += __shfl_xor_sync(~0u, sum[row], 1);
    sum[row] += __shfl_xor_sync(~0u, sum[row], 2);
    const float raised = fmaxf(reference[row], sink[row]);
    const float alpha = exp2_approx(reference[row] - raised);
    sum[row] = fmaf(sum[row], alpha, exp2_approx(sink[row] - raised));
    reference[row] = raised;
    float quotient;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(quotient) : "f"(sum[row]));  // relative error 2^-23
    inverse[row] = sum[row] == 0.0f ? 0.0f : alpha * quotient;
  }
}

// Logarithm of the sum of exponentials of a row, natural; -inf for a row that saw no key.
__device__ __forceinline__ float log_sum_exp(float reference, float sum) {
  return sum == 0.0f ? kMasked : (reference + log2f(sum)) * kLn2;
}
