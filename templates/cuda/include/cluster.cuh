// Blocks of a cluster: ranks, barriers and copies across their shared memories (PTX ISA, "Cluster of Cooperative Thread
// Arrays", "mapa", "barrier.cluster"). A shared memory address of this block, mapped, is the same place of another one.
#pragma once

#include "barrier.cuh"
#include "tma.cuh"

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ uint32_t cluster_size() {
  uint32_t size;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}

__device__ __forceinline__ uint32_t mapped(uint32_t address, uint32_t rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

template <typename Value>
__device__ __forceinline__ const Value* mapped(const Value* place, uint32_t rank) {
  const Value* there;
  asm volatile("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(place), "r"(rank));
  return there;
}

// All threads of all blocks of the cluster meet; what any of them wrote before is visible to all.
__device__ __forceinline__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The same in two halves, between which a thread may do something else.
__device__ __forceinline__ void arrive_cluster() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void wait_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// The last barrier before the blocks exit. Relaxed: reads from each other are done, writes elsewhere need not be.
__device__ __forceinline__ void leave_cluster() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\n\tbarrier.cluster.wait.aligned;" ::: "memory");
}

// Arrive at a barrier of any block of the cluster. What it guards for another block is read by products, which are
// complete, and written by copies alone: a fence of the whole cluster would take longer than a product.
__device__ __forceinline__ void arrive_at(uint32_t barrier, uint32_t rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(mapped(barrier, rank)) : "memory");
}

// Writes a word to the shared memory of any block of the cluster; sync_cluster makes it visible there.
__device__ __forceinline__ void store_to(uint32_t rank, uint32_t to, uint32_t value) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(mapped(to, rank)), "r"(value) : "memory");
}

// Multicast: a box of a tensor to the same address of all blocks in `blocks`, one bit each, whose barriers count its bytes.
__device__ __forceinline__ void load_box_to(
    uint32_t blocks, uint32_t to, const TensorMap& map, uint32_t full, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%4, %5, %6, %7}], [%2], %3;"
      ::"r"(to), "l"(&map), "r"(full), "h"(static_cast<uint16_t>(blocks)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

__device__ __forceinline__ void load_box_to(
    uint32_t blocks, uint32_t to, const TensorMap& map, uint32_t full, int c0, int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%4, %5, %6, %7, %8}], [%2], %3;"
      ::"r"(to), "l"(&map), "r"(full), "h"(static_cast<uint16_t>(blocks)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// Copies shared memory of this block to that of another, whose barrier counts the bytes.
__device__ __forceinline__ void copy_to(uint32_t rank, uint32_t to, uint32_t from, uint32_t bytes, uint32_t full) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      ::"r"(mapped(to, rank)), "r"(from), "r"(bytes), "r"(mapped(full, rank))
      : "memory");
}

// Adds four floats to global memory, in no fixed order (PTX ISA, "red").
__device__ __forceinline__ void add_floats(float* to, float a, float b, float c, float d) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
