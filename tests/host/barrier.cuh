// mbarriers, which complete a phase when all arrivals came and all announced bytes landed.
#pragma once

#include "types.cuh"

inline int block_of(uint32_t address) { return current->block->cluster->blocks[address >> kRankBits]->slot; }
inline Barrier& barrier_at(uint32_t address) {
  Block* block = current->block->cluster->blocks[address >> kRankBits];
  return block->barriers[address & ((1u << kRankBits) - 1)];
}
// The copies in this scope count for an mbarrier.
struct Copying {
#if RACES
  races::As as;
  explicit Copying(uint32_t full) : as(races::As::copies(barrier_at(full).signal, block_of(full))) {}
#else
  explicit Copying(uint32_t) {}
#endif
};
inline void settle_phase(Barrier& barrier, uint32_t address) {
  if (barrier.pending < 0) fail("too many arrivals at a barrier", address);
  if (barrier.pending == 0 && barrier.bytes == 0) {
    barrier.phase ^= 1;
    barrier.pending = barrier.expected;
    races::complete(barrier.signal, true);
    moved = true;
  }
}
inline void init_barrier(uint32_t address, int arrivals) { barrier_at(address) = {arrivals, arrivals}; }
inline void fence_barrier_init() {}
template <int>
inline void shrink_registers() {}
template <int>
inline void grow_registers() {}
inline void arrive(uint32_t address, int times = 1) {
  Barrier& barrier = barrier_at(address);
  races::arrive(barrier.signal, block_of(address));
  barrier.pending -= times;
  settle_phase(barrier, address);
}
inline void arrive_expecting(uint32_t address, int bytes) {
  barrier_at(address).bytes += bytes;
  arrive(address);
}
inline void land(uint32_t address, int bytes) {
  Barrier& barrier = barrier_at(address);
  barrier.bytes -= bytes;
  settle_phase(barrier, address);
}
inline bool is_complete(uint32_t address, uint32_t parity) {
  Barrier& barrier = barrier_at(address);
  if ((barrier.phase ^ 1) != static_cast<int>(parity)) return false;
  races::acquire(barrier.signal, block_of(address), true);
  return true;
}
inline void wait(uint32_t address, uint32_t parity) {
  if (barrier_at(address).expected == 0) fail("a barrier that nobody has made", address);
  while (!is_complete(address, parity)) yield();
  __syncwarp();
}
