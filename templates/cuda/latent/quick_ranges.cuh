// Divisions of small numbers by few instructions, each of which runs once and is in no cache.
#pragma once

#include "work_list.cuh"

// Quotient of two numbers that are not negative, the second one not 0, if it is below 2^21: an approximation is then off by one at most.
__device__ __forceinline__ int quick_quotient(int number, int divisor) {
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(static_cast<float>(divisor)));
  const int quotient = static_cast<int>(static_cast<float>(number) * reciprocal), rest = number - quotient * divisor;
  return quotient + (rest >= divisor) - (rest < 0);
}

struct Quick {
  static __device__ __forceinline__ int quotient(int number, int divisor) { return quick_quotient(number, divisor); }
  static __device__ __forceinline__ EvenRanges ranges(int chunks, int workers) {
    EvenRanges ranges;
    ranges.count = workers;
    ranges.quotient = quick_quotient(chunks, max(workers, 1));
    ranges.remainder = chunks - ranges.quotient * max(workers, 1);
    return ranges;
  }
};
