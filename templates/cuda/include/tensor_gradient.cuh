// Gradients of tensors that a score reads: sums over a tile of dS in shared memory, and additions to global memory.
//
// The tile has kRows rows of queries, in one box of 64 keys or two side by side (kKeys), swizzled over the 128 bytes of a
// row: chunk c of 8 keys of row q lies at place c ^ q % 8.
#pragma once

#include "types.cuh"

// Adds to global memory, in no fixed order; nobody waits for it.
__device__ __forceinline__ void add_float(float* to, float x) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to), "f"(x) : "memory");
}

__device__ __forceinline__ void add_floats(float* to, float4 x) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
}

__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
  for (int other = 16; other > 0; other /= 2) x += __shfl_xor_sync(~0u, x, other);
  return x;
}

// Eight neighbouring numbers of 16 bits in shared memory.
__device__ __forceinline__ uint4 load_eight(uint32_t from) {
  uint4 eight;
  asm volatile(
      "ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(eight.x), "=r"(eight.y), "=r"(eight.z), "=r"(eight.w)
      : "r"(from)
      : "memory");
  return eight;
}

// And four of these.
__device__ __forceinline__ uint2 load_four(uint32_t from) {
  uint2 four;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(four.x), "=r"(four.y) : "r"(from) : "memory");
  return four;
}

// The sum of a row.
template <typename Element, int kRows, int kKeys>
__device__ __forceinline__ float sum_of_row(uint32_t tile, int row) {
  float2 sum = {};
#pragma unroll 2
  for (int chunk = 0; chunk < kKeys / 8; ++chunk) {
    const uint4 eight = load_eight(tile + chunk / 8 * (128 * kRows) + 128 * row + 16 * (chunk % 8 ^ row % 8));
    const float2 a = unpack<Element>(eight.x), b = unpack<Element>(eight.y), c = unpack<Element>(eight.z), d = unpack<Element>(eight.w);
    sum.x += (a.x + b.x) + (c.x + d.x);
    sum.y += (a.y + b.y) + (c.y + d.y);
  }
  return sum.x + sum.y;
}

// The sum of all of it, in all lanes: of 512 bytes after the other, in whatever order, while the next ones are on their way.
template <typename Element, int kRows, int kKeys>
__device__ __forceinline__ float sum_of_tile(uint32_t tile, int lane) {
  constexpr int kLoads = kRows * kKeys / 256;
  tile += 16 * lane;
  float2 sum = {};
  const auto add = [&](const uint4& eight) {
    const float2 a = unpack<Element>(eight.x), b = unpack<Element>(eight.y), c = unpack<Element>(eight.z), d = unpack<Element>(eight.w);
    sum.x += (a.x + b.x) + (c.x + d.x);
    sum.y += (a.y + b.y) + (c.y + d.y);
  };
  uint4 first = load_eight(tile);
#pragma unroll 1
  for (int i = 0; i < kLoads; i += 2) {
    const uint4 second = load_eight(tile + 512 * (i + 1));
    add(first);
    first = load_eight(tile + 512 * ((i + 2) % kLoads));
    add(second);
  }
  return sum_of_warp(sum.x + sum.y);
}

template <typename Element>
__device__ __forceinline__ float2 load_pair(uint32_t from) {
  uint32_t both;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(both) : "r"(from) : "memory");
  return unpack<Element>(both);
}

// The sums of the keys 2 * lane and 2 * lane + 1 over all queries, of a tile of one box.
template <typename Element, int kRows>
__device__ __forceinline__ float2 sums_of_columns(uint32_t tile, int lane) {
  const uint32_t from = tile + 4 * (lane % 4), chunk = lane / 4;
  float2 sums = {};
#pragma unroll 8
  for (uint32_t row = 0; row < kRows; ++row) {
    const float2 both = load_pair<Element>(from + 128 * row + 16 * (chunk ^ row % 8));
    sums.x += both.x, sums.y += both.y;
  }
  return sums;
}

// Calls `add(row - key, sum)` for the sum of each diagonal; those of odd numbers come in two parts. A lane goes along an
// even diagonal from row to row, and where it leaves the tile goes on with the one that is kKeys higher. In 8 rows it
// passes two chunks of keys.
template <typename Element, int kRows, int kKeys, typename Add>
__device__ __forceinline__ void add_diagonals(uint32_t tile, int lane, const Add& add) {
  const auto chunk_at = [&](uint32_t chunk) { return tile + chunk % (kKeys / 8) / 8 * (128 * kRows) + 16 * (chunk % 8); };
#pragma unroll 1
  for (uint32_t half = 0; half < kKeys; half += 64) {
    const uint32_t diagonal = half + 2 * lane, first = kKeys - diagonal;  // the key in row 0
    float before[3] = {}, after[3] = {};  // of the lower and of the higher one: of the odd one below, itself, the odd one above
    uint32_t chunk = first / 8, next = chunk_at(chunk);
#pragma unroll 1
    for (uint32_t rows = 0; rows < kRows; rows += 8) {
      const uint32_t own = next;
      next = chunk_at(++chunk) + 128 * rows;
#pragma unroll
      for (uint32_t i = 0; i < 8; i += 2) {
        const uint32_t from = ((first % 8 + i < 8 ? own : next) ^ 16 * i) | 2 * ((first + i) % 8);
        const float2 upper = load_pair<Element>(from + 128 * i), lower = load_pair<Element>((from ^ 16) + 128 * (i + 1));
        const float middle = upper.x + lower.y;
        if (rows + i < diagonal) {
          before[0] += upper.y, before[1] += middle, before[2] += lower.x;
        } else {
          after[0] += upper.y, after[1] += middle, after[2] += lower.x;
        }
      }
      next += 1024;
    }
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      add(static_cast<int>(diagonal) - kKeys + i - 1, before[i]);
      add(static_cast<int>(diagonal) + i - 1, after[i]);
    }
  }
}

// The largest power of two that is at most n, and at most the lanes of a warp.
__device__ constexpr int lanes_for(int n) {
  int lanes = 32;
  while (lanes > n) lanes /= 2;
  return lanes;
}

// Calls `add(row, key, sum)` for each block of kBlockRows queries and kBlockKeys keys, with its first ones. As many lanes as
// there are eights of keys add up a block, and several blocks are added up at a time if these are few.
template <typename Element, int kRows, int kKeys, int kBlockRows, int kBlockKeys, typename Add>
__device__ __forceinline__ void add_blocks(uint32_t tile, int lane, const Add& add) {
  static_assert(kRows % kBlockRows == 0 && kKeys % kBlockKeys == 0 && kBlockKeys % 8 == 0);
  constexpr int kChunks = kBlockKeys / 8, kEights = kBlockRows * kChunks, kLanes = lanes_for(kEights), kAcross = kKeys / kBlockKeys;
  constexpr int kBlocks = kRows / kBlockRows * kAcross;
#pragma unroll 1
  for (int first = 0; first < kBlocks; first += 32 / kLanes) {
    const int block = first + lane / kLanes, row = block / kAcross * kBlockRows, key = block % kAcross * kBlockKeys;
    float2 sum = {};
    if (block < kBlocks) {
#pragma unroll 2
      for (int i = lane % kLanes; i < kEights; i += kLanes) {
        const int at = row + i / kChunks, chunk = key / 8 + i % kChunks;
        const uint4 eight = load_eight(tile + chunk / 8 * (128 * kRows) + 128 * at + 16 * (chunk % 8 ^ at % 8));
        const float2 a = unpack<Element>(eight.x), b = unpack<Element>(eight.y), c = unpack<Element>(eight.z), d = unpack<Element>(eight.w);
        sum.x += (a.x + b.x) + (c.x + d.x);
        sum.y += (a.y + b.y) + (c.y + d.y);
      }
    }
    float total = sum.x + sum.y;
#pragma unroll
    for (int other = kLanes / 2; other > 0; other /= 2) total += __shfl_xor_sync(~0u, total, other);
    if (lane % kLanes == 0 && block < kBlocks) add(row, key, total);
  }
}

// Adds a term to a sum of terms that share an entry; where the entry changes, the sum is added to the old one first. An
// entry of -1 is nowhere. Without branches, which would come between matrix products.
template <typename Entry>
__device__ __forceinline__ void add_to_run(float* to, Entry& run, float& sum, Entry entry, float term) {
  const bool ends = entry != run && run >= 0 && sum != 0.0f;
  asm volatile(
      "{.reg .pred p; setp.ne.s32 p, %2, 0; @p red.relaxed.gpu.global.add.f32 [%0], %1;}"
      ::"l"(to + run), "f"(sum), "r"(static_cast<int>(ends))
      : "memory");
  sum = (entry == run ? sum : 0.0f) + term;
  run = entry;
}

// Adds to an entry, unless it is -1, or the lane is not meant. Without branches, too.
template <typename Entry>
__device__ __forceinline__ void add_to_entry(float* to, Entry entry, float sum, bool meant = true) {
  const bool adds = meant && entry >= 0 && sum != 0.0f;
  asm volatile(
      "{.reg .pred p; setp.ne.s32 p, %2, 0; @p red.relaxed.gpu.global.add.f32 [%0], %1;}"
      ::"l"(to + entry), "f"(sum), "r"(static_cast<int>(adds))
      : "memory");
}

// A sum of terms that share an entry of a gradient, over several steps, of which each lane has a part; an entry of -1 is nowhere.
struct SharedEntry {
  int entry = -1;
  float sum = 0.0f;

  __device__ __forceinline__ void leave(float* to, int lane) { add_to_entry(to, entry, sum_of_warp(sum), lane == 0); }
};

// Adds sums of all lanes to their entries. Additions to one address wait for one another: where all share an entry, their sum
// stays in registers until the entry is another one; else neighbouring lanes that share one add once.
template <int kParts>
__device__ __forceinline__ void add_to_shared_entries(
    float* to, SharedEntry& shared, const int (&entries)[kParts], float (&sums)[kParts], int lane) {
  const int first = __shfl_sync(~0u, entries[0], 0);
  bool alike = true;
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < kParts; ++i) alike = alike && entries[i] == first, total += sums[i];
  alike = __all_sync(~0u, alike);
  if (__any_sync(~0u, alike && first == shared.entry)) {
    shared.sum += total;
    return;
  }
  shared.leave(to, lane);
  shared = {alike ? first : -1, alike ? total : 0.0f};
  if (__any_sync(~0u, alike)) return;
  uint32_t begins[kParts];
  int end[kParts];  // of the lanes that share the entry
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    const int before = __shfl_up_sync(~0u, entries[i], 1);
    begins[i] = __ballot_sync(~0u, lane == 0 || entries[i] != before);
    const uint32_t later = begins[i] >> lane >> 1;
    end[i] = later != 0 ? lane + __ffs(later) : 32;
  }
#pragma unroll
  for (int other = 1; other < 32; other *= 2) {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const float more = __shfl_down_sync(~0u, sums[i], other);
      sums[i] += lane + other < end[i] ? more : 0.0f;
    }
  }
#pragma unroll
  for (int i = 0; i < kParts; ++i) add_to_entry(to, entries[i], sums[i], begins[i] >> lane & 1);
}

// Sums of diagonals, on which query minus key is the same, of 16 keys, eight queries after the other, by the warp that has
// the terms as accumulators: lane l those of queries 2 (l % 4) and the next one, with key l / 4 and the one 8 after it.
//
// Blocks of 8 x 8 that lie on one diagonal are added up first, term by term: the block of the last eight keys, and that of
// the first eight keys with the queries before. What lies on or below the diagonal of such a block, and what lies above that
// of the next one, are eight diagonals, of which (query - key) % 8 tells which.
template <int kQueries>
struct DiagonalsOfWarp {
  static constexpr int kEights = kQueries / 8 + 2;  // of diagonals: the first two have negative numbers
  static constexpr int kParts = (kEights + 3) / 4;
  float2 begun = {};   // the block of the first eight keys, with the queries before
  float2 before = {};  // the sum of the blocks on the diagonal before
  float terms[4];      // of each lane, of up to four times eight diagonals
  float sums[kParts];  // of these the n-th eight in the lanes l % 4 == n

  // Adds terms of the next eight queries, and of the first and last eight keys.
  __device__ __forceinline__ void next(int eight, float2 first_keys, float2 last_keys, int lane) {
    const float2 whole = {begun.x + last_keys.x, begun.y + last_keys.y};
    add(eight, before, whole, lane);
    before = whole;
    begun = first_keys;
  }

  // Finishes the sums, and gives each lane one of each 32 diagonals, as `number` counts them from that of the first query and key.
  __device__ __forceinline__ void end(int lane) {
    add(kEights - 2, before, begun, lane);
    add(kEights - 1, begun, {}, lane);
    const int own = lane / 8, from = 4 * ((2 * own - lane) & 7) + own;
#pragma unroll
    for (int i = 0; i < kParts; ++i) sums[i] = __shfl_sync(~0u, sums[i], from);
  }

  static __device__ __forceinline__ int number(int part, int lane) { return min(max(32 * part - 16 + lane, -15), kQueries - 1); }

 private:
  __device__ __forceinline__ void add(int eight, float2 below, float2 above, int lane) {
    const int query = 2 * (lane % 4), key = lane / 4, last = eight % 4;
    const float own = query >= key ? below.x : above.x, other = query + 1 >= key ? below.y : above.y;
    terms[last] = own + __shfl_sync(~0u, other, lane + 4);  // which has the same diagonal for the next query and key
    if (last < 3 && eight < kEights - 1) return;
    // lanes 18 and 9 apart share their diagonals, too: each of the four keeps the sum of one eight
    const bool upper = lane & 2, odd = lane & 1;
    float pairs[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float low = i <= last ? terms[i] : 0.0f, high = i + 2 <= last ? terms[i + 2] : 0.0f;
      pairs[i] = (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, 18);
    }
    sums[eight / 4] = (odd ? pairs[1] : pairs[0]) + __shfl_sync(~0u, odd ? pairs[0] : pairs[1], lane + (odd ? -9 : 9));
  }
};

// Eight neighbouring numbers of dS as they are, of which `count` are wanted; `aligned`: at a multiple of 16 bytes.
template <typename Element>
__device__ __forceinline__ void store_eight(Element* to, const uint4& eight, int count, bool aligned) {
  if (aligned && count >= 8) {
    *reinterpret_cast<uint4*>(to) = eight;
    return;
  }
  const uint32_t pairs[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i < count) to[i] = Element{static_cast<uint16_t>(pairs[i / 2] >> 16 * (i % 2))};
  }
}

// A term in float32: added to what others add, or stored.
template <bool kAdds>
__device__ __forceinline__ void put_float(float* to, float x) {
  if constexpr (kAdds) {
    add_float(to, x);
  } else {
    *to = x;
  }
}

template <bool kAdds>
__device__ __forceinline__ void put_floats(float* to, float4 x) {
  if constexpr (kAdds) {
    add_floats(to, x);
  } else {
    __stcs(reinterpret_cast<float4*>(to), x);
  }
}

// Eight numbers of dS times a factor, in float32.
template <typename Element, bool kAdds>
__device__ __forceinline__ void put_eight(float* to, const uint4& eight, float factor, int count, bool aligned) {
  const uint32_t pairs[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    const float2 first = unpack<Element>(pairs[i / 2]), second = unpack<Element>(pairs[i / 2 + 1]);
    const float4 four = {factor * first.x, factor * first.y, factor * second.x, factor * second.y};
    if (aligned && i + 4 <= count) {
      put_floats<kAdds>(to + i, four);
    } else {
      if (i < count) put_float<kAdds>(to + i, four.x);
      if (i + 1 < count) put_float<kAdds>(to + i + 1, four.y);
      if (i + 2 < count) put_float<kAdds>(to + i + 2, four.z);
      if (i + 3 < count) put_float<kAdds>(to + i + 3, four.w);
    }
  }
}

template <typename Element>
__device__ __forceinline__ void store_eight(float* to, const uint4& eight, int count, bool aligned, float factor) {
  put_eight<Element, false>(to, eight, factor, count, aligned);
}

template <typename Element>
__device__ __forceinline__ void add_eight(float* to, const uint4& eight, float factor, int count, bool aligned) {
  put_eight<Element, true>(to, eight, factor, count, aligned);
}

// A whole tile: so many lanes have the keys of a row, 8 each. L2 evicts it first, since nobody in this kernel reads it.
template <typename Element, int kRows, int kKeys>
__device__ __forceinline__ void store_tile(Element* to, long long stride, uint32_t tile, int lane) {
  constexpr int kLanes = kKeys / 8, kStep = 32 / kLanes;
  const uint32_t from = tile + lane % kLanes / 8 * (128 * kRows) + lane / kLanes * 128, chunk = lane % 8 ^ lane / kLanes;
  to += lane / kLanes * stride + 8 * (lane % kLanes);
#pragma unroll 4
  for (int row = 0; row < kRows; row += kStep) {
    __stcs(reinterpret_cast<uint4*>(to), load_eight(from + 128 * row + 16 * (chunk ^ row % 8)));
    to += kStep * stride;
  }
}

// The same in float32, of which a lane has 4 keys, so that a warp writes whole rows of the gradient one after the other.
template <typename Element, int kRows, int kKeys, bool kAdds>
__device__ __forceinline__ void put_tile(float* to, long long stride, uint32_t tile, float factor, int lane) {
  constexpr int kLanes = kKeys / 4, kStep = 32 / kLanes;
  const uint32_t from = tile + lane % kLanes / 16 * (128 * kRows) + lane / kLanes * 128 + 8 * (lane % 2);
  const uint32_t chunk = lane / 2 % 8 ^ lane / kLanes;
  to += lane / kLanes * stride + 4 * (lane % kLanes);
#pragma unroll 2
  for (int row = 0; row < kRows; row += kStep) {
    const uint2 four = load_four(from + 128 * row + 16 * (chunk ^ row % 8));
    const float2 a = unpack<Element>(four.x), b = unpack<Element>(four.y);
    put_floats<kAdds>(to, make_float4(factor * a.x, factor * a.y, factor * b.x, factor * b.y));
    to += kStep * stride;
  }
}

template <typename Element, int kRows, int kKeys>
__device__ __forceinline__ void store_tile(float* to, long long stride, uint32_t tile, int lane, float factor) {
  put_tile<Element, kRows, kKeys, false>(to, stride, tile, factor, lane);
}

template <typename Element, int kRows, int kKeys>
__device__ __forceinline__ void add_tile(float* to, long long stride, uint32_t tile, float factor, int lane) {
  put_tile<Element, kRows, kKeys, true>(to, stride, tile, factor, lane);
}
