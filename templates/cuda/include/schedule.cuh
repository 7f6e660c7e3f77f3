// The tile scheduler, and searches for bounds in sorted data.
#pragma once

#include "types.cuh"

// Finds the unit (batch x head) and the query tile of an index: `heads_in_l2` units share L2, longest tiles first.
// Divisions of unsigned counts take fewer instructions.
template <typename Count>
__device__ __forceinline__ void place_tile_by(
    Count index, Count q_tiles, Count units, Count heads_in_l2, int& unit, int& q_tile) {
  const Count units_before = index / (heads_in_l2 * q_tiles) * heads_in_l2;
  const Count width = min(heads_in_l2, units - units_before);
  const Count rest = index - units_before * q_tiles;
  unit = units_before + rest % width;
  q_tile = q_tiles - 1 - rest / width;
}
__device__ __forceinline__ void place_tile(
    int index, int q_tiles, int units, int heads_in_l2, int& unit, int& q_tile) {
  place_tile_by<int>(index, q_tiles, units, heads_in_l2, unit, q_tile);
}

// The value that another lane holds.
template <typename Numbers>
__device__ __forceinline__ Numbers from_lane(const Numbers& own, int lane) {
  Numbers other;
#pragma unroll
  for (int i = 0; i < sizeof(Numbers) / sizeof(int); ++i) {
    reinterpret_cast<int*>(&other)[i] = __shfl_sync(~0u, reinterpret_cast<const int*>(&own)[i], lane);
  }
  return other;
}

// The next tile that no block has taken. The counter runs from 0 and wraps when every block has found it at its end
// once, so that it is 0 again for the next launch.
__device__ __forceinline__ int take_tile(uint32_t* counter, int tiles, int lane, int takers = gridDim.x) {
  int index = 0;
  if (lane == 0) index = takers + atomicInc(counter, tiles - 1);
  return __shfl_sync(~0u, index, 0);
}

// The sequences of a batch with at least `least` queries, of at most 1,024; all sequences if `least` is 0. A warp finds
// them: each lane keeps a bit for each of 32 sequences.
struct LongSequences {
  uint32_t bits = 0;
  int before = 0;  // of these sequences, in the lanes before
  int count;
  bool all;

  __device__ __forceinline__ LongSequences(const int* cu_seqlens_q, int batch, int least, int lane)
      : count(batch), all(least == 0) {
    if (all) return;
#pragma unroll 4
    for (int first = 0; first < batch; first += 32) {
      const int b = first + lane;
      const bool found = b < batch && cu_seqlens_q[b + 1] - cu_seqlens_q[b] >= least;
      const uint32_t of_lanes = __ballot_sync(~0u, found);
      if (lane == first / 32) bits = of_lanes;
    }
    const int own = __popc(bits);
    int until = own;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(~0u, until, distance);
      if (lane >= distance) until += other;
    }
    before = until - own;
    count = __shfl_sync(~0u, until, 31);
  }

  // The index in the batch of the sequence that is number `place` of them.
  __device__ __forceinline__ int number(int place, int lane) const {
    if (all) return place;
    const int owner = __popc(__ballot_sync(~0u, before <= place)) - 1;
    const uint32_t word = __shfl_sync(~0u, bits, owner);
    const int left = place - __shfl_sync(~0u, before, owner);
    const bool found = (word >> lane & 1) && __popc(word & (1u << lane) - 1) == left;
    return 32 * owner + __ffs(__ballot_sync(~0u, found)) - 1;
  }
};

// First position in [0, length] whose element is >= value (> value if strict); elements ascend. Eight lanes probe eight
// places at once, each group of eight for itself: five rounds for 32,768 elements.
template <typename Number, typename Value>
__device__ __forceinline__ int first_at_least(
    const Number* elements, long long stride, int length, Value value, bool strict) {
  const int lane = threadIdx.x % 8, group = threadIdx.x % 32 / 8;
  int low = 0, high = length;
  while (__any_sync(~0u, low < high)) {
    const int step = (high - low + 7) / 8;
    const int probe = low + (lane + 1) * step - 1;
    bool below = false;
    if (low < high && probe < high) {
      const auto element = elements[probe * stride];
      below = strict ? element <= value : element < value;
    }
    low += __popc(__ballot_sync(~0u, below) >> 8 * group & 0xff) * step;
    high = min(low + max(step - 1, 0), high);
  }
  return low;
}
