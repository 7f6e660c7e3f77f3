// Rows in vectors of 16 bytes, and the rotation of pairs of their numbers by angles of which tables hold cosines and sines.
#pragma once

#include "types.cuh"

__device__ __forceinline__ float to_float(float x) { return x; }

template <typename Element>
__device__ __forceinline__ Element rounded_to(float x) {
  return {static_cast<uint16_t>(pack<Element>(x, 0.0f))};
}

template <>
__device__ __forceinline__ float rounded_to<float>(float x) {
  return x;
}

// 16 bytes of a row.
template <typename Element>
struct alignas(16) Vector {
  static constexpr int kElements = 16 / sizeof(Element);
  Element elements[kElements];

  static __device__ __forceinline__ Vector load(const Element* from) { return *reinterpret_cast<const Vector*>(from); }
  __device__ __forceinline__ void store(Element* to) const { *reinterpret_cast<Vector*>(to) = *this; }
};

// What the numbers of a table of cosines or sines are.
enum Form { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };

// One number of a table.
__device__ __forceinline__ float table_number(const void* table, long long place, int form) {
  if (form == kFloat32) return static_cast<const float*>(table)[place];
  const uint16_t bits = static_cast<const uint16_t*>(table)[place];
  return form == kBfloat16 ? to_float(bf16{bits}) : to_float(fp16{bits});
}

// kCount numbers of a table, which begin at a multiple of the bytes of two.
template <int kCount>
__device__ __forceinline__ void table_numbers(float (&to)[kCount], const void* table, long long place, int form) {
  if (form == kFloat32) {
    const float2* const pairs = reinterpret_cast<const float2*>(static_cast<const float*>(table) + place);
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      const float2 both = pairs[i];
      to[2 * i] = both.x;
      to[2 * i + 1] = both.y;
    }
  } else {
    const uint32_t* const pairs = reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(table) + place);
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      const float2 both = form == kBfloat16 ? unpack<bf16>(pairs[i]) : unpack<fp16>(pairs[i]);
      to[2 * i] = both.x;
      to[2 * i + 1] = both.y;
    }
  }
}

// A number, rotated with its partner: the first of a pair (a, b) becomes a cos - b sin, the second a sin + b cos. Each
// operation is rounded by itself, so that these are the bits which float32 gives anywhere.
__device__ __forceinline__ float rotated(float own, float partner, float cos, float sin, bool first) {
  return __fadd_rn(__fmul_rn(own, cos), __fmul_rn(partner, first ? -sin : sin));
}
