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

// Dtypes of a table of cosines or sines.
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

// Four numbers of a table, which begin at a multiple of their bytes.
__device__ __forceinline__ void four_table_numbers(float (&to)[4], const void* table, long long place, int form) {
  if (form == kFloat32) {
    const float4 all = *reinterpret_cast<const float4*>(static_cast<const float*>(table) + place);
    to[0] = all.x;
    to[1] = all.y;
    to[2] = all.z;
    to[3] = all.w;
  } else {
    const uint2 all = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(table) + place);
    const float2 low = form == kBfloat16 ? unpack<bf16>(all.x) : unpack<fp16>(all.x);
    const float2 high = form == kBfloat16 ? unpack<bf16>(all.y) : unpack<fp16>(all.y);
    to[0] = low.x;
    to[1] = low.y;
    to[2] = high.x;
    to[3] = high.y;
  }
}

// Four cosines and the sines of the same angles: one branch for both tables.
__device__ __forceinline__ void four_angles(
    float (&cos)[4], float (&sin)[4], const void* cos_table, long long cos_place, const void* sin_table,
    long long sin_place, int form) {
  if (form == kFloat32) {
    four_table_numbers(cos, cos_table, cos_place, kFloat32);
    four_table_numbers(sin, sin_table, sin_place, kFloat32);
  } else {
    four_table_numbers(cos, cos_table, cos_place, form);
    four_table_numbers(sin, sin_table, sin_place, form);
  }
}

// A number, rotated with its partner: the first of a pair (a, b) becomes a cos - b sin, the second a sin + b cos. Each
// operation is rounded by itself, so that these are the bits which float32 gives anywhere.
__device__ __forceinline__ float rotated(float own, float partner, float cos, float sin, bool first) {
  return __fadd_rn(__fmul_rn(own, cos), __fmul_rn(partner, first ? -sin : sin));
}

// The numbers of one vector of a row, rotated: `x` are those of elements `element` … of the row at `row`, which holds
// their partners. Tables begin at the row of the position; `whole` says that a vector is rotated as a whole or not at all,
// and that angles can be read two at once.
template <typename Element>
__device__ __forceinline__ void rotate_vector(
    float (&x)[Vector<Element>::kElements], const Element* row, int element, int rotary_half, const void* cos_table,
    long long cos_row, const void* sin_table, long long sin_row, int form, int interleaved, int whole) {
  constexpr int kElements = Vector<Element>::kElements;
  if (!whole) {  // the rotated numbers, or a half of them, end inside a vector, or tables begin between two words
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const int at = element + i;
      if (at < 2 * rotary_half) {
        const bool first = interleaved ? at % 2 == 0 : at < rotary_half;
        const int step = interleaved ? 1 : rotary_half, pair = interleaved ? at / 2 : first ? at : at - rotary_half;
        const float cos = table_number(cos_table, cos_row + pair, form), sin = table_number(sin_table, sin_row + pair, form);
        x[i] = rotated(to_float(row[at]), to_float(row[first ? at + step : at - step]), cos, sin, first);
      }
    }
  } else if (interleaved) {  // pairs of neighbours
    float cos[kElements / 2], sin[kElements / 2];
    table_numbers(cos, cos_table, cos_row + element / 2, form);
    table_numbers(sin, sin_table, sin_row + element / 2, form);
#pragma unroll
    for (int i = 0; i < kElements; i += 2) {
      const float a = x[i], b = x[i + 1];
      x[i] = rotated(a, b, cos[i / 2], sin[i / 2], true);
      x[i + 1] = rotated(b, a, cos[i / 2], sin[i / 2], false);
    }
  } else {  // a number of the first half with one of the second
    const bool first = element < rotary_half;
    const int pair = first ? element : element - rotary_half;
    const auto partner = Vector<Element>::load(row + (first ? element + rotary_half : pair));
#pragma unroll
    for (int part = 0; part < kElements; part += kElements / 2) {  // by halves, to hold fewer angles
      float cos[kElements / 2], sin[kElements / 2];
      table_numbers(cos, cos_table, cos_row + pair + part, form);
      table_numbers(sin, sin_table, sin_row + pair + part, form);
#pragma unroll
      for (int i = part; i < part + kElements / 2; ++i) {
        x[i] = rotated(x[i], to_float(partner.elements[i]), cos[i - part], sin[i - part], first);
      }
    }
  }
}
