// fwd_sm80_mma_bf16_d64_blocks_m64n64s3w4_tilemap
//
// Attention forward, variant blocks: mask `sel[h, q // 64, kv // 64] and q_pos >= kv`.
// Rendered by `attngen build tests/render/others.yaml`, schedule mma_forward.
//
// A block of 4 warps computes O of 64 query rows: S = Q K^T, P = exp2(S), O += P V, tile by tile of keys from the last
// to the first. Each warp has 16 rows, and keeps their S, P and O in registers. Tiles of K and V alternate in a ring
// of 3 stages, which all warps fill by cp.async. Other blocks on the same multiprocessor multiply while one is in its softmax.
#include "copy.cuh"
#include "expression.cuh"
#include "mma.cuh"
#include "quad.cuh"
#include "schedule.cuh"
#include "softmax.cuh"
#include "tile_map.cuh"

using Element = bf16;  // of Q, K, V and P
using OutElement = bf16;  // of O

constexpr int kBlockM = 64;  // query rows of a work tile
constexpr int kBlockN = 64;  // keys of one step
constexpr int kHeadDimQk = 64, kHeadDimV = 64;
constexpr int kColumnsQk = 64, kColumnsV = 64;  // that are multiplied
constexpr int kThreads = 128;
constexpr int kRowBlocks = 1;  // of 16 rows, of a warp
constexpr int kWarpRows = 16 * kRowBlocks;
constexpr int kStages = 3;  // of the ring of K and V
constexpr int kBoxBytes = 128;  // of a row, over which it is swizzled
constexpr int kBoxColumns = kBoxBytes / sizeof(Element);
constexpr int kProductK = 32 / sizeof(Element);  // columns of Q and K, or keys, that one product sums over
static_assert(kBlockM == kWarpRows * kThreads / 32);
constexpr float kRaiseAbove = 8.0f;  // log2 units by which the running max must grow before the row max follows
// Shared memory, from its start.
constexpr uint32_t kQ = 0;  // 8192 B: Q
constexpr uint32_t kRing = 8192;  // 24576 B: tiles of K and V in turn
constexpr uint32_t kStageBytes = 8192;

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

extern "C" __global__ void __launch_bounds__(kThreads, 2) fwd_sm80_mma_bf16_d64_blocks_m64n64s3w4_tilemap(
    const bf16* q_ptr, const bf16* k_ptr, const bf16* v_ptr, bf16* out_ptr, float* lse_ptr,
    const int* seqused_k_ptr, const int* tile_map_ptr, const unsigned char* u_sel,
    long long stride_q_b, long long stride_q_s, long long stride_q_h,
    long long stride_k_b, long long stride_k_s, long long stride_k_h,
    long long stride_v_b, long long stride_v_s, long long stride_v_h,
    long long stride_out_b, long long stride_out_s, long long stride_out_h,
    long long stride_tile_map_b, long long stride_tile_map_h, long long stride_tile_map_q,
    long long stride_u_sel_0, long long stride_u_sel_1,
    int extent_u_sel_0, int extent_u_sel_1, int extent_u_sel_2,
    int batch, int heads, int kv_heads, int group, int heads_in_l2, int q_tiles, int seqlen_q, int max_seqlen_k,
    int total_q, int total_k, int words,
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

  const int q_start = work.q_start;
  const int q_hi = min(q_start + kBlockM - 1, seqlen_q - 1);
  // Tiles between the first and the last visible key.
  const int2 hull = [&] {
    const int q_pos_hi = q_hi + (seqlen_k - seqlen_q);
    const int visible_hi = max(min(q_pos_hi + 1, seqlen_k) + kBlockN - 1, 0) / kBlockN;
    const int visible_lo = 0;
    return int2{visible_lo, visible_hi};
  }();
  const int visible_lo = hull.x, visible_hi = hull.y;
  int word = (visible_hi + 31) / 32;  // the last one whose tiles are listed,
  uint32_t tiles_left = 0, partial_tiles = 0;  // those of its tiles that are still to come, and those that need the mask
  // The next tile to copy, with kPartial if it needs the mask; -1: there is none.
  constexpr int kPartial = 1 << 30;
  const auto next_tile = [&] {
    while (tiles_left == 0) {
      if (--word < visible_lo / 32) return -1;
      const int* tile_map = tile_map_ptr + b * stride_tile_map_b + h * stride_tile_map_h + q_start / kBlockM * stride_tile_map_q;
      const uint32_t partial_word = tile_map[words + word];
      const uint32_t visible_word = tile_map[word] | partial_word;
      tiles_left = visible_word;
      partial_tiles = partial_word;
    }
    const int bit = 31 - __clz(tiles_left);
    tiles_left ^= 1u << bit;
    return 32 * word + bit | (partial_tiles >> bit & 1 ? kPartial : 0);
  };

  const Element* const k_start = k_ptr + b * stride_k_b + hk * stride_k_h;
  const Element* const v_start = v_ptr + b * stride_v_b + hk * stride_v_h;
  const auto k_at = [&](int key) { return k_start + key * stride_k_s; };
  const auto v_at = [&](int key) { return v_start + key * stride_v_s; };
  // Copies K of a tile, whole or in parts. A tile of -1 has no rows.
  const auto load_k = [&](int listed, uint32_t to, int part = 0, int parts = 1) {
    const int start = max((listed & kPartial - 1), 0) * kBlockN;
    load_rows<kBlockN, kHeadDimQk>(shared + to, [&](int row) { return k_at(start + row); }, listed < 0 ? 0 : seqlen_k - start, part, parts);
  };
  // Copies V of a tile, whole or in parts. A tile of -1 has no rows.
  const auto load_v = [&](int listed, uint32_t to, int part = 0, int parts = 1) {
    const int start = max((listed & kPartial - 1), 0) * kBlockN;
    load_rows<kBlockN, kHeadDimV>(shared + to, [&](int row) { return v_at(start + row); }, listed < 0 ? 0 : seqlen_k - start, part, parts);
  };
  load_rows<kBlockM, kHeadDimQk>(shared + kQ, [&](int row) {
    const int q = work.q_start + row;
    return q_ptr + work.b * stride_q_b + q * stride_q_s + work.h * stride_q_h;
  }, work.seqlen_q - work.q_start);
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
  const float scale_log2e = softmax_scale * kLog2e;
  const auto* u_sel_h = u_sel + static_cast<long long>(h) * stride_u_sel_0; asm("" : "+l"(u_sel_h));
  float acc[kRowBlocks][kColumnsV / 2] = {};  // O, not yet divided by the row sum
  float s[kRowBlocks][kBlockN / 2];           // S, then the logits
  uint32_t p[kRowBlocks][kBlockN * sizeof(Element) / 8];  // P, packed
  float row_maxima[kRowBlocks][2], row_sums[kRowBlocks][2] = {};
#pragma unroll
  for (int block = 0; block < kRowBlocks; ++block) row_maxima[block][0] = row_maxima[block][1] = kUnseen;
  // Issues the part of some copies that stands at a place among products: in the first quarter of these, two copies of a lane
  // together, since the compiler puts three empty loads before each part.
  const auto copy_at = [](int place, int places, const auto& copy) {
    const int quarter = (places + 3) / 4, parts = max(quarter / 2, 1);
    if (place % 2 == min(quarter, 2) - 1 && place / 2 < parts) copy(place / 2, parts);
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
    const int tile = (listed[0] & kPartial - 1);
    const bool partial = (listed[0] & kPartial) != 0;
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
            int u_q_div_64;
            int visible_to;
          };
          Row rows[2];
#pragma unroll
          for (int row = 0; row < 2; ++row) {
            const int q_row = min(q_first + 8 * row, seqlen_q - 1);  // rows after the end repeat the last one
            const int q_pos = q_row + (seqlen_k - seqlen_q);
            const int u_q_div_64 = q_row / 64;
            const int visible_to = min(q_pos + 1, seqlen_k) - kv_first;
            rows[row] = {u_q_div_64, visible_to};
          }
#pragma unroll
          for (int i = 0; i < kBlockN / 4; ++i) {
            const int key = 8 * (i / 2) + i % 2;  // from the first one of the lane
            const int kv = kv_first + key;
            const int u_kv_div_64 = kv / 64;
#pragma unroll
            for (int row = 0; row < 2; ++row) {
              float& x = s[4 * (i / 2) + 2 * row + i % 2];
              const auto [u_q_div_64, visible_to] = rows[row];
              const bool u_sel_h_q_div_64_kv_div_64 = (u_q_div_64 < extent_u_sel_1 && u_kv_div_64 < extent_u_sel_2) ? u_sel_h[static_cast<unsigned>(u_q_div_64) * stride_u_sel_1 + static_cast<unsigned>(u_kv_div_64)] != 0 : false;
              if (!(key < visible_to && u_sel_h_q_div_64_kv_div_64)) x = kMasked;
            }
          }
        }
      }
    };
    multiply_k(stage, copy_beside_k);
    finish_logits();
    float maxima[kRowBlocks][2];
    bool raises = false;
#pragma unroll
    for (int block = 0; block < kRowBlocks; ++block) {
      auto &row_max = row_maxima[block], &maximum = maxima[block];
      find_maximum(s[block], scale_log2e, maximum);
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        if (maximum[row] <= row_max[row] + kRaiseAbove) maximum[row] = row_max[row];
        raises = raises || maximum[row] > row_max[row];
      }
    }
    if (__any_sync(~0u, raises)) {
#pragma unroll
      for (int block = 0; block < kRowBlocks; ++block) {
        float alpha[2];
        raise_row_max(maxima[block], row_maxima[block], alpha);
        rescale(acc[block], alpha);
        row_sums[block][0] *= alpha[0];
        row_sums[block][1] *= alpha[1];
      }
    }
#pragma unroll
    for (int block = 0; block < kRowBlocks; ++block) {
      exponentiate<Element>(s[block], scale_log2e, row_maxima[block], p[block], row_sums[block]);
    }
    finish_copies();
    stage = next_stage(stage);
    wait_tile();
    const auto copy_beside_v = [&](int part, int parts) { load_v(listed[kAhead], fill, part, parts); };
    multiply_v(stage, copy_beside_v);
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
// Makes the tile map, in up to three launches. The first one classifies: a block has 32 tiles, of which a bit says that a tile is
// full, since every query sees every key, another that it is partial, since some query sees some key. Given hashes to write, a
// block hashes its partial tiles: those with the same visible pairs have the same hash. Given a list of slots, blocks write the
// visible pairs of their tiles, a bit for each element of a lane of a consumer.
extern "C" __global__ void __launch_bounds__(128, 8) classify_fwd_sm80_mma_bf16_d64_blocks_m64n64s3w4_tilemap(
    int* tile_map_ptr, long long* tile_hashes_ptr, const int* tile_list_ptr, const int* seqused_k_ptr,
    const unsigned char* u_sel,
    long long stride_u_sel_0, long long stride_u_sel_1,
    int extent_u_sel_0, int extent_u_sel_1, int extent_u_sel_2,
    int batch, int heads, int kv_heads, int group, int heads_in_l2, int q_tiles, int seqlen_q, int max_seqlen_k,
    int total_q, int total_k, int words, long long map_words, int map_heads,
    int has_seqused_k
) {
  constexpr int kWarps = 4;
  constexpr int kKeyParts = (kBlockN + 31) / 32, kQueryParts = (kBlockM + 31) / 32, kParts = kKeyParts * kQueryParts;  // of a tile, 32 x 32 pairs
  constexpr int kCellRows = 32, kCellKeys = 32;  // of a tile, decided by bounds
  constexpr int kCellsBeside = (kBlockN + kCellKeys - 1) / kCellKeys, kCells = (kBlockM + kCellRows - 1) / kCellRows * kCellsBeside;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool listed = tile_list_ptr != nullptr, hashes = tile_hashes_ptr != nullptr;
  const int own_row = blockIdx.x / words, word = blockIdx.x % words;
  int* const map_row = tile_map_ptr + 2LL * words * own_row;
  const int own_unit = own_row / q_tiles;
  int q_tile = own_row % q_tiles, h = own_unit % map_heads, b = own_unit / map_heads;  // a list has others
  __shared__ uint32_t seen_bits[kBlockN * kQueryParts];
  // A bit for each tile: whether a pair is known to be visible, and one to be hidden, by bounds of each warp's cells and from looks
  // at pairs; and cells that bounds leave open.
  __shared__ uint32_t seen_of[kWarps];
  __shared__ uint32_t hidden_of[kWarps];
  __shared__ uint32_t later_seen, later_hidden;
  __shared__ uint32_t open_parts[kParts];
  __shared__ unsigned long long hash_of[32];
  if (threadIdx.x == 0) {
    later_seen = later_hidden = 0;
  }
  if (threadIdx.x < 32) hash_of[threadIdx.x] = 0;
  uint32_t seen = 0, hidden = 0, every_part = 0;  // of which tiles all parts are open
  if (!listed && !hashes) {
    if (threadIdx.x < 32) tile_map_ptr[map_words + 32LL * blockIdx.x + threadIdx.x] = -1;
    const int seqlen_k = has_seqused_k ? seqused_k_ptr[b] : max_seqlen_k;
    {
      const int q_start = q_tile * kBlockM;
      const int kv_start = (32 * word + lane) * kBlockN;  // a lane has a tile
      uint32_t seen = 0, hidden = 0;
      if (seqlen_q > 0 && seqlen_k > 0) {
#pragma unroll 4
        for (int cell = warp; cell < kCells; cell += kWarps) {
          const int row = cell / kCellsBeside * kCellRows, key = cell % kCellsBeside * kCellKeys;
          const bool exists = q_start + row < seqlen_q, inside = exists && kv_start + key < seqlen_k;
          const bool whole = kv_start + min(key + kCellKeys, kBlockN) <= seqlen_k;  // keys after the end count as hidden
          const int q_lo = min(q_start + row, seqlen_q - 1), q_end = min(q_start + min(row + kCellRows, kBlockM), seqlen_q);
          const int kv_lo = min(kv_start + key, seqlen_k - 1), kv_end = min(kv_start + min(key + kCellKeys, kBlockN), seqlen_k);
          {
            const int kv_hi = kv_end - 1;
            const int q_pos_lo = q_lo + (seqlen_k - seqlen_q);
            const int q_pos_hi = q_end - 1 + (seqlen_k - seqlen_q);
            const int u_tiles_q_lo_div_64 = q_lo / 64;
            const int u_tiles_kv_lo_div_64 = kv_lo / 64;
            const bool u_tiles_sel_h_q_lo_div_64_kv_lo_div_64 = ((u_tiles_q_lo_div_64 < extent_u_sel_1 && u_tiles_kv_lo_div_64 < extent_u_sel_2) ? u_sel[static_cast<long long>(h) * stride_u_sel_0 + static_cast<long long>(u_tiles_q_lo_div_64) * stride_u_sel_1 + static_cast<long long>(u_tiles_kv_lo_div_64)] : 0) != 0;
            const bool may = inside && (u_tiles_sel_h_q_lo_div_64_kv_lo_div_64 && q_pos_hi >= kv_lo);
            const bool must = inside && (u_tiles_sel_h_q_lo_div_64_kv_lo_div_64 && q_pos_lo >= kv_hi);
            seen |= __ballot_sync(~0u, must), hidden |= __ballot_sync(~0u, exists && !(may && whole));
            const uint32_t open = __ballot_sync(~0u, may && !must);
            if (lane == 0) open_parts[cell] = open;
          }
        }
      } else if (threadIdx.x < kParts) {
        open_parts[threadIdx.x] = 0;
      }
      if (lane == 0) {
        seen_of[warp] = seen;
        hidden_of[warp] = hidden;
      }
    }
    __syncthreads();
    const auto of_all_warps = [&](const uint32_t* words_of) { return __reduce_or_sync(~0u, lane < kWarps ? words_of[lane] : 0); };
    seen = of_all_warps(seen_of), hidden = of_all_warps(hidden_of);
  } else {
    every_part = listed ? 1 : map_row[words + word];
    __syncthreads();
  }
  const int items = listed ? tile_list_ptr[0] : blockIdx.x + 1;  // a block without a list has its own tiles
#pragma unroll 1
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    int first_tile = 32 * word;
    if (listed) {
      const int slot = tile_list_ptr[1 + item];  // among all of the map
      const int row = slot / (32 * words), unit = row / q_tiles;
      first_tile = slot % (32 * words), q_tile = row % q_tiles, h = unit % map_heads, b = unit / map_heads;
    }
    const int seqlen_k = has_seqused_k ? seqused_k_ptr[b] : max_seqlen_k;
    const auto* u_sel_h = u_sel + static_cast<long long>(h) * stride_u_sel_0; asm("" : "+l"(u_sel_h));
    int before = 0;  // open parts of the block, of which its warps take turns
#pragma unroll 1
    for (int first_part = 0; first_part < kParts; first_part += 32) {
      uint32_t lane_open = first_part + lane < kParts ? every_part : 0;  // a lane has a part
      if (!listed && !hashes && first_part + lane < kParts) lane_open = open_parts[first_part + lane];
      lane_open &= ~(seen & hidden);
      uint32_t parts_left = __ballot_sync(~0u, lane_open != 0), left = 0;
      int part = 0;
#pragma unroll 1
      while (__any_sync(~0u, (parts_left | left) != 0)) {
        if (left == 0) {
          const int place = __ffs(parts_left) - 1;
          parts_left &= parts_left - 1;
          part = first_part + place;
          const uint32_t open = __shfl_sync(~0u, lane_open, place);
          const int turn = before + __popc(open & (1u << lane) - 1) + 2 * part;  // parts of a tile go to many warps
          left = __ballot_sync(~0u, open >> lane & 1 && turn % kWarps == warp);
          before += __popc(open);
          continue;
        }
        const int bit = __ffs(left) - 1, kv_tile = first_tile + bit;
        left &= left - 1;
        const uint32_t mixed_tiles = (seen | at_once(later_seen)) & (hidden | at_once(later_hidden));  // partial, whatever other pairs say
        if (__shfl_sync(~0u, mixed_tiles, 0) >> bit & 1) continue;
        const int q_start = q_tile * kBlockM, kv_start = kv_tile * kBlockN;
        const int key = 32 * (part % kKeyParts) + lane, query_part = part / kKeyParts, q_first = q_start + 32 * query_part;
        if (!listed && q_first >= seqlen_q) continue;  // a list asks for all of a tile, a map for the queries that exist
        const int kv = kv_start + key;
        const int of_key_0 = kv / 64;
        // The mask's values of a query; a lane has one query.
        int lane_u_q_div_64;
        {
          const int q_row = min(q_first + lane, seqlen_q - 1);
          const int u_q_div_64 = q_row / 64;
          lane_u_q_div_64 = u_q_div_64;
        }
        const int queries = min(min(kBlockM - 32 * query_part, seqlen_q - q_first), 32);
        const uint32_t inside = queries > 0 ? ~0u >> (32 - queries) : 0;
        int writes_pairs = listed, adds_hashes = hashes;
        asm volatile("" : "+r"(writes_pairs), "+r"(adds_hashes));  // else the loop is compiled for each value
        uint32_t bits = 0;
#pragma unroll 8
        for (int i = 0; i < 32; ++i) {
          const int q_row = min(q_first + i, seqlen_q - 1);
          const int u_q_div_64 = __shfl_sync(~0u, lane_u_q_div_64, i);
          const int q_pos = q_row + (seqlen_k - seqlen_q);
          const bool u_sel_h_q_div_64_kv_div_64 = ((u_q_div_64 < extent_u_sel_1 && of_key_0 < extent_u_sel_2) ? u_sel_h[static_cast<unsigned>(u_q_div_64) * stride_u_sel_1 + static_cast<unsigned>(of_key_0)] : 0) != 0;
          bits |= static_cast<uint32_t>(u_sel_h_q_div_64_kv_div_64 && q_pos >= kv) << i;
        }
        bits &= inside;
        if (kv >= seqlen_k) bits = 0;
        const bool own = kBlockN % 32 == 0 || key < kBlockN;
        if (writes_pairs) {
          if (own) seen_bits[kQueryParts * key + query_part] = bits;
        } else if (adds_hashes) {
          const unsigned long long hash = own && bits ? mixed(static_cast<unsigned long long>(kQueryParts * key + query_part) << 32 | bits) : 0;
          const unsigned long long sum = sum_of_lanes(hash);
          if (lane == 0) atomicAdd(&hash_of[bit], sum);
        } else {
          const bool some = __any_sync(~0u, own && bits), all = __all_sync(~0u, !own || bits == inside);  // only a whole tile of keys is full
          if (lane == 0 && some) atomicOr(&later_seen, 1u << bit);
          if (lane == 0 && !all) atomicOr(&later_hidden, 1u << bit);
        }
      }
    }
    if (!listed) break;
    __syncthreads();
#pragma unroll 1
    for (int place = threadIdx.x; place < 128 * 1; place += 32 * kWarps) {  // a lane of a consumer's word
      const int part = place / 128, own = 64 * (part / 1) + 16 * (place % 128 / 32) + place % 32 / 4;
      uint32_t bits = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int other = 64 * (part % 1) + 8 * i + 2 * (place % 4);
        if (other >= kBlockN) break;
#pragma unroll
        for (int second = 0; second < 2; ++second) {
          const uint32_t pair = seen_bits[kQueryParts * (other + second) + own / 32] >> own % 32;
          bits |= ((pair & 1) | (pair >> 8 & 1) << 2) << (4 * i + second);
        }
      }
      tile_map_ptr[(1 + kSlotsOfWord) * map_words + static_cast<long long>(item) * 128 + place] = bits;
    }
    __syncthreads();
  }
  if (listed) return;
  __syncthreads();
  if (hashes) {
    if (threadIdx.x < 32 && every_part >> lane & 1) {
      const unsigned long long hash = hash_of[lane];
      tile_hashes_ptr[32LL * blockIdx.x + lane] = hash ? hash : 1;  // 0: not partial
    }
    return;
  }
  if (threadIdx.x == 0) {
    seen |= later_seen, hidden |= later_hidden;
    map_row[word] = seen & ~hidden;
    map_row[words + word] = seen & hidden;
    // the order in which blocks take rows, first without long ones (`_long_rows_first` may change it)
    const int place = q_tiles - 1 - q_tile;
    if (word == 0 && h == 0) tile_map_ptr[2LL * gridDim.x + b * q_tiles + place] = q_tile;
    if (blockIdx.x == 0) tile_map_ptr[map_words - 1] = 0;
  }
}
