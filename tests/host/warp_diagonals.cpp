// Sums of diagonals by the warp that has the terms as accumulators, on the host. `given.inc` says how many queries a step has,
// where its first query and key are apart, the terms of all steps, and which entry a diagonal adds to.
#include "launch.h"
#include "types.cuh"

#include "tensor_gradient.inc"

#include "given.inc"

static float own[kDiagonals], shared[kEntries];

static void warp() {
  using Diagonals = DiagonalsOfWarp<kQueries>;
  const int lane = current->lane;
  SharedEntry kept;
  for (int step = 0; step < kSteps; ++step) {
    const auto term = [&](int query, int key) { return terms[(step * kQueries + query) * 16 + key]; };
    Diagonals diagonals;
    for (int eight = 0; eight < kQueries / 8; ++eight) {
      const int query = 8 * eight + 2 * (lane % 4), key = lane / 4;
      diagonals.next(
          eight, {term(query, key), term(query + 1, key)}, {term(query, key + 8), term(query + 1, key + 8)}, lane);
    }
    diagonals.end(lane);
    int entries[Diagonals::kParts];
    float sums[Diagonals::kParts];
    for (int i = 0; i < Diagonals::kParts; ++i) {
      const int apart = firsts[step] + diagonals.number(i, lane);
      add_to_entry(own, apart + kBefore, diagonals.sums[i]);
      entries[i] = entry_of(apart), sums[i] = diagonals.sums[i];
    }
    add_to_shared_entries(shared, kept, entries, sums, lane);
  }
  kept.leave(shared, lane);
}

int main() {
  kernel = warp;
  launch(1, 1, 32);
  for (float x : own) std::printf("%.9g ", x);
  std::printf("\n");
  for (float x : shared) std::printf("%.9g ", x);
  std::printf("\n");
}
