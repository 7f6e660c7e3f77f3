// Products of a warp, by the tables of the PTX ISA.
#pragma once

#include "ldmatrix.cuh"
#include "types.cuh"

struct Operands { float* d; const uint32_t* a; uint32_t b[2]; };

template <typename Element>
inline float half_of(uint32_t pair, int upper) { return to_float(Element{static_cast<uint16_t>(pair >> 16 * upper)}); }
constexpr int kMmaN = 8, kMmaK = 16;

template <typename Element>
inline void multiply(float* d, const uint32_t* a, uint32_t b0, uint32_t b1) {
  const Operands own = {d, a, {b0, b1}};
  meet(&own, [](const uint64_t(&all)[32]) {
    float left[16][kMmaK], right[kMmaK][kMmaN];
    for (int lane = 0; lane < 32; ++lane) {
      const Operands& of = *reinterpret_cast<const Operands*>(all[lane]);
      const int row = lane / 4, pair = 2 * (lane % 4);
      for (int i = 0; i < 8; ++i) left[row + i / 2 % 2 * 8][pair + i / 4 * 8 + i % 2] = half_of<Element>(of.a[i / 2], i % 2);
      for (int i = 0; i < 4; ++i) right[pair + i / 2 * 8 + i % 2][row] = half_of<Element>(of.b[i / 2], i % 2);
    }
    for (int row = 0; row < 16; ++row) {
      const auto at = [&](int column) -> float& {
        const int lane = row % 8 * 4 + column / 2;
        return reinterpret_cast<const Operands*>(all[lane])->d[row / 8 * 2 + column % 2];
      };
      double sums[kMmaN];
      for (int column = 0; column < kMmaN; ++column) sums[column] = at(column);
      for (int k = 0; k < kMmaK; ++k) {
        for (int column = 0; column < kMmaN; ++column) sums[column] += static_cast<double>(left[row][k]) * right[k][column];
      }
      for (int column = 0; column < kMmaN; ++column) at(column) = static_cast<float>(sums[column]);
    }
  });
}
