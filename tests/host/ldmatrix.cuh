// Blocks of the operands of products, by the tables of the PTX ISA.
#pragma once

#include "types.cuh"

inline void load_blocks(uint32_t (&blocks)[4], uint32_t from, bool transposed = false) {
  auto& results = current->warp->blocks[current->warp->meetings & 1];
  meet(from, [&](const uint64_t(&all)[32]) {
    for (int block = 0; block < 4; ++block) {
      uint16_t elements[8][8];
      for (int row = 0; row < 8; ++row) std::memcpy(elements[row], place_of_address(static_cast<uint32_t>(all[8 * block + row])), 16);
      for (int lane = 0; lane < 32; ++lane) {
        const int row = lane / 4, column = 2 * (lane % 4);
        const uint32_t low = transposed ? elements[column][row] : elements[row][column];
        const uint32_t high = transposed ? elements[column + 1][row] : elements[row][column + 1];
        results[lane][block] = low | high << 16;
      }
    }
  });
  std::memcpy(blocks, results[current->lane], sizeof(blocks));
}
inline void load_four(uint32_t (&numbers)[4], uint32_t from) { std::memcpy(numbers, place_of_address(from), sizeof(numbers)); }
inline void load_blocks_transposed(uint32_t (&blocks)[4], uint32_t from) { load_blocks(blocks, from, true); }
