// Numbers of 8 bits times a scale, as fp16: two instructions for two of them, where bf16 takes five.
//
// fp16 has fewer exponents than float32 scales. So a part of a work item has an exponent: its rows are multiplied by 2^-exponent,
// those columns of Q by 2^exponent, and O by 2^exponent in the end. The largest scale of the part tells whether fp16 held its rows.
#pragma once

#include "widen_bf16.cuh"

constexpr int kFirstExponent = -6;    // of a block's first part: it holds scales of up to 2.28, and largest ones from 2^-14 on
constexpr int kMostExponent = 100;    // so that 2^exponent and its reciprocal are normal numbers
constexpr float kMostHalfScale = 146.0f, kLeastHalfScale = 0x1p-8f;  // bounds of the largest scale over 2^exponent: 448 * 146 is finite,
                                                                     // and scales of 2^-6 times the largest one are normal numbers

__device__ __forceinline__ float power_of_two(int exponent) { return __uint_as_float(static_cast<uint32_t>(exponent + 127) << 23); }

// Whether fp16 holds rows over 2^exponent whose largest scale has these bits.
__device__ __forceinline__ bool fits_fp16(uint32_t largest, int exponent) {
  const float scale = __uint_as_float(largest) * power_of_two(-exponent);
  return largest == 0 || (scale >= kLeastHalfScale && scale <= kMostHalfScale);
}

// The exponent for rows whose largest scale has these bits.
__device__ __forceinline__ int exponent_for(uint32_t largest) {
  return max(-kMostExponent, min(static_cast<int>(largest >> 23) - 127, kMostExponent));
}

// A scale as fp16, twice.
struct HalfScale {
  uint32_t both;

  HalfScale() = default;
  explicit __device__ __forceinline__ HalfScale(float scale) { both = pack<fp16>(scale, scale); }
};

// Four e4m3 as fp16, times a scale.
__device__ __forceinline__ uint2 scaled_four(uint32_t four, uint32_t scale) {
  uint2 to;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high;"
      " mul.rn.f16x2 %0, %0, %3; mul.rn.f16x2 %1, %1, %3;}"
      : "=&r"(to.x), "=&r"(to.y)
      : "r"(four), "r"(scale));
  return to;
}

__device__ __forceinline__ uint4 widened(uint32_t first, uint32_t second, const HalfScale& scale) {
  const uint2 a = scaled_four(first, scale.both), b = scaled_four(second, scale.both);
  return {a.x, a.y, b.x, b.y};
}

// Two bf16 times a factor as fp16, no further than the largest finite number.
__device__ __forceinline__ uint32_t half_pair(uint32_t pair, float factor) {
  const float2 both = unpack<bf16>(pair);
  uint32_t to;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(to) : "f"(both.y * factor), "f"(both.x * factor));
  return to;
}

__device__ __forceinline__ uint4 half_chunk(uint4 chunk, float factor) {
  return {half_pair(chunk.x, factor), half_pair(chunk.y, factor), half_pair(chunk.z, factor), half_pair(chunk.w, factor)};
}

// Loads 16 bytes of a row. Unlike loads past the coherent path, this one stays between the barriers of a warp around it.
__device__ __forceinline__ void load_box(uint4& to, const void* from) {
  asm volatile("ld.global.L2::128B.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(to.x), "=r"(to.y), "=r"(to.z), "=r"(to.w) : "l"(from) : "memory");
}

constexpr int kLineBytes = 128;  // of L2

// Brings a line to L2.
__device__ __forceinline__ void prefetch_line(const void* line) { asm volatile("prefetch.global.L2 [%0];" ::"l"(line) : "memory"); }
