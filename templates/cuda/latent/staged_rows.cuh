// Rows of an accumulator on their way through shared memory, from where the copy engine stores each by one instruction.
#pragma once

#include "tma.cuh"
#include "types.cuh"

// Bytes from one staged row of kBytes to the next: rows of a column lie in other banks.
template <int kBytes>
constexpr uint32_t kStagedPitch = kBytes + 16;

// Two rows of a warp's product times a factor of each, of 16 bits. Lane l gives the place of chunk l / 16 of row l % 16.
template <typename To, int kRegisters>
__device__ __forceinline__ void stage_rows(uint32_t to, const float (&acc)[kRegisters], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < kRegisters; i += 8) {
    uint32_t blocks[4];
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      const float by = factor[block % 2];
      blocks[block] = pack<To>(acc[i + 2 * block] * by, acc[i + 2 * block + 1] * by);
    }
    store_blocks(to + 4 * i, blocks[0], blocks[1], blocks[2], blocks[3]);
  }
}

// The same number, of which the compiler knows nothing: else it keeps multiples of it in registers.
__device__ __forceinline__ long long unknown(long long number) {
  asm volatile("" : "+l"(number));
  return number;
}
