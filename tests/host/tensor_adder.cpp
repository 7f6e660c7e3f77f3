// The warp of a backward that adds up gradients from tiles of dS, on the host. `role.inc` is what the kernel has, and
// `given.inc` what it is given: its arguments, the steps, and a number of 16 bits for each pair of each step.
#include <vector>

#include "launch.h"
#include "types.cuh"

#include "tensor_gradient.inc"


constexpr uint32_t kDs = 4096, kDsStep = 1024, kDsBoxBytes = 128;
struct DsStep {
  int tile, h, b, hk, kv_start;
  int q_begin, k_begin, seqlen_q, seqlen_k;
};

#include "given.inc"

constexpr int kBlockN = kDsKeys, kFirstDs = 1;
constexpr uint32_t here = 0;  // shared memory of a block of a cluster
constexpr uint32_t kDsBytes = kBlockM * kBlockN * 2;

template <typename Value>
Value& shared_at(uint32_t address) {
  return *reinterpret_cast<Value*>(place_of_address(address));
}

static int taken = 0;  // steps
struct DsRing {
  int stage;
  uint32_t phase;
  DsRing(int stage, uint32_t phase, uint32_t = here) : stage(stage), phase(phase) {}
  void wait() const {
    if (stage != (taken + 1) % 2 || phase != (taken / 2 & 1)) fail("waits for another tile", taken);
    __syncwarp();
    if (current->lane == 0) {
      std::memset(&shared_at<char>(kDs + (stage ^ 1) * kDsBytes), 0xff, kDsBytes);  // NaN: the other tile is written again
      shared_at<DsStep>(kDsStep + stage * sizeof(DsStep)) = taken < kSteps ? steps[taken] : DsStep{-1};
      for (int row = 0; taken < kSteps && row < kBlockM; ++row) {
        for (int key = 0; key < kBlockN; ++key) {
          const uint32_t chunk = key / 8 % 8 ^ row % 8;
          const uint32_t to = kDs + stage * kDsBytes + key / 64 * kBlockM * kDsBoxBytes + row * kDsBoxBytes + 16 * chunk + 2 * (key % 8);
          shared_at<uint16_t>(to) = pairs[(taken * kBlockM + row) * kBlockN + key];
        }
      }
    }
    __syncwarp();
    if (current->lane == 31) ++taken;
    __syncwarp();
  }
  void release() const {}
};
inline uint32_t not_hoisted(uint32_t x) { return x; }
inline float divide_approx(float a, float b) { return a / b; }

static void role() {
  const int lane = current->lane;
#include "role.inc"
}

int main() {
  kernel = role;
  launch(1, 1, 32);
  print_gradients();
}
