// Shared-memory barriers, named barriers and register reallocation: one function for each PTX instruction.
#pragma once

#include "types.cuh"

// mbarrier (PTX ISA, "Parallel Synchronization: mbarrier"). A barrier completes a phase when all planned arrivals came
// and all announced bytes landed; phases alternate in parity, the first one to complete is 0.

__device__ __forceinline__ void init_barrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

// Makes initialized barriers visible to the copy engine, where there is one.
__device__ __forceinline__ void fence_barrier_init() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void arrive(uint32_t barrier, int times) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(times) : "memory");
#else
  for (int i = 0; i < times; ++i) arrive(barrier);
#endif
}

// Arrive, and announce bytes that copies will bring.
__device__ __forceinline__ void arrive_expecting(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ bool try_wait(uint32_t barrier, uint32_t parity) {
  uint32_t complete;
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
      : "=r"(complete)
      : "r"(barrier), "r"(parity)
      : "memory");
#else
  asm volatile(
      "{.reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
      : "=r"(complete)
      : "r"(barrier), "r"(parity)
      : "memory");
#endif
  return complete != 0;
}

// Whether the phase of this parity is complete, without waiting for it.
__device__ __forceinline__ bool is_complete(uint32_t barrier, uint32_t parity) {
  uint32_t complete;
  asm volatile(
      "{.reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
      : "=r"(complete)
      : "r"(barrier), "r"(parity)
      : "memory");
  return complete != 0;
}

// A whole warp waits until the phase of this parity is complete. The vote tells the compiler that lanes stay together.
__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
  while (!__all_sync(~0u, try_wait(barrier, parity))) {
  }
}

// Named barriers (PTX ISA, "bar"): 0 is __syncthreads; `threads` counts those that sync and those that arrive.

__device__ __forceinline__ void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The number of the thread, read again where S, P and O leave no register to keep what follows from it.
__device__ __forceinline__ int thread_again() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// Registers move from the producer, which needs few, to the consumers (PTX ISA, "setmaxnreg").

template <int kRegisters>
__device__ __forceinline__ void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
