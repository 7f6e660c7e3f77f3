// Barriers that count the asynchronous copies of threads (PTX ISA, "cp.async.mbarrier.arrive").
#pragma once

#include "types.cuh"

// Arrives once all copies that this thread has issued so far have landed. The barrier expects this arrival.
__device__ __forceinline__ void arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
