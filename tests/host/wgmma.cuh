// Products of a warpgroup whose operands lie in shared memory, K-major and swizzled over 128 bytes. A thread computes its
// own sums at once.
#pragma once

#include "tma.cuh"

inline void fence_products() {}
inline void commit_products() {}
template <int kPending>
inline void wait_products() {}
template <int kCount>
inline void fence_registers(float (&)[kCount]) {}

template <uint32_t kLeading, uint32_t kStride, uint32_t kSwizzle>
struct Matrix {
  static_assert(kStride == 1024 && kSwizzle == 1);
  uint32_t address;

  explicit Matrix(uint32_t address) : address(address) {}
  uint64_t at(uint32_t bytes) const { return address + bytes; }
};

template <typename Element>
inline float swizzled_element(uint32_t from, int row, int column) {
  const uint32_t address = from + 128 * row + 2 * column;
  return to_float(*reinterpret_cast<const Element*>(place_of_address(address ^ (address >> 7 & 7) << 4)));
}

template <typename Element, int kN>
struct Product {
  template <int kTransposeB>
  static void ss(float (&d)[kN / 2], uint64_t a, uint64_t b, int accumulate) {
    const int thread = threadIdx.x % 128, lane = thread % 32;
    for (int i = 0; i < kN / 2; ++i) {
      const int row = thread / 32 * 16 + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
      double sum = accumulate ? d[i] : 0.0f;
      for (int k = 0; k < 16; ++k) {
        sum += static_cast<double>(swizzled_element<Element>(a, row, k)) * swizzled_element<Element>(b, column, k);
      }
      d[i] = static_cast<float>(sum);
    }
  }
};
