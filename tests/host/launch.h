// Launches of a kernel whose blocks may form clusters: every thread of a cluster is a fiber. One program includes this, once.
#pragma once

#include <ctime>
#include <functional>

#include "threads.h"

Thread* current;
int blocks_of_grid;
bool moved;
jmp_buf scheduler;

static std::function<void()> kernel;
constexpr int kStackBytes = 96 << 10;

// A fiber is used again and again: to begin one costs more than to run a small kernel.
static void run_thread() {
  for (;;) {
    kernel();
    current->done = moved = true;
    --current->block->cluster->threads;
    settle_cluster(*current->block->cluster);
    yield();
  }
}
static Thread* fiber(size_t index) {
  static std::vector<Thread*> all;
  if (index == all.size()) {
    all.push_back(new Thread{});
    all[index]->stack = std::malloc(kStackBytes);
  }
  Thread* thread = all[index];
  if (!thread->done) {  // new, or left by a run that failed
    getcontext(&thread->context);
    thread->context.uc_stack.ss_sp = thread->stack;
    thread->context.uc_stack.ss_size = kStackBytes;
    makecontext(&thread->context, run_thread, 0);
    thread->started = false;
  }
  return thread;
}
static char* shared_memory_of(size_t index) {
#if RACES
  return static_cast<char*>(__builtin_memset(races::memory_of(static_cast<int>(index)), 0xff, kSharedBytes));
#endif
  static std::vector<char*> all;
  if (index == all.size()) all.push_back(static_cast<char*>(std::aligned_alloc(1024, kSharedBytes)));
  return static_cast<char*>(std::memset(all[index], 0xff, kSharedBytes));
}

// Runs so many clusters at once, and another one when all threads of one are done; a warp goes on as long as any lane can.
// In an `order` other than 0 clusters begin in any order, and some are slow.
static void launch(int grid, int cluster_blocks, int threads_of_block, int at_once = 1) {
  blocks_of_grid = grid;
  const int warps_of_block = threads_of_block / 32;
  std::vector<int> waiting(grid / cluster_blocks);  // clusters that have not begun, the next one last
  for (size_t i = 0; i < waiting.size(); ++i) waiting[i] = static_cast<int>(waiting.size() - 1 - i);
  for (size_t i = waiting.size(); order != 0 && i > 1; --i) std::swap(waiting[i - 1], waiting[any_below(i)]);
  at_once = std::min(at_once, static_cast<int>(waiting.size()));
  std::vector<Cluster> clusters(at_once);
  std::vector<Block*> blocks(at_once * cluster_blocks);
  std::vector<Thread*> threads(blocks.size() * threads_of_block);
  std::vector<uint32_t> slowness(blocks.size());
  const auto begin = [&](int slot) {
    clusters[slot] = {{}, cluster_blocks * threads_of_block};
    for (int rank = 0; rank < cluster_blocks; ++rank) {
      const int number = slot * cluster_blocks + rank;
      Block* block = new Block{waiting.back() * cluster_blocks + rank, rank, number, &clusters[slot], shared_memory_of(number)};
      block->warps.resize(warps_of_block);
#if RACES
      for (int warp = 0; warp < warps_of_block; ++warp) block->warps[warp].actor = races::new_actor("warp", warp, number);
#endif
      clusters[slot].blocks.push_back(block);
      blocks[number] = block;
      slowness[number] = order != 0 ? 1 + any_below(3) * any_below(8) : 1;
      for (int i = 0; i < threads_of_block; ++i) {
        Thread* thread = fiber(number * threads_of_block + i);
        thread->index = {i, 0, 0};
        thread->block = block;
        thread->warp = &block->warps[i / 32];
        thread->lane = i % 32;
        thread->done = false;
        thread->products = thread->copies = thread->stores = 0;
        thread->held.count = 0;
        threads[number * threads_of_block + i] = thread;
      }
    }
    waiting.pop_back();
  };
  const auto end = [&](int slot) {
    for (Block* block : clusters[slot].blocks) {
#if RACES
      races::end(block->slot);
#endif
      for (auto& [address, barrier] : block->barriers) {
        if (barrier.bytes != 0) fail("a copy that nobody waited for", address);
      }
      delete block;
    }
    clusters[slot].blocks.clear();
  };
  for (int slot = 0; slot < at_once; ++slot) begin(slot);
#if RACES
  const std::clock_t last_clock = std::clock() + 10 * CLOCKS_PER_SEC;
  long long turns = 0;
#endif
  const size_t warps = threads.size() / 32;
  size_t first_warp = order != 0 ? any_below(warps) : 0;
  bool all_go = true;
  long long rounds = 0, seen = 0;  // in which warps only read again and again, and what they may have seen
  for (int running = at_once; running > 0;) {
    bool any_moved = clock_read = false, any_polled = false, any_left_out = false;
    for (size_t number = 0; number < warps; ++number) {
      const size_t warp = (first_warp + number) % warps;
      if (clusters[warp / warps_of_block / cluster_blocks].threads == 0) continue;
      if (!all_go && any_below(slowness[warp / warps_of_block]) != 0) {
        any_left_out = true;
        continue;
      }
      do {
        moved = polled = false;
#if RACES
        if (++turns % 1024 == 0 && std::clock() > last_clock) fail("threads wait for others again and again");
#endif
        for (size_t thread = 32 * warp; thread < 32 * warp + 32; ++thread) {
          if (!threads[thread]->done) resume(threads[thread]);
        }
        any_moved = any_moved || (moved && !polled);
        any_polled = any_polled || polled;
      } while (moved && !polled);
    }
    for (int slot = 0; slot < at_once; ++slot) {
      if (clusters[slot].threads > 0 || clusters[slot].blocks.empty()) continue;
      end(slot);
      any_moved = true;
      if (waiting.empty()) --running;
      else begin(slot);
    }
    all_go = order == 0 || !any_moved;
    if (order != 0) first_warp = any_below(warps);
    if (any_left_out) continue;
    rounds = any_moved || seen != publications ? 0 : rounds + 1;
    seen = publications;
    if (any_moved || (any_polled && rounds < 1000)) continue;
    if (!clock_read || waiting.empty()) fail("all threads wait for others");
    now += 1ll << 32;  // who waits for blocks that have not begun gives up
  }
}

static float random_number() {
  static uint32_t state = 1;
  float sum = 0.0f;
  for (int i = 0; i < 4; ++i) {
    state = state * 1664525u + 1013904223u;
    sum += (state >> 8) / 16777216.0f;
  }
  return (sum - 2.0f) * 1.7f;
}
