// Division by a number that is the same in all of a launch: a multiplication by its reciprocal (Granlund and Montgomery,
// "Division by Invariant Integers using Multiplication", 1994), exact for 0 <= n < 2^31.
#pragma once

#include "types.cuh"

struct Divisor {
  int value;
  uint32_t multiplier;
  int shift;

  Divisor() = default;
  // `reciprocal` is ceil(2^31 * 2^shift / value), which the host has found, with the least shift of 2^shift >= value.
  __device__ __forceinline__ Divisor(int value, int reciprocal)
      : value(value), multiplier(reciprocal), shift(32 - __clz(value - 1)) {}

  __device__ __forceinline__ int quotient(int n) const { return __umulhi(2 * n, multiplier) >> shift; }
  __device__ __forceinline__ int remainder(int n) const { return n - quotient(n) * value; }
};
