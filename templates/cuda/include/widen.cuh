// K and V of 8 bits as operands of products of 16 bits. Each e4m3 is a number of fp16, and converting two is one instruction.
//
// A lane reads 16 bytes of a row at a time, enough for four products, where blocks of 8 x 8 would give it two. So its columns
// of Q and K follow each other, and its keys and its columns of O are those that `scattered` tells: rows of a swizzle are
// read without conflicts of banks then.
#pragma once

#include "e4m3.cuh"
#include "mma.cuh"
#include "softmax.cuh"

// Bytes of a row that a lane reads at once.
template <int kCount>
struct alignas(kCount) Bytes {
  uint32_t words[kCount / 4];
};

// Row of 8, or run of columns of 8, that is number `place` of a product: lanes have 0 and 4, 1 and 5, 2 and 6, 3 and 7.
__device__ __forceinline__ int scattered(int place) { return place / 2 + place % 2 * 4; }

// Two columns that follow each other of two keys, from four of each, as fp16: both keys of the first, then of the second.
__device__ __forceinline__ uint2 widened_lower(uint32_t key, uint32_t next) { return widened(__byte_perm(key, next, 0x5140)); }
__device__ __forceinline__ uint2 widened_upper(uint32_t key, uint32_t next) { return widened(__byte_perm(key, next, 0x7362)); }

// The larger ones of two pairs of 16-bit numbers without a sign.
__device__ __forceinline__ uint32_t larger_pair(uint32_t a, uint32_t b) {
#if __CUDA_ARCH__ >= 900
  uint32_t larger;
  asm("max.u16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
#else
  return max(a >> 16, b >> 16) << 16 | max(a & 0xffff, b & 0xffff);
#endif
}

// Pairs of bf16 of a row, which four lanes share, as fp16: times the power of two that brings the largest number of the
// row close to the largest of fp16. Every number of 2^-29 of that or more stays exact. Returns what brings products back.
// `row`: which ones of four registers are of it, as the A operand has them.
template <int kCount>
__device__ __forceinline__ float narrow_exponents(uint32_t (&pairs)[kCount], int row) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = row; i < kCount; i += 2) largest = larger_pair(largest, pairs[i] & 0x7fff7fff);
  largest = larger_pair(largest, __shfl_xor_sync(~0u, largest, 1));
  largest = larger_pair(largest, __shfl_xor_sync(~0u, largest, 2));
  const int exponent = max(static_cast<int>(max(largest & 0xffff, largest >> 16) >> 7), 16);
  const float factor = __uint_as_float(269 - exponent << 23);  // 2^15 / 2^(exponent - 127)
#pragma unroll
  for (int i = row; i < kCount; i += 2) {
    const float2 both = unpack<bf16>(pairs[i]);
    pairs[i] = pack<fp16>(both.x * factor, both.y * factor);
  }
  return __uint_as_float(exponent - 15 << 23);
}

// P keeps its bits down to 2^-29 of the largest one, which is 2^kPeak when the row max is set; fp16 ends at 2^16.
constexpr int kPeak = 15;

// Logits in units of log2, each key's with the logarithm of the scale of its value.
template <int kCount>
__device__ __forceinline__ void lift(float (&s)[kCount], float scale, const float4 (&keys)[kCount / 2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) s[i] = fmaf(s[i], scale, keys[i / 4 * 2 + i % 2].y);
}

// P = exp2(S - row max) of logits that `lift` has made; sums are without the scales of values.
template <typename Element, int kCount>
__device__ __forceinline__ void exponentiate(
    const float (&s)[kCount], const float4 (&keys)[kCount / 2], const float (&row_max)[2], uint32_t (&p)[kCount / 2],
    float (&sum)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    const float low = exp2_approx(s[i] - row_max[row_of(i)]), high = exp2_approx(s[i + 1] - row_max[row_of(i)]);
    sum[row_of(i)] += low * keys[i / 4 * 2].z + high * keys[i / 4 * 2 + 1].z;
    p[i / 2] = pack<Element>(low, high);
  }
}

// Scales of a page: the scale of its keys, and the logarithm and the reciprocal of that of its values. Values with a smaller
// one than 2^-60 count, and add nothing.
__device__ __forceinline__ float4 page_scales(float of_keys, float of_values) {
  const float positive = fmaxf(of_values, 0x1p-60f);
  float4 scales = {of_keys, 0.0f, 0.0f, 0.0f};
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(scales.y) : "f"(positive));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(scales.z) : "f"(positive));
  return scales;
}

// Stores two rows of an accumulator whose columns are scattered: `PartialRow::store` of others. A lane has runs of kRun columns.
// Of rows of kWidth columns a warp may have those from `first` on; who has the first ones stores row max and sum.
template <typename Partial, int kRun, int kCount, int kWidth = 2 * kCount>
__device__ __forceinline__ void store_scattered(
    float* to, int row, int rows, int lane, const float (&acc)[kCount], const float (&row_max)[2], const float (&sum)[2],
    int first = 0) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float whole = sum[half] + __shfl_xor_sync(~0u, sum[half], 1);
    whole += __shfl_xor_sync(~0u, whole, 2);
    if (row + 8 * half < rows) {
      float* const at = to + (row + 8 * half) * Partial::kFloats;
#pragma unroll
      for (int i = 0; i < kCount / 4; i += 4) {  // products of 8 columns each, one of each run
#pragma unroll
        for (int next = 0; next < 2; ++next) {
          const float* const x = acc + 4 * i + 2 * half + next;
          const int column = first + i / kRun * 8 * kRun + (lane % 4 + 4 * next) * kRun + i % kRun;
          *reinterpret_cast<float4*>(at + column) = {x[0], x[4], x[8], x[12]};
        }
      }
      if (first == 0 && lane % 4 == 0) *reinterpret_cast<float2*>(at + kWidth) = {row_max[half], whole};
    }
  }
}
