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
  ++cluster.arrived;
  settle_cluster(cluster);
}
inline void wait_cluster() {
  while (current->block->cluster->meetings == current->cluster_meeting) yield();
}
inline void leave_cluster() {
  arrive_cluster();
  wait_cluster();
}
template <typename Value>
inline const Value* mapped(const Value* place, uint32_t rank) {
  return reinterpret_cast<const Value*>(place_of_address(mapped(address_of(place), rank)));
}
