// Matrix products of a warp (PTX ISA, "mma.m16n8k16").
//
// D (16 x 8, float32) += A (16 x 16) * B (16 x 8). A lane holds four elements of D: element i of lane l is row
// l / 4 + 8 * (i / 2), column 2 * (l % 4) + i % 2. So D of two products side by side is A of the next one, once packed.
#pragma once

#include "ldmatrix.cuh"
#include "types.cuh"

constexpr int kMmaN = 8, kMmaK = 16;

template <typename Element>
__device__ __forceinline__ void multiply(float* d, const uint32_t* a, uint32_t b0, uint32_t b1);

#define DEFINE_MULTIPLY(Element, TYPE)                                                                           \
  template <>                                                                                                    \
  __device__ __forceinline__ void multiply<Element>(float* d, const uint32_t* a, uint32_t b0, uint32_t b1) {     \
    asm volatile(                                                                                                \
        "mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE                                                   \
        ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                   \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                         \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                                         \
  }

DEFINE_MULTIPLY(bf16, "bf16")
DEFINE_MULTIPLY(fp16, "f16")

// The same for 8 bits, with K of 32: a register holds four elements, where it holds two of 16 bits (PTX ISA, "mma.m16n8k32").
template <>
__device__ __forceinline__ void multiply<e4m3>(float* d, const uint32_t* a, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
