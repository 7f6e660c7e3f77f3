// Tiles of queries of many sequences, one after the other.
#pragma once

#include "types.cuh"

// Tiles of `kQueries` packed queries, numbered through all sequences: the first one that may be of sequence b, whose queries
// begin at a row. Each sequence has as many as its queries need, or one more.
template <int kQueries>
__device__ __forceinline__ int first_tile_of(int q_begin, int b) {
  return (q_begin + b * (kQueries - 1)) / kQueries;
}

// The sequence of a tile: the last one whose first tile is not behind it. All lanes of a warp ask for the same.
template <int kQueries>
__device__ __forceinline__ int sequence_of_tile(const int* cu_seqlens_q, int batch, int tile) {
  const int lane = threadIdx.x % 32;
  int low = 0, high = batch - 1;  // the sequence is one of these
  while (low < high) {
    const int step = (high - low + 31) / 32, probe = low + (lane + 1) * step;
    const bool begun = probe <= high && first_tile_of<kQueries>(cu_seqlens_q[probe], probe) <= tile;
    low += __popc(__ballot_sync(~0u, begun)) * step;
    high = min(low + step - 1, high);
  }
  return low;
}
