// Bounds that are found in sorted data, by all lanes of a warp.
#pragma once

#include "types.cuh"

// First position in [0, length] whose element is >= value (> value if strict); elements ascend. All lanes ask for the same:
// they probe 32 places at once, three rounds for 32,768 elements.
template <typename Number, typename Value>
__device__ __forceinline__ int first_at_least_by_warp(
    const Number* elements, long long stride, int length, Value value, bool strict) {
  const int lane = threadIdx.x % 32;
  int low = 0, high = length;
  while (__any_sync(~0u, low < high)) {
    const int step = (high - low + 31) / 32;
    const int probe = low + (lane + 1) * step - 1;
    bool below = false;
    if (probe < high) {
      const auto element = elements[probe * stride];
      below = strict ? element <= value : element < value;
    }
    low += __popc(__ballot_sync(~0u, below)) * step;
    high = min(low + step - 1, high);
  }
  return low;
}
