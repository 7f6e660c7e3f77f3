// Soft-capping, cap * tanh(s / cap), where no argument of tanh is large: then a polynomial takes the place of tanh, whose unit
// is that of exp2, and would be busy for as long as the products.
#pragma once

#include "softmax.cuh"

// tanh(x) = x * (k0 + k1 x^2 + k2 x^4) up to |x| = 0.75, relative error 2^-12.2: half that of tanh.approx.f32.
struct SoftCap {
  float linear, cubic, quintic;  // of the product of query and key, to logits in units of log2
  int largest;                   // square of the product up to which they hold, as bits

  // `scale` leads from the product to the argument of tanh, `multiplier` from tanh to units of log2.
  __device__ __forceinline__ SoftCap(float scale, float multiplier) {
    const float square = scale * scale;
    linear = 0.99978518f * scale * multiplier;
    cubic = -0.32629672f * square * scale * multiplier;
    quintic = 0.09735545f * square * square * scale * multiplier;
    largest = __float_as_int(0.5625f / square);
  }
};

// P = exp2(logits - row max), straight from the products S; adds to the sums of its rows. False in some lane: an argument was
// too large, or not a number, so that P and the sums are of no use.
template <typename Element, int kCount>
__device__ __forceinline__ bool exponentiate_capped(
    const float (&s)[kCount], const SoftCap& cap, const float (&row_max)[2], uint32_t (&p)[kCount / 2], float (&sum)[2]) {
  int reach = 0;  // the largest square: numbers that are not negative are in the order of their bits
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    float x[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float square = s[i + j] * s[i + j];
      reach = max(reach, __float_as_int(square));
      const float slope = fmaf(square, fmaf(square, cap.quintic, cap.cubic), cap.linear);
      x[j] = exp2_approx(fmaf(s[i + j], slope, -row_max[row_of(i)]));
    }
    sum[row_of(i)] += x[0] + x[1];
    p[i / 2] = pack<Element>(x[0], x[1]);
  }
  return reach <= cap.largest;
}

// The same in 8 bits.
template <typename Element, int kCount>
__device__ __forceinline__ bool exponentiate_capped(
    const float (&s)[kCount], const SoftCap& cap, const float (&row_max)[2], uint32_t (&p)[kCount / 4], float (&sum)[2]) {
  int reach = 0;
  exponentiate_each<Element, kCount>(
      [&](int i) {
        const float square = s[i] * s[i];
        reach = max(reach, __float_as_int(square));
        const float slope = fmaf(square, fmaf(square, cap.quintic, cap.cubic), cap.linear);
        return fmaf(s[i], slope, -row_max[row_of(i)]);
      },
      p, sum);
  return reach <= cap.largest;
}
