// topk_sm90a
//
// Indices of the k largest scores of each row, ascending; of equal scores the lower indices.
// Rendered by `attngen build specs/index.yaml`, schedule topk.
//
// A block has a row, and loads it in chunks of 4096 scores. Scores above a threshold become candidates in shared memory.
// When those of the next chunk might not fit, candidates are cut to the k largest, whose least is the new threshold. At the
// end the k largest are written in the order of their indices.
#include "pdl.cuh"
#include "slots.cuh"
#include "topk.cuh"

constexpr int kVectors = 2;  // of four scores, that a thread loads at once
constexpr int kChunk = 4 * kVectors * kThreads;
constexpr int kSampled = 4 * kThreads, kLeastSampled = 4 * kSampled;  // scores of a sample, and of a row that has one
static_assert(kThreads == 512 && kBins == 2048 && kChunk == 4096);
static_assert(sizeof(Selection) == 8352);

extern __shared__ char shared_memory[];

__device__ __forceinline__ float minus_infinity() { return score_of(kKeyOfMinusInfinity); }

// Writes the indices of the k largest of some scores, or their slots in a cache. Shared memory holds `kCapacity` candidates.
template <int kCapacity, typename Slots>
__device__ __forceinline__ void select_largest(
    const float* scores, int length, int k, int* out, const Slots& slots_of_row) {
  Selection& shared = *reinterpret_cast<Selection*>(shared_memory);
  uint32_t* const keys = reinterpret_cast<uint32_t*>(shared_memory + sizeof(Selection));
  uint32_t* const indices = keys + kCapacity;
  const int thread = threadIdx.x;
  for (int i = thread; i < kBins; i += kThreads) shared.bins[i] = 0;
  if (thread < 3) shared.appended[thread] = 0;

  // Vectors begin at multiples of 16 bytes, so that the first one may begin before the row.
  const int before = static_cast<int>(reinterpret_cast<uint64_t>(scores) / 4 % 4);
  float4 next[kVectors];
  const auto load = [&](int first) {
    const bool inside = first >= 0 && first + kChunk <= length;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int at = first + 4 * (j * kThreads + thread);
      if (inside || (at >= 0 && at + 4 <= length)) {
        next[j] = __ldcs(reinterpret_cast<const float4*>(scores + at));
      } else {
        const auto score = [&](int i) { return at + i >= 0 && at + i < length ? scores[at + i] : minus_infinity(); };
        next[j] = make_float4(score(0), score(1), score(2), score(3));
      }
    }
  };

  // A row is read with a threshold that a sample of it suggests; again without one, if too few scores exceed that.
  int count = 0;
  float threshold = minus_infinity();  // which is never selected
  const bool samples = length >= kLeastSampled && k <= length / 4;
  __syncthreads();
  if (samples) {
    const int place = static_cast<int>(static_cast<long long>(thread) / 8 * (length - 32) / (kThreads / 8)) + thread % 8 * 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) keys[4 * thread + i] = key_of(scores[place + i]);
    __syncthreads();
    const int likely = static_cast<int>(static_cast<long long>(kSampled) * k / length);
    int rank = likely + 4 * static_cast<int>(sqrtf(static_cast<float>(likely))) + 8;
    bool whole;
    const uint32_t bound = nth_largest(shared, kSampled, rank, whole, 2 * rank, [&](int i, uint32_t& value) {
      value = keys[i];
      return true;
    });
    threshold = score_of(max(bound, kKeyOfMinusInfinity));
  }
  for (bool suggested = samples;; suggested = false) {
    load(-before);
    int turn = 0;
    for (int first = -before; first < length; first += kChunk) {
      if (count > kCapacity - kChunk) {
        const uint32_t bound = cut_candidates(shared, keys, indices, count, k, (k + kCapacity - kChunk) / 2);
        threshold = score_of(max(bound, kKeyOfMinusInfinity));
      }
      float now[4 * kVectors];
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        now[4 * j] = next[j].x, now[4 * j + 1] = next[j].y, now[4 * j + 2] = next[j].z, now[4 * j + 3] = next[j].w;
      }
      load(first + kChunk);  // which arrive while these are looked at
      uint32_t passing = 0;
#pragma unroll
      for (int i = 0; i < 4 * kVectors; ++i) passing |= static_cast<uint32_t>(!(now[i] <= threshold)) << i;  // NaN, too
      if (thread == 0) shared.appended[turn == 2 ? 0 : turn + 1] = 0;
      if (__any_sync(~0u, passing)) {
        int to = count + reserve(shared.appended[turn], __popc(passing));
#pragma unroll
        for (int i = 0; i < 4 * kVectors; ++i) {
          if (passing >> i & 1) {
            keys[to] = key_of(now[i]);
            indices[to++] = first + 4 * (i / 4 * kThreads + thread) + i % 4;
          }
        }
      }
      __syncthreads();
      count += shared.appended[turn];
      turn = turn == 2 ? 0 : turn + 1;
    }
    if (!suggested || count >= k) break;
    count = 0;
    threshold = minus_infinity();
    __syncthreads();
    if (thread < 3) shared.appended[thread] = 0;
    __syncthreads();
  }
  Cut cut = {0, ~0u};  // all
  int selected = k;
  if (count > k) cut = cut_of(shared, keys, indices, count, selected, 0);

  // In the order of indices: a bit for each score of a window, in the words of the histogram.
  const auto slot_of = slots_of_row();
  int written = 0, turn = 0;
  for (int window = 0; window < length; window += 32 * kBins) {
    for (int i = thread; i < count; i += kThreads) {
      const uint32_t bit = indices[i] - window;
      if (bit < 32 * kBins && cut.selects(keys[i], indices[i])) atomicOr(&shared.bins[bit / 32], 1u << bit % 32);
    }
    __syncthreads();
    uint32_t words[kBinsOfThread];
    int many = 0;
#pragma unroll
    for (int i = 0; i < kBinsOfThread; ++i) {
      uint32_t& word = shared.bins[kBinsOfThread * thread + i];
      words[i] = word;
      word = 0;
      many += __popc(words[i]);
    }
    int to = written + block_sums(shared, many, turn) - many;
#pragma unroll
    for (int i = 0; i < kBinsOfThread; ++i) {
      for (uint32_t word = words[i]; word; word &= word - 1) {
        out[to++] = slot_of(window + 32 * (kBinsOfThread * thread + i) + __ffs(word) - 1);
      }
    }
    written += block_total(shared, turn);
    turn ^= 1;
  }
  for (int i = written + thread; i < k; i += kThreads) out[i] = -1;
}
// Selects at most 3072 scores of each row.
extern "C" __global__ void __launch_bounds__(kThreads, 3) topk_sm90a(
    const float* scores_ptr, const int* lengths_ptr, const int* page_table_ptr, const int* cu_seqlens_q_ptr,
    int* out_ptr,
    long long stride_scores,
    long long page_table_stride,
    long long stride_out,
    int columns, int k, int batch, int queries, int page_size, int page_size_reciprocal
) {
  launch_dependents();
  wait_dependencies();  // nothing in global memory is read or written before
  const int row = blockIdx.x, length = lengths_ptr == nullptr ? columns : max(0, min(lengths_ptr[row], columns));
  select_largest<8192>(scores_ptr + row * stride_scores, length, k, out_ptr + row * stride_out, [&] {
    return Slots(page_table_ptr, page_table_stride, cu_seqlens_q_ptr, batch, row, queries, page_size, page_size_reciprocal);
  });
}
// Selects at most 19456 scores of each row.
extern "C" __global__ void __launch_bounds__(kThreads, 1) topk_sm90a_large(
    const float* scores_ptr, const int* lengths_ptr, const int* page_table_ptr, const int* cu_seqlens_q_ptr,
    int* out_ptr,
    long long stride_scores,
    long long page_table_stride,
    long long stride_out,
    int columns, int k, int batch, int queries, int page_size, int page_size_reciprocal
) {
  launch_dependents();
  wait_dependencies();  // nothing in global memory is read or written before
  const int row = blockIdx.x, length = lengths_ptr == nullptr ? columns : max(0, min(lengths_ptr[row], columns));
  select_largest<24576>(scores_ptr + row * stride_scores, length, k, out_ptr + row * stride_out, [&] {
    return Slots(page_table_ptr, page_table_stride, cu_seqlens_q_ptr, batch, row, queries, page_size, page_size_reciprocal);
  });
}
