// A tile of dS in shared memory with keys by rows, from which the warps of a block add up gradients of tensors.
#pragma once

#include "copy.cuh"
#include "ldmatrix.cuh"
#include "tensor_gradient.cuh"

// The queries of a key lie in boxes of kBytes, swizzled over these, box after box of all keys.
template <typename Element, int kKeys, int kQueries, int kBytes, int kWarps>
struct DsByKeys {
  static constexpr int kQueriesOfBox = kBytes / sizeof(Element);

  uint32_t tile;

  // The address of 8 neighbouring queries of a key.
  __device__ __forceinline__ uint32_t at(int key, int query) const {
    return tile + (query / kQueriesOfBox * kKeys + key) * kBytes + 16 * swizzled<kBytes>(key, query % kQueriesOfBox / 8);
  }

  // The sum of the share of a warp, in all lanes.
  __device__ __forceinline__ float sum(int warp, int lane) const {
    float2 sum = {};
#pragma unroll 2
    for (int i = 32 * warp + lane; i < kKeys * kQueries / 8; i += 32 * kWarps) {
      const uint4 eight = load_eight(tile + 16 * i);
      const float2 a = unpack<Element>(eight.x), b = unpack<Element>(eight.y), c = unpack<Element>(eight.z), d = unpack<Element>(eight.w);
      sum.x += (a.x + b.x) + (c.x + d.x);
      sum.y += (a.y + b.y) + (c.y + d.y);
    }
    return sum_of_warp(sum.x + sum.y);
  }

  // Calls `add(query - key, sum)` for each diagonal of the warp's share of the keys. A lane goes along an even diagonal, two keys
  // and two queries at a time, which have elements of both neighbours.
  template <typename Add>
  __device__ __forceinline__ void each_diagonal(int warp, int lane, const Add& add) const {
    constexpr int kOwn = kKeys / kWarps;
    static_assert(kOwn % 2 == 0);
    const int first = kOwn * warp;
#pragma unroll 1
    for (int group = -kOwn - first; group <= kQueries - first; group += 64) {
      const int diagonal = group + 2 * lane;
      float lower = 0.0f, middle = 0.0f, upper = 0.0f;
#pragma unroll 4
      for (int key = first; key < first + kOwn; key += 2) {
        const int query = key + diagonal;
        if (query >= 0 && query < kQueries) {
          const float2 here = load_pair<Element>(at(key, query) + 4 * (query % 8 / 2));
          const float2 next = load_pair<Element>(at(key + 1, query) + 4 * (query % 8 / 2));
          lower += next.x, middle += here.x + next.y, upper += here.y;
        }
      }
      const float of_next_lane = __shfl_down_sync(~0u, lower, 1);
      if (lane < 31) upper += of_next_lane;
      if (lane == 0) add(diagonal - 1, lower);
      add(diagonal, middle);
      add(diagonal + 1, upper);
    }
  }

  // Calls `add(query, sum)` for each query, with the sum over the warp's share of the keys.
  template <typename Add>
  __device__ __forceinline__ void each_query(int warp, int lane, const Add& add) const {
    constexpr int kChunks = kQueries / 8, kAtOnce = 32 / kChunks;  // of 8 queries; keys that a warp reads at once
    float sums[8] = {};
#pragma unroll 2
    for (int key = warp * kAtOnce + lane / kChunks; key < kKeys; key += kWarps * kAtOnce) {
      const uint4 eight = load_eight(at(key, 8 * (lane % kChunks)));
      const uint32_t pairs[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 both = unpack<Element>(pairs[i]);
        sums[2 * i] += both.x, sums[2 * i + 1] += both.y;
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int other = kChunks; other < 32; other *= 2) sums[i] += __shfl_xor_sync(~0u, sums[i], other);
      if (lane < kChunks) add(8 * lane + i, sums[i]);
    }
  }

  // Calls `add(query, key, sum)` for each block of so many queries and keys, with its first ones; warps take turns.
  template <int kBlockQueries, int kBlockKeys, typename Add>
  __device__ __forceinline__ void each_sum_of_block(int warp, int lane, const Add& add) const {
    constexpr int kChunks = kBlockQueries / 8, kAcross = kQueries / kBlockQueries, kBlocks = kKeys / kBlockKeys * kAcross;
    static_assert(kQueries % kBlockQueries == 0 && kKeys % kBlockKeys == 0 && kBlockQueries % 8 == 0);
#pragma unroll 1
    for (int block = warp; block < kBlocks; block += kWarps) {
      const int key = block / kAcross * kBlockKeys, query = block % kAcross * kBlockQueries;
      float2 sum = {};
#pragma unroll 2
      for (int i = lane; i < kBlockKeys * kChunks; i += 32) {
        const uint4 eight = load_eight(at(key + i / kChunks, query + 8 * (i % kChunks)));
        const float2 a = unpack<Element>(eight.x), b = unpack<Element>(eight.y), c = unpack<Element>(eight.z), d = unpack<Element>(eight.w);
        sum.x += (a.x + b.x) + (c.x + d.x);
        sum.y += (a.y + b.y) + (c.y + d.y);
      }
      const float total = sum_of_warp(sum.x + sum.y);
      if (lane == 0) add(query, key, total);
    }
  }

  // Calls `use(query, key, pairs)` for each 8 queries by 32 keys of the warp. A lane has two neighbouring keys of one query in
  // each 8 keys from `key` on.
  template <typename Use>
  __device__ __forceinline__ void each_block(int warp, int lane, const Use& use) const {
#pragma unroll 1
    for (int i = warp; i < kKeys / 32 * (kQueries / 8); i += kWarps) {
      const int key = i % (kKeys / 32) * 32, query = i / (kKeys / 32) * 8;
      uint32_t pairs[4];
      load_blocks_transposed(pairs, at(key + lane, query));
      use(query + lane / 4, key, pairs);
    }
  }
};
