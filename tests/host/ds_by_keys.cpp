// The warps of a block, one after the other, that add up gradients from a tile of dS with keys by rows, on the host.
// `given.inc` has the tile's format, and a number of 16 bits for each query of each key.
#include <vector>

#include "mma.cuh"

#include "tensor_gradient.inc"
#include "swizzled.inc"
#include "ds_by_keys.inc"

Thread* current;
int blocks_of_grid;
bool moved;
jmp_buf scheduler;

#include "given.inc"

using Tile = DsByKeys<Element, kKeys, kQueries, kBytes, kWarps>;
static float sum_of_all, of_diagonals[kKeys + kQueries + 256], of_queries[kQueries], copied[kQueries][kKeys];

static void run_thread() {
  const Tile tile = {kSharedStart};
  const int lane = current->lane;
  for (int warp = 0; warp < kWarps; ++warp) {
    const float sum = tile.sum(warp, lane);
    if (lane == 0) sum_of_all += sum;
    tile.each_diagonal(warp, lane, [&](int diagonal, float sum) {
      if (sum != 0.0f) of_diagonals[diagonal + kKeys] += sum;
    });
    tile.each_query(warp, lane, [&](int query, float sum) { of_queries[query] += sum; });
    tile.each_block(warp, lane, [&](int query, int key, uint32_t (&pairs)[4]) {
      for (int i = 0; i < 4; ++i) {
        const float2 both = unpack<Element>(pairs[i]);
        copied[query][key + 8 * i + 2 * (lane % 4)] += both.x;
        copied[query][key + 8 * i + 2 * (lane % 4) + 1] += both.y;
      }
    });
    __syncwarp();
  }
  current->done = moved = true;
  for (;;) yield();
}

int main() {
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
  current = threads[0];
  const Tile tile = {kSharedStart};
  for (int key = 0; key < kKeys; ++key) {
    for (int query = 0; query < kQueries; ++query) {
      std::memcpy(place_of_address(tile.at(key, query) + 2 * (query % 8)), &pairs[key * kQueries + query], 2);
    }
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
  std::printf("%.9g\n", sum_of_all);
  for (int i = 1; i < kKeys + kQueries; ++i) std::printf("%.9g ", of_diagonals[i]);
  std::printf("\n");
  for (float sum : of_queries) std::printf("%.9g ", sum);
  std::printf("\n");
  for (auto& row : copied) {
    for (float x : row) std::printf("%.9g ", x);
  }
  std::printf("\n");
}
