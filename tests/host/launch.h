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

// Runs so many clusters at once, and their threads until all are done; a warp goes on as long as any lane can. In an `order`
// other than 0 some blocks are slow.
static void launch(int grid, int cluster_blocks, int threads_of_block, int at_once = 1) {
  blocks_of_grid = grid;
  const int blocks_at_once = std::min(at_once * cluster_blocks, grid);
  for (int first = 0; first < grid; first += blocks_at_once) {
    std::vector<Cluster> clusters(at_once, Cluster{{}, cluster_blocks * threads_of_block});
    std::vector<Block*> blocks;
    std::vector<Thread*> threads;
    for (int number = 0; number < std::min(blocks_at_once, grid - first); ++number) {
      Cluster& cluster = clusters[number / cluster_blocks];
      Block* block = new Block{first + number, number % cluster_blocks, number, &cluster, shared_memory_of(number)};
      block->warps.resize(threads_of_block / 32);
#if RACES
      for (int warp = 0; warp < threads_of_block / 32; ++warp) block->warps[warp].actor = races::new_actor("warp", warp, number);
#endif
      cluster.blocks.push_back(block);
      blocks.push_back(block);
      for (int i = 0; i < threads_of_block; ++i) {
        Thread* thread = fiber(threads.size());
        thread->index = {i, 0, 0};
        thread->block = block;
        thread->warp = &block->warps[i / 32];
        thread->lane = i % 32;
        thread->done = false;
        thread->products = thread->copies = thread->stores = 0;
        thread->held.count = 0;
        threads.push_back(thread);
      }
    }
#if RACES
    const std::clock_t last_clock = std::clock() + 10 * CLOCKS_PER_SEC;
    long long turns = 0;
#endif
    std::vector<uint32_t> slowness(blocks.size(), 1);
    for (uint32_t& one : slowness) {
      if (order != 0) one = 1 + any_below(3) * any_below(8);
    }
    const size_t warps_of_block = threads_of_block / 32;
    size_t first_warp = order != 0 ? any_below(threads.size() / 32) : 0;
    bool all_go = true;
    long long rounds = 0, seen = 0;  // in which warps only read again and again, and what they may have seen
    for (bool all_done = false; !all_done;) {
      bool any_moved = clock_read = false, any_polled = false;
      all_done = true;
      bool any_left_out = false;
      for (size_t number = 0; number < threads.size() / 32; ++number) {
        const size_t warp = 32 * ((first_warp + number) % (threads.size() / 32));
        if (!all_go && any_below(slowness[warp / 32 / warps_of_block]) != 0) {
          any_left_out = true;
          all_done = false;
          continue;
        }
        do {
          moved = polled = false;
#if RACES
          if (++turns % 1024 == 0 && std::clock() > last_clock) fail("threads wait for others again and again");
#endif
          for (int lane = 0; lane < 32; ++lane) {
            if (!threads[warp + lane]->done) resume(threads[warp + lane]);
          }
          any_moved = any_moved || (moved && !polled);
          any_polled = any_polled || polled;
        } while (moved && !polled);
        for (int lane = 0; lane < 32; ++lane) all_done = all_done && threads[warp + lane]->done;
      }
      all_go = order == 0 || !any_moved;
      if (order != 0) first_warp = any_below(threads.size() / 32);
      if (any_left_out) continue;
      rounds = any_moved || seen != publications ? 0 : rounds + 1;
      seen = publications;
      if (all_done || any_moved || (any_polled && rounds < 1000)) continue;
      if (!clock_read || blocks_at_once == grid) fail("all threads wait for others");
      now += 1ll << 32;  // who waits for blocks that have not begun gives up
    }
    for (Block* block : blocks) {
#if RACES
      races::end(block->slot);
#endif
      for (auto& [address, barrier] : block->barriers) {
        if (barrier.bytes != 0) fail("a copy that nobody waited for", address);
      }
      delete block;
    }
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
