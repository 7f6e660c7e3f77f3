// Sums that go from registers to the shared memory of another block of the cluster.
#pragma once

#include "cluster.cuh"

inline void send_float4(uint32_t to, uint32_t full, float a, float b, float c, float d) {
  const float four[4] = {a, b, c, d};
  {
    const Copying copying(full);
    std::memcpy(place_of_address(to), four, sizeof(four));
  }
  land(full, sizeof(four));
}

inline void arrive_once_loaded(uint32_t barrier, uint32_t, int lane) {
  __syncwarp();
  if (lane == 0) arrive(barrier);
}
