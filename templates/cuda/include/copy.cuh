// Asynchronous copies from global to shared memory by each thread (PTX ISA, "cp.async").
#pragma once

#include "types.cuh"

// Copies 16 bytes past L1, or writes zeros without reading.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, bool exists) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(exists ? 16 : 0) : "memory");
}

// The same, so many bytes after both addresses.
template <int kTo, int kFrom>
__device__ __forceinline__ void copy_async_at(uint32_t to, const void* from, bool exists) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0 + %3], [%1 + %4], 16, %2;" ::"r"(to), "l"(from), "r"(exists ? 16 : 0), "n"(kTo),
               "n"(kFrom)
               : "memory");
}

// Copies one number of 32 bits.
__device__ __forceinline__ void copy_number_async(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

// The same where a condition holds, without a branch.
__device__ __forceinline__ void copy_number_async_if(bool condition, uint32_t to, const void* from) {
  asm volatile(
      "{\n"
      ".reg .pred holds;\n"
      "setp.ne.b32 holds, %0, 0;\n"
      "@holds cp.async.ca.shared.global [%1], [%2], 4;\n"
      "}" ::"r"(static_cast<int>(condition)),
      "r"(to), "l"(from)
      : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `kLeft` of this thread's last groups of copies are under way.
template <int kLeft>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

// Makes this thread arrive at a barrier in shared memory once all copies that it has issued so far have landed. The barrier's
// count has to include that arrival (PTX ISA, "cp.async.mbarrier.arrive.noinc").
__device__ __forceinline__ void arrive_when_copied(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Writes a number of 32 bits to shared memory.
__device__ __forceinline__ void store_number(uint32_t to, uint32_t number) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(number) : "memory");
}

// Writes a number to shared memory where a condition holds, without a branch.
__device__ __forceinline__ void store_number_if(bool condition, uint32_t to, float number) {
  asm volatile(
      "{\n"
      ".reg .pred holds;\n"
      "setp.ne.b32 holds, %0, 0;\n"
      "@holds st.shared.f32 [%1], %2;\n"
      "}" ::"r"(static_cast<int>(condition)),
      "r"(to), "f"(number)
      : "memory");
}

// The chunk of 16 bytes of a row in which a chunk of its columns lies, so that neither copies nor ldmatrix have bank
// conflicts: eight rows, or two or four of them side by side, have each column in other banks.
template <int kBoxBytes>
__device__ __forceinline__ int swizzled(int row, int chunk) {
  static_assert(kBoxBytes == 128 || kBoxBytes == 64);
  return chunk ^ (kBoxBytes == 128 ? row % 8 : row / 2 % 4);
}

// Adds a number to one in global memory, in no fixed order.
__device__ __forceinline__ void add_to(float* to, float number) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to), "f"(number) : "memory");
}
