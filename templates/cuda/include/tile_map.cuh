// A tile map: for each row of tiles the words of full tiles, then those of partial ones, a bit for each tile; after the words
// of all rows, a slot for each tile, which says where the bits of its visible pairs are (-1: nowhere); and last these bits.
#pragma once

#include "types.cuh"

constexpr int kSlotsOfWord = 16;  // 32 slots for the two words of 32 tiles

// The number with all its bits spread over the result (Steele, Lea and Flood 2014, SplitMix64).
__device__ __forceinline__ unsigned long long mixed(unsigned long long x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}
