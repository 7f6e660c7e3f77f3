// Element types, as templates/cuda/include/types.cuh has them.
#pragma once

#include "threads.h"

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

struct bf16 { uint16_t bits; };

inline float to_float(bf16 x) { return __uint_as_float(static_cast<uint32_t>(x.bits) << 16); }
inline uint32_t rounded(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
template <typename Element>
inline uint32_t pack(float low, float high);
template <>
inline uint32_t pack<bf16>(float low, float high) {
  return rounded(low) | rounded(high) << 16;
}

struct fp16 { uint16_t bits; };

inline float to_float(fp16 x) {
  _Float16 half;
  std::memcpy(&half, &x, 2);
  return half;
}
template <>
inline uint32_t pack<fp16>(float low, float high) {
  const _Float16 both[2] = {static_cast<_Float16>(low), static_cast<_Float16>(high)};
  uint32_t bits;
  std::memcpy(&bits, both, 4);
  return bits;
}
template <typename Element>
inline float2 unpack(uint32_t both) {
  return {to_float(Element{static_cast<uint16_t>(both)}), to_float(Element{static_cast<uint16_t>(both >> 16)})};
}
