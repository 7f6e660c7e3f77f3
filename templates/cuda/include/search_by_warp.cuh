// Bounds that are found in sorted data, by all lanes of a warp.
#pragma once

#include "types.cuh"

// First position in [0, length] whose element is >= value (> value if strict); elements ascend. All lanes ask for the same:
// each probes four places at once, in two rounds for 16,384 elements.
template <typename Number, typename Value>
__device__ __forceinline__ int first_at_least_by_warp(
    const Number* elements, long long stride, int length, Value value, bool strict) {
  constexpr int kProbes = 4;
  const int lane = threadIdx.x % 32;
  int low = 0, high = length;
  while (__any_sync(~0u, low < high)) {
    const int step = (high - low + 32 * kProbes - 1) / (32 * kProbes);
    bool below[kProbes];
#pragma unroll
    for (int i = 0; i < kProbes; ++i) {
      const int probe = low + (32 * i + lane + 1) * step - 1;
      below[i] = false;
      if (probe < high) {
        const auto element = elements[probe * stride];
        below[i] = strict ? element <= value : element < value;
      }
    }
    int probes_below = 0;
#pragma unroll
    for (int i = 0; i < kProbes; ++i) probes_below += __popc(__ballot_sync(~0u, below[i]));
    low += probes_below * step;
    high = min(low + step - 1, high);
  }
  return low;
}
