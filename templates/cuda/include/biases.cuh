// Tiles of biases: elements of queries and keys as TMA stores them, box after box of keys, read in the order of accumulators.
#pragma once

#include "ldmatrix.cuh"
#include "types.cuh"

// Load an element of 8, 16 or 32 bits from shared memory to the lowest bits of a word.
__device__ __forceinline__ uint32_t load_shared_8(uint32_t from) {
  uint32_t word;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(word) : "r"(from) : "memory");
  return word;
}
__device__ __forceinline__ uint32_t load_shared_16(uint32_t from) {
  uint32_t word;
  asm volatile("ld.shared.u16 %0, [%1];" : "=r"(word) : "r"(from) : "memory");
  return word;
}
__device__ __forceinline__ uint32_t load_shared_32(uint32_t from) {
  uint32_t word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(from) : "memory");
  return word;
}
__device__ __forceinline__ void load_shared_pair(uint32_t& first, uint32_t& second, uint32_t from) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(first), "=r"(second) : "r"(from) : "memory");
}

// The value of an element in the lowest bits of a word.
__device__ __forceinline__ float value_of(uint32_t word, const bf16*) { return to_float(bf16{static_cast<uint16_t>(word)}); }
__device__ __forceinline__ float value_of(uint32_t word, const fp16*) { return to_float(fp16{static_cast<uint16_t>(word)}); }
__device__ __forceinline__ float value_of(uint32_t word, const float*) { return __uint_as_float(word); }
template <typename Integer>
__device__ __forceinline__ int value_of(uint32_t word, const Integer*) {
  return static_cast<Integer>(word);
}

// Element `i` of the lane's row `row` (0 or 1), from what `read` of a tile returned. With four words, a word holds two
// neighbouring elements, and i % 2 is one of pair i / 2 % 2; with eight words, each holds one element. `bits_of` returns a
// word whose lowest bits are the element, whatever the others are.
template <typename Element>
__device__ __forceinline__ uint32_t bits_of(const uint32_t (&pairs)[4], int i, int row) {
  const uint32_t both = pairs[i / 2 % 2 * 2 + row];
  return i % 2 == 0 ? both : both >> 8 * sizeof(Element);
}
template <typename Element>
__device__ __forceinline__ uint32_t bits_of(const uint32_t (&elements)[8], int i, int row) {
  return elements[2 * (i / 2 % 2 * 2 + row) + i % 2];
}
template <typename Element, int kWords>
__device__ __forceinline__ auto element_of(const uint32_t (&words)[kWords], int i, int row) {
  return value_of(bits_of<Element>(words, i, row), static_cast<const Element*>(nullptr));
}

// An index of a table with so many entries; a negative one counts from the end.
__device__ __forceinline__ int from_end(int index, int entries) { return index < 0 ? index + entries : index; }

// Entry number `lane` of a table of which each lane of the warp holds one entry: shuffles read the five lowest bits of a lane.
// `entry_of_any` takes any number, and returns 0 for one that no lane holds.
__device__ __forceinline__ float entry_of_lane(float held, int lane) { return __shfl_sync(~0u, held, lane); }
__device__ __forceinline__ float entry_of_any(float held, int lane) {
  const float entry = __shfl_sync(~0u, held, lane);
  return static_cast<uint32_t>(lane) < 32 ? entry : 0.0f;
}
// The same of which each lane holds two entries: that of its own number, and `above`, that of 32 more.
__device__ __forceinline__ float entry_of_lane(float held, float above, int entry) {
  const float low = __shfl_sync(~0u, held, entry), high = __shfl_sync(~0u, above, entry);
  return entry & 32 ? high : low;
}
__device__ __forceinline__ float entry_of_any(float held, float above, int entry) {
  const float one = entry_of_lane(held, above, entry);
  return static_cast<uint32_t>(entry) < 64 ? one : 0.0f;
}

// A tile of `kRows` queries, in boxes whose rows are `kBoxBytes` long and swizzled. A warp reads 16 of its rows in the order
// of an accumulator of S, in which a lane has two neighbouring keys of two rows that are 8 apart.
template <typename Element, int kRows, int kBoxBytes, int kBytes = sizeof(Element)>
struct BiasTile {
  uint32_t row;    // address of the lane's first row in the first box
  uint32_t chunk;  // bytes from there to its first pair of keys, swizzled

  __device__ __forceinline__ BiasTile(uint32_t tile, int first_row, int lane)
      : row(tile + (first_row + lane / 4) * kBoxBytes),
        chunk(2 * kBytes * (lane % 4) ^ 16 * (kBoxBytes == 128 ? lane / 4 : lane / 8)) {
    static_assert((kBytes == 1 || kBytes == 4) && (kBoxBytes == 128 || kBoxBytes == 64));
  }

  // Reads the lane's elements of 16 keys: in both rows those of the first 8 keys, then those of the last 8.
  __device__ __forceinline__ void read(uint32_t (&elements)[kBytes == 1 ? 4 : 8], int key) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int bytes = kBytes * (key + i / 2 * 8);
      const uint32_t at = row + bytes / kBoxBytes * kRows * kBoxBytes + i % 2 * 8 * kBoxBytes + (bytes % kBoxBytes ^ chunk);
      if constexpr (kBytes == 1) {
        elements[i] = load_shared_16(at);
      } else {
        load_shared_pair(elements[2 * i], elements[2 * i + 1], at);
      }
    }
  }
};

// The same for elements of 16 bits, which `ldmatrix` loads in pairs of keys.
template <typename Element, int kRows, int kBoxBytes>
struct BiasTile<Element, kRows, kBoxBytes, 2> {
  uint32_t row;    // address of the row that the lane passes to ldmatrix, in the first box
  uint32_t chunk;  // bytes from there to its first chunk of 16 bytes, swizzled

  __device__ __forceinline__ BiasTile(uint32_t tile, int first_row, int lane)
      : row(tile + (first_row + lane % 16) * kBoxBytes),
        chunk(16 * (lane / 16 ^ (kBoxBytes == 128 ? lane % 8 : lane / 2 % 4))) {
    static_assert(kBoxBytes == 128 || kBoxBytes == 64);
  }

  // Of 16 keys: pairs of the first 8 of either row, then of the others.
  __device__ __forceinline__ void read(uint32_t (&pairs)[4], int key) const {
    const int bytes = 2 * key;
    load_blocks(pairs, row + bytes / kBoxBytes * kRows * kBoxBytes + (bytes % kBoxBytes ^ chunk));
  }
};
