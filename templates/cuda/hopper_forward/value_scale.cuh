// Scales of V that differ from tile to tile: P takes them up, as a part of its exponents.
#pragma once

#include "softmax.cuh"

// The scale of the values of a tile, by which P is multiplied: it lifts the logits of the tile, and with them the maximum.
struct ValueScale {
  float log2, inverse;

  __device__ __forceinline__ explicit ValueScale(float scale) {
    const float positive = fmaxf(scale, 0x1p-60f);  // what has a smaller one counts, and adds nothing
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(log2) : "f"(positive));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(positive));
  }
  __device__ __forceinline__ void lift(float (&maximum)[2]) const {
    maximum[0] += log2;
    maximum[1] += log2;
  }
};

template <typename Element, int kCount, int kPacked>
__device__ __forceinline__ void exponentiate(
    const float (&s)[kCount], float scale, const float (&row_max)[2], const ValueScale& value_scale,
    uint32_t (&p)[kPacked], float (&sum)[2]) {
  const float lowered[2] = {row_max[0] - value_scale.log2, row_max[1] - value_scale.log2};
  exponentiate<Element>(s, scale, lowered, p, sum);
}
