// Barriers that count the asynchronous copies of threads (PTX ISA, "cp.async.mbarrier.arrive").
#pragma once

#include "types.cuh"

// An address that the compiler does not compute again from what it was made of.
template <typename Element>
__device__ __forceinline__ const Element* kept_in_registers(const Element* address) {
  asm volatile("" : "+l"(address));
  return address;
}

// Arrives once all copies that this thread has issued so far have landed. The barrier expects this arrival.
__device__ __forceinline__ void arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
