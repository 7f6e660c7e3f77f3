// Loads of matrix fragments from shared memory (PTX ISA, "ldmatrix").
#pragma once

#include "types.cuh"

// Four 8 x 8 blocks of 16-bit elements: lane l gives the address of row l % 8 of block l / 8, and gets two elements of
// row l / 4 of each.
__device__ __forceinline__ void load_blocks(uint32_t (&blocks)[4], uint32_t from) {
  asm volatile(
      "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(blocks[0]), "=r"(blocks[1]), "=r"(blocks[2]), "=r"(blocks[3])
      : "r"(from)
      : "memory");
}

// Four numbers of each lane, in the order of other loads.
__device__ __forceinline__ void load_four(uint32_t (&numbers)[4], uint32_t from) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(numbers[0]), "=r"(numbers[1]), "=r"(numbers[2]), "=r"(numbers[3])
               : "r"(from)
               : "memory");
}

// The same, each block transposed.
__device__ __forceinline__ void load_blocks_transposed(uint32_t (&blocks)[4], uint32_t from) {
  asm volatile(
      "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(blocks[0]), "=r"(blocks[1]), "=r"(blocks[2]), "=r"(blocks[3])
      : "r"(from)
      : "memory");
}
