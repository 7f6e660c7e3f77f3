// A block without a cluster, on cards that have none: the functions of cluster.cuh that kernels of either kind call.
#pragma once

#include "barrier.cuh"

__device__ __forceinline__ constexpr uint32_t cluster_rank() { return 0; }
__device__ __forceinline__ constexpr uint32_t cluster_size() { return 1; }

template <typename Value>
__device__ __forceinline__ const Value* mapped(const Value* place, uint32_t) {
  return place;
}

__device__ __forceinline__ void arrive_cluster() {}
__device__ __forceinline__ void wait_cluster() {}
__device__ __forceinline__ void leave_cluster() {}
