// topk_sm90a_short
//
// Indices of the k largest scores of each short row, ascending; of equal scores the lower indices.
// Rendered by `attngen build tests/render/others.yaml`, schedule topk_short.
//
// A warp has a row, of which each lane holds every 32nd score. The k-th largest is found bit by bit, from the highest on: how
// many scores are as large is a sum over the lanes; a bound that k of them reach is enough. Indices are written as votes count those before them.
#include "pdl.cuh"
#include "slots.cuh"
#include "topk.cuh"

constexpr int kRows = 8;  // of a block, one for each warp

// Writes the indices of the k largest of at most 32 `kValues` scores, or their slots in a cache.
template <int kValues>
__device__ __forceinline__ void select_in_warp(const float* scores, int length, int k, int* out, const Slots& slot_of) {
  const int lane = threadIdx.x % 32;
  uint32_t keys[kValues];
#pragma unroll
  for (int i = 0; i < kValues; ++i) keys[i] = 32 * i + lane < length ? key_of(scores[32 * i + lane]) : 0;
  const auto count_from = [&](uint32_t bound) {
    int count = 0;
#pragma unroll
    for (int i = 0; i < kValues; ++i) count += keys[i] >= bound;
    return __reduce_add_sync(~0u, count);
  };
  uint32_t bound = kKeyOfMinusInfinity + 1;  // -inf is never selected
  int equal = 32 * kValues;  // of those that equal the bound, how many are selected
  if (count_from(bound) > k) {
    bound = 0;
    for (uint32_t bit = 1u << 31; bit > 0; bit >>= 1) {
      const int count = count_from(bound | bit);
      if (count >= k) bound |= bit;
      if (count == k) break;
    }
    equal = bound == ~0u ? k : k - count_from(bound + 1);
  }
  const uint32_t lower_lanes = (1u << lane) - 1;
  int written = 0;
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    const uint32_t ties = __ballot_sync(~0u, keys[i] == bound);
    const bool selected = keys[i] > bound || (keys[i] == bound && __popc(ties & lower_lanes) < equal);
    equal -= __popc(ties);
    const uint32_t votes = __ballot_sync(~0u, selected);
    if (selected) out[written + __popc(votes & lower_lanes)] = slot_of(32 * i + lane);
    written += __popc(votes);
  }
  for (int i = written + lane; i < k; i += 32) out[i] = -1;
}
// Rows of at most 256 scores.
extern "C" __global__ void __launch_bounds__(32 * kRows) topk_sm90a_short(
    const float* scores_ptr, const int* lengths_ptr, const int* page_table_ptr, const int* cu_seqlens_q_ptr,
    int* out_ptr,
    long long stride_scores,
    long long page_table_stride,
    long long stride_out,
    int columns, int k, int batch, int queries, int page_size, int page_size_reciprocal, int rows
) {
  launch_dependents();
  wait_dependencies();  // nothing in global memory is read or written before
  const int row = blockIdx.x * kRows + threadIdx.x / 32;
  if (row >= rows) return;
  const int length = lengths_ptr == nullptr ? columns : max(0, min(lengths_ptr[row], columns));
  const Slots slot_of(page_table_ptr, page_table_stride, cu_seqlens_q_ptr, batch, row, queries, page_size, page_size_reciprocal);
  select_in_warp<8>(scores_ptr + row * stride_scores, length, k, out_ptr + row * stride_out, slot_of);
}
// Rows of at most 1024 scores.
extern "C" __global__ void __launch_bounds__(32 * kRows) topk_sm90a_short_wide(
    const float* scores_ptr, const int* lengths_ptr, const int* page_table_ptr, const int* cu_seqlens_q_ptr,
    int* out_ptr,
    long long stride_scores,
    long long page_table_stride,
    long long stride_out,
    int columns, int k, int batch, int queries, int page_size, int page_size_reciprocal, int rows
) {
  launch_dependents();
  wait_dependencies();  // nothing in global memory is read or written before
  const int row = blockIdx.x * kRows + threadIdx.x / 32;
  if (row >= rows) return;
  const int length = lengths_ptr == nullptr ? columns : max(0, min(lengths_ptr[row], columns));
  const Slots slot_of(page_table_ptr, page_table_stride, cu_seqlens_q_ptr, batch, row, queries, page_size, page_size_reciprocal);
  select_in_warp<32>(scores_ptr + row * stride_scores, length, k, out_ptr + row * stride_out, slot_of);
}
// Rows of at most 2048 scores.
extern "C" __global__ void __launch_bounds__(32 * kRows) topk_sm90a_short_widest(
    const float* scores_ptr, const int* lengths_ptr, const int* page_table_ptr, const int* cu_seqlens_q_ptr,
    int* out_ptr,
    long long stride_scores,
    long long page_table_stride,
    long long stride_out,
    int columns, int k, int batch, int queries, int page_size, int page_size_reciprocal, int rows
) {
  launch_dependents();
  wait_dependencies();  // nothing in global memory is read or written before
  const int row = blockIdx.x * kRows + threadIdx.x / 32;
  if (row >= rows) return;
  const int length = lengths_ptr == nullptr ? columns : max(0, min(lengths_ptr[row], columns));
  const Slots slot_of(page_table_ptr, page_table_stride, cu_seqlens_q_ptr, batch, row, queries, page_size, page_size_reciprocal);
  select_in_warp<64>(scores_ptr + row * stride_scores, length, k, out_ptr + row * stride_out, slot_of);
}
