// bwd_sm90a_mmaindexed_bf16_d128_listed_m16n16s3w4
//
// Attention backward, variant listed: mask `True`.
// Rendered by `attngen build tests/render/others.yaml`, schedule mma_indexed_backward.
//
// P = exp2(logit - LSE) and dP = dO V^T are recomputed, tile by tile; dS = P (dP - D) times the scale, dV = P^T dO, dK = dS^T Q and
// dQ = dS K. Three kernels run one after the other: preprocess (D and LSE of each query row, zeros for the sums of dK and dV), dqkv (all
// products), postprocess (rounds dK and dV).
#include "copy.cuh"
#include "gradient.cuh"
#include "mma.cuh"
#include "softmax.cuh"
#include "sums.cuh"

using Element = bf16;  // of Q, K, V, dO, P and dS
using GradElement = bf16;  // of dQ, dK and dV

constexpr int kRows = 16;    // heads of a block
constexpr int kBlockN = 16;  // keys of a step
constexpr int kHeadDimQk = 128;
constexpr int kHeadDimV = 128;
constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kStages = 3;  // of a warp
constexpr int kChunk = 16 / sizeof(Element);
constexpr int kColumns = 32;  // of dK and dV that a warp multiplies at once

constexpr uint32_t kKBytes = kBlockN * kHeadDimQk * sizeof(Element), kVBytes = kBlockN * kHeadDimV * sizeof(Element);
constexpr uint32_t kStageBytes = kKBytes + kVBytes;

// Shared memory.
constexpr uint32_t kKv = 0;  // 98304 B: K and V of a tile, for each stage of each warp
constexpr uint32_t kQ = 98304;  // 4096 B: Q
constexpr uint32_t kDout = 102400;  // 4096 B: dO
constexpr uint32_t kEntries = 106496;  // 768 B: keys of tiles, -1 for none
// Swizzled offset of 16 bytes of a row, so that neither copies nor ldmatrix have bank conflicts.
template <int kWidth>
__device__ __forceinline__ uint32_t place_of(int row, int chunk) {
  return row * (kWidth * sizeof(Element)) + 16 * swizzled<128>(row, chunk);
}

// A width, as a type that a generic lambda can use as a constant.
template <int kOwn>
struct Width {
  static constexpr int kNumber = kOwn;
};

// An 8 x 8 block of 16-bit elements, transposed (PTX ISA, "movmatrix").
__device__ __forceinline__ uint32_t transposed(uint32_t block) {
  uint32_t other;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(other) : "r"(block));
  return other;
}

extern __shared__ __align__(1024) char shared_memory[];

template <typename Value>
__device__ __forceinline__ Value& shared_at(uint32_t address) {
  return *reinterpret_cast<Value*>(shared_memory + address);
}

// D = rowsum(dO * O) - dLSE of each query row, its log-sum-exp in units of log2, and zeros for the accumulator of dK and dV. A warp has a row.
extern "C" __global__ void __launch_bounds__(128) bwd_sm90a_mmaindexed_bf16_d128_listed_m16n16s3w4_preprocess(
    const bf16* out_ptr, const bf16* dout_ptr, const float* lse_ptr, const float* dlse_ptr, float* lse_log2_ptr,
    float* delta_ptr, float* dkv_sum_ptr,
    long long stride_out_b, long long stride_out_s, long long stride_out_h,
    long long stride_dout_b, long long stride_dout_s, long long stride_dout_h,
    int heads, int rows, int row_tiles, long long sum_chunks,
    int has_dlse
) {
  const int lane = threadIdx.x % 32;
  const int h = blockIdx.x % heads, row_tile = blockIdx.x / heads % row_tiles, b = blockIdx.x / heads / row_tiles;
  // A block clears its share of the accumulator while its rows arrive.
  const long long share = (sum_chunks + gridDim.x - 1) / gridDim.x, share_end = min(share * (blockIdx.x + 1), sum_chunks);
  for (long long i = share * blockIdx.x + threadIdx.x; i < share_end; i += 128) {
    reinterpret_cast<float4*>(dkv_sum_ptr)[i] = {};
  }
#pragma unroll
  for (int i = threadIdx.x / 32; i < 16; i += 4) {
    const int row = row_tile * 16 + i;
    if (row >= rows) break;
    float delta = 0.0f;
#pragma unroll
    for (int column = kChunk * lane; column < kHeadDimV; column += 32 * kChunk) {
      const int4 out = *reinterpret_cast<const int4*>(out_ptr + b * stride_out_b + h * stride_out_h + row * stride_out_s + column);
      const int4 dout = *reinterpret_cast<const int4*>(dout_ptr + b * stride_dout_b + h * stride_dout_h + row * stride_dout_s + column);
      delta += dot<Element>(out.x, dout.x) + dot<Element>(out.y, dout.y) + dot<Element>(out.z, dout.z) + dot<Element>(out.w, dout.w);
    }
#pragma unroll
    for (int other = 1; other < 32; other *= 2) delta += __shfl_xor_sync(~0u, delta, other);
    if (lane == 0) {
      const long long entry = (b * static_cast<long long>(heads) + h) * rows + row;
      const float lse = lse_ptr[entry];
      const bool dead = lse == kMasked;  // a row that sees no key: +inf makes each of its probabilities 0
      lse_log2_ptr[entry] = dead ? -kMasked : lse * kLog2e;
      delta_ptr[entry] = dead ? 0.0f : delta - (has_dlse ? dlse_ptr[entry] : 0.0f);
    }
  }
}

// A block has 16 heads of a query. Its warps take tiles of 16 keys of the query's list in turn, and gather their rows, each into
// stages of its own. A warp adds dK and dV of its tile to sums in global memory, and keeps dQ of its keys in registers; at last the
// block adds up dQ of its warps.
extern "C" __global__ void __launch_bounds__(kThreads) bwd_sm90a_mmaindexed_bf16_d128_listed_m16n16s3w4_dqkv(
    const bf16* q_ptr, const bf16* k_ptr, const bf16* v_ptr, const bf16* dout_ptr, bf16* dq_ptr,
    float* dkv_sum_ptr, const float* lse_log2_ptr, const float* delta_ptr, const int* seqused_k_ptr,
    const int* indices_ptr,
    long long stride_q_b, long long stride_q_s, long long stride_q_h,
    long long stride_k_b, long long stride_k_s, long long stride_k_h,
    long long stride_v_b, long long stride_v_s, long long stride_v_h,
    long long stride_dout_b, long long stride_dout_s, long long stride_dout_h,
    long long stride_dq_b, long long stride_dq_s, long long stride_dq_h,
    long long stride_indices_0, long long stride_indices_1,
    int extent_indices_0, int extent_indices_1, int extent_indices_2,
    int batch, int heads, int kv_heads, int group, int key_rows, int seqlen_q, int max_seqlen_k, int total_q,
    int total_k,
    float softmax_scale,
    int has_seqused_k
) {
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // uniform across the warp, and the compiler knows
  const int lane = threadIdx.x % 32;
  const uint32_t here = static_cast<uint32_t>(__cvta_generic_to_shared(shared_memory));

  // Blocks in order: groups of heads of a query, then queries of a sequence, then sequences, then KV heads.
  const int units = (group + kRows - 1) / kRows;
  const int hk = blockIdx.x / units / seqlen_q / batch, b = blockIdx.x / units / seqlen_q % batch;
  const int q = blockIdx.x / units % seqlen_q, first_head = blockIdx.x % units * kRows;
  const int seqlen_k = has_seqused_k ? seqused_k_ptr[b] : max_seqlen_k;
  const int entries = extent_indices_2;
  const int* const list = indices_ptr + b * stride_indices_0 + q * stride_indices_1;
  const int tiles = (entries + 15) / 16;

  // The two rows of a lane: heads of the query.
  const int own_row = lane / 4;  // the other one is 8 rows below
  int query[2], head[2];
  float lse[2], delta[2];
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const int of_group = first_head + own_row + 8 * row;
    const int h = hk * group + min(of_group, group - 1);
    query[row] = q;
    head[row] = h;
    const long long entry = (b * static_cast<long long>(heads) + h) * seqlen_q + q;
    lse[row] = of_group < group ? lse_log2_ptr[entry] : -kMasked;  // +inf makes each probability 0
    delta[row] = of_group < group ? delta_ptr[entry] : 0.0f;
  }
  const float scale_log2e = softmax_scale * kLog2e;

  // Q and dO of the block.
  for (int i = threadIdx.x; i < kRows * kHeadDimQk / kChunk; i += kThreads) {
    const int row = i / (kHeadDimQk / kChunk), chunk = i % (kHeadDimQk / kChunk);
    const bool exists = first_head + row < group;
    const int h = hk * group + (exists ? first_head + row : 0);
    copy_async(here + kQ + place_of<kHeadDimQk>(row, chunk), q_ptr + b * stride_q_b + h * stride_q_h + q * stride_q_s + kChunk * chunk, exists);
  }
  for (int i = threadIdx.x; i < kRows * kHeadDimV / kChunk; i += kThreads) {
    const int row = i / (kHeadDimV / kChunk), chunk = i % (kHeadDimV / kChunk);
    const bool exists = first_head + row < group;
    const int h = hk * group + (exists ? first_head + row : 0);
    copy_async(here + kDout + place_of<kHeadDimV>(row, chunk), dout_ptr + b * stride_dout_b + h * stride_dout_h + q * stride_dout_s + kChunk * chunk, exists);
  }
  commit_copies();
  // Entry number `entry` of the list; -1 after its end.
  const auto read_entry = [&](int entry) { return entry < entries ? __ldg(list + entry) : -1; };
  // The key of an entry; -1: none.
  const auto key_of = [&](int number, int entry) {
    const int key = number;
    return static_cast<uint32_t>(key) < static_cast<uint32_t>(seqlen_k) ? key : -1;
  };
  const auto stage_of = [&](int step) { return here + kKv + (warp * kStages + step % kStages) * kStageBytes; };
  const auto entries_of = [&](int step) { return kEntries + 4 * kBlockN * (warp * kStages + step % kStages); };
  // Gathers rows of K and V of a step of this warp, whose keys lanes have.
  const auto load_step = [&](int step, int key) {
    const uint32_t to = stage_of(step);
    if (lane < kBlockN) shared_at<int>(entries_of(step) + 4 * lane) = key;
#pragma unroll
    for (int i = 0; i < kBlockN * kHeadDimQk / kChunk / 32; ++i) {
      const int row = (lane + 32 * i) / (kHeadDimQk / kChunk), chunk = (lane + 32 * i) % (kHeadDimQk / kChunk);
      const int own_key = __shfl_sync(~0u, key, row);
      const int from = max(own_key, 0);
      copy_async(to + 0 + place_of<kHeadDimQk>(row, chunk), k_ptr + b * stride_k_b + hk * stride_k_h + from * stride_k_s + kChunk * chunk, own_key >= 0);
    }
#pragma unroll
    for (int i = 0; i < kBlockN * kHeadDimV / kChunk / 32; ++i) {
      const int row = (lane + 32 * i) / (kHeadDimV / kChunk), chunk = (lane + 32 * i) % (kHeadDimV / kChunk);
      const int own_key = __shfl_sync(~0u, key, row);
      const int from = max(own_key, 0);
      copy_async(to + kKBytes + place_of<kHeadDimV>(row, chunk), v_ptr + b * stride_v_b + hk * stride_v_h + from * stride_v_s + kChunk * chunk, own_key >= 0);
    }
  };

  const int steps = tiles > warp ? (tiles - warp + kWarps - 1) / kWarps : 0;
  const auto entry_of = [&](int step) { return (warp + step * kWarps) * kBlockN + lane % kBlockN; };
#pragma unroll 1
  for (int step = 0; step < kStages - 1; ++step) {
    if (step < steps) load_step(step, key_of(read_entry(entry_of(step)), entry_of(step)));
    commit_copies();
  }
  int next = read_entry(entry_of(kStages - 1));  // an entry is read a step before its row is copied
  wait_copies<kStages - 1>();
  __syncthreads();  // Q and dO are there

  // The 8 columns of a row that each lane reads: for A, for B whose rows are those of the other matrix, and for B transposed.
  const int a_row = lane % 16, a_chunk = lane / 16, b_row = lane / 16 * 8 + lane % 8, b_chunk = lane / 8 % 2;
  float dq[kHeadDimQk / 2] = {};
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const int tile = warp + step * kWarps;
    wait_copies<kStages - 2>();
    __syncwarp();  // rows are there, and those of the step before have been multiplied
    if (step + kStages - 1 < steps) load_step(step + kStages - 1, key_of(next, entry_of(step + kStages - 1)));
    commit_copies();
    next = read_entry(entry_of(step + kStages));
    const uint32_t k = stage_of(step), v = k + kKBytes, own_entries = entries_of(step);

    // S = Q K^T and dP = dO V^T
    float s[kBlockN / 2] = {}, dp[kBlockN / 2] = {};
#pragma unroll
    for (int chunk = 0; chunk < kHeadDimQk / kChunk; chunk += 2) {
      uint32_t a[4], b[4];
      load_blocks(a, here + kQ + place_of<kHeadDimQk>(a_row, chunk + a_chunk));
      load_blocks(b, k + place_of<kHeadDimQk>(b_row, chunk + b_chunk));
      multiply<Element>(s, a, b[0], b[1]);
      multiply<Element>(s + 4, a, b[2], b[3]);
    }
#pragma unroll
    for (int chunk = 0; chunk < kHeadDimV / kChunk; chunk += 2) {
      uint32_t a[4], b[4];
      load_blocks(a, here + kDout + place_of<kHeadDimV>(a_row, chunk + a_chunk));
      load_blocks(b, v + place_of<kHeadDimV>(b_row, chunk + b_chunk));
      multiply<Element>(dp, a, b[0], b[1]);
      multiply<Element>(dp + 4, a, b[2], b[3]);
    }
    // The keys of a lane's elements. An entry that names no key becomes seqlen_k, after the last key, which is masked.
    int keys[kBlockN / 4];
    bool listed = true;
#pragma unroll
    for (int i = 0; i < kBlockN / 4; i += 2) {
      const int2 two = shared_at<int2>(own_entries + 4 * (4 * i + 2 * (lane % 4)));
      listed = listed && min(two.x, two.y) >= 0;
      keys[i] = two.x < 0 ? seqlen_k : two.x;
      keys[i + 1] = two.y < 0 ? seqlen_k : two.y;
    }
    const int kv_first = 0;
    if (__any_sync(~0u, !listed)) {
      const int visible_to = seqlen_k - kv_first;
#pragma unroll
      for (int i = 0; i < kBlockN / 4; ++i) {
        const int key = keys[i];
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          float& x = s[4 * (i / 2) + 2 * row + i % 2];
          if (key >= visible_to) x = kMasked;
        }
      }
    }

    // P and dS = P (dP - D), as A, and with rows of keys
    uint32_t p[4], ds[4];
#pragma unroll
    for (int i = 0; i < kBlockN / 2; i += 2) {
      const int row = row_of(i);
      const float low = exp2_approx(fmaf(s[i], scale_log2e, -lse[row])), high = exp2_approx(fmaf(s[i + 1], scale_log2e, -lse[row]));
      p[i / 2] = pack<Element>(low, high);
      ds[i / 2] = pack<Element>(low * (dp[i] - delta[row]) * softmax_scale, high * (dp[i + 1] - delta[row]) * softmax_scale);
    }
    const uint32_t p_keys[4] = {transposed(p[0]), transposed(p[2]), transposed(p[1]), transposed(p[3])};
    const uint32_t ds_keys[4] = {transposed(ds[0]), transposed(ds[2]), transposed(ds[1]), transposed(ds[3])};

    // dQ += dS K
#pragma unroll
    for (int column = 0; column < kHeadDimQk; column += 16) {
      uint32_t b[4];
      load_blocks_transposed(b, k + place_of<kHeadDimQk>(a_row, column / kChunk + a_chunk));
      multiply<Element>(dq + column / 2, ds, b[0], b[1]);
      multiply<Element>(dq + column / 2 + 4, ds, b[2], b[3]);
    }
    // dV = P^T dO and dK = dS^T Q, some columns at a time
    long long rows[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int key = shared_at<int>(own_entries + 4 * (lane / 4 + 8 * row));
      rows[row] = key < 0 ? -1 : (static_cast<long long>(b) * max_seqlen_k + key) * kv_heads + hk;
    }
    const auto add = [&](auto width, float* sums, uint32_t matrix, const uint32_t (&weights)[4]) {
      constexpr int kWidth = width.kNumber;
      float* const to[2] = {rows[0] < 0 ? nullptr : sums + rows[0] * kWidth, rows[1] < 0 ? nullptr : sums + rows[1] * kWidth};
#pragma unroll
      for (int column = 0; column < kWidth; column += kColumns) {
        float acc[kColumns / 2] = {};
#pragma unroll
        for (int part = 0; part < kColumns; part += 16) {
          uint32_t b[4];
          load_blocks_transposed(b, here + matrix + place_of<kWidth>(a_row, (column + part) / kChunk + a_chunk));
          multiply<Element>(acc + part / 2, weights, b[0], b[1]);
          multiply<Element>(acc + part / 2 + 4, weights, b[2], b[3]);
        }
        add_rows(to, column, acc, lane);
      }
    };
    add(Width<kHeadDimQk>(), dkv_sum_ptr, kQ, ds_keys);
    add(Width<kHeadDimV>(), dkv_sum_ptr + key_rows * static_cast<long long>(kHeadDimQk), kDout, p_keys);
  }

  // dQ of all warps, added up in their order. A thread has four columns of a row.
  wait_copies<0>();
  __syncthreads();  // all stages have been read
#pragma unroll
  for (int i = 0; i < kHeadDimQk / 8; ++i) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      shared_at<float2>(kKv + 4 * ((warp * kRows + lane / 4 + 8 * row) * kHeadDimQk + 8 * i + 2 * (lane % 4))) = {dq[4 * i + 2 * row], dq[4 * i + 2 * row + 1]};
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kRows * kHeadDimQk / 4; i += kThreads) {
    const int row = i / (kHeadDimQk / 4), column = i % (kHeadDimQk / 4) * 4;
    if (first_head + row >= group) break;
    float4 sum = {};
#pragma unroll
    for (int other = 0; other < kWarps; ++other) {
      const float4 of_warp = shared_at<float4>(kKv + 4 * ((other * kRows + row) * kHeadDimQk + column));
      sum.x += of_warp.x, sum.y += of_warp.y, sum.z += of_warp.z, sum.w += of_warp.w;
    }
    const int h = hk * group + first_head + row;
    GradElement* const to = dq_ptr + b * stride_dq_b + h * stride_dq_h + q * stride_dq_s + column;
    *reinterpret_cast<uint2*>(to) = {pack<GradElement>(sum.x, sum.y), pack<GradElement>(sum.z, sum.w)};
  }
}

// Rounds dK and dV, whose sums lie behind those of dK. A thread has 8 columns of a row.
extern "C" __global__ void __launch_bounds__(256) bwd_sm90a_mmaindexed_bf16_d128_listed_m16n16s3w4_postprocess(
    const float* dkv_sum_ptr, bf16* dk_ptr, bf16* dv_ptr,
    long long stride_dk_b, long long stride_dk_s, long long stride_dk_h,
    long long stride_dv_b, long long stride_dv_s, long long stride_dv_h,
    int kv_heads, int key_rows, int max_seqlen_k
) {
  const long long first = blockIdx.x * 16LL;  // row of a KV head
  const auto round = [&](const float* sums, GradElement* to, int columns, long long stride_b, long long stride_s, long long stride_h) {
    const int chunks = columns / 8;
    for (int i = threadIdx.x; i < 16 * chunks; i += 256) {
      const long long number = first + i / chunks;
      if (number >= key_rows) return;
      const int column = i % chunks * 8, hk = number % kv_heads;
      const long long row = number / kv_heads;
      const float4* const from = reinterpret_cast<const float4*>(sums + number * columns + column);
      const float4 low = from[0], high = from[1];
      GradElement* const at = to + row / max_seqlen_k * stride_b + row % max_seqlen_k * stride_s + hk * stride_h + column;
      *reinterpret_cast<uint4*>(at) = {
          pack<GradElement>(low.x, low.y), pack<GradElement>(low.z, low.w), pack<GradElement>(high.x, high.y), pack<GradElement>(high.z, high.w)};
    }
  };
  round(dkv_sum_ptr, dk_ptr, kHeadDimQk, stride_dk_b, stride_dk_s, stride_dk_h);
  round(dkv_sum_ptr + key_rows * static_cast<long long>(kHeadDimQk), dv_ptr, kHeadDimV, stride_dv_b, stride_dv_s, stride_dv_h);
}
