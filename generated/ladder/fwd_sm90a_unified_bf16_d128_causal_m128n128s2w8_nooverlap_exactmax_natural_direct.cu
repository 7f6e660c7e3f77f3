// fwd_sm90a_unified_bf16_d128_causal_m128n128s2w8_nooverlap_exactmax_natural_direct
//
// Attention forward, variant causal: mask `q_pos >= kv`.
// Rendered from templates/cuda/forward/unified.cu.j2 by `attngen build specs/ladder.yaml`.
//
// No warp roles: a block of 2 warpgroups, each of which computes O of 64 query rows from the keys that the block
// sees, from the last to the first. The first warp also loads, by TMA, as far ahead as there are stages.
#include "expression.cuh"
#include "quad.cuh"
#include "ring.cuh"
#include "schedule.cuh"
#include "softmax.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

using Element = bf16;  // of Q, K, V and P
using OutElement = bf16;  // of O

constexpr int kBlockM = 128;  // query rows of a tile of work
constexpr int kBlockN = 128;  // keys of one step
constexpr int kHeadDimQk = 128;
constexpr int kHeadDimV = 128;
constexpr int kConsumers = 2;  // warpgroups that multiply
constexpr int kThreads = 256;
constexpr int kElementBytes = sizeof(Element), kOutElementBytes = sizeof(OutElement);
static_assert(kOutElementBytes == 2);  // O leaves its registers in pairs of 16 bits
constexpr int kMmaK = 16;  // K of one wgmma: the elements that it sums over
static_assert(kMmaK == Product<Element, kBlockN>::kK);
constexpr int kPacked = 4 / kElementBytes;  // probabilities in a register
constexpr int kBoxBytes = 128;  // of a row of one copy, swizzled
constexpr int kBoxColumns = kBoxBytes / kElementBytes;  // columns that one copy brings
constexpr int kOutChunk = 16 / kOutElementBytes;  // columns of O in 16 bytes
// Shared memory. Addresses are constants, so that they cost no instruction; the kernel checks where it begins.
constexpr uint32_t kShared = 1024;
constexpr uint32_t kQ = kShared + 0;  // 32768 B: Q
constexpr uint32_t kK = kShared + 32768;  // 65536 B: K, a tile per stage
constexpr uint32_t kV = kShared + 98304;  // 65536 B: V, a tile per stage
constexpr uint32_t kQFull = kShared + 163840;  // 8 B: barriers
constexpr uint32_t kKFull = kShared + 163848;  // 16 B: barriers
constexpr uint32_t kKEmpty = kShared + 163864;  // 16 B: barriers
constexpr uint32_t kVFull = kShared + 163880;  // 16 B: barriers
constexpr uint32_t kVEmpty = kShared + 163896;  // 16 B: barriers

// Rings: who fills the stages -> who empties them.
using QRing = Ring<kQFull, kNoBarrier, 1>;  // the first warp -> each warpgroup
using KRing = Ring<kKFull, kKEmpty, 2>;  // the first warp -> each warpgroup
using VRing = Ring<kVFull, kVEmpty, 2>;  // the first warp -> each warpgroup

constexpr uint32_t kQBytes = kBlockM * kHeadDimQk * kElementBytes;
constexpr uint32_t kKBytes = kBlockN * kHeadDimQk * kElementBytes;
constexpr uint32_t kVBytes = kBlockN * kHeadDimV * kElementBytes;
static_assert(QRing::kStages * kQBytes == 32768);
static_assert(KRing::kStages * kKBytes == 65536 && VRing::kStages * kVBytes == 65536);

// How wgmma reads these: Q and K are K-major; V is MN-major, since its rows are keys.
using QMatrix = Matrix<16, 8 * kBoxBytes, 1>;
using KMatrix = Matrix<16, 8 * kBoxBytes, 1>;
using VMatrix = Matrix<kBlockN * kBoxBytes, 8 * kBoxBytes, 1>;

// KV tiles of which some of the rows see some key, and those of which every row sees every key.
struct Spans {
  int visible_lo, visible_hi;
  int full_lo, full_hi;
};

// The tile of work of a block: which rows of which head, and over how many KV tiles they go.
struct Place {
  int b, h, q_start, tiles, q_begin, k_begin, seqlen_q, seqlen_k;
};

extern __shared__ char shared_memory[];

extern "C" __global__ void __launch_bounds__(kThreads, 1) fwd_sm90a_unified_bf16_d128_causal_m128n128s2w8_nooverlap_exactmax_natural_direct(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map,
    bf16* out_ptr, float* lse_ptr, const int* seqused_k_ptr,
    long long stride_out_b, long long stride_out_s, long long stride_out_h,
    int batch, int heads, int kv_heads, int group, int section, int q_tiles, int seqlen_q, int max_seqlen_k,
    int total_q, int total_k,
    float softmax_scale,
    int write_lse, int has_seqused_k
) {
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // uniform across the warp, and the compiler knows
  const int lane = threadIdx.x % 32;
  const int warpgroup = warp / 4;

  Place work;
  Spans mine, all;  // of the rows of this warpgroup, and of all rows
  {
    const int unit = blockIdx.x / q_tiles, q_tile = blockIdx.x % q_tiles;
    const int b = unit / heads, h = unit % heads;
    const int q_begin = b * seqlen_q, k_begin = b * max_seqlen_k;
    const int seqlen_k = has_seqused_k ? seqused_k_ptr[b] : max_seqlen_k;
    const int whole_tiles = seqlen_k / kBlockN;
    const int part = lane / 8;  // eight lanes for the rows of each warpgroup, and eight for all rows
    const int q_start = q_tile * kBlockM + (part < kConsumers ? 64 * part : 0);
    const int q_hi = min(q_start + (part < kConsumers ? 64 : kBlockM), seqlen_q) - 1;
    const int q_pos_lo = q_start + (seqlen_k - seqlen_q);
    const int q_pos_hi = q_hi + (seqlen_k - seqlen_q);
    const int visible_hi = (max(q_pos_hi + 1, 0) + kBlockN - 1) / kBlockN;
    const int full_hi = min(max(q_pos_lo + 1, 0) / kBlockN, whole_tiles);
    Spans spans = {0, visible_hi, 0, full_hi};
    if (q_start >= seqlen_q) spans = {};
    mine = from_lane(spans, 8 * warpgroup);
    all = from_lane(spans, 8 * kConsumers);
    const int tiles = max(all.visible_hi - all.visible_lo, 0);
    work = {b, h, q_tile * kBlockM, tiles, q_begin, k_begin, seqlen_q, seqlen_k};
  }
  if (__any_sync(~0u, work.tiles == 0)) {  // no row sees a key: writes O = 0 and its LSE
    const int rows = min(kBlockM, work.seqlen_q - work.q_start);
    for (int i = threadIdx.x; i < rows * 16; i += kThreads) {
      const int q = work.q_start + i / 16;
      *reinterpret_cast<int4*>((out_ptr + work.b * stride_out_b + work.h * stride_out_h + (q) * stride_out_s) + kOutChunk * (i % 16)) = {};
    }
    for (int i = threadIdx.x; write_lse && i < rows; i += kThreads) {
      const int q = work.q_start + i;
      lse_ptr[(work.b * static_cast<long long>(heads) + work.h) * seqlen_q + q] = kMasked;
    }
    return;
  }

  if (threadIdx.x == 0) {
    if (static_cast<uint32_t>(__cvta_generic_to_shared(shared_memory)) != kShared) __trap();
    init_barriers(kQFull, 1, 1);  // the first warp, and the bytes of the copy
    init_barriers(kKFull, 2, 1);  // the first warp, and the bytes of the copy
    init_barriers(kKEmpty, 2, 2);  // each warpgroup
    init_barriers(kVFull, 2, 1);  // the first warp, and the bytes of the copy
    init_barriers(kVEmpty, 2, 2);  // each warpgroup
    fence_barrier_init();
  }
  __syncthreads();

  // The number of the KV tile at which `remaining` are left, itself included.
  const auto tile_at = [&](int remaining) {
    const int tile = all.visible_lo + remaining - 1;
    return tile;
  };

  // What the first warp loads: Q, then K and V from the last tile to the first.
  const int kv_head = work.h / group;
  int k_unloaded = work.tiles, v_unloaded = work.tiles;
  KRing k_to;
  VRing v_to;
  constexpr QRing q_ring;  // there is one tile of Q
  const auto load_q = [&] {
    if (lane == 0) {
      q_ring.arrive_expecting(kQBytes);
      for (int column = 0; column < kHeadDimQk; column += kBoxColumns) {
        load_box(kQ + column * kBlockM * kElementBytes, q_map, q_ring.full(), column, work.h,
                 work.q_start, work.b);
      }
    }
    __syncwarp();
  };
  const auto load_k = [&] {
    k_to.acquire();
    if (lane == 0) {
      k_to.arrive_expecting(kKBytes);
      const int start = tile_at(k_unloaded) * kBlockN;
      for (int column = 0; column < kHeadDimQk; column += kBoxColumns) {
        load_box(kK + k_to.stage * kKBytes + column * kBlockN * kElementBytes, k_map, k_to.full(), column, kv_head,
                 start, work.b);
      }
    }
    __syncwarp();
    --k_unloaded;
    k_to.advance();
  };
  const auto load_v = [&] {
    v_to.acquire();
    if (lane == 0) {
      v_to.arrive_expecting(kVBytes);
      const int start = tile_at(v_unloaded) * kBlockN, rows = min(kBlockN, work.seqlen_k - start);  // rows after the end become 0
      for (int column = 0; column < kHeadDimV; column += kBoxColumns) {
        load_box(kV + v_to.stage * kVBytes + column * kBlockN * kElementBytes, v_map, v_to.full(), column, kv_head,
                 kBlockN - rows, start + rows, work.b);
      }
    }
    __syncwarp();
    --v_unloaded;
    v_to.advance();
  };
  if (warp == 0) {
    load_q();
    for (int ahead = 1; ahead < KRing::kStages; ++ahead) {
      if (__any_sync(~0u, k_unloaded > 0)) {
        load_k();
        load_v();
      }
    }
  }

  // 64 query rows of a warpgroup. A lane holds elements of two rows, 8 apart.
  const int group_thread = threadIdx.x % 128;
  const bool leader = group_thread == 0;
  const int row_in_group = 16 * (warp % 4) + lane / 4;
  const uint32_t q_rows = kQ + warpgroup * 64 * kBoxBytes;

  float s[kBlockN / 2];      // S, then the logits
  uint32_t p[kBlockN / 2 / kPacked];  // P, packed
  float acc[kHeadDimV / 2];  // O, not yet divided by the row sum

  // S = Q K^T
  const auto issue_qk = [&](int stage, int q_stage) {
    const QMatrix q(q_rows + q_stage * kQBytes);
    const KMatrix k(kK + stage * kKBytes);
    fence_products();
#pragma unroll
    for (int column = 0; column < kHeadDimQk; column += kMmaK) {
      const uint32_t box = column / kBoxColumns * kBoxBytes, inside = column % kBoxColumns * kElementBytes;
      Product<Element, kBlockN>::ss<0>(s, q.at(box * kBlockM + inside), k.at(box * kBlockN + inside), column > 0);
    }
    commit_products();
  };
  // O += P V
  const auto issue_pv = [&](int stage) {
    const VMatrix v(kV + stage * kVBytes);
    fence_products();
#pragma unroll
    for (int key = 0; key < kBlockN; key += kMmaK) {
      Product<Element, kHeadDimV>::rs<1>(acc, p + key / 2 / kPacked, v.at(key * kBoxBytes), 1);
    }
    commit_products();
  };

  KRing k_ring;
  VRing v_ring;
  int left = work.tiles, tile = 0;
  bool partial = false;
  // Waits for a tile. The one loaded meanwhile takes the stage of the tile before, which every warpgroup has had a step
  // of time to release.
  const auto wait_k = [&] {
    if (warp == 0 && __any_sync(~0u, k_unloaded > 0)) load_k();
    tile = tile_at(left);
    partial = !(tile >= mine.full_lo && tile < mine.full_hi);
    k_ring.wait();
  };
  const auto wait_v = [&] {
    if (warp == 0 && __any_sync(~0u, v_unloaded > 0)) load_v();
    v_ring.wait();
  };
  const auto release_k = [&] {
    if (leader) k_ring.release();
    k_ring.advance();
  };
  const auto release_v = [&] {
    if (leader) v_ring.release();
    v_ring.advance();
  };

  const int seqlen_k = work.seqlen_k;
  const int q_first = work.q_start + 64 * warpgroup + row_in_group;
  const float scale_log2e = softmax_scale * kLog2e;
  float reference[2] = {kUnseen, kUnseen}, row_sum[2] = {0.0f, 0.0f}, maximum[2], alpha[2];
#pragma unroll
  for (int i = 0; i < kHeadDimV / 2; ++i) acc[i] = 0.0f;

  // S becomes logits; pairs that are not visible get -inf.
  const auto finish_logits = [&] {
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
          if (key >= visible_to) x = kMasked;
        }
      }
    }
  };

  // The first tile.
  q_ring.wait();
  wait_k();
  issue_qk(k_ring.stage, q_ring.stage);
  wait_products<0>();
  settle(s);
  release_k();
  finish_logits();
  // The running max of the first tile; P = exp2(S - max)
  find_maximum(s, scale_log2e, maximum);
  raise_reference(maximum, reference, alpha);
  exponentiate<Element>(s, scale_log2e, reference, p, row_sum);

  // The other tiles: O += P V of the tile before is issued right after S = Q K^T of this one.
  while (__any_sync(~0u, --left > 0)) {
    wait_k();
    issue_qk(k_ring.stage, q_ring.stage);  // S = Q K^T of this tile
    wait_products<0>();
    settle(s);
    release_k();
    wait_v();
    issue_pv(v_ring.stage);  // O += P V of the tile before
    wait_products<0>();
    settle(acc);
    release_v();
    finish_logits();
    find_maximum(s, scale_log2e, maximum);
    // A new running max: O and the row sum are rescaled by alpha = exp2(old max - new max).
    raise_reference(maximum, reference, alpha);
    rescale(acc, alpha);
    row_sum[0] *= alpha[0];
    row_sum[1] *= alpha[1];
    exponentiate<Element>(s, scale_log2e, reference, p, row_sum);
  }

  // The last O += P V.
  wait_v();
  issue_pv(v_ring.stage);
  float normalize[2];
  finish_sum(row_sum, normalize);
  wait_products<0>();
  settle(acc);
  rescale(acc, normalize);

  // Straight from registers: each lane of a quad writes 16 bytes of a row, 64 in all.
  const auto store_rows = [&] {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int q = work.q_start + 64 * warpgroup + row_in_group + 8 * row;
      OutElement* const to = (out_ptr + work.b * stride_out_b + work.h * stride_out_h + (q) * stride_out_s) + 8 * (lane % 4);
#pragma unroll
      for (int column = 0; column < 128; column += 32) {
        uint32_t two_columns[4];
#pragma unroll
        for (int block = 0; block < 4; ++block) {
          const int i = column / 2 + 4 * block + 2 * row;
          two_columns[block] = pack<OutElement>(acc[i], acc[i + 1]);
        }
        gather_block(two_columns);
        if (q < seqlen_q) {
          *reinterpret_cast<uint4*>(to + column) = {two_columns[0], two_columns[1], two_columns[2], two_columns[3]};
        }
      }
    }
  };
  store_rows();
  if (write_lse && lane % 4 == 0) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int q = work.q_start + 64 * warpgroup + row_in_group + 8 * row;
      if (q < seqlen_q) lse_ptr[(work.b * static_cast<long long>(heads) + work.h) * seqlen_q + q] = log_sum_exp(reference[row], row_sum[row]);
    }
  }
}
