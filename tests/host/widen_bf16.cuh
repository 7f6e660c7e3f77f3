// Numbers of 8 bits times a scale, and loads of rows of them.
#pragma once

#include "types.cuh"

struct RaisedScale {
  float scale;
  RaisedScale() = default;
  explicit RaisedScale(float scale) : scale(scale) {}
};
inline uint32_t scaled_pair(uint32_t two, float scale) {
  return pack<bf16>(to_float(e4m3{static_cast<unsigned char>(two)}) * scale, to_float(e4m3{static_cast<unsigned char>(two >> 8)}) * scale);
}
inline uint4 widened(uint32_t first, uint32_t second, const RaisedScale& scale) {
  return {scaled_pair(first, scale.scale), scaled_pair(first >> 16, scale.scale), scaled_pair(second, scale.scale), scaled_pair(second >> 16, scale.scale)};
}
struct RaisedPower {
  float scale;
  explicit RaisedPower(uint32_t exponent) : scale(std::ldexp(1.0f, static_cast<int>(exponent) - 127)) {}
};
inline uint4 widened(uint32_t first, uint32_t second, const RaisedPower& power) { return widened(first, second, RaisedScale(power.scale)); }
inline void load_boxes(uint4 (&to)[4], const void* from) {
  for (int i = 0; i < 4; ++i) std::memcpy(&to[i], static_cast<const char*>(from) + 64 * i, 16);
}
inline void load_row_scales(uint32_t& to, const void* from) { std::memcpy(&to, from, 4); }
inline void load_row_scales(float2& to, const void* from) { std::memcpy(&to, from, 8); }
inline void store_chunk(uint32_t to, uint4 chunk) { std::memcpy(place_of_address(to), &chunk, 16); }
