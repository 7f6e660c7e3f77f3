// Products of a warpgroup whose operands lie in shared memory, swizzled over 128 bytes: K-major or MN-major; A may be in
// registers. A warp computes its own rows at once.
#pragma once

#include "tma.cuh"

inline void fence_products() {}
#if RACES
// A product is complete when all warps of its warpgroup have issued it, and it may read until somebody waits for that.
inline Products& products_of() {
  Products& own = current->block->warpgroups[threadIdx.x / 128];
  races::actor_of(own.actor, "products of warpgroup", threadIdx.x / 128, current->block->slot);
  return own;
}
struct Multiplying {
  races::As as;
  Multiplying() : as(products_of().actor, current->products + 1) {}
};
inline void hold(const void* registers, int count, bool written) {
  races::hold(current->held, registers, 4 * count, written, current->products + 1);
}
inline void commit_products() {
  Products& own = products_of();
  if (own.groups.size() == current->products) own.groups.emplace_back();
  Group& group = own.groups[current->products++];
  races::arrive(group.signal, current->block->slot);
  moved = true;
  if (++group.threads == 128) races::complete(group.signal, false);
}
template <int kPending>
inline void wait_products() {
  const int groups = static_cast<int>(current->products) - kPending;
  if (groups <= 0) return;
  Products& own = products_of();
  while (own.groups[groups - 1].threads < 128) yield();
  races::acquire(own.groups[groups - 1].signal, current->block->slot, false);
  races::finish(own.actor, groups);
  races::let_go(current->held, groups);
}
#else
struct Multiplying {};
inline void hold(const void*, int, bool) {}
inline void commit_products() {}
template <int kPending>
inline void wait_products() {}
#endif
template <int kCount>
inline void fence_registers(float (&)[kCount]) {}

// A place in a block's own shared memory, and above it the bytes from one box of columns to the next, and whether rows of boxes
// have 64 bytes.
constexpr uint64_t kNarrow = 1ull << 63;
template <uint32_t kLeading, uint32_t kStride, uint32_t kSwizzle>
struct Matrix {
  static_assert((kStride == 1024 && kSwizzle == 1) || (kStride == 512 && kSwizzle == 2));
  uint32_t address;

  explicit Matrix(uint32_t address) : address(address) {}
  uint64_t at(uint32_t bytes) const { return (kSwizzle == 2 ? kNarrow : 0) | static_cast<uint64_t>(kLeading) << 32 | (address + bytes); }
};

template <typename Element>
inline float swizzled_element(uint64_t matrix, int row, int column, uint32_t leading = 0) {
  const uint32_t own = current->block->rank << kRankBits;
  const uint32_t columns = matrix & kNarrow ? 32 : 64;
  const uint32_t address = static_cast<uint32_t>(matrix) + leading * (column / columns) + 2 * (columns * row + column % columns);
  return to_float(*reinterpret_cast<const Element*>(place_of_address(own | address ^ (address >> 7 & columns / 8 - 1) << 4)));
}

template <typename Element, int kN>
struct Product {
  static constexpr int kK = 16;
  struct Given { float* d; const uint32_t* registers; };

  // Most of the time goes here, and no shared memory.
  [[gnu::noinline, gnu::no_sanitize("thread")]] static void add_row(float (&sums)[kN], const float (&left)[kK], const float (&right)[kK][kN]) {
    for (int k = 0; k < kK; ++k) {
      for (int n = 0; n < kN; ++n) sums[n] += left[k] * right[k][n];
    }
  }
  template <int kTransposeB, int kTransposeA>
  static void multiply(float (&d)[kN / 2], const uint32_t* registers, uint64_t a, uint64_t b, int accumulate) {
    const Given own = {d, registers};
    hold(d, kN / 2, true);
    if (registers) hold(registers, 4, false);
    const int first = threadIdx.x % 128 / 32 * 16;
    meet(&own, [&](const uint64_t(&all)[32]) {
      const Multiplying multiplying;
      const auto given = [&](int lane) -> const Given& { return *reinterpret_cast<const Given*>(all[lane]); };
      float left[16][kK], right[kK][kN];
      for (int row = 0; row < 16; ++row) {
        for (int k = 0; k < kK; ++k) {
          if (registers) {
            const uint32_t pair = given(row % 8 * 4 + k % 8 / 2).registers[row / 8 + k / 8 * 2];
            left[row][k] = to_float(Element{static_cast<uint16_t>(pair >> 16 * (k % 2))});
          } else {
            left[row][k] = kTransposeA ? swizzled_element<Element>(a, k, first + row) : swizzled_element<Element>(a, first + row, k);
          }
        }
      }
      for (int k = 0; k < kK; ++k) {
        for (int n = 0; n < kN; ++n) {
          right[k][n] = kTransposeB ? swizzled_element<Element>(b, k, n, (b & ~kNarrow) >> 32) : swizzled_element<Element>(b, n, k);
        }
      }
      for (int row = 0; row < 16; ++row) {
        float sums[kN];
        const auto at = [&](int n) -> float& { return given(row % 8 * 4 + n % 8 / 2).d[n / 8 * 4 + row / 8 * 2 + n % 2]; };
        for (int n = 0; n < kN; ++n) sums[n] = accumulate ? at(n) : 0.0f;
        add_row(sums, left[row], right);
        for (int n = 0; n < kN; ++n) at(n) = sums[n];
      }
    });
  }
  template <int kTransposeB, int kTransposeA = 0>
  static void ss(float (&d)[kN / 2], uint64_t a, uint64_t b, int accumulate) {
    multiply<kTransposeB, kTransposeA>(d, nullptr, a, b, accumulate);
  }
  template <int kTransposeB>
  static void rs(float (&d)[kN / 2], const uint32_t* a, uint64_t b, int accumulate) {
    multiply<kTransposeB, 0>(d, a, 0, b, accumulate);
  }
};
