// Parts of a result that several blocks have: each stores its own, and who is done last adds all of them.
#pragma once

#include "counted.cuh"

// A thread's numbers, in an order in which what neighbouring threads store lies side by side.
template <int kThreads, int kCount>
__device__ __forceinline__ void store_part(float* to, const float (&own)[kCount], int thread) {
  static_assert(kCount % 4 == 0);
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    const float4 four = make_float4(own[i], own[i + 1], own[i + 2], own[i + 3]);
    __stcg(reinterpret_cast<float4*>(to) + kThreads * i / 4 + thread, four);
  }
}

// Adds a part, which another block may have stored: through L2, where it is.
template <int kThreads, int kCount>
__device__ __forceinline__ void add_part(float (&sum)[kCount], const float* from, int thread) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    const float4 four = __ldcg(reinterpret_cast<const float4*>(from) + kThreads * i / 4 + thread);
    sum[i] += four.x;
    sum[i + 1] += four.y;
    sum[i + 2] += four.z;
    sum[i + 3] += four.w;
  }
}
