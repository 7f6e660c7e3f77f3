// Rings of stages in shared memory, as one role sees them: where it stands, and the barriers of that stage. A writer
// acquires a stage, fills it and arrives; a reader waits for it, reads and releases it. Each advances for itself.
#pragma once

#include "barrier.cuh"

constexpr uint32_t kNoBarrier = 0;

// Stages whose barriers are adjacent, from kFull and kEmpty on; kNoBarrier where something else signals.
template <uint32_t kFull, uint32_t kEmpty, int kCount>
struct Ring {
  static constexpr int kStages = kCount;

  uint32_t phase = 0;  // its parity: that of the barrier which says that the stage is full
  int stage = 0;
  uint32_t base = 0;   // added to the addresses of barriers

  Ring() = default;
  __device__ __forceinline__ Ring(int stage, uint32_t phase = 0, uint32_t base = 0)
      : phase(phase), stage(stage), base(base) {}

  // The ring after that many stages.
  static __device__ __forceinline__ Ring at(int position, uint32_t base = 0) {
    return Ring(position % kStages, position / kStages & 1, base);
  }

  __device__ __forceinline__ uint32_t full() const {
    static_assert(kFull != kNoBarrier);
    return base + kFull + 8 * stage;
  }
  __device__ __forceinline__ uint32_t empty() const {
    static_assert(kEmpty != kNoBarrier);
    return base + kEmpty + 8 * stage;
  }

  // Addresses in the block itself, which other blocks of a cluster map to this one's.
  static __device__ __forceinline__ uint32_t full_of(int stage) { return kFull + 8 * stage; }
  static __device__ __forceinline__ uint32_t empty_of(int stage) { return kEmpty + 8 * stage; }

  // The stage that many stages before this one.
  __device__ __forceinline__ int before(int count) const { return stage - count + (stage < count ? kStages : 0); }

  // The writer's side. The first time around all stages are empty: waiting for the phase before the first one passes.
  __device__ __forceinline__ void acquire() const { ::wait(empty(), phase ^ 1); }
  __device__ __forceinline__ void arrive() const { ::arrive(full()); }
  __device__ __forceinline__ void arrive_expecting(int bytes) const { ::arrive_expecting(full(), bytes); }

  // The reader's side.
  __device__ __forceinline__ void wait() const { ::wait(full(), phase); }
  __device__ __forceinline__ bool is_full() const { return is_complete(full(), phase); }
  __device__ __forceinline__ void release() const { ::arrive(empty()); }
  __device__ __forceinline__ void release(int times) const { ::arrive(empty(), times); }
  // The stage before this one.
  __device__ __forceinline__ void release_last() const {
    ::arrive(base + kEmpty + 8 * (stage == 0 ? kStages - 1 : stage - 1));
  }

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// Two stages that alternate.
template <uint32_t kFull, uint32_t kEmpty>
struct Pair : Ring<kFull, kEmpty, 2> {
  using Ring<kFull, kEmpty, 2>::Ring;

  __device__ __forceinline__ void advance() {
    this->stage ^= 1;
    this->phase ^= this->stage == 0;
  }
};

// A barrier without a stage: one role waits for an event, again and again.
template <uint32_t kBarrier>
struct Event {
  uint32_t base;
  uint32_t phase = 0;

  __device__ __forceinline__ explicit Event(uint32_t base = 0) : base(base) {}
  __device__ __forceinline__ void wait() {
    ::wait(base + kBarrier, phase);
    phase ^= 1;
  }
  static __device__ __forceinline__ void arrive(uint32_t base = 0) { ::arrive(base + kBarrier); }
};

// Initializes `count` barriers side by side, with that many arrivals each.
__device__ __forceinline__ void init_barriers(uint32_t first, int count, int arrivals) {
  for (int i = 0; i < count; ++i) init_barrier(first + 8 * i, arrivals);
}

// The same for the barriers that are this thread's.
__device__ __forceinline__ void init_barriers(uint32_t first, int count, int arrivals, int thread, int threads) {
  for (int i = thread; i < count; i += threads) init_barrier(first + 8 * i, arrivals);
}

// A named barrier: one of a group that an enum of the kernel names by its first.
template <typename Name>
__device__ __forceinline__ void named_sync(Name first, int which, int threads) {
  named_sync(static_cast<int>(first) + which, threads);
}

template <typename Name>
__device__ __forceinline__ void named_arrive(Name first, int which, int threads) {
  named_arrive(static_cast<int>(first) + which, threads);
}
