// Weights that are the sigmoids of logits, in place of a softmax.
#pragma once

#include "softmax.cuh"

// P = 1 / (1 + exp2(-S * scale)) in 16 bits, as the A operand of the next product. A masked logit, -inf, gives 0. Weights are
// small where a bias lowers all logits: the error of exp2 and of the quotient is relative, as that of tanh.approx is not.
template <typename Element, int kCount>
__device__ __forceinline__ void take_sigmoid(const float (&s)[kCount], float scale, uint32_t (&p)[kCount / 2]) {
  static_assert(sizeof(Element) == 2);
  const auto sigmoid = [&](float x) {
    float quotient;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(quotient) : "f"(1.0f + exp2_approx(-scale * x)));  // relative error 2^-23
    return quotient;
  };
#pragma unroll
  for (int i = 0; i < kCount; i += 2) p[i / 2] = pack<Element>(sigmoid(s[i]), sigmoid(s[i + 1]));
}
