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

  // Calls `add(query - key, sum)` for each diagonal of the warp, of which a lane follows one from key to key.
  template <typename Add>
  __device__ __forceinline__ void each_diagonal(int warp, int lane, const Add& add) const {
#pragma unroll 1
    for (int group = 32 * warp; group < kKeys + kQueries - 1; group += 32 * kWarps) {
      const int diagonal = group + lane - (kKeys - 1);
      float sum = 0.0f;
#pragma unroll 4
      for (int key = max(0, kKeys - 1 - (group + 31)); key < min(kKeys, kKeys + kQueries - 1 - group); ++key) {
        const int query = diagonal + key;
        if (query >= 0 && query < kQueries) {
          const float2 both = load_pair<Element>(at(key, query) + 4 * (query % 8 / 2));
          sum += query % 2 ? both.y : both.x;
        }
      }
      add(diagonal, sum);
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
