// Dropout of the probabilities that a thread holds, by random numbers that depend on the pair of query and key alone.
#pragma once

#include "types.cuh"

// Philox-4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): a counter becomes four words.
__device__ __forceinline__ void philox(uint64_t seed, uint32_t (&counter)[4]) {
  uint32_t low_key = static_cast<uint32_t>(seed), high_key = static_cast<uint32_t>(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = static_cast<uint64_t>(counter[0]) * 0xd2511f53u;
    const uint64_t second = static_cast<uint64_t>(counter[2]) * 0xcd9e8d57u;
    counter[0] = static_cast<uint32_t>(second >> 32) ^ counter[1] ^ low_key;
    counter[1] = static_cast<uint32_t>(second);
    counter[2] = static_cast<uint32_t>(first >> 32) ^ counter[3] ^ high_key;
    counter[3] = static_cast<uint32_t>(first);
    low_key += 0x9e3779b9u;
    high_key += 0xbb67ae85u;
  }
}

// Sets to 0 what is dropped of the probabilities of a tile, pairs in 16 bits as the A operand of a product. A counter
// serves both rows of a lane and its four keys of 16, by 16 bits each: queries q and q + 8, keys t, t + 1, t + 8, t + 9.
template <int kCount>
__device__ __forceinline__ void drop_pairs(
    uint32_t (&p)[kCount], uint64_t seed, uint32_t column, uint32_t row, uint32_t unit, uint32_t offset,
    uint32_t threshold) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    uint32_t word[4] = {column + i, row, unit, offset};
    philox(seed, word);
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // keys t and t + 1, or t + 8 and t + 9
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {  // query q, or q + 8
        const uint32_t numbers = word[2 * upper + half];
        const uint32_t low = (numbers & 0xffffu) < threshold ? 0u : 0x0000ffffu;
        const uint32_t high = numbers >> 16 < threshold ? 0u : 0xffff0000u;
        p[i + 2 * half + upper] &= low | high;
      }
    }
  }
}

// Finds which pairs of a step are kept where products have keys by rows: bit n is element n of a lane's 2 keys x 16 queries,
// and of the next 16. Of the two keys that share a counter another lane, 4 further or before, holds the other one; of the two
// queries of a lane each has a counter of its own. So a lane asks for one of them, and shares what it gets.
template <int kQueries>
__device__ __forceinline__ void keep_pairs(
    uint32_t (&kept)[(kQueries + 63) / 64], uint64_t seed, uint32_t column, uint32_t row, bool odd, uint32_t unit,
    uint32_t offset, uint32_t threshold) {
#pragma unroll
  for (int i = 0; i < (kQueries + 63) / 64; ++i) {
    uint32_t own = 0;
#pragma unroll
    for (int block = 0; block < 4 && 4 * i + block < kQueries / 16; ++block) {
      uint32_t word[4] = {column, row + odd + 8 * (4 * i + block), unit, offset};
      philox(seed, word);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const uint32_t number = n % 2 == 0 ? word[n / 2] & 0xffffu : word[n / 2] >> 16;
        own |= (number < threshold ? 0u : 1u) << (8 * block + n);
      }
    }
    const uint32_t other = __shfl_xor_sync(~0u, own, 4);
    kept[i] = odd ? (own & 0xaaaaaaaau) | (other >> 1 & 0x55555555u) : (own & 0x55555555u) | (other << 1 & 0xaaaaaaaau);
  }
}

// An argument, read again: the compiler keeps neither it nor what is computed from it in registers.
__device__ __forceinline__ float read_again(float argument) {
  float same;
  asm volatile("mov.f32 %0, %1;" : "=f"(same) : "f"(argument));
  return same;
}

// Whether an element is kept.
template <int kCount>
__device__ __forceinline__ bool is_kept(const uint32_t (&kept)[kCount], int element) {
  return kept[element / 32] >> element % 32 & 1;
}
