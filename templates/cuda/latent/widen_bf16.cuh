// Numbers of 8 bits times a scale, as bf16, each rounded once.
//
// The exponent and mantissa of an e4m3 are moved to where bf16 has them: this is the number times 2^-120, subnormal ones
// included, since bf16 then has a subnormal one, too. Multiplying by the scale times 2^120 makes up for it.
#pragma once

#include "types.cuh"

constexpr float kRaised = 0x1p120f;
constexpr float kMostScale = 0x1.fep127f;  // largest number of bf16, for scales of 2^8 and more

// Both halves of `scale` * 2^120, where the second one is what rounding the first one left.
struct RaisedScale {
  uint32_t high, low;

  RaisedScale() = default;
  explicit __device__ __forceinline__ RaisedScale(float scale) {
    const float product = scale * kRaised, raised = product > kMostScale ? kMostScale : product;  // NaN stays NaN
    high = pack<bf16>(raised, raised);
    const float rest = raised - unpack<bf16>(high).x;
    low = pack<bf16>(rest, rest);
  }
};

// 2^(exponent - 127), as e8m0 has it, times 2^120.
struct RaisedPower {
  uint32_t high;

  RaisedPower() = default;
  explicit __device__ __forceinline__ RaisedPower(uint32_t exponent) {
    const uint32_t bits = exponent == 255 ? 0x7fff : min(exponent + 120, 254) << 7;  // 255 is NaN
    high = bits | bits << 16;
  }
};

// Two e4m3 of four as bf16 times 2^-120: kSelector takes each, and its sign as the byte above.
template <uint32_t kSelector>
__device__ __forceinline__ uint32_t lowered_pair(uint32_t four) {
  uint32_t extended;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(extended) : "r"(four), "n"(kSelector));
  return extended << 4 & 0x87f087f0;
}

__device__ __forceinline__ uint32_t times(uint32_t pair, const RaisedScale& scale) {
  uint32_t product;
  asm("{.reg .b32 rest; mul.rn.bf16x2 rest, %1, %3; fma.rn.bf16x2 %0, %1, %2, rest;}"
      : "=r"(product)
      : "r"(pair), "r"(scale.high), "r"(scale.low));
  return product;
}

__device__ __forceinline__ uint32_t times(uint32_t pair, const RaisedPower& scale) {
  uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(pair), "r"(scale.high));
  return product;
}

// Eight e4m3 as bf16.
template <typename Scale>
__device__ __forceinline__ uint4 widened(uint32_t first, uint32_t second, const Scale& scale) {
  constexpr uint32_t kLower = 0x9180, kUpper = 0xb3a2;
  return {times(lowered_pair<kLower>(first), scale), times(lowered_pair<kUpper>(first), scale),
          times(lowered_pair<kLower>(second), scale), times(lowered_pair<kUpper>(second), scale)};
}

// Loads 16 bytes from global memory that is not written meanwhile, or zeros. Loads stay where they are in the program, so that what
// follows hides their latency.
__device__ __forceinline__ void load_early(uint4& to, const void* from, bool exists) {
  asm volatile(
      "{.reg .pred exists; setp.ne.b32 exists, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;"
      " @exists ld.global.nc.L2::128B.v4.b32 {%0, %1, %2, %3}, [%4];}"
      : "=&r"(to.x), "=&r"(to.y), "=&r"(to.z), "=&r"(to.w)
      : "l"(from), "r"(static_cast<int>(exists)));
}

// The same of a row that exists: 16 bytes of each of four boxes of 64 bytes, and scales. Stores stay where they are, too.
__device__ __forceinline__ void load_boxes(uint4 (&to)[4], const void* from) {
  asm volatile(
      "ld.global.nc.L2::128B.v4.b32 {%0, %1, %2, %3}, [%16];"
      " ld.global.nc.L2::128B.v4.b32 {%4, %5, %6, %7}, [%16 + 64];"
      " ld.global.nc.L2::128B.v4.b32 {%8, %9, %10, %11}, [%16 + 128];"
      " ld.global.nc.L2::128B.v4.b32 {%12, %13, %14, %15}, [%16 + 192];"
      : "=&r"(to[0].x), "=&r"(to[0].y), "=&r"(to[0].z), "=&r"(to[0].w), "=&r"(to[1].x), "=&r"(to[1].y), "=&r"(to[1].z), "=&r"(to[1].w),
        "=&r"(to[2].x), "=&r"(to[2].y), "=&r"(to[2].z), "=&r"(to[2].w), "=&r"(to[3].x), "=&r"(to[3].y), "=&r"(to[3].z), "=&r"(to[3].w)
      : "l"(from));
}
__device__ __forceinline__ void load_row_scales(float2& to, const void* from) {
  asm volatile("ld.global.nc.v2.f32 {%0, %1}, [%2];" : "=f"(to.x), "=f"(to.y) : "l"(from));
}
__device__ __forceinline__ void load_row_scales(float& to, const void* from) {
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(to) : "l"(from));
}
__device__ __forceinline__ void load_row_scales(uint32_t& to, const void* from) {
  asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(to) : "l"(from));
}
__device__ __forceinline__ void store_chunk(uint32_t to, uint4 chunk) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(chunk.x), "r"(chunk.y), "r"(chunk.z), "r"(chunk.w) : "memory");
}
