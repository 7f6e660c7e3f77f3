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

template <typename Element>
inline uint32_t raised(uint32_t magnitudes, uint32_t pair) {
  const float2 x = unpack<Element>(magnitudes), y = unpack<Element>(pair);
  return pack<Element>(std::fmax(x.x, std::fabs(y.x)), std::fmax(x.y, std::fabs(y.y)));
}

struct e4m3 { unsigned char bits; };
struct e5m2 { unsigned char bits; };

inline float to_float(e4m3 x) {
  const int exponent = x.bits >> 3 & 15, fraction = x.bits & 7;
  const float magnitude = (x.bits & 0x7f) == 0x7f ? NAN
                          : exponent ? std::ldexp(8 + fraction, exponent - 10) : std::ldexp(static_cast<float>(fraction), -9);
  return x.bits & 0x80 ? -magnitude : magnitude;
}

// Rounds to nearest even and saturates: `kMantissa` bits behind the point, `kBias` of exponents, `kMost` the bits of the
// largest finite number.
template <int kMantissa, int kBias, unsigned kMost>
inline uint32_t rounded_to_8_bits(float x) {
  const uint32_t sign = std::signbit(x) ? 0x80 : 0;
  if (x != x) return 0x7f;
  if (x == 0.0f) return sign;
  const float magnitude = std::fabs(x);
  int exponent;
  std::frexp(magnitude, &exponent);
  const int lowest = std::max(exponent - 1, 1 - kBias) - kMantissa;  // exponent of the last bit
  const double steps = std::nearbyint(std::ldexp(static_cast<double>(magnitude), -lowest));
  const double most = std::ldexp((1 << kMantissa) + (kMost & (1 << kMantissa) - 1), static_cast<int>(kMost >> kMantissa) - kBias - kMantissa);
  if (!(std::ldexp(steps, lowest) <= most)) return sign | kMost;
  // Numbers of one exponent follow each other, and the next exponent follows them.
  const int first = lowest + kMantissa - (1 - kBias);  // exponents above that of the subnormal ones
  return sign | static_cast<uint32_t>((first << kMantissa) + static_cast<int>(steps));
}
template <typename Element>
inline uint32_t pack(float x0, float x1, float x2, float x3);
template <>
inline uint32_t pack<e4m3>(float x0, float x1, float x2, float x3) {
  const auto one = rounded_to_8_bits<3, 7, 0x7e>;
  return one(x0) | one(x1) << 8 | one(x2) << 16 | one(x3) << 24;
}
template <>
inline uint32_t pack<e5m2>(float x0, float x1, float x2, float x3) {
  const auto one = rounded_to_8_bits<2, 15, 0x7b>;
  return one(x0) | one(x1) << 8 | one(x2) << 16 | one(x3) << 24;
}

// Four e4m3 as two pairs of fp16.
inline uint2 widened_by_table(uint32_t four) {
  const auto one = [&](int i) { return to_float(e4m3{static_cast<unsigned char>(four >> 8 * i)}); };
  return {pack<fp16>(one(0), one(1)), pack<fp16>(one(2), one(3))};
}
