// A kernel whose blocks know nothing of each other on the host, as a library: `run_blocks` takes what the driver would be
// given.
#include <functional>
#include <utility>

#include "threads.h"

// Blocks run one after the other, and threads of one only take turns where they wait.
#define __shared__ static
int threads_in_block;
#define blockDim (Dim{threads_in_block, 1, 1})
inline void atomicMax(uint32_t* place, uint32_t value) { *place = max(*place, value); }

#include "kernel.inc"

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

static void run_thread() {
  kernel();
  current->done = moved = true;
  yield();
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
  const bool planned = kAnyThreads ? threads_of_block % 32 == 0 && threads_of_block <= kThreads : threads_of_block == kThreads;
  if (!planned) fail("another number of threads than planned", threads_of_block);
  threads_in_block = threads_of_block;
  take(KERNEL, parameters);
  blocks_of_grid = grid;
  std::vector<char> stacks(static_cast<size_t>(threads_of_block) * kStackBytes);
  for (int index = grid - 1; index >= 0; --index) {
    Cluster cluster{{}, threads_of_block};
    Block block{index, 0, &cluster, nullptr};
    block.warps.resize(threads_of_block / 32);
    std::vector<Thread> threads(threads_of_block);
    for (int i = 0; i < threads_of_block; ++i) {
      Thread& thread = threads[i];
      thread.index = {i, 0, 0};
      thread.block = &block;
      thread.warp = &block.warps[i / 32];
      thread.lane = i % 32;
      getcontext(&thread.context);
      thread.context.uc_stack.ss_sp = stacks.data() + static_cast<size_t>(i) * kStackBytes;
      thread.context.uc_stack.ss_size = kStackBytes;
      makecontext(&thread.context, run_thread, 0);
    }
    for (bool all_done = false; !all_done;) {
      moved = false;
      all_done = true;
      for (Thread& thread : threads) {
        if (!thread.done) resume(&thread);
        all_done = all_done && thread.done;
      }
      if (!all_done && !moved) fail("all threads wait for others");
    }
  }
}
