// Registers of a consumer whose work tiles have rows of several batch entries: arrays of one more dimension.
#pragma once

#include "softmax.cuh"
#include "wgmma.cuh"

template <int kEntries, int kCount>
__device__ __forceinline__ void fence_registers(float (&d)[kEntries][kCount]) {
#pragma unroll
  for (int entry = 0; entry < kEntries; ++entry) fence_registers(d[entry]);
}

template <int kEntries, int kCount>
__device__ __forceinline__ void rescale(float (&acc)[kEntries][kCount], const float (&factor)[kEntries][2]) {
#pragma unroll
  for (int entry = 0; entry < kEntries; ++entry) rescale(acc[entry], factor[entry]);
}
