// Gathering rows by `cp.async`: mbarriers that count the copies of threads.
#pragma once

#include "types.cuh"

// The same address, which the compiler has to keep in registers instead of computing it again at each use.
template <typename Element>
__device__ __forceinline__ const Element* kept_in_registers(const Element* address) {
  asm volatile("" : "+l"(address));
  return address;
}

// Makes this thread arrive at a barrier once all copies that it has issued so far have landed; the barrier's count has to
// include that arrival (PTX ISA, "cp.async.mbarrier.arrive.noinc").
__device__ __forceinline__ void arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
