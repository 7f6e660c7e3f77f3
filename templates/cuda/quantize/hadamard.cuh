// The Hadamard transform of rows that threads share: numbers in registers, some of each row in each of several lanes.
//
// A stage adds and subtracts numbers whose places differ in one bit. Stages go from the lowest bit to the highest, each
// sum is rounded to float32, so that all ways to share a row give the same bits.
#pragma once

#include "mma.cuh"
#include "rotary.cuh"

constexpr int kSlots = 8;    // vectors of 16 bytes that a thread has at most, of one row or four of each of two rows
constexpr int kNumbers = 8;  // of a vector: elements of 16 bits

// 16 bytes of a row, two elements in each word.
struct alignas(16) Words {
  uint32_t pairs[kNumbers / 2];

  static __device__ __forceinline__ Words load(const void* from) { return *static_cast<const Words*>(from); }
};

// The signs that two neighbours change, as bits 15 and 31 of a word: bits 2 i and 2 i + 1 of a vector's `flips`.
__device__ __forceinline__ uint32_t signs_of_pair(uint32_t flips, int i) {
  return (flips >> 2 * i & 1) << 15 | (flips >> 2 * i + 1 & 1) << 31;
}

// First angle of a vector: row and column of the tables.
struct Angle {
  int row, first;
};

__device__ __forceinline__ void flip(Words& words, const Words& signs) {
#pragma unroll
  for (int i = 0; i < kNumbers / 2; ++i) words.pairs[i] ^= signs.pairs[i];
}

__device__ __forceinline__ void flip(float (&x)[kNumbers], const Words& signs) {
#pragma unroll
  for (int i = 0; i < kNumbers / 2; ++i) {
    x[2 * i] = __uint_as_float(__float_as_uint(x[2 * i]) ^ signs.pairs[i] << 16);
    x[2 * i + 1] = __uint_as_float(__float_as_uint(x[2 * i + 1]) ^ signs.pairs[i] & 0xffff0000);
  }
}

// Differences, rounded to the elements' type.
template <typename Element>
__device__ __forceinline__ void subtract(Words& words, const Words& from_each) {
#pragma unroll
  for (int i = 0; i < kNumbers / 2; ++i) {
    const float2 a = unpack<Element>(words.pairs[i]), b = unpack<Element>(from_each.pairs[i]);
    words.pairs[i] = pack<Element>(a.x - b.x, a.y - b.y);
  }
}

template <typename Element>
__device__ __forceinline__ void to_floats(float (&to)[kNumbers], const Words& words) {
#pragma unroll
  for (int i = 0; i < kNumbers / 2; ++i) {
    const float2 both = unpack<Element>(words.pairs[i]);
    to[2 * i] = both.x;
    to[2 * i + 1] = both.y;
  }
}

// Slot 1 becomes slot 0, and so on; slot 0 becomes the last.
__device__ __forceinline__ void next_slot_first(float (&x)[kSlots][kNumbers]) {
#pragma unroll
  for (int i = 0; i < kNumbers; ++i) {
    const float first = x[0][i];
#pragma unroll
    for (int slot = 0; slot < kSlots - 1; ++slot) x[slot][i] = x[slot + 1][i];
    x[kSlots - 1][i] = first;
  }
}

// Rotates vectors as a whole: in slots that differ in bit `kStep` lie numbers and their partners, or in one with 0 as
// neighbours. `place_of` gives the first angle of a slot in both tables, or -1 where nothing is to be rotated.
template <int kStep, typename Place>
__device__ __forceinline__ void rotate_slots(
    float (&x)[kSlots][kNumbers], const Place& place_of, const void* cos_table, long long cos_stride,
    const void* sin_table, long long sin_stride, int form) {
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
    const Angle angle = place_of(slot);
    if ((slot & kStep) != 0 || angle.first < 0) continue;
    constexpr int kAngles = kStep == 0 ? kNumbers / 2 : kNumbers;
#pragma unroll
    for (int part = 0; part < kAngles; part += 4) {
      float cos[4], sin[4];
      const int at = angle.first + part;
      four_angles(cos, sin, cos_table, angle.row * cos_stride + at, sin_table, angle.row * sin_stride + at, form);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& first = kStep == 0 ? x[slot][2 * i] : x[slot][part + i];
        float& second = kStep == 0 ? x[slot][2 * i + 1] : x[slot + kStep][part + i];
        const float a = first, b = second;
        first = rotated(a, b, cos[i], sin[i], true);
        second = rotated(b, a, cos[i], sin[i], false);
      }
    }
  }
}

__device__ __forceinline__ void add_and_subtract(float& a, float& b) {
  const float sum = a + b;
  b = a - b;
  a = sum;
}

// The stage of vectors whose slots differ in one bit.
template <int kStep>
__device__ __forceinline__ void add_and_subtract_slots(float (&x)[kSlots][kNumbers]) {
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) {
      if ((slot & kStep) == 0) add_and_subtract(x[slot][i], x[slot + kStep][i]);
    }
  }
}

// The stage of numbers in lanes that differ in one bit.
template <int kBit>
__device__ __forceinline__ void add_and_subtract_lanes(float (&x)[kSlots][kNumbers]) {
  const float sign = threadIdx.x & kBit ? -1.0f : 1.0f;
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) {
      x[slot][i] = fmaf(sign, x[slot][i], __shfl_xor_sync(~0u, x[slot][i], kBit));  // the product is exact
    }
  }
}

// The stages of numbers of one vector.
__device__ __forceinline__ void add_and_subtract_numbers(float (&x)[kSlots][kNumbers]) {
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
#pragma unroll
    for (int step = 1; step < kNumbers; step *= 2) {
#pragma unroll
      for (int i = 0; i < kNumbers; ++i) {
        if ((i & step) == 0) add_and_subtract(x[slot][i], x[slot][i + step]);
      }
    }
  }
}

// All stages. Slots 0 and 1 are neighbours; those that differ in bit 1 or 2 are apart by all 2^kLaneBits lanes which share
// a transform, and twice as far. 2^kSlotBits: vectors of one transform in a thread, which may have several transforms.
template <int kSlotBits, int kLaneBits>
__device__ __forceinline__ void hadamard_transform(float (&x)[kSlots][kNumbers]) {
  add_and_subtract_numbers(x);
  if constexpr (kSlotBits > 0) add_and_subtract_slots<1>(x);
  if constexpr (kLaneBits > 0) add_and_subtract_lanes<1>(x);
  if constexpr (kLaneBits > 1) add_and_subtract_lanes<2>(x);
  if constexpr (kSlotBits > 1) add_and_subtract_slots<2>(x);
  if constexpr (kSlotBits > 2) add_and_subtract_slots<4>(x);
}

// The same where bits are those of a call: 0 to 3 of slots, with 2 also 1 or 2 of lanes, with 3 also 2. Branches part and
// meet only at the end, so that registers need not agree between stages; what sizes begin with stands once.
__device__ __forceinline__ void hadamard_transform(float (&x)[kSlots][kNumbers], int slot_bits, int lane_bits) {
  add_and_subtract_numbers(x);
  if (slot_bits == 0) return;
  add_and_subtract_slots<1>(x);
  if (slot_bits == 1) return;
  if (lane_bits == 0) {
    add_and_subtract_slots<2>(x);
    if (slot_bits == 3) add_and_subtract_slots<4>(x);
    return;
  }
  add_and_subtract_lanes<1>(x);
  if (lane_bits == 1) return add_and_subtract_slots<2>(x);
  add_and_subtract_lanes<2>(x);
  add_and_subtract_slots<2>(x);
  if (slot_bits == 3) add_and_subtract_slots<4>(x);
}

// Numbers of 16 bits need not be added one by one: a product with 16 x 16 signs does four stages, those of bits 0 and 2
// within a vector and those of four lanes. A vector is a lane's whole A operand: numbers 2, 3, 6 and 7 are those 8 rows
// further. These are the signs, as the B operand of columns 0 to 7 and that of columns 8 to 15 has them.
template <typename Element>
__device__ __forceinline__ Words hadamard_factor(int lane) {
  const uint32_t ones = pack<Element>(1.0f, 1.0f);
  Words factor;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int column = lane / 4 + i / 2 * 8, row = 2 * (lane % 4) + i % 2 * 8;
    const uint32_t lower = __popc(row & column) & 1, upper = __popc(row + 1 & column) & 1;
    factor.pairs[i] = ones ^ lower << 15 ^ upper << 31;
  }
  return factor;
}

// All stages of a transform of four lanes and 2^kSlotBits vectors in each.
template <typename Element, int kSlotBits>
__device__ __forceinline__ void hadamard_products(
    float (&x)[kSlots][kNumbers], const Words (&words)[kSlots], const Words& factor) {
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) x[slot][i] = 0.0f;
    multiply<Element>(&x[slot][0], words[slot].pairs, factor.pairs[0], factor.pairs[1]);
    multiply<Element>(&x[slot][4], words[slot].pairs, factor.pairs[2], factor.pairs[3]);
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) {
      if ((i & 2) == 0) add_and_subtract(x[slot][i], x[slot][i + 2]);
    }
  }
  if constexpr (kSlotBits > 0) add_and_subtract_slots<1>(x);
  if constexpr (kSlotBits > 1) add_and_subtract_slots<2>(x);
  if constexpr (kSlotBits > 2) add_and_subtract_slots<4>(x);
}

// The largest finite magnitudes of both halves of the slots; 0 if there is none.
__device__ __forceinline__ void find_largest(const float (&x)[kSlots][kNumbers], float (&largest)[2]) {
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
    float& own = largest[slot / (kSlots / 2)];
    if (slot % (kSlots / 2) == 0) own = 0.0f;
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) own = fmaxf(own, fabsf(x[slot][i]));  // drops NaN
  }
  const float infinity = __uint_as_float(0x7f800000);
  if (fmaxf(largest[0], largest[1]) < infinity) return;
  largest[0] = largest[1] = 0.0f;
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) {
      const float magnitude = fabsf(x[slot][i]);
      float& own = largest[slot / (kSlots / 2)];
      if (magnitude < infinity) own = fmaxf(own, magnitude);
    }
  }
}
