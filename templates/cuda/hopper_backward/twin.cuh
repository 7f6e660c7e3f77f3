// Sums that go from registers to the shared memory of another block of the cluster (PTX ISA, "st.async").
#pragma once

#include "types.cuh"

// Stores four floats in another block, where a barrier counts their bytes; both addresses are mapped.
__device__ __forceinline__ void send_float4(uint32_t to, uint32_t full, float a, float b, float c, float d) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
      ::"r"(to), "f"(a), "f"(b), "f"(c), "f"(d), "r"(full)
      : "memory");
}

// Lane 0 arrives at a barrier of another block, mapped, once the warp has what it loads from shared memory. Arrivals at other
// blocks do not wait in line with loads, and may overtake them: `loaded` has bits of each of them, so that this instruction
// has to wait. A shuffle always finds lane 0.
__device__ __forceinline__ void arrive_once_loaded(uint32_t barrier, uint32_t loaded, int lane) {
  asm volatile(
      "{.reg .pred there, first; .reg .b32 any;\n\t"
      "setp.eq.s32 first, %2, 0;\n\t"
      "shfl.sync.idx.b32 any|there, %1, 0, 31, 0xffffffff;\n\t"
      "and.pred first, first, there;\n\t"
      "@first mbarrier.arrive.shared::cluster.b64 _, [%0];}"
      ::"r"(barrier), "r"(loaded), "r"(lane)
      : "memory");
}
