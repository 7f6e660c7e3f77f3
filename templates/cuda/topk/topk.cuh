// Selection of the largest of many scores by radix: keys in the order of the scores, and histograms of their digits.
#pragma once

#include "types.cuh"

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kBins = 2048;  // of a histogram: a digit of a key has 11 bits at most
constexpr int kBinsOfThread = kBins / kThreads;

// Scores as unsigned integers of the same order. -0 equals 0, and NaN is the largest.
constexpr uint32_t kKeyOfMinusInfinity = 0x007fffff;

__device__ __forceinline__ uint32_t key_of(float score) {
  const uint32_t bits = __float_as_uint(score);
  if (score != score) return ~0u;
  if (bits == 0x80000000) return 0x80000000;
  return bits ^ (static_cast<uint32_t>(static_cast<int>(bits) >> 31) | 0x80000000);
}

__device__ __forceinline__ float score_of(uint32_t key) {
  return __uint_as_float(key >> 31 ? key ^ 0x80000000 : ~key);
}

// Shared state of a selection, beside candidates.
struct Selection {
  uint32_t bins[kBins];  // zeros between uses
  int warp_sums[2][kWarps];
  int appended[3];  // candidates of a chunk, of the one before and of the next
  int kept;
  int digit, rest, in_bin;  // the bin with the n-th largest: its number, n within it, and how many it has
  int unused;
};

// Inclusive sums over the lanes of a warp.
__device__ __forceinline__ int lane_sums(int value) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int apart = 1; apart < 32; apart *= 2) {
    const int below = __shfl_up_sync(~0u, value, apart);
    if (lane >= apart) value += below;
  }
  return value;
}

// Inclusive sums over all threads, after a barrier. Calls without a barrier between them take turns at two places.
__device__ __forceinline__ int block_sums(Selection& shared, int value, int turn) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, sums = lane_sums(value);
  if (lane == 31) shared.warp_sums[turn][warp] = sums;
  __syncthreads();
  return sums + __reduce_add_sync(~0u, lane < warp ? shared.warp_sums[turn][lane] : 0);
}

// The sum over all threads, after block_sums.
__device__ __forceinline__ int block_total(const Selection& shared, int turn) {
  const int lane = threadIdx.x % 32;
  return __reduce_add_sync(~0u, lane < kWarps ? shared.warp_sums[turn][lane] : 0);
}

// Reserves places behind a counter in shared memory, `count` for each lane, and returns the lane's first one.
__device__ __forceinline__ int reserve(int& counter, int count) {
  const int sums = lane_sums(count);
  int first = 0;
  if (threadIdx.x % 32 == 31 && sums) first = atomicAdd(&counter, sums);
  return __shfl_sync(~0u, first, 31) + sums - count;
}

// Finds the bin with the n-th largest, counted from the highest bin, and clears all. Two barriers.
__device__ __forceinline__ void find_bin(Selection& shared, int n) {
  // A thread has neighbouring bins, the first one the highest.
  const int last = kBins - 1 - kBinsOfThread * static_cast<int>(threadIdx.x);
  int own[kBinsOfThread], sum = 0;
#pragma unroll
  for (int i = 0; i < kBinsOfThread; ++i) {
    own[i] = shared.bins[last - i];
    shared.bins[last - i] = 0;
    sum += own[i];
  }
  const int up_to = block_sums(shared, sum, 0);
  int before = up_to - sum;
  if (before < n && n <= up_to) {
#pragma unroll
    for (int i = 0; i < kBinsOfThread; ++i) {
      if (before < n && n <= before + own[i]) {
        shared.digit = last - i;
        shared.rest = n - before;
        shared.in_bin = own[i];
      }
      before += own[i];
    }
  }
  __syncthreads();
}

// The n-th largest value, of which then `n` are among the first ones; or, if `whole`, a lower bound of it that exactly
// the first ones reach. A bound that at most `most` values reach is enough. `value_of` gives the value of a candidate, or
// false where it has none.
template <typename Value>
__device__ __forceinline__ uint32_t nth_largest(
    Selection& shared, int count, int& n, bool& whole, int most, const Value& value_of) {
  uint32_t prefix = 0, mask = 0;
  const int wanted = n;
#pragma unroll 1
  for (int shift = 21;; shift = shift == 21 ? 10 : 0) {
    const uint32_t digits = shift == 0 ? 1023 : 2047;
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += kThreads) {
      uint32_t value;
      if (value_of(i, value) && (value & mask) == prefix) atomicAdd(&shared.bins[value >> shift & digits], 1);
    }
    __syncthreads();
    find_bin(shared, n);
    prefix |= static_cast<uint32_t>(shared.digit) << shift;
    mask |= digits << shift;
    n = shared.rest;
    const int reaching = wanted - n + shared.in_bin;  // those of the bin, and larger ones
    whole = n == shared.in_bin || reaching <= most;
    if (whole) n = shared.in_bin;
    if (whole || shift == 0) return prefix;
  }
}

// The end of a selection: larger keys belong to it, and of this key those up to an index.
struct Cut {
  uint32_t key, index;

  __device__ __forceinline__ bool selects(uint32_t its_key, uint32_t its_index) const {
    return its_key > key || (its_key == key && its_index <= index);
  }
};

// Cut of the candidates, so that k of them remain; up to `most`, if that is larger. Sets their number.
__device__ __forceinline__ Cut cut_of(
    Selection& shared, const uint32_t* keys, const uint32_t* indices, int count, int& k, int most) {
  bool whole;
  int rest = k;
  const int wanted = k;
  const uint32_t key = nth_largest(shared, count, rest, whole, most, [&](int i, uint32_t& value) {
    value = keys[i];
    return true;
  });
  if (whole) {
    k = wanted - shared.rest + rest;
    return {key, ~0u};
  }
  const uint32_t index = nth_largest(shared, count, rest, whole, 0, [&](int i, uint32_t& value) {
    value = ~indices[i];  // the lowest index is the largest value
    return keys[i] == key;
  });
  return {key, ~index};
}

// Cuts candidates, so that from k to `most` of them remain, among these the k largest; they stand first then, in any
// order. Sets their number, and returns a lower bound of the k-th largest key, which later candidates must exceed.
__device__ __forceinline__ uint32_t cut_candidates(
    Selection& shared, uint32_t* keys, uint32_t* indices, int& count, int k, int most) {
  constexpr int kTogether = 4;
  const Cut cut = cut_of(shared, keys, indices, count, k, most);
  if (threadIdx.x == 0) shared.kept = 0;
  for (int first = 0; first < count; first += kTogether * kThreads) {
    uint32_t key[kTogether], index[kTogether], stays = 0;
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      const int i = first + j * kThreads + threadIdx.x;
      if (i < count) {
        key[j] = keys[i];
        index[j] = indices[i];
        stays |= static_cast<uint32_t>(cut.selects(key[j], index[j])) << j;
      }
    }
    __syncthreads();  // all are read whose places may be written now
    int to = reserve(shared.kept, __popc(stays));
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      if (stays >> j & 1) {
        keys[to] = key[j];
        indices[to++] = index[j];
      }
    }
  }
  __syncthreads();
  count = k;
  return cut.key;
}
