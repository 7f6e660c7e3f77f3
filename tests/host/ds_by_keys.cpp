// The warps of a block, one after the other, that add up gradients from a tile of dS with keys by rows, on the host.
// `given.inc` has the tile's format, and a number of 16 bits for each query of each key.
#include <vector>

#include "launch.h"
#include "mma.cuh"

#include "tensor_gradient.inc"
#include "swizzled.inc"
#include "ds_by_keys.inc"

#include "given.inc"

using Tile = DsByKeys<Element, kKeys, kQueries, kBytes, kWarps>;
static float sum_of_all, of_diagonals[kKeys + kQueries + 256], of_queries[kQueries], of_blocks[3][kKeys * kQueries / 64], copied[kQueries][kKeys];

static void add_up() {
  const Tile tile = {kSharedStart};
  const int lane = current->lane;
  for (int key = lane; key < kKeys; key += 32) {
    for (int query = 0; query < kQueries; ++query) {
      std::memcpy(place_of_address(tile.at(key, query) + 2 * (query % 8)), &pairs[key * kQueries + query], 2);
    }
  }
  __syncwarp();
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
    tile.each_sum_of_block<8, 8>(warp, lane, [&](int query, int key, float sum) { of_blocks[0][key / 8 * (kQueries / 8) + query / 8] += sum; });
    tile.each_sum_of_block<kQueries, 16>(warp, lane, [&](int, int key, float sum) { of_blocks[1][key / 16] += sum; });
    tile.each_sum_of_block<16, kKeys>(warp, lane, [&](int query, int, float sum) { of_blocks[2][query / 16] += sum; });
    __syncwarp();
  }
}

int main() {
  kernel = add_up;
  launch(1, 1, 32);
  std::printf("%.9g\n", sum_of_all);
  for (int i = 1; i < kKeys + kQueries; ++i) std::printf("%.9g ", of_diagonals[i]);
  std::printf("\n");
  for (float sum : of_queries) std::printf("%.9g ", sum);
  std::printf("\n");
  for (auto& row : copied) {
    for (float x : row) std::printf("%.9g ", x);
  }
  std::printf("\n");
  for (auto& blocks : of_blocks) {
    for (float sum : blocks) std::printf("%.9g ", sum);
    std::printf("\n");
  }
}
