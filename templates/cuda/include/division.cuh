// Division by scalars of a call that rounds down: / and % of dividends that are not negative, floor_div and floor_mod of
// any. The host computes the reciprocals.
#pragma once

#include "divisor.cuh"

__device__ __forceinline__ int operator/(int n, const Divisor& by) {
  return __umulhi(2 * static_cast<uint32_t>(n), by.multiplier) >> by.shift;
}

__device__ __forceinline__ int operator%(int n, const Divisor& by) { return n - n / by * by.value; }

// floor(n / d) is -1 - floor((-1 - n) / d).
__device__ __forceinline__ int floor_div(int n, const Divisor& by) {
  const int sign = n >> 31;
  return (n ^ sign) / by ^ sign;
}

__device__ __forceinline__ int floor_mod(int n, const Divisor& by) { return n - floor_div(n, by) * by.value; }
