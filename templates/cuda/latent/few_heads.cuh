// Products of latent attention with few heads, transposed: heads are columns (wgmma.cuh).
#pragma once

#include "barrier.cuh"
#include "gradient.cuh"

// The consumer of every other tile, in which a work item has up to kHeadsOfItem heads.
template <int kNumber, int kHeadsOfItem>
struct FewHeads {
  static constexpr int half = kNumber, heads = kHeadsOfItem;
};

// Values by number, each computed where it is read, so that they take no registers.
template <typename Function>
struct Computed {
  Function of;

  __device__ __forceinline__ explicit Computed(Function of) : of(of) {}
  __device__ __forceinline__ int operator[](int number) const { return of(number); }
};

// Whether the value of any thread that meets at a named barrier is true (PTX ISA, "barrier.cta").
__device__ __forceinline__ bool named_any(int id, int threads, bool value) {
  uint32_t any;
  asm volatile(
      "{.reg .pred p, q; setp.ne.u32 p, %1, 0; barrier.cta.red.or.pred q, %2, %3, p; selp.u32 %0, 1, 0, q;}"
      : "=r"(any)
      : "r"(static_cast<uint32_t>(value)), "r"(id), "r"(threads)
      : "memory");
  return any != 0;
}

// A float rounded to 16 bits.
template <typename Element>
__device__ __forceinline__ Element to_element(float x) {
  return {static_cast<uint16_t>(pack<Element>(x, 0.0f))};
}
