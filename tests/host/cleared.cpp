// Steps of the loader of a backward, and what the warp that rounds dQ clears beforehand, on the host. `visits.inc` and
// `clears.inc` are what the kernel has, `given.inc` what it is given. Prints each step, then the gradient.
#include <vector>

#include "types.cuh"

using Element = bf16;
constexpr int kBlockN = 128, kOwnKeys = 64, kPartial = 1 << 24, kHidden = 1 << 26, kQueryChunk = 8;

Thread* current;
int blocks_of_grid;
bool moved;
jmp_buf scheduler;

#include "given.inc"

static void loader(int unit, int kv_tile) {
  const int lane = current->lane, part = -1, parts = 1;
  const int b = unit / kv_heads, hk = unit % kv_heads, kv_start = kv_tile * kBlockN, seqlen_k = max_seqlen_k;
  const int q_begin = b * seqlen_q, k_begin = b * seqlen_k;
  const auto load_step = [&](int h, int tile, auto...) {
    if (lane == 0) std::printf("%d %d %d %d\n", b, h, kv_tile, tile);
  };
#include "visits.inc"
}

static void rounder() {
  const int lane = current->lane;
#include "clears.inc"
}

static void run_thread() {
  for (int unit = 0; unit < batch * kv_heads; ++unit) {
    for (int kv_tile = 0; kv_tile < kv_tiles; ++kv_tile) {
      loader(unit, kv_tile);
      __syncwarp();
    }
  }
  for (int block = 0; block < blocks_of_grid; ++block) {
    if (current->lane == 0) current->block->index = block;
    __syncwarp();
    rounder();
    __syncwarp();
  }
  current->done = moved = true;
  for (;;) yield();
}

int main() {
  blocks_of_grid = 5;
  for (uint16_t& entry : gradient) entry = 1;
  Cluster cluster{{}, 32};
  Block* block = new Block{0, 0, &cluster, static_cast<char*>(std::aligned_alloc(1024, kSharedBytes))};
  block->warps.resize(1);
  cluster.blocks.push_back(block);
  std::vector<Thread*> threads;
  for (int i = 0; i < 32; ++i) {
    Thread* thread = new Thread{};
    getcontext(&thread->context);
    thread->context.uc_stack.ss_sp = std::malloc(96 << 10);
    thread->context.uc_stack.ss_size = 96 << 10;
    makecontext(&thread->context, run_thread, 0);
    thread->index = {i, 0, 0};
    thread->block = block;
    thread->warp = &block->warps[0];
    thread->lane = i;
    threads.push_back(thread);
  }
  for (bool all = false; !all;) {
    all = true;
    moved = false;
    for (Thread* thread : threads) {
      if (thread->done) continue;
      all = false;
      resume(thread);
    }
    if (!all && !moved) fail("all wait");
  }
  std::printf("gradient\n");
  for (uint16_t entry : gradient) std::putchar('0' + entry);
}
