// fwd_sm80_mma_bf16_d128_bounded_m128n64s3w4_bounded
//
// Attention forward, variant bounded: mask `q_pos >= kv`, score `30.0 * tanh(s / 30.0)`.
// Rendered by `attngen build tests/render/others.yaml`, schedule mma_forward.
//
// A block of 4 warps computes O of 128 query rows: S = Q K^T, P = exp2(S), O += P V, tile by tile of keys from the last
// to the first. Each warp has 32 rows, and keeps their S, P and O in registers. Tiles of K and V alternate in a ring
// of 3 stages, which all warps fill by cp.async. Other blocks on the same multiprocessor multiply while one is in its softmax.
#include "copy.cuh"
#include "expression.cuh"
#include "mma.cuh"
#include "quad.cuh"
#include "schedule.cuh"
#include "softmax.cuh"

using Element = bf16;  // of Q, K, V and P
using OutElement = bf16;  // of O

constexpr int kBlockM = 128;  // query rows of a work tile
constexpr int kBlockN = 64;  // keys of one step
constexpr int kHeadDimQk = 128, kHeadDimV = 128;
constexpr int kColumnsQk = 128, kColumnsV = 128;  // that are multiplied
constexpr int kThreads = 128;
constexpr int kRowBlocks = 2;  // of 16 rows, of a warp
constexpr int kWarpRows = 16 * kRowBlocks;
constexpr int kStages = 3;  // of the ring of K and V
constexpr int kBoxBytes = 128;  // of a row, over which it is swizzled
constexpr int kBoxColumns = kBoxBytes / sizeof(Element);
constexpr int kProductK = 32 / sizeof(Element);  // columns of Q and K, or keys, that one product sums over
static_assert(kBlockM == kWarpRows * kThreads / 32);
constexpr float kFixedMax = 0.0f;  // subtracted in place of every row max: the score's bounds keep P in range whatever Q and K are
// Shared memory, from its start.
constexpr uint32_t kQ = 0;  // 32768 B: Q
constexpr uint32_t kRing = 32768;  // 49152 B: tiles of K and V in turn
constexpr uint32_t kStageBytes = 16384;

// KV tiles of which some of the rows see some key, and those of which every row sees every key.
struct Spans {
  int visible_lo, visible_hi;
  int full_lo, full_hi;
};

// A work tile: which rows of which head, and where they and their keys begin.
struct Work {
  int b, h, q_start, q_begin, k_begin, seqlen_q, seqlen_k;
};

extern __shared__ __align__(1024) char shared_memory[];

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
  const int own = threadIdx.x % kCopiers / kLanes, chunk = threadIdx.x % kLanes;
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

extern "C" __global__ void __launch_bounds__(kThreads, 2) fwd_sm80_mma_bf16_d128_bounded_m128n64s3w4_bounded(
    const bf16* q_ptr, const bf16* k_ptr, const bf16* v_ptr, bf16* out_ptr, float* lse_ptr,
    const int* seqused_k_ptr,
    long long stride_q_b, long long stride_q_s, long long stride_q_h,
    long long stride_k_b, long long stride_k_s, long long stride_k_h,
    long long stride_v_b, long long stride_v_s, long long stride_v_h,
    long long stride_out_b, long long stride_out_s, long long stride_out_h,
    int batch, int heads, int kv_heads, int group, int heads_in_l2, int q_tiles, int seqlen_q, int max_seqlen_k,
    int total_q, int total_k,
    float softmax_scale,
    int write_lse, int has_seqused_k
) {
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // uniform across the warp, and the compiler knows
  const int lane = threadIdx.x % 32;
  const uint32_t shared = static_cast<uint32_t>(__cvta_generic_to_shared(shared_memory));
  int unit, q_tile;
  place_tile_by<uint32_t>(blockIdx.x, q_tiles, batch * heads, heads_in_l2, unit, q_tile);
  const int b = static_cast<uint32_t>(unit) / static_cast<uint32_t>(heads), h = unit - b * heads;
  const int hk = static_cast<uint32_t>(h) / static_cast<uint32_t>(group);
  const int q_begin = b * seqlen_q, k_begin = b * max_seqlen_k;
  const int seqlen_k = has_seqused_k ? seqused_k_ptr[b] : max_seqlen_k;
  const Work work = {b, h, q_tile * kBlockM, q_begin, k_begin, seqlen_q, seqlen_k};

  load_rows<kBlockM, kHeadDimQk>(shared + kQ, [&](int row) {
    const int q = work.q_start + row;
    return q_ptr + work.b * stride_q_b + q * stride_q_s + work.h * stride_q_h;
  }, work.seqlen_q - work.q_start);

  const auto spans_of = [&](int first_row, int rows) {
    const int whole_tiles = seqlen_k / kBlockN;
    const int q_start = work.q_start + first_row;
    const int q_hi = min(work.q_start + (first_row + rows - 1), seqlen_q - 1);
    const int q_pos_lo = q_start + (seqlen_k - seqlen_q);
    const int q_pos_hi = q_hi + (seqlen_k - seqlen_q);
    const int visible_hi = (max(q_pos_hi + 1, 0) + kBlockN - 1) / kBlockN;
    const int full_hi = min(max(q_pos_lo + 1, 0) / kBlockN, whole_tiles);
    return q_start < seqlen_q ? Spans{0, visible_hi, 0, full_hi} : Spans{};
  };
  const Spans all = spans_of(0, kBlockM);
  const Spans mine = spans_of(kWarpRows * warp, kWarpRows);
  const int tiles = max(all.visible_hi - all.visible_lo, 0);
  int remaining = tiles;
  // The next tile to copy; -1: there is none.
  const auto next_tile = [&] {
    if (remaining <= 0) return -1;
    const int tile = all.visible_lo + remaining - 1;
    --remaining;
    return tile;
  };

  const Element* const k_start = k_ptr + b * stride_k_b + hk * stride_k_h;
  const Element* const v_start = v_ptr + b * stride_v_b + hk * stride_v_h;
  const auto k_at = [&](int key) { return k_start + key * stride_k_s; };
  const auto v_at = [&](int key) { return v_start + key * stride_v_s; };
  // Copies K of a tile, whole or in parts. A tile of -1 has no rows.
  const auto load_k = [&](int listed, uint32_t to, int part = 0, int parts = 1) {
    const int start = max(listed, 0) * kBlockN;
    load_rows<kBlockN, kHeadDimQk>(shared + to, [&](int row) { return k_at(start + row); }, listed < 0 ? 0 : seqlen_k - start, part, parts);
  };
  // Copies V of a tile, whole or in parts. A tile of -1 has no rows.
  const auto load_v = [&](int listed, uint32_t to, int part = 0, int parts = 1) {
    const int start = max(listed, 0) * kBlockN;
    load_rows<kBlockN, kHeadDimV>(shared + to, [&](int row) { return v_at(start + row); }, listed < 0 ? 0 : seqlen_k - start, part, parts);
  };
  // Half-step 2 i takes K of the i-th tile, half-step 2 i + 1 its V. Stages are filled in turn.
  constexpr int kAhead = kStages / 2;  // steps ahead for which there are copies under way
  uint32_t fill = kRing;
  const auto next_stage = [](uint32_t stage) { return stage == kRing + (kStages - 1) * kStageBytes ? kRing : stage + kStageBytes; };
  const auto finish_copies = [&] {
    fill = next_stage(fill);
    commit_copies();
  };
  int listed[kAhead + 1];  // the tile of this step, and those of the next ones
#pragma unroll
  for (int i = 0; i <= kAhead; ++i) listed[i] = next_tile();
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    if (i % 2 == 0) {
      load_k(listed[i / 2], fill);
    } else {
      load_v(listed[i / 2], fill);
    }
    finish_copies();
  }

  // Shared-memory address of a lane's rows of Q, K and V for ldmatrix: columns that are multiples of 16 are added by XOR.
  const uint32_t q_place = shared + kQ + (kWarpRows * warp + lane % 16) * kBoxBytes + 16 * swizzled<kBoxBytes>(lane % 16, lane / 16);
  const int k_row = lane / 16 * 8 + lane % 8, v_row = lane % 16, v_chunk = lane / 16;
  const uint32_t k_lane = shared + k_row * kBoxBytes + 16 * swizzled<kBoxBytes>(k_row, lane / 8 % 2);
  const uint32_t v_lane = shared + v_row * kBoxBytes + 16 * swizzled<kBoxBytes>(v_row, v_chunk);
  // The place of a column, and of a row of a tile of `kRows`, given that of a lane in the first ones.
  const auto place = [](uint32_t lane_place, int rows, int row, int column) {
    return (lane_place ^ static_cast<int>(sizeof(Element)) * (column % kBoxColumns)) + (column / kBoxColumns * rows + row) * kBoxBytes;
  };
  const float u_value = softmax_scale * 0.03333333333333333f;
  const float scale_log2e = kLog2e * 30.0f;
  float acc[kRowBlocks][kColumnsV / 2] = {};  // O, not yet divided by the row sum
  float s[kRowBlocks][kBlockN / 2];           // S, then the logits
  uint32_t p[kRowBlocks][kBlockN * sizeof(Element) / 8];  // P, packed
  float row_maxima[kRowBlocks][2], row_sums[kRowBlocks][2] = {};
#pragma unroll
  for (int block = 0; block < kRowBlocks; ++block) row_maxima[block][0] = row_maxima[block][1] = kFixedMax;
  // Issues the part of some copies that stands at a place among products: in the first quarter of these.
  const auto copy_at = [](int place, int places, const auto& copy) {
    if (4 * place < places) copy(place, (places + 3) / 4);
  };
  // S = Q K^T, and copies among the products
  const auto multiply_k = [&](uint32_t tile, const auto& copy) {
#pragma unroll
    for (int block = 0; block < kRowBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < kBlockN / 2; ++i) s[block][i] = 0.0f;
    }
#pragma unroll
    for (int column = 0; column < kColumnsQk; column += kProductK) {
      uint32_t q[kRowBlocks][4];
#pragma unroll
      for (int block = 0; block < kRowBlocks; ++block) {
        load_blocks(q[block], place(q_place, kBlockM, 16 * block, column));
      }
#pragma unroll
      for (int key = 0; key < kBlockN; key += 2 * kMmaN) {
        uint32_t keys[4];
        load_blocks(keys, place(k_lane + tile, kBlockN, key, column));
#pragma unroll
        for (int block = 0; block < kRowBlocks; ++block) {
          const uint32_t* const a = q[block];
          multiply<Element>(s[block] + key / 2, a, keys[0], keys[1]);
          multiply<Element>(s[block] + key / 2 + 4, a, keys[2], keys[3]);
        }
        copy_at(column / kProductK * (kBlockN / 16) + key / 16, kColumnsQk / kProductK * (kBlockN / 16), copy);
      }
    }
  };
  // O += P V, and copies among the products
  const auto multiply_v = [&](uint32_t tile, const auto& copy) {
#pragma unroll
    for (int key = 0; key < kBlockN; key += kMmaK) {
#pragma unroll
      for (int column = 0; column < kColumnsV; column += 2 * kMmaN) {
        uint32_t values[4];
        load_blocks_transposed(values, place(v_lane + tile, kBlockN, key, column));
#pragma unroll
        for (int block = 0; block < kRowBlocks; ++block) {
          multiply<Element>(acc[block] + column / 2, p[block] + key / 4, values[0], values[1]);
          multiply<Element>(acc[block] + column / 2 + 4, p[block] + key / 4, values[2], values[3]);
        }
        copy_at(key / kMmaK * (kColumnsV / 16) + column / 16, kBlockN / kMmaK * (kColumnsV / 16), copy);
      }
    }
  };

  uint32_t stage = kRing;  // that is read next
  // Waits for the next tile. All warps have read the stage that is filled again.
  const auto wait_tile = [&] {
    wait_copies<kStages - 2>();
    __syncthreads();
  };
  while (__any_sync(~0u, listed[0] >= 0)) {
    const int tile = listed[0];
    const bool partial = !(tile >= mine.full_lo && tile < mine.full_hi);
    const bool seen = tile >= mine.visible_lo && tile < mine.visible_hi;  // by some row of the warp
    wait_tile();
    const auto copy_beside_k = [&](int part, int parts) { load_k(listed[kAhead], fill, part, parts); };
    // S becomes logits; pairs that are not visible get -inf.
    const auto finish_logits = [&, &scores = s] {
#pragma unroll
      for (int block = 0; block < kRowBlocks; ++block) {
        const int row_in_group = kWarpRows * warp + 16 * block + lane / 4;
        const int q_first = work.q_start + row_in_group;
        auto& s = scores[block];
        const int kv_first = tile * kBlockN + 2 * (lane % 4);
        if (__any_sync(~0u, partial)) {
          struct Row {
            int visible_to;
          };
          Row rows[2];
#pragma unroll
          for (int row = 0; row < 2; ++row) {
            const int q_row = min(q_first + 8 * row, seqlen_q - 1);  // rows after the end repeat the last one
            const int q_pos = q_row + (seqlen_k - seqlen_q);
            const int visible_to = min(q_pos + 1, seqlen_k) - kv_first;
            rows[row] = {visible_to};
          }
#pragma unroll
          for (int i = 0; i < kBlockN / 4; ++i) {
            const int key = 8 * (i / 2) + i % 2;  // from the first one of the lane
#pragma unroll
            for (int row = 0; row < 2; ++row) {
              float& x = s[4 * (i / 2) + 2 * row + i % 2];
              const auto [visible_to] = rows[row];
              x = tanh_approx(x * u_value);
              if (key >= visible_to) x = kMasked;
            }
          }
        } else {
#pragma unroll
          for (int i = 0; i < kBlockN / 4; ++i) {
#pragma unroll
            for (int row = 0; row < 2; ++row) {
              float& x = s[4 * (i / 2) + 2 * row + i % 2];
              x = tanh_approx(x * u_value);
            }
          }
        }
      }
    };
    if (__any_sync(~0u, seen)) {
      multiply_k(stage, copy_beside_k);
      finish_logits();
#pragma unroll
      for (int block = 0; block < kRowBlocks; ++block) {
        exponentiate<Element>(s[block], scale_log2e, row_maxima[block], p[block], row_sums[block]);
      }
    } else {
      copy_beside_k(0, 1);
    }
    finish_copies();
    stage = next_stage(stage);
    wait_tile();
    const auto copy_beside_v = [&](int part, int parts) { load_v(listed[kAhead], fill, part, parts); };
    if (__any_sync(~0u, seen)) {
      multiply_v(stage, copy_beside_v);
    } else {
      copy_beside_v(0, 1);
    }
    finish_copies();
    stage = next_stage(stage);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) listed[i] = listed[i + 1];
    listed[kAhead] = next_tile();
  }
  wait_copies<0>();

  float factors_of_rows[kRowBlocks][2];  // by which O is multiplied
#pragma unroll
  for (int block = 0; block < kRowBlocks; ++block) {
    auto &row_max = row_maxima[block], &row_sum = row_sums[block];
    float normalize[2];
    finish_sum(row_sum, normalize);
    factors_of_rows[block][0] = normalize[0];
    factors_of_rows[block][1] = normalize[1];
  }
  if (write_lse) {  // each lane of a quad has another one of its rows
    float row_max = row_maxima[0][0], row_sum = row_sums[0][0];
#pragma unroll
    for (int i = 1; i < 2 * kRowBlocks; ++i) {
      row_max = select_number(lane % 4 == i, row_maxima[i / 2][i % 2], row_max);
      row_sum = select_number(lane % 4 == i, row_sums[i / 2][i % 2], row_sum);
    }
    const int q = work.q_start + (kWarpRows * warp + lane / 4 + 8 * (lane % 4));
    if (lane % 4 < 2 * kRowBlocks && q < seqlen_q) lse_ptr[(work.b * static_cast<long long>(heads) + work.h) * seqlen_q + q] = log_sum_exp(row_max, row_sum);
  }
  OutElement* own_rows;  // the first row of the lane
  {
    const int q = work.q_start + (kWarpRows * warp + lane / 4);
    own_rows = (out_ptr + work.b * stride_out_b + q * stride_out_s + work.h * stride_out_h);
  }
#pragma unroll
  for (int block = 0; block < kRowBlocks; ++block) {
    rescale(acc[block], factors_of_rows[block]);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int row_in_group = kWarpRows * warp + 16 * block + lane / 4;
      const int q = work.q_start + row_in_group + 8 * row;
      OutElement* const of_row = own_rows + (16 * block + 8 * row) * stride_out_s;
      OutElement* const to = of_row + 8 * (lane % 4);
#pragma unroll
      for (int column = 0; column < kHeadDimV; column += 32) {
        uint32_t two_columns[4] = {};
#pragma unroll
        for (int i = 0; i < 4 && column + 8 * i < kColumnsV; ++i) {
          const float* const two = acc[block] + column / 2 + 4 * i + 2 * row;
          two_columns[i] = pack<OutElement>(two[0], two[1]);
        }
        gather_block(two_columns);
        if (q < seqlen_q) store_block(to + column, two_columns);
      }
    }
  }
}
