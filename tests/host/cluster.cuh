// Blocks of a cluster: ranks, barriers, and each other's shared memory.
#pragma once

#include "tma.cuh"

inline uint32_t cluster_size() { return current->block->cluster->blocks.size(); }
inline uint32_t cluster_rank() { return current->block->rank; }
inline uint32_t mapped(uint32_t address, uint32_t rank) { return (address & ((1u << kRankBits) - 1)) | rank << kRankBits; }
inline void arrive_cluster() {
  Cluster& cluster = *current->block->cluster;
  current->cluster_meeting = cluster.meetings;
  moved = true;
  races::arrive(cluster.signal, current->block->slot);
  ++cluster.arrived;
  settle_cluster(cluster);
}
inline void wait_cluster() {
  while (current->block->cluster->meetings == current->cluster_meeting) yield();
  races::acquire(current->block->cluster->signal, current->block->slot, false);
}
inline void sync_cluster() {
  arrive_cluster();
  wait_cluster();
}
inline void leave_cluster() { sync_cluster(); }
inline void arrive_at(uint32_t barrier, uint32_t rank) { arrive(mapped(barrier, rank)); }
template <typename... Coordinates>
inline void load_box_to(uint32_t blocks, uint32_t to, const TensorMap& map, uint32_t full, Coordinates... coordinates) {
  for (uint32_t rank = 0; blocks >> rank; ++rank) {
    if (blocks >> rank & 1) load_box(mapped(to, rank), map, mapped(full, rank), coordinates...);
  }
}
template <typename Value>
inline const Value* mapped(const Value* place, uint32_t rank) {
  return reinterpret_cast<const Value*>(place_of_address(mapped(address_of(place), rank)));
}
inline void copy_to(uint32_t rank, uint32_t to, uint32_t from, uint32_t bytes, uint32_t full) {
  {
    const Copying copying(mapped(full, rank));
    std::memcpy(place_of_address(mapped(to, rank)), place_of_address(from), bytes);
  }
  land(mapped(full, rank), bytes);
}
inline void add_floats(float* to, float a, float b, float c, float d) {
  const float four[4] = {a, b, c, d};
  for (int i = 0; i < 4; ++i) races::add(to + i, four[i]);
}
inline void store_to(uint32_t rank, uint32_t to, uint32_t value) { std::memcpy(place_of_address(mapped(to, rank)), &value, 4); }
