// Order of events by barriers alone: each access to shared memory, and to what blocks write of global memory, is checked
// against those that no barrier, and no release that somebody acquires, orders it with, in whatever order the fibers of a run took turns. Vector clocks, as of Flanagan and Freund 2009, "FastTrack".
//
// An actor does one thing after the other: a warp, or a queue of what warps have issued (products, copies, stores), whose
// numbers count from 1. A signal passes on what its arrivals know: an mbarrier, a named barrier, or that of a cluster. So
// does a word of global memory that is written by an atomic operation which releases, to one which acquires.
// Without RACES nothing is checked.
#pragma once

#include <cstddef>
#include <cstdint>

#ifndef RACES
#define RACES 0
#endif

namespace races {

// Registers of a lane that products read or write until they are waited for. No instrumented code changes it.
struct Registers {
  static constexpr int kMost = 128;
  struct Held {
    const char *first, *end;
    bool written;
    uint32_t group;
  } all[kMost];
  int count = 0;
};

#if RACES
[[noreturn]] void fail(const char* what, long long number);
char* memory_of(int block);                  // its shared memory, and nothing known about it
int new_actor(const char* kind, int number, int block);
void resume(int actor, Registers& lane);  // a warp whose accesses follow, and registers of its lane
// The one kept in a place, new the first time; `writes`: to global memory, too.
int actor_of(int& place, const char* kind, int number, int block, bool writes = false);

void arrive(int& signal, int block);         // the warp passes on what it knows
void arrive_later(int& signal, int block, int queue, uint32_t number);  // and what it has issued, up to a number
void complete(int& signal, bool parity);     // those who wait learn of all arrivals; `parity`: they must not come too late
void acquire(int& signal, int block, bool parity);
void finish(int queue, uint32_t number);     // the warp knows that a queue has done this much
void finish_written(int queue, uint32_t number);  // and that it is in global memory, too
void fence();                                // orders atomic operations around it, as a release and an acquire
void add(float* to, float number);           // in no order with other additions
void hold(Registers& lane, const void* first, size_t bytes, bool written, uint32_t group);
void let_go(Registers& lane, uint32_t group);  // of groups up to this one
void end(int block);              // after all warps: nothing may reach a block that has left

// Accesses in this scope are those of a queue, issued by the warp; number 0: those of copies to an mbarrier.
struct As {
  explicit As(int queue, uint32_t number);
  static As copies(int& signal, int block);
  ~As();
  As(const As&) = delete;
};
void touch(const void* place, size_t bytes, bool writes);
#else
inline void resume(int, Registers&) {}
inline void arrive(int&, int) {}
inline void complete(int&, bool) {}
inline void acquire(int&, int, bool) {}
inline void fence() {}
inline void add(float* to, float number) { *to += number; }
#endif

}  // namespace races
