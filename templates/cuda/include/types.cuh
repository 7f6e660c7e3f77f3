// Element types and integers, without any header of the toolkit.
#pragma once

using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// 16-bit floats are storage only: arithmetic is float32.
struct bf16 {
  uint16_t bits;
};

struct fp16 {
  uint16_t bits;
};

struct e4m3 {
  unsigned char bits;
};

struct e5m2 {
  unsigned char bits;
};

__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float(static_cast<uint32_t>(x.bits) << 16); }

__device__ __forceinline__ float to_float(fp16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}

// Two floats rounded to nearest even, the first one in the lower half.
template <typename Element>
__device__ __forceinline__ uint32_t pack(float low, float high);

template <>
__device__ __forceinline__ uint32_t pack<bf16>(float low, float high) {
  uint32_t both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

template <>
__device__ __forceinline__ uint32_t pack<fp16>(float low, float high) {
  uint32_t both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

// Four floats, each rounded to nearest even and no further than the largest finite number, the first one lowest.
template <typename Element>
__device__ __forceinline__ uint32_t pack(float x0, float x1, float x2, float x3);

template <>
__device__ __forceinline__ uint32_t pack<e4m3>(float x0, float x1, float x2, float x3) {
  uint32_t all;
  asm("{.reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1; cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;"
      " mov.b32 %0, {low, high};}"
      : "=r"(all)
      : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
  return all;
}

template <>
__device__ __forceinline__ uint32_t pack<e5m2>(float x0, float x1, float x2, float x3) {
  uint32_t all;
  asm("{.reg .b16 low, high; cvt.rn.satfinite.e5m2x2.f32 low, %2, %1; cvt.rn.satfinite.e5m2x2.f32 high, %4, %3;"
      " mov.b32 %0, {low, high};}"
      : "=r"(all)
      : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
  return all;
}

// The two floats of a pair.
template <typename Element>
__device__ __forceinline__ float2 unpack(uint32_t both);

template <>
__device__ __forceinline__ float2 unpack<bf16>(uint32_t both) {
  return {__uint_as_float(both << 16), __uint_as_float(both & 0xffff0000)};
}

template <>
__device__ __forceinline__ float2 unpack<fp16>(uint32_t both) {
  return {to_float(fp16{static_cast<uint16_t>(both)}), to_float(fp16{static_cast<uint16_t>(both >> 16)})};
}

// Two magnitudes, raised to those of another pair; NaN is passed over (PTX ISA, "max").
template <typename Element>
__device__ __forceinline__ uint32_t raised(uint32_t magnitudes, uint32_t pair);

template <>
__device__ __forceinline__ uint32_t raised<bf16>(uint32_t magnitudes, uint32_t pair) {
  uint32_t larger;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(magnitudes), "r"(pair & 0x7fff7fff));
  return larger;
}

template <>
__device__ __forceinline__ uint32_t raised<fp16>(uint32_t magnitudes, uint32_t pair) {
  uint32_t larger;
  asm("max.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(magnitudes), "r"(pair & 0x7fff7fff));
  return larger;
}
