// Steps of the loader of a backward, and what the warp that rounds dQ clears beforehand, on the host. `visits.inc` and
// `clears.inc` are what the kernel has, `given.inc` what it is given. Prints each step, then the gradient.
#include <vector>

#include "launch.h"
#include "pdl.cuh"
#include "types.cuh"

using Element = bf16;
constexpr int kBlockN = 128, kOwnKeys = 64, kPartial = 1 << 24, kHidden = 1 << 26, kQueryChunk = 8;


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

static void clear_what_no_step_stores() {
  blocks_of_grid = 5;
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
}

int main() {
  kernel = clear_what_no_step_stores;
  for (auto& entry : gradient) entry = 1;
  launch(1, 1, 32);
  std::printf("gradient\n");
  for (const auto entry : gradient) std::putchar('0' + entry);
}
