// Products of a warp and blocks of their operands, by the tables of the PTX ISA.
#pragma once

#include "types.cuh"

struct Operands { const uint32_t* a; uint32_t b[2]; };

template <typename Element>
inline float half_of(uint32_t pair, int upper) { return to_float(Element{static_cast<uint16_t>(pair >> 16 * upper)}); }
constexpr int kMmaN = 8, kMmaK = 16;

template <typename Element>
inline void multiply(float* d, const uint32_t* a, uint32_t b0, uint32_t b1) {
  const Operands own = {a, {b0, b1}};
  uint64_t all[32];
  exchange(&own, all);
  for (int i = 0; i < 4; ++i) {
    const int row = current->lane / 4 + 8 * (i / 2), column = 2 * (current->lane % 4) + i % 2;
    double sum = d[i];
    for (int k = 0; k < 16; ++k) {
      const Operands& of_a = *reinterpret_cast<const Operands*>(all[row % 8 * 4 + k % 8 / 2]);
      const Operands& of_b = *reinterpret_cast<const Operands*>(all[column * 4 + k % 8 / 2]);
      sum += static_cast<double>(half_of<Element>(of_a.a[row / 8 + 2 * (k / 8)], k % 2)) * half_of<Element>(of_b.b[k / 8], k % 2);
    }
    d[i] = static_cast<float>(sum);
  }
  exchange(0, all);  // nobody changes operands that others still read
}
inline void load_blocks(uint32_t (&blocks)[4], uint32_t from, bool transposed = false) {
  uint64_t all[32];
  exchange(from, all);
  for (int block = 0; block < 4; ++block) {
    uint32_t pair = 0;
    for (int upper = 0; upper < 2; ++upper) {
      int row = current->lane / 4, column = 2 * (current->lane % 4) + upper;
      if (transposed) std::swap(row, column);
      const char* place = place_of_address(static_cast<uint32_t>(all[8 * block + row])) + 2 * column;
      pair |= static_cast<uint32_t>(*reinterpret_cast<const uint16_t*>(place)) << 16 * upper;
    }
    blocks[block] = pair;
  }
  exchange(0, all);
}
inline void load_blocks_transposed(uint32_t (&blocks)[4], uint32_t from) { load_blocks(blocks, from, true); }
