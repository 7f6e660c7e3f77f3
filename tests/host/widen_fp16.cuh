// Numbers of 8 bits times a scale, as fp16, and the exponents of parts.
#pragma once

#include "widen_bf16.cuh"

constexpr int kFirstExponent = -6;
constexpr int kMostExponent = 100;
constexpr float kMostHalfScale = 146.0f, kLeastHalfScale = 0x1p-8f;

inline float power_of_two(int exponent) { return __uint_as_float(static_cast<uint32_t>(exponent + 127) << 23); }
inline bool fits_fp16(uint32_t largest, int exponent) {
  const float scale = __uint_as_float(largest) * power_of_two(-exponent);
  return largest == 0 || (scale >= kLeastHalfScale && scale <= kMostHalfScale);
}
inline int exponent_for(uint32_t largest) {
  return max(-kMostExponent, min(static_cast<int>(largest >> 23) - 127, kMostExponent));
}

struct HalfScale {
  uint32_t both;
  HalfScale() = default;
  explicit HalfScale(float scale) { both = pack<fp16>(scale, scale); }
};
inline uint2 scaled_four(uint32_t four, uint32_t scale) {
  const float of = unpack<fp16>(scale).x;
  const auto number = [&](int i) { return of * to_float(e4m3{static_cast<unsigned char>(four >> 8 * i)}); };
  return {pack<fp16>(number(0), number(1)), pack<fp16>(number(2), number(3))};
}
inline uint4 widened(uint32_t first, uint32_t second, const HalfScale& scale) {
  const uint2 a = scaled_four(first, scale.both), b = scaled_four(second, scale.both);
  return {a.x, a.y, b.x, b.y};
}
inline uint32_t half_pair(uint32_t pair, float factor) {
  const float2 both = unpack<bf16>(pair);
  const auto finite = [&](float x) { return x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x; };
  return pack<fp16>(finite(both.x * factor), finite(both.y * factor));
}
inline uint4 half_chunk(uint4 chunk, float factor) {
  return {half_pair(chunk.x, factor), half_pair(chunk.y, factor), half_pair(chunk.z, factor), half_pair(chunk.w, factor)};
}
inline void load_box(uint4& to, const void* from) { std::memcpy(&to, from, 16); }
constexpr int kLineBytes = 128;
inline void prefetch_line(const void*) {}
