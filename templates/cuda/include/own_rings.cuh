// Rings of which each consumer has its own. Their stages are numbered through: those of the second ring follow those of the
// first.
#pragma once

#include "ring.cuh"

// One of them.
template <uint32_t kFull, uint32_t kEmpty, int kCount>
struct OwnRing : Ring<kFull, kEmpty, kCount> {
  int first;  // stage of this ring

  __device__ __forceinline__ explicit OwnRing(int ring) : Ring<kFull, kEmpty, kCount>(kCount * ring), first(kCount * ring) {}

  __device__ __forceinline__ bool is(int ring) const { return first == kCount * ring; }

  __device__ __forceinline__ void advance() {
    if (++this->stage == first + kCount) {
      this->stage = first;
      this->phase ^= 1;
    }
  }
  // Passes over stages that only the other consumer reads.
  __device__ __forceinline__ void skip(int stages) {
    const int position = this->stage - first + kCount * this->phase + stages;
    this->stage = first + position % kCount;
    this->phase = position / kCount & 1;
  }
};
