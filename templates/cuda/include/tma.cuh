// The copy engine (TMA): boxes of a tensor to shared memory and back (PTX ISA, "cp.async.bulk.tensor").
#pragma once

#include "types.cuh"

// A CUtensorMap as the host encoded it: address, extents, strides, box and swizzle.
struct alignas(64) TensorMap {
  uint64_t words[16];
};

__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Coordinates count elements, the fastest axis first; what lies outside the tensor arrives as zeros, and counts.

__device__ __forceinline__ void load_box(uint32_t to, const TensorMap& map, uint32_t full, int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
      ::"r"(to), "l"(&map), "r"(full), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}

__device__ __forceinline__ void load_box(
    uint32_t to, const TensorMap& map, uint32_t full, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];"
      ::"r"(to), "l"(&map), "r"(full), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

__device__ __forceinline__ void load_box(
    uint32_t to, const TensorMap& map, uint32_t full, int c0, int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];"
      ::"r"(to), "l"(&map), "r"(full), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// The same for data that is read once: L2 evicts it first (PTX ISA, "cache eviction priority hints"; the policy is
// what createpolicy.fractional.L2::evict_first makes).
constexpr uint64_t kEvictFirst = 0x12f0000000000000;

__device__ __forceinline__ void load_box_once(uint32_t to, const TensorMap& map, uint32_t full, int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5}], [%2], %6;"
      ::"r"(to), "l"(&map), "r"(full), "r"(c0), "r"(c1), "r"(c2), "l"(kEvictFirst)
      : "memory");
}

__device__ __forceinline__ void load_box_once(
    uint32_t to, const TensorMap& map, uint32_t full, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;"
      ::"r"(to), "l"(&map), "r"(full), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(kEvictFirst)
      : "memory");
}

// The same with an eviction policy that is not known when the kernel is compiled.
constexpr uint64_t kEvictNormal = 0x1000000000000000;

__device__ __forceinline__ void load_box_kept(
    uint32_t to, const TensorMap& map, uint32_t full, uint64_t policy, int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5}], [%2], %6;"
      ::"r"(to), "l"(&map), "r"(full), "r"(c0), "r"(c1), "r"(c2), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void load_box_kept(
    uint32_t to, const TensorMap& map, uint32_t full, uint64_t policy, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;"
      ::"r"(to), "l"(&map), "r"(full), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(policy)
      : "memory");
}

// Neighbouring bytes, a multiple of 16, from and to addresses that are such multiples.
__device__ __forceinline__ void load_bytes(uint32_t to, const void* from, uint32_t full, int bytes) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      ::"r"(to), "l"(from), "r"(bytes), "r"(full)
      : "memory");
}

// Rows and columns outside the tensor are not written.
__device__ __forceinline__ void store_box(const TensorMap& map, uint32_t from, int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];"
      ::"l"(&map), "r"(from), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}

__device__ __forceinline__ void store_box(const TensorMap& map, uint32_t from, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
      ::"l"(&map), "r"(from), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

__device__ __forceinline__ void store_box(const TensorMap& map, uint32_t from, int c0, int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];"
      ::"l"(&map), "r"(from), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// Four 8 x 8 blocks of a product, packed as for the next one, to shared memory: lane l gives the address of row l % 8
// of block l / 8 (PTX ISA, "stmatrix").
__device__ __forceinline__ void store_blocks(uint32_t to, uint32_t b0, uint32_t b1, uint32_t b2, uint32_t b3) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(b0), "r"(b1), "r"(b2), "r"(b3)
      : "memory");
}

__device__ __forceinline__ void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until this thread's stores have read their shared memory, which may then be overwritten.
__device__ __forceinline__ void wait_stores_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// Orders ordinary writes of shared memory before reads by the copy engine and the tensor cores.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
