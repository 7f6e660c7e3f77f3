// Numbers of 8 bits as numbers of 16.
#pragma once

#include "types.cuh"

// Four e4m3 as fp16: the two lower ones, and the two upper ones.
__device__ __forceinline__ uint2 widened(uint32_t four) {
  uint2 wide;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high;}"
      : "=r"(wide.x), "=r"(wide.y)
      : "r"(four));
  return wide;
}

// A pair of fp16 times a scale, as another pair, and no further than its largest number.
template <typename Element>
__device__ __forceinline__ uint32_t scaled(uint32_t pair, float scale) {
  const float2 both = unpack<fp16>(pair);
  return pack<Element>(both.x * scale, both.y * scale);
}

template <>
__device__ __forceinline__ uint32_t scaled<fp16>(uint32_t pair, float scale) {
  constexpr float kMost = 65504.0f;
  const float2 both = unpack<fp16>(pair);
  const float x = both.x * scale, y = both.y * scale;  // NaN stays NaN
  return pack<fp16>(x > kMost ? kMost : x < -kMost ? -kMost : x, y > kMost ? kMost : y < -kMost ? -kMost : y);
}
