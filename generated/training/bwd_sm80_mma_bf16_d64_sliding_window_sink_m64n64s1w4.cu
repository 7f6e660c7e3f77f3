// bwd_sm80_mma_bf16_d64_sliding_window_sink_m64n64s1w4
//
// Attention backward, variant sliding_window_sink: mask `0 <= q_pos - kv and q_pos - kv < window`, sink `sinks[h]`.
// Rendered by `attngen build specs/training.yaml`, schedule mma_backward.
//
// P = exp2(logit - LSE) and dP = dO V^T are recomputed, tile by tile; dS = P (dP - D), dV = P^T dO, dK = dS^T Q
// and dQ = dS K, the latter two times the scale (Dao et al. 2022, "FlashAttention", algorithm 4). Three kernels run
// one after the other: preprocess (D and LSE of each query row), dqkv (all products), postprocess (scales and rounds dQ).
#include "copy.cuh"
#include "expression.cuh"
#include "gradient.cuh"
#include "mma.cuh"
#include "quad.cuh"
#include "schedule.cuh"
#include "softmax.cuh"

using Element = bf16;  // of Q, K, V, dO, P and dS
using GradElement = bf16;  // of dQ, dK and dV

// Columns of each of some warps, which have whole products of 16 columns; the last warp may have fewer.
constexpr int up_to(int columns, int warps) { return (columns + 16 * warps - 1) / (16 * warps) * 16; }

constexpr int kBlockM = 64;  // query rows of one step
constexpr int kBlockN = 64;  // keys of a block
constexpr int kHeadDimQk = 64, kHeadDimV = 64;
constexpr int kColumnsQk = 64, kColumnsV = 64;  // that are multiplied
constexpr int kThreads = 128;
constexpr int kStages = 1;  // of the rings of Q and dO
constexpr int kSteps = kStages == 1 ? 2 : kStages;  // that are known: this one, and those that are copied
constexpr int kBoxBytes = 128;  // of a row, over which it is swizzled
constexpr int kBoxColumns = kBoxBytes / sizeof(Element);
constexpr int kChunk = 16 / sizeof(Element);  // columns in 16 bytes

// A warp has S^T, dP^T, P^T and dS^T of 32 keys and some queries of a step, in two blocks of 16 keys; of dK and dV, the
// same keys and some columns; of dQ, 32 queries and some columns.
constexpr int kKeyWarps = kBlockN / 32, kQueryWarps = kThreads / kBlockN;
constexpr int kWarpM = kBlockM / kQueryWarps;
constexpr int kWarpQk = up_to(kColumnsQk, kQueryWarps), kWarpV = up_to(kColumnsV, kQueryWarps);
constexpr int kDqWarps = kThreads / kBlockM, kWarpDq = up_to(kColumnsQk, kDqWarps);
constexpr int kSumsOfTile = kBlockM * kColumnsQk;  // floats of dQ of a tile of queries, in the order of registers
static_assert(sizeof(Element) == 2 && kWarpM % 16 == 0 && kBlockM % 32 == 0);

// P^T and dS^T in shared memory: rows are keys, box after box of queries, over which they are swizzled.
constexpr int kPairBytes = 2 * kBlockM < 128 ? 64 : 128, kPairQueries = kPairBytes / sizeof(Element);

// Shared memory, from its start.
constexpr uint32_t kK = 0;  // 8192 B: K
constexpr uint32_t kV = 8192;  // 8192 B: V
constexpr uint32_t kQ = 16384;  // 8192 B: Q, a tile per stage
constexpr uint32_t kDout = 24576;  // 8192 B: dO, a tile per stage
constexpr uint32_t kDs = 32768;  // 8192 B: dS of a step
constexpr uint32_t kP = 40960;  // 8192 B: P of a step
constexpr uint32_t kLse = 49152;  // 256 B: log-sum-exp of the rows of each stage
constexpr uint32_t kDelta = 49408;  // 256 B: D of the rows of each stage
constexpr uint32_t kQBytes = (kDout - kQ) / kStages, kDoutBytes = (kDs - kDout) / kStages, kRowBytes = 4 * kBlockM;  // of a stage

// A step: a tile of queries, with a bit that says whether the mask is applied, and their head.
struct Step {
  int tile, h;
};
constexpr int kPartial = 1 << 24;

// A number that a function knows when it is compiled.
template <int kNumber>
struct Number {};

extern __shared__ __align__(1024) char shared_memory[];

template <typename Value>
__device__ __forceinline__ Value& shared_at(uint32_t address) {
  return *reinterpret_cast<Value*>(shared_memory + address);
}

// Copies 16 bytes of each box of a row, from kColumn on. Places are constants: an address serves all boxes.
template <int kAllRows, int kColumns, int kColumn = 0>
__device__ __forceinline__ void load_boxes(uint32_t to, const Element* from, bool exists, int first_column) {
  if constexpr (kColumn < kColumns) {
    copy_async_at<kColumn / kBoxColumns * kAllRows * kBoxBytes, kColumn * static_cast<int>(sizeof(Element))>(
        to, from, exists && (kColumns % kBoxColumns == 0 || kColumn + first_column < kColumns));
    load_boxes<kAllRows, kColumns, kColumn + kBoxColumns>(to, from, exists, first_column);
  }
}

// Copies rows to shared memory, box after box of columns, swizzled; zeros for rows that do not exist, and after the last
// column. Rows can be copied in `parts`, each in a call. They may be some of kAllRows, and copied by all threads or by a warp.
template <int kRows, int kColumns, int kAllRows = kRows, int kCopiers = kThreads, typename RowAt>
__device__ __forceinline__ void load_rows(uint32_t to, const RowAt& row_at, int rows, int part = 0, int parts = 1) {
  constexpr int kLanes = kBoxBytes / 16, kRowsAtOnce = kCopiers / kLanes;
  constexpr int kColumnsOfLane = 16 / sizeof(Element);
  static_assert(kRowsAtOnce % 8 == 0 || (kRowsAtOnce == 4 && kBoxBytes == 128));
  const int own = threadIdx.x / kLanes, chunk = threadIdx.x % kLanes;
  const uint32_t place = to + own * kBoxBytes + 16 * swizzled<kBoxBytes>(own, chunk);
  constexpr int kTimes = (kRows + kRowsAtOnce - 1) / kRowsAtOnce;
#pragma unroll
  for (int time = part * kTimes / parts; time < (part + 1) * kTimes / parts; ++time) {
    const int first = time * kRowsAtOnce;
    const int row = first + own;
    const uint32_t place_of_row = (place ^ first % 8 * 16) + first * kBoxBytes;  // of the chunk
    if (kRows % kRowsAtOnce != 0 && row >= kRows) break;
    const Element* const from = row_at(row);
    const bool row_exists = row < rows;
    load_boxes<kAllRows, kColumns>(place_of_row, from + kColumnsOfLane * chunk, row_exists, kColumnsOfLane * chunk);
  }
}

// D = rowsum(dO * O) - dLSE of each query row, its log-sum-exp in units of log2, and zeros for the dQ accumulator.
extern "C" __global__ void __launch_bounds__(128) bwd_sm80_mma_bf16_d64_sliding_window_sink_m64n64s1w4_preprocess(
    const bf16* out_ptr, const bf16* dout_ptr, const float* lse_ptr, const float* dlse_ptr, float* lse_log2_ptr,
    float* delta_ptr, float* dq_sum_ptr,
    long long stride_out_b, long long stride_out_s, long long stride_out_h,
    long long stride_dout_b, long long stride_dout_s, long long stride_dout_h,
    int heads, int rows, int row_tiles, long long sum_chunks,
    int has_dlse
) {
  constexpr int kLanes = 8, kRows = 16 * kLanes / 128;  // lanes of a row, 16 bytes each; rows of a thread
  const int chunk = threadIdx.x % kLanes;
  const int h = blockIdx.x % heads, row_tile = blockIdx.x / heads % row_tiles, b = blockIdx.x / heads / row_tiles;
  const int first = row_tile * 16 + threadIdx.x / kLanes;
  // A block clears its share of the dQ accumulator while its rows arrive.
  const long long share = (sum_chunks + gridDim.x - 1) / gridDim.x, share_end = min(share * (blockIdx.x + 1), sum_chunks);
  for (long long i = share * blockIdx.x + threadIdx.x; i < share_end; i += 128) {
    reinterpret_cast<float4*>(dq_sum_ptr)[i] = {};
  }
  float delta[kRows] = {};
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = first + i * (16 / kRows);
    if (row < rows) {
      const int4 out = *reinterpret_cast<const int4*>(out_ptr + b * stride_out_b + h * stride_out_h + row * stride_out_s + kChunk * chunk);
      const int4 dout = *reinterpret_cast<const int4*>(dout_ptr + b * stride_dout_b + h * stride_dout_h + row * stride_dout_s + kChunk * chunk);
      delta[i] = dot<Element>(out.x, dout.x) + dot<Element>(out.y, dout.y) + dot<Element>(out.z, dout.z) + dot<Element>(out.w, dout.w);
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = first + i * (16 / kRows);
#pragma unroll
    for (int other = 1; other < kLanes; other *= 2) delta[i] += __shfl_xor_sync(~0u, delta[i], other);
    if (chunk == 0 && row < rows) {
      const long long entry = (b * static_cast<long long>(heads) + h) * rows + row;
      const float lse = lse_ptr[entry];
      const bool dead = lse == kMasked;  // a row that sees no key: +inf makes each of its probabilities 0
      lse_log2_ptr[entry] = dead ? -kMasked : lse * kLog2e;
      delta_ptr[entry] = dead ? 0.0f : delta[i] - (has_dlse ? dlse_ptr[entry] : 0.0f);
    }
  }
}

// A block of 4 warps has a tile of keys, and goes through the queries of all heads that share them. A warp computes S^T = K Q^T
// and dP^T = V dO^T of 32 keys and some queries, and keeps some columns of dK += dS^T Q and dV += P^T dO of these keys in
// registers. P and dS go through shared memory, since these sum over the queries of other warps, and dQ = dS K over their keys.
extern "C" __global__ void __launch_bounds__(kThreads, 2) bwd_sm80_mma_bf16_d64_sliding_window_sink_m64n64s1w4_dqkv(
    const bf16* q_ptr, const bf16* k_ptr, const bf16* v_ptr, const bf16* dout_ptr, float* dq_sum_ptr, bf16* dk_ptr,
    bf16* dv_ptr, const float* lse_log2_ptr, const float* delta_ptr, const int* seqused_k_ptr,
    const float* u_sinks,
    long long stride_q_b, long long stride_q_s, long long stride_q_h,
    long long stride_k_b, long long stride_k_s, long long stride_k_h,
    long long stride_v_b, long long stride_v_s, long long stride_v_h,
    long long stride_dout_b, long long stride_dout_s, long long stride_dout_h,
    long long stride_dk_b, long long stride_dk_s, long long stride_dk_h,
    long long stride_dv_b, long long stride_dv_s, long long stride_dv_h,
    int extent_u_sinks_0,
    int batch, int heads, int kv_heads, int group, int heads_in_l2, int kv_tiles, int seqlen_q, int max_seqlen_k,
    int total_q, int total_k, int q_tiles,
    float softmax_scale,
    int u_window,
    int has_seqused_k
) {
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // uniform across the warp, and the compiler knows
  const int lane = threadIdx.x % 32;
  const uint32_t shared = static_cast<uint32_t>(__cvta_generic_to_shared(shared_memory));
  const int units = batch * kv_heads;
  int unit, kv_tile;
  place_tile(blockIdx.x, kv_tiles, units, heads_in_l2, unit, kv_tile);
  kv_tile = kv_tiles - 1 - kv_tile;
  const int b = unit / kv_heads, hk = unit % kv_heads, kv_start = kv_tile * kBlockN;
  const int q_begin = b * seqlen_q, k_begin = b * max_seqlen_k, keys = max_seqlen_k;
  const int seqlen_k = has_seqused_k ? seqused_k_ptr[b] : keys;

  const int whole_tiles = seqlen_q / kBlockM;
  const bool ragged = kv_start + kBlockN > seqlen_k;  // the last keys end in this tile: every step applies the mask
  const int head_end = kv_start < seqlen_k ? (hk + 1) * group : hk * group;  // no query sees keys after the used ones
  int step_head = hk * group;
  int place = 0, steps_left = -1;  // of the head; -1: it is to begin
  // The next step to copy; a tile of -1: there is none.
  const auto next_step = [&] {
    while (step_head < head_end) {
      const int h = step_head;
      const int kv_hi = max(min(kv_start + kBlockN, seqlen_k) - 1, kv_start);
      const int u_seqlen_q_minus_seqlen_k = seqlen_q - seqlen_k;
      const int u_value = u_seqlen_q_minus_seqlen_k + kv_start;
      const int visible_lo = max(u_value, 0) / kBlockM;
      const int u_value_2 = u_seqlen_q_minus_seqlen_k + kv_hi;
      const int u_window_min_1073741823 = min(u_window, 1073741823);
      const int visible_hi = max(min(u_value_2 + u_window_min_1073741823, seqlen_q) + kBlockM - 1, 0) / kBlockM;
      const int full_lo = (max(u_value_2, 0) + kBlockM - 1) / kBlockM;
      const int full_hi = min(max(u_value + u_window_min_1073741823, 0) / kBlockM, whole_tiles);
      const int tiles = max(visible_hi - visible_lo, 0);
      if (steps_left < 0) {
        steps_left = tiles;
        place = tiles > 0 ? tiles - 1 : 0;  // the last one first: faster under causal masks than others were (docs/notebook/mma.md)
      }
      if (steps_left > 0) {
        const int tile = visible_lo + place;
        const bool partial = ragged || !(tile >= full_lo && tile < full_hi);
        if (++place == tiles) place = 0;
        --steps_left;
        return Step{tile | (partial ? kPartial : 0), h};
      }
      steps_left = -1;
      ++step_head;
    }
    return Step{-1, 0};
  };

  // They may be issued in parts. A tile of -1 has no rows.
  const auto load_step = [&](const Step& step, uint32_t stage, int part = 0, int parts = 1) {
    const int h = step.h, q_start = (max(step.tile, 0) & kPartial - 1) * kBlockM, rows = step.tile < 0 ? 0 : seqlen_q - q_start;
    load_rows<kBlockM, kHeadDimQk>(shared + kQ + stage * kQBytes, [&](int row) { return q_ptr + b * stride_q_b + h * stride_q_h + (q_start + row) * stride_q_s; }, rows, part, parts);
    load_rows<kBlockM, kHeadDimV>(shared + kDout + stage * kDoutBytes, [&](int row) { return dout_ptr + b * stride_dout_b + h * stride_dout_h + (q_start + row) * stride_dout_s; }, rows, part, parts);
    if (part == parts - 1) {  // without branches, which would stand between products
      const int q = q_start + threadIdx.x;
      const long long entry = (b * static_cast<long long>(heads) + h) * seqlen_q + q;
      const uint32_t place = shared + stage * kRowBytes + 4 * threadIdx.x;
      const bool own = threadIdx.x < kBlockM, exists = own && static_cast<int>(threadIdx.x) < rows;
      copy_number_async_if(exists, place + kLse, lse_log2_ptr + entry);
      copy_number_async_if(exists, place + kDelta, delta_ptr + entry);
      store_number_if(own && !exists, place + kLse, -kMasked);  // each of its probabilities is 0
      store_number_if(own && !exists, place + kDelta, 0.0f);
    }
    if (part == parts - 1) commit_copies();
  };

  load_rows<kBlockN, kHeadDimQk>(shared + kK, [&](int row) { return k_ptr + b * stride_k_b + hk * stride_k_h + (kv_start + row) * stride_k_s; }, seqlen_k - kv_start);
  load_rows<kBlockN, kHeadDimV>(shared + kV, [&](int row) { return v_ptr + b * stride_v_b + hk * stride_v_h + (kv_start + row) * stride_v_s; }, seqlen_k - kv_start);
  Step steps[kSteps];  // this one, and the next ones
#pragma unroll
  for (int i = 0; i < kSteps; ++i) steps[i] = next_step();
#pragma unroll
  for (int i = 0; i < kSteps - 1; ++i) load_step(steps[i], i);

  const int key_warp = warp % kKeyWarps, query_warp = warp / kKeyWarps;
  const int dq_group = warp / kDqWarps, dq_column = warp % kDqWarps * kWarpDq;  // of the warp: which 32 queries, and columns
  // Rows that a lane reads by ldmatrix: as the A operand or as B with rows of its k, transposed; and as B with rows of its n.
  const int b_row = lane / 16 * 8 + lane % 8;
  const uint32_t a_lane = lane % 16 * kBoxBytes + 16 * swizzled<kBoxBytes>(lane % 16, lane / 16);
  const uint32_t b_lane = b_row * kBoxBytes + 16 * swizzled<kBoxBytes>(b_row, lane / 8 % 2);
  const uint32_t p_lane = lane % 16 * kPairBytes + 16 * swizzled<kPairBytes>(lane % 16, lane / 16);
  // The place of a column, and of a row of a region of `rows`, given that of a lane in the first ones.
  const auto place_of = [](uint32_t lane_place, int rows, int row, int column) {
    return (lane_place ^ 2 * (column % kBoxColumns)) + (column / kBoxColumns * rows + row) * kBoxBytes;
  };
  const uint32_t k_rows = shared + kK + a_lane + 32 * key_warp * kBoxBytes, v_rows = shared + kV + a_lane + 32 * key_warp * kBoxBytes;
  const float scale_log2e = softmax_scale * kLog2e;
  const int u_window_min_1073741823 = min(u_window, 1073741823);
  float dk[2][kWarpQk / 2] = {}, dv[2][kWarpV / 2] = {};
  float logits[2][kWarpM / 2], dp[2][kWarpM / 2];  // S^T, then P^T; dP^T
  uint32_t probabilities[2][kWarpM / 4], ds[2][kWarpM / 4];  // in pairs of 16 bits
  // Work that may stand among products, at one of so many places: work for groups of elements, a block of keys by 8 queries, or
  // copies, in the first quarter.
  const auto for_elements = [](const auto& work) {
    return [=](int place, int places) {
      constexpr int kGroups = kWarpM / 4;
#pragma unroll
      for (int group = place * kGroups / places; group < (place + 1) * kGroups / places; ++group) work(group % 2, group / 2);
    };
  };
  const auto for_copies = [](const auto& copy) {
    return [=](int place, int places) {
      if (4 * place < places) copy(place, (places + 3) / 4);
    };
  };
  const auto nothing = [](int, int) {};
  static_assert(kWarpDq * kDqWarps == kColumnsQk);
  // dQ of the step before is added among the products of S and dP, since memory takes these additions slowly. The first step adds
  // zeros: a branch would stand between products.
  constexpr int kLateColumns = 32;  // of the warp, the last ones
  float dq[kLateColumns / 16][2][8] = {};
  const auto sums_of = [&](const Step& step) {
    const int h = step.h, tile = step.tile & kPartial - 1, column = dq_column + kWarpDq - kLateColumns;
    return dq_sum_ptr + static_cast<long long>((b * heads + h) * q_tiles + tile) * kSumsOfTile + (2 * dq_group * (kColumnsQk / 8) + column / 8) * 128 + lane;
  };
  float* dq_to = sums_of(steps[0]);
  const bool adds_late = steps[0].tile >= 0;
  constexpr int kLate = 16;  // additions of a lane among the products of S
  const auto add_late = [&](int first, int end) {
#pragma unroll
    for (int i = first; i < end; ++i) {
      const int group = i / 16, block = i % 16 / 8, own = i % 8;
      add_to(dq_to + (block * (kColumnsQk / 8) + 2 * group) * 128 + 32 * own, dq[group][block][own]);
    }
  };
  const auto late_beside = [&](const auto& work) {
    return [&](int place, int places) {
      work(place, places);
      add_late(place * kLate / places, (place + 1) * kLate / places);
    };
  };
  const auto rest_beside = [&](const auto& work) {
    return [&](int place, int places) {
      work(place, places);
      add_late(kLate + place * (kLateColumns - kLate) / places, kLate + (place + 1) * (kLateColumns - kLate) / places);
    };
  };
  const auto clear = [](float (&sums)[2][kWarpM / 2]) {
#pragma unroll
    for (int i = 0; i < kWarpM; ++i) sums[i % 2][i / 2] = 0.0f;
  };
  // dP begins with -D.
  const auto begin_dp = [&](uint32_t delta_numbers) {
#pragma unroll
    for (int i = 0; i < kWarpM / 8; ++i) {
      const float2 delta = shared_at<float2>(delta_numbers + 32 * i);
#pragma unroll
      for (int j = 0; j < 4; ++j) dp[j / 2][4 * i + 2 * (j % 2)] = -delta.x, dp[j / 2][4 * i + 2 * (j % 2) + 1] = -delta.y;
    }
  };
  // The first columns of the keys of the warp, in K or V, as A operands, and those of its first queries.
  const auto load_first_keys = [&](uint32_t (&a)[2][4], uint32_t keys) {
#pragma unroll
    for (int block = 0; block < 2; ++block) load_blocks(a[block], place_of(keys, kBlockN, 16 * block, 0));
  };
  const auto load_first_queries = [&](uint32_t (&rows)[4], uint32_t queries) {
    load_blocks(rows, place_of(queries + query_warp * kWarpM * kBoxBytes + b_lane, kBlockM, 0, 0));
  };
  // The keys of the warp, in K or V, by its queries of a step, in Q or dO, given the first ones of both; other work stands
  // among the products.
  const auto multiply_rows = [&]<int kColumns>(float (&to)[2][kWarpM / 2], uint32_t keys, const uint32_t (&first_keys)[2][4], uint32_t queries, const uint32_t (&first_queries)[4], Number<kColumns>, const auto& work) {
#pragma unroll
    for (int column = 0; column < kColumns; column += kMmaK) {
      uint32_t a[2][4];
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        if (column == 0) {
#pragma unroll
          for (int i = 0; i < 4; ++i) a[block][i] = first_keys[block][i];
        } else {
          load_blocks(a[block], place_of(keys, kBlockN, 16 * block, column));
        }
      }
#pragma unroll
      for (int q = 0; q < kWarpM; q += 2 * kMmaN) {
        uint32_t rows[4];
        if (column == 0 && q == 0) {
#pragma unroll
          for (int i = 0; i < 4; ++i) rows[i] = first_queries[i];
        } else {
          load_blocks(rows, place_of(queries + query_warp * kWarpM * kBoxBytes + b_lane, kBlockM, q, column));
        }
#pragma unroll
        for (int block = 0; block < 2; ++block) {
          multiply<Element>(to[block] + q / 2, a[block], rows[0], rows[1]);
          multiply<Element>(to[block] + q / 2 + 4, a[block], rows[2], rows[3]);
        }
        work(column / kMmaK * (kWarpM / 16) + q / 16, kColumns / kMmaK * (kWarpM / 16));
      }
    }
  };
  // Adds the columns of the warp of P^T dO, or of dS^T Q, over 16 queries, given those of P^T or dS^T.
  const auto add_product = [&]<int kColumns, int kAll>(float (&to)[2][kColumns / 2], const uint32_t (&a)[2][4], uint32_t queries, int query, int column, Number<kColumns>, Number<kAll>) {
    int place = query_warp * kColumns + column;
    if (kQueryWarps * kColumns > kAll && place >= kAll) place = column;  // of no use, but in the tile
    uint32_t columns[4];
    load_blocks_transposed(columns, (queries + a_lane ^ 2 * (place % kBoxColumns)) + (place / kBoxColumns * kBlockM + query) * kBoxBytes);
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      multiply<Element>(to[block] + column / 2, a[block], columns[0], columns[1]);
      multiply<Element>(to[block] + column / 2 + 4, a[block], columns[2], columns[3]);
    }
  };
  // dV += P^T dO, or dK += dS^T Q, of the warp's own queries, whose P^T or dS^T are in registers; other work stands among the
  // products.
  const auto add_own = [&]<int kColumns, int kAll>(float (&to)[2][kColumns / 2], const uint32_t (&own)[2][kWarpM / 4], uint32_t queries, Number<kColumns>, Number<kAll>, const auto& work) {
#pragma unroll
    for (int q = 0; q < kWarpM; q += kMmaK) {
      uint32_t a[2][4];
#pragma unroll
      for (int i = 0; i < 8; ++i) a[i / 4][i % 4] = own[i / 4][q / 4 + i % 4];
#pragma unroll
      for (int column = 0; column < kColumns; column += 2 * kMmaN) {
        add_product(to, a, queries, query_warp * kWarpM + q, column, Number<kColumns>(), Number<kAll>());
        work(q / kMmaK * (kColumns / 16) + column / 16, kWarpM / kMmaK * (kColumns / 16));
      }
    }
  };
  // The same of the queries of other warps, whose P^T or dS^T are in shared memory.
  const auto add_others = [&]<int kColumns, int kAll>(float (&to)[2][kColumns / 2], uint32_t all, uint32_t queries, Number<kColumns>, Number<kAll>) {
#pragma unroll
    for (int part = 1; part < kQueryWarps; ++part) {
#pragma unroll
      for (int q = 0; q < kWarpM; q += kMmaK) {
        const int query = (query_warp + part) % kQueryWarps * kWarpM + q;
        uint32_t a[2][4];
#pragma unroll
        for (int block = 0; block < 2; ++block) {
          load_blocks(a[block], (all + p_lane ^ 2 * (query % kPairQueries)) + (query / kPairQueries * kBlockN + 32 * key_warp + 16 * block) * kPairBytes);
        }
#pragma unroll
        for (int column = 0; column < kColumns; column += 2 * kMmaN) add_product(to, a, queries, query, column, Number<kColumns>(), Number<kAll>());
      }
    }
  };
  // A pair of neighbouring queries of a step, for one key of the warp, to shared memory.
  const uint32_t share_lane = (query_warp * kWarpM / kPairQueries * kBlockN + 32 * key_warp + lane / 4) * kPairBytes +
                              16 * swizzled<kPairBytes>(lane / 4, query_warp * kWarpM % kPairQueries / 8) + 4 * (lane % 4);
  const auto share = [&](uint32_t region, int block, int pair, uint32_t value) {
    store_number(shared + (share_lane ^ 16 * (pair / 2)) + (region + (16 * block + 8 * (pair % 2)) * kPairBytes), value);
  };

  uint32_t stage = 0, fill = kStages - 1;  // that is read, and filled next
  const auto next_stage = [](uint32_t stage) { return stage == kStages - 1 ? 0u : stage + 1; };
  wait_copies<kSteps - 2>();
  __syncthreads();  // K and V are there
  while (__any_sync(~0u, steps[0].tile >= 0)) {
    const Step step = steps[0];
    uint32_t first_of_k[2][4], first_of_q[4];
    load_first_keys(first_of_k, k_rows);
    wait_copies<kSteps - 2>();
    __syncthreads();  // all have read the stage that is filled again, P and dS
    const uint32_t q_tile = shared + kQ + stage * kQBytes, dout_tile = shared + kDout + stage * kDoutBytes;

    clear(logits);
    load_first_queries(first_of_q, q_tile);
    multiply_rows(logits, k_rows, first_of_k, q_tile, first_of_q, Number<kColumnsQk>(), late_beside(nothing));
    const Step last = next_step();  // while the last products of S are under way
    // P = exp2(logit - LSE); 0 for pairs that are not visible.
    const uint32_t lse_numbers = kLse + stage * kRowBytes + 4 * query_warp * kWarpM + 8 * (lane % 4);
    uint32_t first_of_v[2][4], first_of_dout[4];
    load_first_keys(first_of_v, v_rows);
    load_first_queries(first_of_dout, dout_tile);
    const uint32_t delta_numbers = lse_numbers + (kDelta - kLse);
    const int h = step.h;
    const int q_first = (step.tile & kPartial - 1) * kBlockM + query_warp * kWarpM + 2 * (lane % 4);
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      float (&s)[kWarpM / 2] = logits[block];
      const int kv_first = kv_start + 32 * key_warp + 16 * block + lane / 4;
      if (__any_sync(~0u, step.tile & kPartial)) {
#pragma unroll
        for (int i = 0; i < kWarpM / 8; ++i) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const int q_row = min(q_first + 8 * i + j, seqlen_q - 1);  // rows after the end repeat the last one
            const int q_pos = q_row + (seqlen_k - seqlen_q);
            const int visible_from = max(q_pos - u_window_min_1073741823 + 1, 0) - kv_first;
            const int visible_to = min(q_pos + 1, seqlen_k) - kv_first;
#pragma unroll
            for (int row = 0; row < 2; ++row) {
              float& x = s[4 * i + 2 * row + j];
              if (8 * row < visible_from || 8 * row >= visible_to) x = kMasked;
            }
          }
        }
      }
    }
    begin_dp(delta_numbers);
    float2 next_lse = shared_at<float2>(lse_numbers);
    multiply_rows(dp, v_rows, first_of_v, dout_tile, first_of_dout, Number<kColumnsV>(), rest_beside(for_elements([&](int block, int i) {
      float (&s)[kWarpM / 2] = logits[block];
      const float2 lse = next_lse;
      if (block == 1 && i + 1 < kWarpM / 8) next_lse = shared_at<float2>(lse_numbers + 32 * (i + 1));
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          float& x = s[4 * i + 2 * row + j];
          x = exp2_approx(fmaf(x, scale_log2e, -(j == 0 ? lse.x : lse.y)));
        }
      }
#pragma unroll
      for (int pair = 2 * i; pair < 2 * i + 2; ++pair) {
        probabilities[block][pair] = pack<Element>(s[2 * pair], s[2 * pair + 1]);
        share(kP, block, pair, probabilities[block][pair]);
      }
    })));
    // dV of the own queries; among its products dS = P (dP - D), to registers and to shared memory.
    add_own(dv, probabilities, dout_tile, Number<kWarpV>(), Number<kColumnsV>(), for_elements([&](int block, int i) {
      const uint32_t (&p)[kWarpM / 4] = probabilities[block];
#pragma unroll
      for (int pair = 2 * i; pair < 2 * i + 2; ++pair) {
        const float2 both = unpack<Element>(p[pair]);
        ds[block][pair] = pack<Element>(both.x * dp[block][2 * pair], both.y * dp[block][2 * pair + 1]);
        share(kDs, block, pair, ds[block][pair]);
      }
    }));
    __syncthreads();

    // dK += dS^T Q, and dV of the other queries; P and dS of these come from shared memory.
    add_own(dk, ds, q_tile, Number<kWarpQk>(), Number<kColumnsQk>(), nothing);
    add_others(dv, shared + kP, dout_tile, Number<kWarpV>(), Number<kColumnsV>());
    add_others(dk, shared + kDs, q_tile, Number<kWarpQk>(), Number<kColumnsQk>());
    __syncthreads();  // all have read Q and dO
    const auto beside_dq = for_copies([&](int part, int parts) { load_step(steps[1], 0, part, parts); });
    // dQ of 32 queries and some of the columns, from all keys.
    if (dq_column < kColumnsQk) {
#pragma unroll
      for (int i = 0; i < kWarpDq; ++i) dq[i / 16][i % 16 / 8][i % 8] = 0.0f;
      uint32_t ds_lane[2];
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        const int key = lane / 16 * 8 + lane % 8, query = 32 * dq_group + 16 * block;
        ds_lane[block] = shared + kDs + (query / kPairQueries * kBlockN + key) * kPairBytes +
                         16 * swizzled<kPairBytes>(key, query % kPairQueries / 8 + lane / 8 % 2);
      }
#pragma unroll
      for (int key = 0; key < kBlockN; key += kMmaK) {
        uint32_t a[2][4];
#pragma unroll
        for (int block = 0; block < 2; ++block) load_blocks_transposed(a[block], ds_lane[block] + key * kPairBytes);
#pragma unroll
        for (int column = 0; column < kWarpDq; column += 2 * kMmaN) {
          const int place = dq_column + column;
          uint32_t columns[4];
          load_blocks_transposed(columns, (shared + kK + a_lane ^ 2 * (place % kBoxColumns)) + (place / kBoxColumns * kBlockN + key) * kBoxBytes);
#pragma unroll
          for (int block = 0; block < 2; ++block) {
            multiply<Element>(dq[column / 16][block], a[block], columns[0], columns[1]);
            multiply<Element>(dq[column / 16][block] + 4, a[block], columns[2], columns[3]);
          }
          beside_dq(key / kMmaK * (kWarpDq / 16) + column / 16, kBlockN / kMmaK * (kWarpDq / 16));
        }
      }
      const int tile = step.tile & kPartial - 1;
      dq_to = sums_of(step);
    }
    if (dq_column >= kColumnsQk) load_step(steps[1], 0);
#pragma unroll
    for (int i = 0; i < kSteps - 1; ++i) steps[i] = steps[i + 1];
    steps[kSteps - 1] = last;
  }
  wait_copies<0>();
  if (adds_late) add_late(0, kLateColumns);

  {
    const auto store_rows = [&]<int kColumns>(const float (&sums)[2][kColumns / 2], float factor, GradElement* rows, long long stride, int columns, Number<kColumns>) {
#pragma unroll
      for (int row = 0; row < 4; ++row) {
        const int key = 32 * key_warp + 8 * row + lane / 4;
        const float* const of_row = sums[row / 2] + row % 2 * 2;
#pragma unroll
        for (int column = 0; column < kColumns; column += 32) {
          const int place = query_warp * kColumns + column;
          GradElement* const to = rows + key * stride + place;
          uint32_t pairs[4];
#pragma unroll
          for (int i = 0; i < 4 && column + 8 * i < kColumns; ++i) {
            const float* const two = of_row + column / 2 + 4 * i;
            pairs[i] = pack<GradElement>(two[0] * factor, two[1] * factor);
          }
          if (column + 32 <= kColumns) {
            gather_block(pairs);
            if (kv_start + key < keys && place + 8 * (lane % 4) < columns) {
              store_block(to + 8 * (lane % 4), pairs);
            }
          } else {  // 16 columns are left
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              if (kv_start + key < keys && place + 8 * i < columns) *reinterpret_cast<uint32_t*>(to + 8 * i + 2 * (lane % 4)) = pairs[i];
            }
          }
        }
      }
    };
    const int first_key = kv_start;
    store_rows(dk, softmax_scale, dk_ptr + b * stride_dk_b + hk * stride_dk_h + first_key * stride_dk_s, stride_dk_s, kHeadDimQk, Number<kWarpQk>());
    store_rows(dv, 1.0f, dv_ptr + b * stride_dv_b + hk * stride_dv_h + first_key * stride_dv_s, stride_dv_s, kHeadDimV, Number<kWarpV>());
  }
}

// Scales and rounds dQ of a tile of queries. Its sums lie in the dQ accumulator in the order of registers.
extern "C" __global__ void __launch_bounds__(128) bwd_sm80_mma_bf16_d64_sliding_window_sink_m64n64s1w4_postprocess(
    const float* dq_sum_ptr, bf16* dq_ptr, const float* u_sinks,
    long long stride_dq_b, long long stride_dq_s, long long stride_dq_h,
    int extent_u_sinks_0,
    int batch, int heads, int kv_heads, int group, int heads_in_l2, int q_tiles, int seqlen_q, int max_seqlen_k,
    int total_q, int total_k,
    float softmax_scale,
    int u_window
) {
  // The rows that were written last are read first, while L2 holds them.
  int unit, q_tile;
  place_tile(gridDim.x - 1 - blockIdx.x, q_tiles, batch * heads, heads_in_l2, unit, q_tile);
  const int b = unit / heads, h = unit % heads, q_start = q_tile * kBlockM;
  const float* const sums = dq_sum_ptr + static_cast<long long>((b * heads + h) * q_tiles + q_tile) * kSumsOfTile;
  const int lane = threadIdx.x % 32;
  for (int part = threadIdx.x / 32; part < kBlockM / 16 * (kColumnsQk / 32); part += 4) {  // 16 rows and 32 columns
    float4 own[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float* const from = sums + (4 * part + j) * 128 + lane;
      own[j] = {from[0], from[32], from[64], from[96]};
    }
    uint4 upper, lower;
    round_sums<GradElement>(own, softmax_scale, lane, upper, lower);
    const int row = 16 * (part / (kColumnsQk / 32)) + lane / 4, column = part % (kColumnsQk / 32) * 32 + 8 * (lane % 4);
    GradElement* const to = dq_ptr + b * stride_dq_b + h * stride_dq_h + (q_start + row) * stride_dq_s + column;
    if (column >= kHeadDimQk) continue;
    if (q_start + row < seqlen_q) *reinterpret_cast<uint4*>(to) = upper;
    if (q_start + row + 8 < seqlen_q) *reinterpret_cast<uint4*>(to + 8 * stride_dq_s) = lower;
  }
}
