// A kernel whose blocks know nothing of each other on the host, as a library: `run_blocks` takes what the driver would be
// given.
#include <functional>
#include <memory>
#include <utility>

#include "threads.h"

// Blocks run one after the other, and threads of one only take turns where they wait.
#define __shared__ static
int threads_in_block;
#define blockDim (Dim{threads_in_block, 1, 1})
inline void atomicMax(uint32_t* place, uint32_t value) { *place = max(*place, value); }
inline uint32_t atomicAdd(uint32_t* place, uint32_t value) { return std::exchange(*place, *place + value); }
inline unsigned long long atomicAdd(unsigned long long* place, unsigned long long value) { return std::exchange(*place, *place + value); }
inline int atomicAdd(int* place, int value) { return std::exchange(*place, *place + value); }
inline void atomicOr(uint32_t* place, uint32_t value) { *place |= value; }

#include "kernel.inc"

#ifndef MOST_THREADS
#define MOST_THREADS kThreads
#endif
#ifdef ANY_THREADS  // as many as a call says, up to what was planned
constexpr bool kAnyThreads = true;
#else
constexpr bool kAnyThreads = false;
#endif

Thread* current;
int blocks_of_grid;
bool moved;
jmp_buf scheduler;

static std::function<void()> kernel;
constexpr int kStackBytes = 64 << 10;

// A fiber is used again and again: to begin one costs more than most of what it runs.
static void run_thread() {
  for (;;) {
    kernel();
    current->done = moved = true;
    yield();
  }
}
static std::vector<Thread>& fibers(int count) {
  static std::vector<Thread> all;
  static std::vector<std::unique_ptr<char[]>> stacks;
  if (static_cast<int>(all.size()) < count) {  // never with others running: their contexts move
    all = std::vector<Thread>(count);
    while (static_cast<int>(stacks.size()) < count) stacks.emplace_back(new char[kStackBytes]);
    for (int i = 0; i < count; ++i) {
      getcontext(&all[i].context);
      all[i].context.uc_stack.ss_sp = stacks[i].get();
      all[i].context.uc_stack.ss_size = kStackBytes;
      makecontext(&all[i].context, run_thread, 0);
    }
  }
  return all;
}

template <typename... Arguments, size_t... kIndices>
static void take(void (*function)(Arguments...), void** parameters, std::index_sequence<kIndices...>) {
  kernel = [=] { function(*static_cast<Arguments*>(parameters[kIndices])...); };
}
template <typename... Arguments>
static void take(void (*function)(Arguments...), void** parameters) {
  take(function, parameters, std::index_sequence_for<Arguments...>());
}

// Runs blocks one after the other, the last one first. `parameters` are addresses of the kernel's parameters, in order.
extern "C" void run_blocks(int grid, int threads_of_block, void** parameters) {
  const bool planned = kAnyThreads ? threads_of_block % 32 == 0 && threads_of_block <= MOST_THREADS : threads_of_block == MOST_THREADS;
  if (!planned) fail("another number of threads than planned", threads_of_block);
  threads_in_block = threads_of_block;
  take(KERNEL, parameters);
  blocks_of_grid = grid;
  std::vector<Thread>& threads = fibers(threads_of_block);
  static char* const memory = static_cast<char*>(std::aligned_alloc(1024, kSharedBytes));
  for (int index = grid - 1; index >= 0; --index) {
    Cluster cluster{{}, threads_of_block};
    Block block{index, 0, 0, &cluster, static_cast<char*>(std::memset(memory, 0xff, kSharedBytes))};
    cluster.blocks = {&block};
    block.warps.resize(threads_of_block / 32);
    for (int i = 0; i < threads_of_block; ++i) {
      Thread& thread = threads[i];
      thread.index = {i, 0, 0};
      thread.block = &block;
      thread.warp = &block.warps[i / 32];
      thread.lane = i % 32;
      thread.done = false;
    }
    for (bool all_done = false; !all_done;) {
      moved = false;
      all_done = true;
      for (int i = 0; i < threads_of_block; ++i) {
        if (!threads[i].done) resume(&threads[i]);
        all_done = all_done && threads[i].done;
      }
      if (!all_done && !moved) fail("all threads wait for others");
    }
  }
}
