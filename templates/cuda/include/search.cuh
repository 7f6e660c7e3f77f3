// Bounds that are found in sorted data, by each thread for itself.
#pragma once

// First position in [0, length] whose element is >= value (> value if strict); elements ascend.
template <typename Number, typename Value>
__device__ __forceinline__ int first_at_least(
    const Number* elements, long long stride, int length, Value value, bool strict) {
  int low = 0, high = length;
  while (low < high) {
    const int probe = low + (high - low) / 2;
    const auto element = elements[probe * stride];
    if (strict ? element <= value : element < value) {
      low = probe + 1;
    } else {
      high = probe;
    }
  }
  return low;
}
