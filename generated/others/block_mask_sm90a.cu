// block_mask_sm90a
//
// A block mask: which blocks of keys the list of each block of queries names.
// Rendered by `attngen build tests/render/others.yaml`, schedule block_mask.
//
// A warp has a row: it clears its bytes in shared memory, sets those that the list names, and writes them 16 at once. A row
// of more than 2048 blocks of keys takes several passes over the list.
#include "pdl.cuh"
#include "divisor.cuh"

constexpr int kThreads = 256;
constexpr int kRows = 8;  // of a block, a warp each
constexpr int kBytes = 2048;  // of a pass
constexpr int kTogether = 4;  // entries that a lane loads at once
constexpr int kVector = sizeof(uint4);

extern "C" __global__ void __launch_bounds__(kThreads) block_mask_sm90a(
    const int* indices_ptr, const int* counts_ptr, unsigned char* out_ptr,
    int stride_indices_b, int stride_indices_h, int stride_indices_q, int stride_indices_entry,
    int stride_counts_b, int stride_counts_h, int stride_counts_q,
    int rows, int capacity, int key_blocks, int heads, int query_blocks, int heads_reciprocal,
    int query_blocks_reciprocal
) {
  __shared__ uint4 shared_rows[kRows][kBytes / kVector];
  launch_dependents();
  const int lane = threadIdx.x % 32, row = blockIdx.x * kRows + threadIdx.x / 32;
  const Divisor of_queries(query_blocks, query_blocks_reciprocal), of_heads(heads, heads_reciprocal);
  const int unit = of_queries.quotient(row), q = row - unit * query_blocks, b = of_heads.quotient(unit), h = unit - b * heads;
  const auto at = [](int steps, int stride) { return static_cast<long long>(steps) * stride; };
  const int* const list = indices_ptr + at(b, stride_indices_b) + at(h, stride_indices_h) + at(q, stride_indices_q);
  const int* const counted = counts_ptr + at(b, stride_counts_b) + at(h, stride_counts_h) + at(q, stride_counts_q);
  unsigned char* const out = out_ptr + at(row, key_blocks);
  uint4* const vectors = shared_rows[threadIdx.x / 32];
  unsigned char* const bytes = reinterpret_cast<unsigned char*>(vectors);

  wait_dependencies();  // nothing in global memory is read or written before
  if (row >= rows) return;
  int entries[kTogether];
  // Those that do not count, too: the first ones come while their number does.
  const auto load = [&](int first) {
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      const int i = first + 32 * j + lane;
      if (i < capacity) entries[j] = list[at(i, stride_indices_entry)];
    }
  };
  load(0);
  const int count = counts_ptr == nullptr ? capacity : min(*counted, capacity);

  // Vectors begin at multiples of 16 bytes, so that the first one may begin in the row before.
  const int before = static_cast<int>(reinterpret_cast<uint64_t>(out) % kVector);
  for (int pass = -before; pass < key_blocks; pass += kBytes) {
    const int end = min(pass + kBytes, key_blocks), least = max(pass, 0);
#pragma unroll 1
    for (int i = lane; pass + kVector * i < end; i += 32) vectors[i] = {0, 0, 0, 0};
    __syncwarp();
#pragma unroll 1
    for (int first = 0; first < count; first += 32 * kTogether) {
      if (first > 0 || pass > 0) load(first);
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        const bool counts = first + 32 * j + lane < count;
        if (counts && entries[j] >= least && entries[j] < end) bytes[entries[j] - pass] = 1;
      }
    }
    __syncwarp();
#pragma unroll 1
    for (int i = lane; pass + kVector * i < end; i += 32) {
      const int to = pass + kVector * i;
      if (to >= 0 && to + kVector <= key_blocks) {
        *reinterpret_cast<uint4*>(out + to) = vectors[i];
      } else {
#pragma unroll 1
        for (int j = max(to, 0); j < min(to + kVector, key_blocks); ++j) out[j] = bytes[j - pass];
      }
    }
    __syncwarp();
  }
}
