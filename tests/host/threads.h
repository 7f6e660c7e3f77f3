// CUDA threads on the host: each is a fiber, and runs until it waits for others. Blocks of a cluster run together.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

#include "races.h"

#define __device__
#define __align__(bytes) alignas(bytes)
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)

// What the host passes for a kernel's `Divisor`; tests/lang/test_divisors.py compares that with Python's.
inline int reciprocal(int divisor) {
  if (divisor <= 0) return 0;
  int shift = 0;
  while ((1ll << shift) < divisor) ++shift;
  return static_cast<int>(static_cast<uint32_t>(((1ll << (31 + shift)) + divisor - 1) / divisor));
}

inline int __umulhi(uint32_t a, uint32_t b) { return static_cast<uint64_t>(a) * b >> 32; }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }

inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t from) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  uint32_t picked = 0;
  for (int i = 0; i < 4; ++i) picked |= static_cast<uint32_t>(bytes >> 8 * (from >> 4 * i & 7) & 0xff) << 8 * i;
  return picked;
}

using std::max;
using std::min;

struct int2 { int x, y; };
struct int4 { int x, y, z, w; };
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct Dim { int x, y, z; };

constexpr int kSharedBytes = 228 * 1024, kSharedStart = 1024, kRankBits = 24;

struct Barrier { int expected = 0, pending = 0, phase = 0; long long bytes = 0; int signal = -1; };
// The values that lanes bring to a meeting stay until all have come to the next, so that two places are enough.
struct Warp {
  int actor = -1, copies = -1, stores = -1;
  int arrived = 0;
  long long meetings = 0;
  uint64_t values[2][32];
  uint32_t blocks[2][32][4];
};
struct Block;
struct Meeting {
  int arrived = 0;
  long long meetings = 0;
  bool any[2] = {};  // whether somebody has brought true to this meeting, and to the last one
  int signal = -1;
  std::map<Warp*, int> lanes;  // that have arrived
};
struct Cluster { std::vector<Block*> blocks; int threads, arrived = 0; long long meetings = 0; int signal = -1; };
// Groups of products that a warpgroup has committed: threads, and what they knew.
struct Group { int threads = 0, signal = -1; };
struct Products { int actor = -1; std::vector<Group> groups; };
struct Block {
  int index, rank, slot;  // its memory's place among those of blocks at once
  Cluster* cluster;
  char* memory;
  std::vector<Warp> warps;
  Meeting named[16];
  Products warpgroups[8];
  std::map<uint32_t, Barrier> barriers;
};
struct Thread {
  Dim index;
  Block* block;
  Warp* warp;
  int lane;
  long long cluster_meeting;
  bool done, started;
  void* stack;
  ucontext_t context;
  jmp_buf place;
  uint32_t products = 0, copies = 0, stores = 0;  // groups that it has committed
  races::Registers held;
};

extern Thread* current;
extern int blocks_of_grid;
extern bool moved;  // something has happened that others may wait for
// Whether a warp has read again what other blocks write, and how often something has happened that such a warp may wait for.
inline bool polled = false;
inline long long publications = 0;
extern jmp_buf scheduler;

#define threadIdx (current->index)
#define blockIdx (Dim{current->block->index, 0, 0})
#define gridDim (Dim{blocks_of_grid, 1, 1})
#define shared_memory (current->block->memory)

[[noreturn]] inline void fail(const char* what, long long number = 0) {
#if RACES
  races::fail(what, number);
#endif
  std::printf("FAILED: %s (%llx)\n", what, number);
  std::exit(3);
}

// A context only begins a fiber: to switch by one asks the kernel for the mask of signals each time, a jump does not.
[[gnu::noinline]] inline void yield() {
  if (_setjmp(current->place) == 0) _longjmp(scheduler, 1);
}
[[gnu::noinline]] inline void resume(Thread* thread) {
  current = thread;
  races::resume(thread->warp->actor, thread->held);
  if (_setjmp(scheduler) != 0) return;
  if (thread->started) _longjmp(thread->place, 1);
  thread->started = true;
  setcontext(&thread->context);
}


// Shared addresses as a cluster has them: the rank of the block above the place in its memory.
inline uint32_t address_of(const void* place) {
  return current->block->rank << kRankBits | (kSharedStart + static_cast<uint32_t>(static_cast<const char*>(place) - shared_memory));
}
#define __cvta_generic_to_shared(place) address_of(place)
inline char* place_of_address(uint32_t address) {
  const uint32_t place = (address & ((1u << kRankBits) - 1)) - kSharedStart;
  if (place >= kSharedBytes) fail("address outside of shared memory", address);
  return current->block->cluster->blocks[address >> kRankBits]->memory + place;
}

#define __cvta_shared_to_generic(address) static_cast<void*>(place_of_address(address))

// All lanes of a warp meet, each with a value. The last to come does for all what they have met for, given what each has
// brought; what they have brought is returned, too.
template <typename Value, typename Work>
inline const uint64_t (&meet(Value own, Work work))[32] {
  Warp& warp = *current->warp;
  const long long meeting = warp.meetings;
  uint64_t(&all)[32] = warp.values[meeting & 1];
  uint64_t raw = 0;
  std::memcpy(&raw, &own, sizeof(Value));
  all[current->lane] = raw;
  moved = true;
  if (++warp.arrived == 32) {
    work(all);
    warp.arrived = 0;
    ++warp.meetings;
  } else {
    while (warp.meetings == meeting) yield();
  }
  return all;
}
template <typename Value>
inline const uint64_t (&exchange(Value own))[32] {
  return meet(own, [](const uint64_t*) {});
}
template <typename Value>
inline Value value_of(uint64_t raw) {
  Value value;
  std::memcpy(&value, &raw, sizeof(Value));
  return value;
}
inline void __syncwarp() { exchange(0); }
template <typename Value>
inline Value __shfl_sync(unsigned, Value own, int lane) {
  return value_of<Value>(exchange(own)[lane & 31]);
}
template <typename Value>
inline Value __shfl_xor_sync(unsigned, Value own, int mask) {
  return __shfl_sync(~0u, own, current->lane ^ mask);
}
template <typename Value>
inline Value __shfl_up_sync(unsigned, Value own, int distance) {
  return __shfl_sync(~0u, own, current->lane >= distance ? current->lane - distance : current->lane);
}
template <typename Value>
inline Value __shfl_down_sync(unsigned, Value own, int distance) {
  return __shfl_sync(~0u, own, current->lane + distance < 32 ? current->lane + distance : current->lane);
}
inline unsigned __ballot_sync(unsigned, bool own) {
  const uint64_t(&all)[32] = exchange(static_cast<int>(own));
  unsigned bits = 0;
  for (int lane = 0; lane < 32; ++lane) bits |= static_cast<unsigned>(all[lane] != 0) << lane;
  return bits;
}
inline unsigned __reduce_max_sync(unsigned, unsigned own) {
  const uint64_t(&all)[32] = exchange(own);
  return static_cast<unsigned>(*std::max_element(all, all + 32));
}
inline int __reduce_max_sync(unsigned, int own) {
  const uint64_t(&all)[32] = exchange(own);
  return *std::max_element(all, all + 32, [](uint64_t a, uint64_t b) { return static_cast<int>(a) < static_cast<int>(b); });
}
inline int __reduce_min_sync(unsigned, int own) {
  const uint64_t(&all)[32] = exchange(own);
  return *std::min_element(all, all + 32, [](uint64_t a, uint64_t b) { return static_cast<int>(a) < static_cast<int>(b); });
}
inline int __reduce_add_sync(unsigned, int own) {
  const uint64_t(&all)[32] = exchange(own);
  int sum = 0;
  for (int lane = 0; lane < 32; ++lane) sum += static_cast<int>(all[lane]);
  return sum;
}
inline unsigned __reduce_or_sync(unsigned, unsigned own) {
  const uint64_t(&all)[32] = exchange(own);
  unsigned any = 0;
  for (int lane = 0; lane < 32; ++lane) any |= static_cast<unsigned>(all[lane]);
  return any;
}
inline unsigned __reduce_and_sync(unsigned, unsigned own) {
  const uint64_t(&all)[32] = exchange(own);
  unsigned every = ~0u;
  for (int lane = 0; lane < 32; ++lane) every &= static_cast<unsigned>(all[lane]);
  return every;
}
inline bool __any_sync(unsigned, bool own) { return __ballot_sync(~0u, own) != 0; }
inline bool __all_sync(unsigned, bool own) { return __ballot_sync(~0u, own) == ~0u; }

// So many threads of the block meet at a barrier of the hardware, of which 0 is that of all.
inline void named_arrive(int id, int threads) {
  Meeting& meeting = current->block->named[id];
  moved = true;
  races::arrive(meeting.signal, current->block->slot);
  if (++meeting.lanes[current->warp] > 32) fail("a warp arrives at a named barrier twice before the others", id);
  if (++meeting.arrived == threads) {
    meeting.arrived = 0;
    meeting.lanes.clear();
    races::complete(meeting.signal, false);
    meeting.any[++meeting.meetings & 1] = false;
  }
}
inline void named_sync(int id, int threads) {
  const long long own = current->block->named[id].meetings;
  named_arrive(id, threads);
  while (current->block->named[id].meetings == own) yield();
  races::acquire(current->block->named[id].signal, current->block->slot, false);
}
inline bool named_or(int id, int threads, bool own) {
  Meeting& meeting = current->block->named[id];
  bool& any = meeting.any[meeting.meetings & 1];
  any = any || own;
  named_sync(id, threads);
  return any;
}
inline int __syncthreads_or(int own) { return named_or(0, 32 * static_cast<int>(current->block->warps.size()), own != 0); }
inline void __syncthreads() { named_sync(0, 32 * static_cast<int>(current->block->warps.size())); }

// The threads of a cluster meet, but for those that have ended.
inline void settle_cluster(Cluster& cluster) {
  if (cluster.arrived > 0 && cluster.arrived == cluster.threads) {
    cluster.arrived = 0;
    races::complete(cluster.signal, false);
    ++cluster.meetings;
    moved = true;
  }
}

inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
template <typename Value>
inline Value __ldg(const Value* place) { return *place; }
inline float4 __ldcs(const float4* place) { return *place; }
template <typename Value>
inline Value __ldcg(const Value* place) { return *place; }
template <typename Value>
inline void __stcg(Value* place, Value value) { *place = value; }
inline void __stcs(uint4* place, uint4 value) { *place = value; }
inline void __stcs(uint2* place, uint2 value) { *place = value; }
inline void __stcs(float4* place, float4 value) { *place = value; }
#define __builtin_assume(said)
inline void __trap() { fail("trap"); }
// Time passes only when nothing else happens, and threads read the clock.
inline long long now = 0;
inline bool clock_read = false;
inline uint32_t order = 0;  // in which warps take turns; 0: one after the other, and what waits gives up only if nothing else can happen
inline uint32_t any_below(uint32_t count) {
  order ^= order << 13, order ^= order >> 17, order ^= order << 5;
  return order % count;
}
inline long long clock64() {
  clock_read = true;
  if (order != 0 && any_below(16) == 0) now += 1ll << 32;
  yield();
  return now;
}
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fdividef(float x, float y) { return x / y; }
inline void __threadfence() { races::fence(); }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline unsigned __float_as_uint(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline int __float_as_int(float x) { return static_cast<int>(__float_as_uint(x)); }
inline float __uint_as_float(unsigned bits) { return value_of<float>(bits); }
inline float __int_as_float(int bits) { return value_of<float>(static_cast<unsigned>(bits)); }

#if RACES
// The compiler sees no accesses in calls.
namespace std {
inline void* checked_memcpy(void* to, const void* from, size_t bytes) {
  races::touch(from, bytes, false);
  races::touch(to, bytes, true);
  return __builtin_memcpy(to, from, bytes);
}
inline void* checked_memset(void* to, int value, size_t bytes) {
  races::touch(to, bytes, true);
  return __builtin_memset(to, value, bytes);
}
}  // namespace std
using std::checked_memcpy;
using std::checked_memset;
#define memcpy checked_memcpy
#define memset checked_memset
#endif
