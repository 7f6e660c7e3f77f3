// bwd_sm90a_wgmma_bf16_d128_blocks_m64n128s5c2_tilemap_blocks
//
// Attention backward, variant blocks: mask `sel[h, q // 64, kv // 64] and q_pos >= kv`.
// Rendered by `attngen build tests/render/others.yaml`, schedule hopper_blocks.
//
// P = exp2(logit - LSE) and dP = dO V^T are recomputed, block by block; dS = P (dP - D), dV = P^T dO, dK = dS^T Q and
// dQ = dS K, the latter two times the scale (Dao et al. 2022, "FlashAttention", algorithm 4). Three kernels run one after the
// other: preprocess (D and LSE of each query row), dkdv and dq. The last one computes P and dP again rather than to have dQ
// added up in memory: lists of blocks ask for more additions than L2 takes in the time of the products.
#include "blocks.cuh"
#include "expression.cuh"
#include "gradient.cuh"
#include "pdl.cuh"
#include "ring.cuh"
#include "schedule.cuh"
#include "softmax.cuh"
#include "tile_map.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

using Element = bf16;  // of Q, K, V, dO, P and dS
using GradElement = bf16;  // of dQ, dK and dV

constexpr int kHeadDimQk = 128;
constexpr int kHeadDimV = 128;
constexpr int kConsumers = 2;  // warpgroups that multiply, with 64 rows of a work tile each
constexpr int kThreads = 384;
constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
constexpr int kElementBytes = sizeof(Element);
static_assert(kElementBytes == 2);  // P and dS are packed in pairs, which stmatrix moves
constexpr int kMmaK = 16;  // K of one wgmma: the elements that it sums over
constexpr int kBoxBytes = 128;  // of a row of one copy, swizzled
constexpr int kBoxColumns = kBoxBytes / kElementBytes;  // columns that one copy brings
constexpr int kChunk = 16 / kElementBytes, kGradChunk = 16 / sizeof(GradElement);  // columns in 16 bytes
constexpr int kTileRows = 64 * kConsumers, kStepRows = 64;  // of a work tile, and of a step
static_assert(kMmaK == Product<Element, kStepRows>::kK);

constexpr uint32_t kShared = 1024;  // where shared memory begins; the kernels check it
constexpr uint32_t kRowBytes = kStepRows * 4;

// Layouts of wgmma's operands: rows of a work tile and of a step by rows (K-major) for S and dP, and a step's by columns
// (MN-major) for the other products.
using TileRows = Matrix<16, 8 * kBoxBytes, 1>;
using StepRows = Matrix<16, 8 * kBoxBytes, 1>;
using StepColumns = Matrix<kStepRows * kBoxBytes, 8 * kBoxBytes, 1>;

constexpr int kMapRows = 64;  // rows of a consumer, which have a row of the tile map
// A step: a block of rows and their head. Two bits for each consumer say whether it applies the mask, and whether its rows see
// nothing of the block.
struct Step {
  int tile, h;
};
constexpr int kPartial = 1 << 24, kHidden = 1 << 26;  // of consumer 0; those of the other follow
static_assert(16777215 < kPartial);  // the last block of the longest sequence
constexpr int kEndOfTile = -1, kEndOfAll = -2;

extern __shared__ char shared_memory[];

template <typename Value>
__device__ __forceinline__ Value& shared_at(uint32_t address) {
  return *reinterpret_cast<Value*>(shared_memory + (address - kShared));
}

// D = rowsum(dO * O) - dLSE of each query row, and its log-sum-exp in units of log2.
extern "C" __global__ void __launch_bounds__(128) bwd_sm90a_wgmma_bf16_d128_blocks_m64n128s5c2_tilemap_blocks_preprocess(
    const bf16* out_ptr, const bf16* dout_ptr, const float* lse_ptr, const float* dlse_ptr, float* lse_log2_ptr,
    float* delta_ptr,
    long long stride_out_b, long long stride_out_s, long long stride_out_h,
    long long stride_dout_b, long long stride_dout_s, long long stride_dout_h,
    int heads, int rows, int row_tiles,
    int has_dlse
) {
  wait_dependencies();  // nothing in global memory is read or written before
  launch_dependents();
  constexpr int kLanes = 16, kRows = 16 * kLanes / 128;  // lanes of a row, 16 bytes each; rows of a thread
  const int chunk = threadIdx.x % kLanes;
  const int h = blockIdx.x % heads, row_tile = blockIdx.x / heads % row_tiles, b = blockIdx.x / heads / row_tiles;
  const int first = row_tile * 16 + threadIdx.x / kLanes;
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

// dK and dV.
namespace by_keys {
constexpr int kBlockM = kStepRows, kBlockN = kTileRows;  // queries of a step, and keys of a work tile

// Shared memory. Addresses are constants, so that they cost no instruction.
constexpr uint32_t kQ = kShared + 0;  // 81920 B: Q, a block per stage
constexpr uint32_t kDout = kShared + 81920;  // 81920 B: dO, a block per stage
constexpr uint32_t kK = kShared + 163840;  // 32768 B: K, then dK
constexpr uint32_t kV = kShared + 196608;  // 32768 B: V, then dV
constexpr uint32_t kLse = kShared + 229376;  // 1280 B: log-sum-exp of the rows of each step
constexpr uint32_t kDelta = kShared + 230656;  // 1280 B: D of the rows of each step
constexpr uint32_t kWork = kShared + 231936;  // 32 B: the work tile that is computed
constexpr uint32_t kStep = kShared + 231968;  // 40 B: which rows each step has, and who sees them
constexpr uint32_t kKvFull = kShared + 232008;  // 8 B: barriers
constexpr uint32_t kKvEmpty = kShared + 232016;  // 8 B: barriers
constexpr uint32_t kQFull = kShared + 232024;  // 40 B: barriers
constexpr uint32_t kQEmpty = kShared + 232064;  // 40 B: barriers

// Rings: who fills the stages -> who empties them.
using KvRing = Ring<kKvFull, kKvEmpty, 1>;  // the loader -> each consumer
using QRing = Ring<kQFull, kQEmpty, 5>;  // the loader -> each warp of the consumers

// Named barriers of the hardware; 0 is __syncthreads.
enum class Named {
  kGroup = 1,  // 2 of them: threads of a consumer meet around gradients in the memory of K and V
};

constexpr int kLoader = 8;  // warps with a role of their own

constexpr uint32_t kQBytes = kBlockM * kHeadDimQk * kElementBytes, kDoutBytes = kBlockM * kHeadDimV * kElementBytes;
constexpr uint32_t kKBytes = kBlockN * kHeadDimQk * kElementBytes, kVBytes = kBlockN * kHeadDimV * kElementBytes;
constexpr int kMaskWords = 1;  // of a lane, with a bit for each of its elements of a partial step
// A work tile: which keys of which KV head. All keys of a sequence have gradients, even those that are not used.
struct Work {
  int b, hk, kv_start, keys;
  int q_begin, k_begin, seqlen_q, seqlen_k;
};
static_assert(sizeof(Work) <= 32 && QRing::kStages * sizeof(Step) == 40);
static_assert(kKBytes == 32768 && QRing::kStages * kQBytes == 81920);

// A block of 3 warpgroups takes one tile of keys and values after the other, and goes through the queries of all heads
// that share them. A warp of the last warpgroup finds these and loads them by TMA. The others consume: each has 64 keys, computes
// S^T = K Q^T and dP^T = V dO^T for the queries that see them, and keeps dK += dS^T Q and dV += P^T dO in registers. None waits
// for another.
extern "C" __global__ void __launch_bounds__(kThreads, 1) bwd_sm90a_wgmma_bf16_d128_blocks_m64n128s5c2_tilemap_blocks_dkdv(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap dout_map,
    bf16* dk_ptr, bf16* dv_ptr, const float* lse_log2_ptr, const float* delta_ptr, const int* seqused_k_ptr,
    const int* tile_map_ptr, uint32_t* tile_counter, const unsigned char* u_sel,
    long long stride_dk_b, long long stride_dk_s, long long stride_dk_h,
    long long stride_dv_b, long long stride_dv_s, long long stride_dv_h,
    long long stride_tile_map_b, long long stride_tile_map_h, long long stride_tile_map_kv,
    long long stride_u_sel_0, long long stride_u_sel_1,
    int extent_u_sel_0, int extent_u_sel_1, int extent_u_sel_2,
    int batch, int heads, int kv_heads, int group, int heads_in_l2, int kv_tiles, int seqlen_q, int max_seqlen_k,
    int total_q, int total_k, int words,
    float softmax_scale,
    int has_seqused_k
) {
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // uniform across the warp, and the compiler knows
  const int lane = threadIdx.x % 32, warpgroup = warp / 4;

  if (threadIdx.x == 0) {
    if (static_cast<uint32_t>(__cvta_generic_to_shared(shared_memory)) != kShared) __trap();
    init_barriers(kKvFull, 1, 1);  // the loader, and the bytes of the copy
    init_barriers(kKvEmpty, 1, 2);  // each consumer
    init_barriers(kQFull, 5, 2);  // the loader twice, for the tiles and for the row statistics, and the bytes of the copy
    init_barriers(kQEmpty, 5, 8);  // each warp of the consumers
    fence_barrier_init();
  }
  __syncthreads();

  if (warpgroup == kConsumers) {
    shrink_registers<kProducerRegisters>();
    if (warp == kLoader) {
      // The loader: takes tiles of keys, loads K and V of each, and for each step Q, dO, LSE and D.
      if (lane == 0) {
        prefetch_map(q_map);
        prefetch_map(k_map);
        prefetch_map(v_map);
        prefetch_map(dout_map);
      }
      wait_dependencies();  // for preprocess, and for the counter of tiles
      launch_dependents();
      const int units = batch * kv_heads, tiles = kv_tiles * units;
      QRing q_ring;
      KvRing kv_ring;
      // Tells consumers what comes instead of a step.
      const auto signal = [&](int what) {
        q_ring.acquire();
        if (lane == 0) {
          shared_at<Step>(kStep + q_ring.stage * sizeof(Step)) = {what, 0};
          q_ring.arrive();
          q_ring.arrive();
        }
        __syncwarp();
        q_ring.advance();
      };
      int index = take_in_order(tile_counter, tiles, lane);
      while (__any_sync(~0u, index < tiles)) {
        int unit, kv_tile;
        place_tile(index, kv_tiles, units, heads_in_l2, unit, kv_tile);
        const int b = unit / kv_heads, hk = unit % kv_heads, kv_start = kv_tile * kBlockN;
        const int q_begin = b * seqlen_q, k_begin = b * max_seqlen_k, keys = max_seqlen_k;
        const int seqlen_k = has_seqused_k ? seqused_k_ptr[b] : keys;
        kv_ring.acquire();
        if (lane == 0) {
          shared_at<Work>(kWork) = {b, hk, kv_start, keys, q_begin, k_begin, seqlen_q, seqlen_k};
          const int rows = min(kBlockN, seqlen_k - kv_start);  // rows after the end become 0; a box that shows nothing is not copied
          kv_ring.arrive_expecting(rows > 0 ? kKBytes + kVBytes : 0);
          for (int column = 0; rows > 0 && column < kHeadDimQk; column += kBoxColumns) {
            load_box(kK + column * kBlockN * kElementBytes, k_map, kv_ring.full(), column, hk, kBlockN - rows, kv_start + rows, b);
          }
          for (int column = 0; rows > 0 && column < kHeadDimV; column += kBoxColumns) {
            load_box(kV + column * kBlockN * kElementBytes, v_map, kv_ring.full(), column, hk, kBlockN - rows, kv_start + rows, b);
          }
        }
        __syncwarp();
        kv_ring.advance();
        const int inner_heads = kv_start < seqlen_k ? group : 0;  // no query sees keys after the used ones
        for (int h = hk * group; __any_sync(~0u, h < hk * group + inner_heads); ++h) {
          const auto load_step = [&](int tile, int bits) {
            const int q_start = tile * kBlockM;
            float lse[kBlockM / 32], delta[kBlockM / 32];  // in flight while the stage is still in use
#pragma unroll
            for (int i = 0; i < kBlockM / 32; ++i) {
              const int q = q_start + 32 * i + lane;
              const long long entry = (b * static_cast<long long>(heads) + h) * seqlen_q + q;
              lse[i] = q < seqlen_q ? lse_log2_ptr[entry] : -kMasked;
              delta[i] = q < seqlen_q ? delta_ptr[entry] : 0.0f;
            }
            q_ring.acquire();
            if (lane == 0) {
              shared_at<Step>(kStep + q_ring.stage * sizeof(Step)) = {tile | bits, h};
              q_ring.arrive_expecting(kQBytes + kDoutBytes);
              for (int column = 0; column < kHeadDimQk; column += kBoxColumns) {
                load_box(kQ + q_ring.stage * kQBytes + column * kBlockM * kElementBytes, q_map, q_ring.full(), column, h, q_start, b);
              }
              for (int column = 0; column < kHeadDimV; column += kBoxColumns) {
                load_box(kDout + q_ring.stage * kDoutBytes + column * kBlockM * kElementBytes, dout_map, q_ring.full(), column, h, q_start, b);
              }
            }
#pragma unroll
            for (int i = 0; i < kBlockM / 32; ++i) {
              const uint32_t to = q_ring.stage * kRowBytes + 4 * (32 * i + row_place(lane));
              shared_at<float>(kLse + to) = lse[i];
              shared_at<float>(kDelta + to) = delta[i];
            }
            __syncwarp();
            if (lane == 0) q_ring.arrive();
            q_ring.advance();
          };
          for (int first_word = 0; __any_sync(~0u, first_word < words); first_word += 16) {
            const int own_word = first_word + lane % 16, own_start = not_hoisted(kv_start) + kMapRows * (lane / 16);
            uint32_t left = 0, partial_word = 0;
            if (own_word < words && own_start < seqlen_k) {
              const int* const own_row = tile_map_ptr + b * stride_tile_map_b + h * stride_tile_map_h + own_start / kMapRows * stride_tile_map_kv;
              partial_word = own_row[words + own_word];
              left = own_row[own_word] | partial_word;
            }
#pragma unroll 1
            while (__any_sync(~0u, left != 0)) {
              const uint32_t of_either = left | __shfl_xor_sync(~0u, left, 16);
              const int from = __ffs(__ballot_sync(~0u, of_either != 0)) - 1;  // in the first half
              const int bit = __ffs(__shfl_sync(~0u, of_either, from)) - 1, of_half = lane & 16 | from;
              const uint32_t seen = __ballot_sync(~0u, __shfl_sync(~0u, left, of_half) >> bit & 1);
              const uint32_t partial = __ballot_sync(~0u, __shfl_sync(~0u, partial_word, of_half) >> bit & 1);
              if (lane == of_half) left &= ~(1u << bit);
              const int of_first = (partial & 1) * kPartial + (~seen & 1) * kHidden;
              const int of_second = (partial >> 16 & 1) * kPartial + (~seen >> 16 & 1) * kHidden;
              load_step(32 * (first_word + from) + bit, of_first + 2 * of_second);
            }
          }
        }
        index = take_in_order(tile_counter, tiles, lane);
        signal(kEndOfTile);
      }
      signal(kEndOfAll);
    }
  } else {
    grow_registers<kConsumerRegisters>();
    // A consumer: 64 keys. Its accumulators of S^T and dP^T have the keys as rows and the queries of a step as columns. Warp w
    // has 16 rows, and a lane has two of them, 8 apart, in two columns of every eight:
    //
    //                                query 8 i + 2 (lane % 4)    the next query
    //     key 16 w + lane / 4              s[4 i]                  s[4 i + 1]
    //     key 16 w + lane / 4 + 8          s[4 i + 2]              s[4 i + 3]
    //
    // Packed in pairs, P^T is the A operand of dV += P^T dO as it is, and dS^T that of dK += dS^T Q.
    const int group_thread = threadIdx.x % 128;
    const bool leader = group_thread == 0;
    const uint32_t own_rows = warpgroup * 64 * kBoxBytes;
    const uint32_t row_numbers = 16 * (lane % 4);  // of the first rows of LSE and D that the lane reads
    const float scale_log2e = softmax_scale * kLog2e;
    float s[kBlockM / 2];          // S^T, then P^T
    float dp[kBlockM / 2];         // dP^T
    uint32_t p[kBlockM / 4];       // P^T, in pairs of 16 bits
    uint32_t ds_pairs[kBlockM / 4];  // dS^T, the same
    float dk[kHeadDimQk / 2], dv[kHeadDimV / 2];

    // S^T = K Q^T
    const auto issue_s = [&](int stage) {
      const TileRows rows(kK + own_rows);
      const StepRows others(kQ + stage * kQBytes);
      fence_products();
#pragma unroll
      for (int column = 0; column < kHeadDimQk; column += kMmaK) {
        const uint32_t box = column / kBoxColumns * kBoxBytes, inside = column % kBoxColumns * kElementBytes;
        Product<Element, kStepRows>::ss<0>(s, rows.at(box * kTileRows + inside), others.at(box * kStepRows + inside), column > 0);
      }
      commit_products();
    };
    // dP^T = V dO^T
    const auto issue_dp = [&](int stage) {
      const TileRows rows(kV + own_rows);
      const StepRows others(kDout + stage * kDoutBytes);
      fence_products();
#pragma unroll
      for (int column = 0; column < kHeadDimV; column += kMmaK) {
        const uint32_t box = column / kBoxColumns * kBoxBytes, inside = column % kBoxColumns * kElementBytes;
        Product<Element, kStepRows>::ss<0>(dp, rows.at(box * kTileRows + inside), others.at(box * kStepRows + inside), column > 0);
      }
      commit_products();
    };
    // dV += P^T dO
    const auto issue_dv = [&](int stage) {
      const StepColumns others(kDout + stage * kDoutBytes);
      fence_products();
#pragma unroll
      for (int row = 0; row < kStepRows; row += kMmaK) {
        Product<Element, kHeadDimV>::template rs<1>(dv, p + row / 4, others.at(row * kBoxBytes), 1);
      }
      commit_products();
    };
    // dK += dS^T Q
    const auto issue_dk = [&](int stage) {
      const StepColumns others(kQ + stage * kQBytes);
      fence_products();
#pragma unroll
      for (int row = 0; row < kStepRows; row += kMmaK) {
        Product<Element, kHeadDimQk>::template rs<1>(dk, ds_pairs + row / 4, others.at(row * kBoxBytes), 1);
      }
      commit_products();
    };

    QRing q_ring;
    KvRing kv_ring;
    KvRing& work_ring = kv_ring;  // the record of a work tile comes with its K and V
    Step step = {};
    // Whether the rows of this consumer see the next step.
    const auto see_step = [&] {
      q_ring.wait();
      step = shared_at<Step>(kStep + q_ring.stage * sizeof(Step));
      return __any_sync(~0u, step.tile < 0 || !(step.tile & kHidden << warpgroup));
    };
    // Gives back a stage of this consumer; each of its warps does, since none waits for the others where a step is hidden.
    const auto release = [&](const auto& ring) {
      __syncwarp();
      if (lane_of_warp() == 0) ring.release();
    };
    // Comes to the next step that its rows see, or to the end of the work tile.
    const auto find_step = [&] {
      while (!see_step()) {
        release(q_ring);
        q_ring.advance();
      }
    };
    // Visible pairs of a partial tile, a bit for each element of the lane.
    uint32_t visible[kMaskWords];
    // P = exp2(logit - LSE); 0 for pairs that are not visible.
    const auto exponentiate_step = [&] {
      const Work& work = shared_at<Work>(kWork + work_ring.stage * sizeof(Work));
      const int seqlen_k = work.seqlen_k;
      const int kv_first = work.kv_start + 64 * warpgroup + 16 * (warp % 4) + lane / 4;
      const int h = step.h;
      const int q_first = (step.tile & kPartial - 1) * kBlockM + 2 * (lane % 4);
      const uint32_t lse_numbers = kLse + q_ring.stage * kRowBytes + row_numbers;
      if (__any_sync(~0u, step.tile & kPartial << warpgroup)) {
        // Evaluates the mask of a tile. The loop is rolled, so that it takes few registers.
        const int q_lo = (step.tile & kPartial - 1) * kBlockM, kv_lo = work.kv_start + kMapRows * warpgroup;
        const int u_kv_lo_div_64 = kv_lo / 64;
        const auto* u_sel_h_kv_lo_div_64 = u_sel + static_cast<long long>(h) * stride_u_sel_0 + static_cast<long long>(u_kv_lo_div_64);
#pragma unroll
        for (int word = 0; word < kMaskWords; ++word) {
          uint32_t bits = 0;
#pragma unroll 1
          for (int i = 8 * word; i < min(8 * word + 8, kBlockM / 8); ++i) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
              const int q_row = min(q_first + 8 * i + j, seqlen_q - 1);  // rows after the end repeat the last one
              const int q_pos = q_row + (seqlen_k - seqlen_q);
              const int u_q_div_64 = q_row / 64;
              const bool u_sel_h_q_div_64_kv_lo_div_64 = (u_q_div_64 < extent_u_sel_1 && u_kv_lo_div_64 < extent_u_sel_2) ? u_sel_h_kv_lo_div_64[static_cast<long long>(u_q_div_64) * stride_u_sel_1] != 0 : false;
              const int visible_to = min(u_sel_h_q_div_64_kv_lo_div_64 ? q_pos + 1 : 0, seqlen_k) - kv_first;
#pragma unroll
              for (int row = 0; row < 2; ++row) {
                bits |= static_cast<uint32_t>(!(8 * row >= visible_to)) << (4 * (i % 8) + 2 * row + j);
              }
            }
          }
          visible[word] = bits;
        }
#pragma unroll
        for (int i = 0; i < kBlockM / 8; ++i) {
          const float2 lse = shared_at<float2>(lse_numbers + 64 * (i / 2) + 8 * (i % 2));
#pragma unroll
          for (int j = 0; j < 2; ++j) {
#pragma unroll
            for (int row = 0; row < 2; ++row) {
              float& x = s[4 * i + 2 * row + j];
              if (!(visible[i / 8] >> (4 * (i % 8) + 2 * row + j) & 1)) x = kMasked;
              x = exp2_approx(fmaf(x, scale_log2e, -(j == 0 ? lse.x : lse.y)));
            }
          }
          p[2 * i] = pack<Element>(s[4 * i], s[4 * i + 1]);
          p[2 * i + 1] = pack<Element>(s[4 * i + 2], s[4 * i + 3]);
        }
      } else {
#pragma unroll
        for (int i = 0; i < kBlockM / 8; ++i) {
          const float2 lse = shared_at<float2>(lse_numbers + 64 * (i / 2) + 8 * (i % 2));
#pragma unroll
          for (int j = 0; j < 2; ++j) {
#pragma unroll
            for (int row = 0; row < 2; ++row) {
              float& x = s[4 * i + 2 * row + j];
              x = exp2_approx(fmaf(x, scale_log2e, -(j == 0 ? lse.x : lse.y)));
            }
          }
          p[2 * i] = pack<Element>(s[4 * i], s[4 * i + 1]);
          p[2 * i + 1] = pack<Element>(s[4 * i + 2], s[4 * i + 3]);
        }
      }
    };
    // dS = P (dP - D)
    const auto find_ds = [&](int stage) {
      const uint32_t delta_numbers = kDelta + stage * kRowBytes + row_numbers;
#pragma unroll
      for (int pair = 0; pair < kBlockM / 4; ++pair) {
        const float2 delta = shared_at<float2>(delta_numbers + 64 * (pair / 4) + 8 * (pair / 2 % 2)), both = unpack<Element>(p[pair]);
        ds_pairs[pair] = pack<Element>(both.x * (dp[2 * pair] - delta.x), both.y * (dp[2 * pair + 1] - delta.y));
      }
    };
    // dK and dV leave through shared memory, so that stores are whole rows: to it,
    const auto stage_rows = [&]<int kFirst, int kColumns>(const auto& acc, float factor, uint32_t own) {
      constexpr int kChunks = kColumns / kGradChunk;
      const int own_lane = not_hoisted(lane), row = 16 * (warp % 4) + own_lane % 16;
#pragma unroll
      for (int i = 0; i < kChunks; i += 2) {
        const int chunk = i + own_lane / 16, swizzled = chunk ^ (row % 8);
        const auto pair = [&](int j) {
          const int place = kFirst / 2 + 4 * i + j;
          return pack<GradElement>(acc[place] * factor, acc[place + 1] * factor);
        };
        store_blocks(own + 16 * (row * kChunks + swizzled), pair(0), pair(2), pair(4), pair(6));
      }
    };
    // and from it.
    const auto store_rows = [&]<int kColumns>(uint32_t own, GradElement* rows, long long stride, int count, int columns) {
      constexpr int kChunks = kColumns / kGradChunk;
      for (int i = group_thread; i < 64 * kChunks; i += 128) {
        const int row = i / kChunks, chunk = i % kChunks, swizzled = chunk ^ (row % 8);
        if (row < count && chunk < columns / kGradChunk) {
          *reinterpret_cast<int4*>(rows + row * stride + kGradChunk * chunk) = shared_at<int4>(own + 16 * (row * kChunks + swizzled));
        }
      }
    };

    while (true) {
      find_step();
      if (__any_sync(~0u, step.tile == kEndOfAll)) break;
#pragma unroll
      for (int i = 0; i < kHeadDimQk / 2; ++i) dk[i] = 0.0f;
#pragma unroll
      for (int i = 0; i < kHeadDimV / 2; ++i) dv[i] = 0.0f;
      kv_ring.wait();
      if (__any_sync(~0u, step.tile >= 0)) {
        issue_s(q_ring.stage);
        issue_dp(q_ring.stage);
        while (true) {
          const auto used = q_ring;
          wait_products<1>();
          fence_registers(s);
          exponentiate_step();
          issue_dv(used.stage);
          wait_products<1>();
          fence_registers(dp);
          find_ds(used.stage);
          wait_products<0>();  // here: beside dK and the products of the next step, ptxas would lack registers
          fence_registers(dv);
          issue_dk(used.stage);
          q_ring.advance();
          // Its own stage goes back before it waits for a step behind those of the other consumer, which may need that stage.
          if (see_step() && __any_sync(~0u, step.tile >= 0)) {
            issue_s(q_ring.stage);
            issue_dp(q_ring.stage);
            wait_products<2>();
            fence_registers(dk);
            release(used);
            continue;
          }
          wait_products<0>();
          fence_registers(dk);
          release(used);
          find_step();
          if (__any_sync(~0u, step.tile < 0)) break;
          issue_s(q_ring.stage);
          issue_dp(q_ring.stage);
        }
      }
      // dK and dV leave through the memory of K and V. The end of the work tile took a stage.
      release(q_ring);
      q_ring.advance();
      const Work work = shared_at<Work>(kWork);
      const int b = work.b, hk = work.hk, key = work.kv_start + 64 * warpgroup;
      const int count = min(64, work.keys - work.kv_start - 64 * warpgroup);
      named_sync(Named::kGroup, warpgroup, 128);
      stage_rows.template operator()<0, kBoxColumns>(dk, softmax_scale, kK + 0 * kTileRows * kElementBytes + own_rows);
      stage_rows.template operator()<64, kBoxColumns>(dk, softmax_scale, kK + 64 * kTileRows * kElementBytes + own_rows);
      named_sync(Named::kGroup, warpgroup, 128);
      store_rows.template operator()<kBoxColumns>(kK + 0 * kTileRows * kElementBytes + own_rows, dk_ptr + b * stride_dk_b + hk * stride_dk_h + key * stride_dk_s + 0, stride_dk_s, count, 128 - 0);
      store_rows.template operator()<kBoxColumns>(kK + 64 * kTileRows * kElementBytes + own_rows, dk_ptr + b * stride_dk_b + hk * stride_dk_h + key * stride_dk_s + 64, stride_dk_s, count, 128 - 64);
      stage_rows.template operator()<0, kBoxColumns>(dv, 1.0f, kV + 0 * kTileRows * kElementBytes + own_rows);
      stage_rows.template operator()<64, kBoxColumns>(dv, 1.0f, kV + 64 * kTileRows * kElementBytes + own_rows);
      named_sync(Named::kGroup, warpgroup, 128);
      store_rows.template operator()<kBoxColumns>(kV + 0 * kTileRows * kElementBytes + own_rows, dv_ptr + b * stride_dv_b + hk * stride_dv_h + key * stride_dv_s + 0, stride_dv_s, count, 128 - 0);
      store_rows.template operator()<kBoxColumns>(kV + 64 * kTileRows * kElementBytes + own_rows, dv_ptr + b * stride_dv_b + hk * stride_dv_h + key * stride_dv_s + 64, stride_dv_s, count, 128 - 64);
      fence_async_proxy();  // what is loaded next comes to the same memory
      named_sync(Named::kGroup, warpgroup, 128);
      if (leader) kv_ring.release();
      kv_ring.advance();
    }
  }
}

// Makes the tile map. A block of threads has a row, the keys of one consumer; a warp makes words of it, a lane a bit for a tile of
// queries: full, since every query sees every key, or partial, since some query sees some key. The mask reads tensors at one element
// for all pairs of a tile; what bounds leave open is evaluated for each pair.
extern "C" __global__ void __launch_bounds__(128) bwd_sm90a_wgmma_bf16_d128_blocks_m64n128s5c2_tilemap_blocks_classify_dkdv(
    int* tile_map_ptr, const int* seqused_k_ptr, const unsigned char* u_sel,
    long long stride_tile_map_b, long long stride_tile_map_h, long long stride_tile_map_kv,
    long long stride_u_sel_0, long long stride_u_sel_1,
    int extent_u_sel_0, int extent_u_sel_1, int extent_u_sel_2,
    int batch, int heads, int kv_heads, int group, int heads_in_l2, int kv_tiles, int seqlen_q, int max_seqlen_k,
    int total_q, int total_k, int words, int map_heads,
    int has_seqused_k
) {
  constexpr int kWarps = 4;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int unit = blockIdx.x / kv_tiles, kv_tile = blockIdx.x % kv_tiles;
  const int h = unit % map_heads, b = unit / map_heads;
  int* const map_row = tile_map_ptr + b * stride_tile_map_b + h * stride_tile_map_h + kv_tile * stride_tile_map_kv;
  const int seqlen_k = has_seqused_k ? seqused_k_ptr[b] : max_seqlen_k;
  const int kv_start = kv_tile * kMapRows;
  const int visible_lo = 0, visible_hi = kv_start < seqlen_k ? (seqlen_q + kBlockM - 1) / kBlockM : 0;
  const auto* u_sel_h = u_sel + static_cast<long long>(h) * stride_u_sel_0; asm("" : "+l"(u_sel_h));
#pragma unroll 1
  for (int word = warp; word < words; word += kWarps) {
    uint32_t full_word, open_word, partial_tiles = 0;
    {
      const int kv_hi = max(min(kv_start + kMapRows, seqlen_k) - 1, kv_start);
      const int candidate = 32 * word + lane;
      const int q_lo = candidate * kBlockM, q_hi = q_lo + (kBlockM - 1);
      const int q_pos_lo = q_lo + (seqlen_k - seqlen_q), q_pos_hi = q_hi + (seqlen_k - seqlen_q);
      const int u_tiles_q_lo_div_64 = q_lo / 64;
      const int u_tiles_kv_lo_div_64 = kv_start / 64;
      const bool u_tiles_sel_h_q_lo_div_64_kv_lo_div_64 = (u_tiles_q_lo_div_64 < extent_u_sel_1 && u_tiles_kv_lo_div_64 < extent_u_sel_2) ? u_sel[static_cast<long long>(h) * stride_u_sel_0 + static_cast<long long>(u_tiles_q_lo_div_64) * stride_u_sel_1 + static_cast<long long>(u_tiles_kv_lo_div_64)] != 0 : false;
      const bool seen = candidate >= visible_lo && candidate < visible_hi && ((u_tiles_sel_h_q_lo_div_64_kv_lo_div_64 && q_pos_hi >= kv_start) || (candidate + 1) * kBlockM > seqlen_q);
      const uint32_t visible_word = __ballot_sync(~0u, seen);
      const uint32_t partial_word = __ballot_sync(~0u, !((u_tiles_sel_h_q_lo_div_64_kv_lo_div_64 && q_pos_lo >= kv_hi) && !((candidate + 1) * kBlockM > seqlen_q) && kv_start + kMapRows <= seqlen_k));
      full_word = visible_word & ~partial_word, open_word = visible_word & partial_word;
    }
#pragma unroll 1
    while (__any_sync(~0u, open_word != 0)) {
      const int item = 31 - __clz(open_word), q_tile = 32 * word + item;
      open_word ^= 1u << item;
      const int q_start = q_tile * kBlockM;
      const int queries = min(kBlockM, seqlen_q - q_start), keys = kMapRows;
      bool some = false, all = true;
#pragma unroll 1
      for (int first = 0; first < keys && (all || !some); first += 32) {  // a lane has a key
        const int key = first + lane, kv = min(kv_start + key, seqlen_k - 1);
        const bool exists = key < keys && kv_start + key < seqlen_k;
        const int of_key_0 = kv / 64;
#pragma unroll 1
        for (int i = 0; i < queries; ++i) {
          const int q_row = q_start + i;
          const int u_q_div_64 = q_row / 64;
          const int q_pos = q_row + (seqlen_k - seqlen_q);
          const bool u_sel_h_q_div_64_kv_div_64 = ((u_q_div_64 < extent_u_sel_1 && of_key_0 < extent_u_sel_2) ? u_sel_h[static_cast<unsigned>(u_q_div_64) * stride_u_sel_1 + static_cast<unsigned>(of_key_0)] : 0) != 0;
          const bool pair = exists && (u_sel_h_q_div_64_kv_div_64 && q_pos >= kv);
          some = some || pair, all = all && (pair || key >= keys);
        }
        some = __any_sync(~0u, some), all = __all_sync(~0u, all);
      }
      full_word |= all ? 1u << item : 0, partial_tiles |= some && !all ? 1u << item : 0;
    }
    if (lane == 0) map_row[word] = full_word, map_row[words + word] = partial_tiles;
  }
}
}  // namespace by_keys

// dQ.
namespace by_queries {
constexpr int kBlockM = kTileRows, kBlockN = kStepRows;  // queries of a work tile, and keys of a step

// Shared memory. Addresses are constants, so that they cost no instruction.
constexpr uint32_t kQ = kShared + 0;  // 32768 B: Q, then dQ
constexpr uint32_t kDout = kShared + 32768;  // 32768 B: dO
constexpr uint32_t kK = kShared + 65536;  // 81920 B: K, a block per stage
constexpr uint32_t kV = kShared + 147456;  // 81920 B: V, a block per stage
constexpr uint32_t kWork = kShared + 229376;  // 32 B: the work tile that is computed
constexpr uint32_t kStep = kShared + 229408;  // 40 B: which rows each step has, and who sees them
constexpr uint32_t kQFull = kShared + 229448;  // 8 B: barriers
constexpr uint32_t kQEmpty = kShared + 229456;  // 8 B: barriers
constexpr uint32_t kKvFull = kShared + 229464;  // 40 B: barriers
constexpr uint32_t kKvEmpty = kShared + 229504;  // 40 B: barriers

// Rings: who fills the stages -> who empties them.
using QRing = Ring<kQFull, kQEmpty, 1>;  // the loader -> each consumer
using KvRing = Ring<kKvFull, kKvEmpty, 5>;  // the loader -> each warp of the consumers

// Named barriers of the hardware; 0 is __syncthreads.
enum class Named {
  kGroup = 1,  // 2 of them: threads of a consumer meet around gradients in the memory of Q
};

constexpr int kLoader = 8;  // warps with a role of their own

constexpr uint32_t kQBytes = kBlockM * kHeadDimQk * kElementBytes, kDoutBytes = kBlockM * kHeadDimV * kElementBytes;
constexpr uint32_t kKBytes = kBlockN * kHeadDimQk * kElementBytes, kVBytes = kBlockN * kHeadDimV * kElementBytes;
constexpr int kMaskWords = 1;  // of a lane, with a bit for each of its elements of a partial step
// A work tile: which queries of which head.
struct Work {
  int b, h, q_start;
  int q_begin, k_begin, seqlen_q, seqlen_k;
};
static_assert(sizeof(Work) <= 32 && KvRing::kStages * sizeof(Step) == 40);
static_assert(kQBytes == 32768 && KvRing::kStages * kKBytes == 81920);

// The same by tiles of queries. Each consumer has 64 of them, computes S = Q K^T and dP = dO V^T for the keys that they see, and
// keeps dQ += dS K in registers.
extern "C" __global__ void __launch_bounds__(kThreads, 1) bwd_sm90a_wgmma_bf16_d128_blocks_m64n128s5c2_tilemap_blocks_dq(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap dout_map,
    bf16* dq_ptr, const float* lse_log2_ptr, const float* delta_ptr, const int* seqused_k_ptr,
    const int* tile_map_ptr, uint32_t* tile_counter, const unsigned char* u_sel,
    long long stride_dq_b, long long stride_dq_s, long long stride_dq_h,
    long long stride_tile_map_b, long long stride_tile_map_h, long long stride_tile_map_q,
    long long stride_u_sel_0, long long stride_u_sel_1,
    int extent_u_sel_0, int extent_u_sel_1, int extent_u_sel_2,
    int batch, int heads, int kv_heads, int group, int heads_in_l2, int q_tiles, int seqlen_q, int max_seqlen_k,
    int total_q, int total_k, int words,
    float softmax_scale,
    int has_seqused_k
) {
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // uniform across the warp, and the compiler knows
  const int lane = threadIdx.x % 32, warpgroup = warp / 4;

  if (threadIdx.x == 0) {
    if (static_cast<uint32_t>(__cvta_generic_to_shared(shared_memory)) != kShared) __trap();
    init_barriers(kQFull, 1, 1);  // the loader, and the bytes of the copy
    init_barriers(kQEmpty, 1, 2);  // each consumer
    init_barriers(kKvFull, 5, 1);  // the loader, and the bytes of the copy
    init_barriers(kKvEmpty, 5, 8);  // each warp of the consumers
    fence_barrier_init();
  }
  __syncthreads();

  if (warpgroup == kConsumers) {
    shrink_registers<kProducerRegisters>();
    if (warp == kLoader) {
      // The loader: takes tiles of queries, loads Q and dO of each, and for each step K and V.
      if (lane == 0) {
        prefetch_map(q_map);
        prefetch_map(k_map);
        prefetch_map(v_map);
        prefetch_map(dout_map);
      }
      wait_dependencies();  // for the kernel before, which takes tiles from the same counter
      const int units = batch * heads, tiles = q_tiles * units;
      KvRing kv_ring;
      QRing q_ring;
      // Tells consumers what comes instead of a step.
      const auto signal = [&](int what) {
        kv_ring.acquire();
        if (lane == 0) {
          shared_at<Step>(kStep + kv_ring.stage * sizeof(Step)) = {what, 0};
          kv_ring.arrive();
        }
        __syncwarp();
        kv_ring.advance();
      };
      int index = take_in_order(tile_counter, tiles, lane);
      while (__any_sync(~0u, index < tiles)) {
        int unit, q_tile;
        place_tile(index, q_tiles, units, heads_in_l2, unit, q_tile);
        const int b = unit / heads, h = unit % heads, hk = h / group, q_start = q_tile * kBlockM;
        const int q_begin = b * seqlen_q, k_begin = b * max_seqlen_k;
        const int seqlen_k = has_seqused_k ? seqused_k_ptr[b] : max_seqlen_k;
        q_ring.acquire();
        if (lane == 0) {
          shared_at<Work>(kWork) = {b, h, q_start, q_begin, k_begin, seqlen_q, seqlen_k};
          q_ring.arrive_expecting(kQBytes + kDoutBytes);
          for (int column = 0; column < kHeadDimQk; column += kBoxColumns) {
            load_box(kQ + column * kBlockM * kElementBytes, q_map, q_ring.full(), column, h, q_start, b);
          }
          for (int column = 0; column < kHeadDimV; column += kBoxColumns) {
            load_box(kDout + column * kBlockM * kElementBytes, dout_map, q_ring.full(), column, h, q_start, b);
          }
        }
        __syncwarp();
        q_ring.advance();
        const auto load_step = [&](int tile, int bits) {
          kv_ring.acquire();
          if (lane == 0) {
            const int kv_start = tile * kBlockN, rows = min(kBlockN, seqlen_k - kv_start);  // rows after the end become 0
            shared_at<Step>(kStep + kv_ring.stage * sizeof(Step)) = {tile | bits, h};
            kv_ring.arrive_expecting(kKBytes + kVBytes);
            for (int column = 0; column < kHeadDimQk; column += kBoxColumns) {
              load_box(kK + kv_ring.stage * kKBytes + column * kBlockN * kElementBytes, k_map, kv_ring.full(), column, hk, kBlockN - rows, kv_start + rows, b);
            }
            for (int column = 0; column < kHeadDimV; column += kBoxColumns) {
              load_box(kV + kv_ring.stage * kVBytes + column * kBlockN * kElementBytes, v_map, kv_ring.full(), column, hk, kBlockN - rows, kv_start + rows, b);
            }
          }
          __syncwarp();
          kv_ring.advance();
        };
        for (int first_word = 0; __any_sync(~0u, first_word < words); first_word += 16) {
          const int own_word = first_word + lane % 16, own_start = not_hoisted(q_start) + kMapRows * (lane / 16);
          uint32_t left = 0, partial_word = 0;
          if (own_word < words && own_start < seqlen_q) {
            const int* const own_row = tile_map_ptr + b * stride_tile_map_b + h * stride_tile_map_h + own_start / kMapRows * stride_tile_map_q;
            partial_word = own_row[words + own_word];
            left = own_row[own_word] | partial_word;
          }
#pragma unroll 1
          while (__any_sync(~0u, left != 0)) {
            const uint32_t of_either = left | __shfl_xor_sync(~0u, left, 16);
            const int from = __ffs(__ballot_sync(~0u, of_either != 0)) - 1;  // in the first half
            const int bit = __ffs(__shfl_sync(~0u, of_either, from)) - 1, of_half = lane & 16 | from;
            const uint32_t seen = __ballot_sync(~0u, __shfl_sync(~0u, left, of_half) >> bit & 1);
            const uint32_t partial = __ballot_sync(~0u, __shfl_sync(~0u, partial_word, of_half) >> bit & 1);
            if (lane == of_half) left &= ~(1u << bit);
            const int of_first = (partial & 1) * kPartial + (~seen & 1) * kHidden;
            const int of_second = (partial >> 16 & 1) * kPartial + (~seen >> 16 & 1) * kHidden;
            load_step(32 * (first_word + from) + bit, of_first + 2 * of_second);
          }
        }
        index = take_in_order(tile_counter, tiles, lane);
        signal(kEndOfTile);
      }
      signal(kEndOfAll);
    }
  } else {
    grow_registers<kConsumerRegisters>();
    wait_dependencies();  // for row statistics
    // A consumer: 64 queries, which are the rows of S and dP; the keys of a step are their columns. Warp w has 16 rows, and a lane has two
    // of them, 8 apart, in two columns of every eight. Packed in pairs, dS is the A operand of dQ += dS K as it is.
    const int group_thread = threadIdx.x % 128, row_in_group = 16 * (warp % 4) + lane / 4;
    const bool leader = group_thread == 0;
    const uint32_t own_rows = warpgroup * 64 * kBoxBytes;

    float s[kBlockN / 2], dp[kBlockN / 2];  // S, then P; dP
    uint32_t ds_pairs[kBlockN / 4];         // dS, in pairs of 16 bits
    float dq[kHeadDimQk / 2];

    // S = Q K^T
    const auto issue_s = [&](int stage) {
      const TileRows rows(kQ + own_rows);
      const StepRows others(kK + stage * kKBytes);
      fence_products();
#pragma unroll
      for (int column = 0; column < kHeadDimQk; column += kMmaK) {
        const uint32_t box = column / kBoxColumns * kBoxBytes, inside = column % kBoxColumns * kElementBytes;
        Product<Element, kStepRows>::ss<0>(s, rows.at(box * kTileRows + inside), others.at(box * kStepRows + inside), column > 0);
      }
      commit_products();
    };
    // dP = dO V^T
    const auto issue_dp = [&](int stage) {
      const TileRows rows(kDout + own_rows);
      const StepRows others(kV + stage * kVBytes);
      fence_products();
#pragma unroll
      for (int column = 0; column < kHeadDimV; column += kMmaK) {
        const uint32_t box = column / kBoxColumns * kBoxBytes, inside = column % kBoxColumns * kElementBytes;
        Product<Element, kStepRows>::ss<0>(dp, rows.at(box * kTileRows + inside), others.at(box * kStepRows + inside), column > 0);
      }
      commit_products();
    };
    // dQ += dS K
    const auto issue_dq = [&](int stage) {
      const StepColumns others(kK + stage * kKBytes);
      fence_products();
#pragma unroll
      for (int row = 0; row < kStepRows; row += kMmaK) {
        Product<Element, kHeadDimQk>::template rs<1>(dq, ds_pairs + row / 4, others.at(row * kBoxBytes), 1);
      }
      commit_products();
    };

    KvRing kv_ring;
    QRing q_ring;
    Step step = {};
    // Whether the rows of this consumer see the next step.
    const auto see_step = [&] {
      kv_ring.wait();
      step = shared_at<Step>(kStep + kv_ring.stage * sizeof(Step));
      return __any_sync(~0u, step.tile < 0 || !(step.tile & kHidden << warpgroup));
    };
    // Gives back a stage of this consumer; each of its warps does, since none waits for the others where a step is hidden.
    const auto release = [&](const auto& ring) {
      __syncwarp();
      if (lane_of_warp() == 0) ring.release();
    };
    // Comes to the next step that its rows see, or to the end of the work tile.
    const auto find_step = [&] {
      while (!see_step()) {
        release(kv_ring);
        kv_ring.advance();
      }
    };
    // dK and dV leave through shared memory, so that stores are whole rows: to it,
    const auto stage_rows = [&]<int kFirst, int kColumns>(const auto& acc, float factor, uint32_t own) {
      constexpr int kChunks = kColumns / kGradChunk;
      const int own_lane = not_hoisted(lane), row = 16 * (warp % 4) + own_lane % 16;
#pragma unroll
      for (int i = 0; i < kChunks; i += 2) {
        const int chunk = i + own_lane / 16, swizzled = chunk ^ (row % 8);
        const auto pair = [&](int j) {
          const int place = kFirst / 2 + 4 * i + j;
          return pack<GradElement>(acc[place] * factor, acc[place + 1] * factor);
        };
        store_blocks(own + 16 * (row * kChunks + swizzled), pair(0), pair(2), pair(4), pair(6));
      }
    };
    // and from it.
    const auto store_rows = [&]<int kColumns>(uint32_t own, GradElement* rows, long long stride, int count, int columns) {
      constexpr int kChunks = kColumns / kGradChunk;
      for (int i = group_thread; i < 64 * kChunks; i += 128) {
        const int row = i / kChunks, chunk = i % kChunks, swizzled = chunk ^ (row % 8);
        if (row < count && chunk < columns / kGradChunk) {
          *reinterpret_cast<int4*>(rows + row * stride + kGradChunk * chunk) = shared_at<int4>(own + 16 * (row * kChunks + swizzled));
        }
      }
    };

    while (true) {
      find_step();
      if (__any_sync(~0u, step.tile == kEndOfAll)) break;
#pragma unroll
      for (int i = 0; i < kHeadDimQk / 2; ++i) dq[i] = 0.0f;
      q_ring.wait();
      const Work work = shared_at<Work>(kWork);
      const int b = work.b;
      const int h = work.h;
      const int seqlen_k = work.seqlen_k;
      const int q_first = work.q_start + 64 * warpgroup + row_in_group;
      const float scale_log2e = softmax_scale * kLog2e;
      float lse[2], delta[2];  // of the lane's rows
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const int q = work.q_start + 64 * warpgroup + row_in_group + 8 * row;
        const bool exists = q < seqlen_q;
        const long long entry = (work.b * static_cast<long long>(heads) + work.h) * seqlen_q + q;
        lse[row] = exists ? lse_log2_ptr[entry] : -kMasked;
        delta[row] = exists ? delta_ptr[entry] : 0.0f;
      }
      uint32_t visible[kMaskWords];  // pairs of a partial step, a bit for each element of the lane
      // Evaluates the mask of a step. The loop is rolled, so that it takes few registers.
      const auto find_visible = [&] {
        const int q_lo = work.q_start + 64 * warpgroup, kv_lo = (step.tile & kPartial - 1) * kBlockN;
        const int kv_first = kv_lo + 2 * (lane % 4);
        const int u_kv_lo_div_64 = kv_lo / 64;
        const auto* u_sel_h_kv_lo_div_64 = u_sel + static_cast<long long>(h) * stride_u_sel_0 + static_cast<long long>(u_kv_lo_div_64);
        struct Row {
          int visible_to;
        };
        Row rows[2];
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          const int q_row = min(q_first + 8 * row, seqlen_q - 1);  // rows after the end repeat the last one
          const int q_pos = q_row + (seqlen_k - seqlen_q);
          const int u_q_div_64 = q_row / 64;
          const bool u_sel_h_q_div_64_kv_lo_div_64 = (u_q_div_64 < extent_u_sel_1 && u_kv_lo_div_64 < extent_u_sel_2) ? u_sel_h_kv_lo_div_64[static_cast<long long>(u_q_div_64) * stride_u_sel_1] != 0 : false;
          const int visible_to = min(u_sel_h_q_div_64_kv_lo_div_64 ? q_pos + 1 : 0, seqlen_k) - kv_first;
          rows[row] = {visible_to};
        }
#pragma unroll
        for (int word = 0; word < kMaskWords; ++word) {
          uint32_t bits = 0;
#pragma unroll 1
          for (int i = 16 * word; i < min(16 * word + 16, kBlockN / 4); ++i) {
            const int key = 8 * (i / 2) + i % 2;  // from the first one of the lane
#pragma unroll
            for (int row = 0; row < 2; ++row) {
              const auto [visible_to] = rows[row];
              bits |= static_cast<uint32_t>(!(key >= visible_to)) << (4 * (i % 16 / 2) + 2 * row + i % 2);
            }
          }
          visible[word] = bits;
        }
      };
      // P = exp2(logit - LSE); 0 for pairs that are not visible.
      const auto exponentiate = [&] {
        if (__any_sync(~0u, step.tile & kPartial << warpgroup)) {
          find_visible();
#pragma unroll
          for (int i = 0; i < kBlockN / 4; ++i) {
#pragma unroll
            for (int row = 0; row < 2; ++row) {
              float& x = s[4 * (i / 2) + 2 * row + i % 2];
              if (!(visible[i / 16] >> 4 * (i % 16 / 2) + 2 * row + i % 2 & 1)) x = kMasked;
            }
          }
        }
#pragma unroll
        for (int i = 0; i < kBlockN / 2; ++i) s[i] = exp2_approx(fmaf(s[i], scale_log2e, -lse[row_of(i)]));
      };
      // dS = P (dP - D)
      const auto find_ds = [&] {
#pragma unroll
        for (int i = 0; i < kBlockN / 2; i += 2) {
          ds_pairs[i / 2] = pack<Element>(s[i] * (dp[i] - delta[row_of(i)]), s[i + 1] * (dp[i + 1] - delta[row_of(i)]));
        }
      };
      if (__any_sync(~0u, step.tile >= 0)) {
        issue_s(kv_ring.stage);
        issue_dp(kv_ring.stage);
        while (true) {
          const auto used = kv_ring;
          wait_products<1>();
          fence_registers(s);
          exponentiate();
          wait_products<0>();
          fence_registers(dp);
          find_ds();
          issue_dq(used.stage);
          kv_ring.advance();
          // Its own stage goes back before it waits for a step behind those of the other consumer, which may need that stage.
          if (see_step() && __any_sync(~0u, step.tile >= 0)) {
            issue_s(kv_ring.stage);
            issue_dp(kv_ring.stage);
            wait_products<2>();
            fence_registers(dq);
            release(used);
            continue;
          }
          wait_products<0>();
          fence_registers(dq);
          release(used);
          find_step();
          if (__any_sync(~0u, step.tile < 0)) break;
          issue_s(kv_ring.stage);
          issue_dp(kv_ring.stage);
        }
      }
      // dQ leaves through the memory of Q. The end of the work tile took a stage.
      release(kv_ring);
      kv_ring.advance();
      const int row = work.q_start + 64 * warpgroup;
      const int count = min(64, seqlen_q - work.q_start - 64 * warpgroup);
      named_sync(Named::kGroup, warpgroup, 128);
      stage_rows.template operator()<0, kBoxColumns>(dq, softmax_scale, kQ + 0 * kTileRows * kElementBytes + own_rows);
      stage_rows.template operator()<64, kBoxColumns>(dq, softmax_scale, kQ + 64 * kTileRows * kElementBytes + own_rows);
      named_sync(Named::kGroup, warpgroup, 128);
      store_rows.template operator()<kBoxColumns>(kQ + 0 * kTileRows * kElementBytes + own_rows, dq_ptr + b * stride_dq_b + h * stride_dq_h + row * stride_dq_s + 0, stride_dq_s, count, 128 - 0);
      store_rows.template operator()<kBoxColumns>(kQ + 64 * kTileRows * kElementBytes + own_rows, dq_ptr + b * stride_dq_b + h * stride_dq_h + row * stride_dq_s + 64, stride_dq_s, count, 128 - 64);
      fence_async_proxy();  // what is loaded next comes to the same memory
      named_sync(Named::kGroup, warpgroup, 128);
      if (leader) q_ring.release();
      q_ring.advance();
    }
  }
}

// Makes the tile map. A block of threads has a row, the queries of one consumer; a warp makes words of it, a lane a bit for a tile of
// keys: full, since every query sees every key, or partial, since some query sees some key. The mask reads tensors at one element
// for all pairs of a tile; what bounds leave open is evaluated for each pair.
extern "C" __global__ void __launch_bounds__(128) bwd_sm90a_wgmma_bf16_d128_blocks_m64n128s5c2_tilemap_blocks_classify_dq(
    int* tile_map_ptr, const int* seqused_k_ptr, const unsigned char* u_sel,
    long long stride_tile_map_b, long long stride_tile_map_h, long long stride_tile_map_q,
    long long stride_u_sel_0, long long stride_u_sel_1,
    int extent_u_sel_0, int extent_u_sel_1, int extent_u_sel_2,
    int batch, int heads, int kv_heads, int group, int heads_in_l2, int q_tiles, int seqlen_q, int max_seqlen_k,
    int total_q, int total_k, int words, int map_heads,
    int has_seqused_k
) {
  constexpr int kWarps = 4;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int unit = blockIdx.x / q_tiles, q_tile = blockIdx.x % q_tiles;
  const int h = unit % map_heads, b = unit / map_heads;
  int* const map_row = tile_map_ptr + b * stride_tile_map_b + h * stride_tile_map_h + q_tile * stride_tile_map_q;
  const int seqlen_k = has_seqused_k ? seqused_k_ptr[b] : max_seqlen_k;
  const int q_start = q_tile * kMapRows;
  const int visible_lo = 0, visible_hi = q_start < seqlen_q ? (seqlen_k + kBlockN - 1) / kBlockN : 0;
  const int q_hi = min(q_start + kMapRows, seqlen_q) - 1;
  const auto* u_sel_h = u_sel + static_cast<long long>(h) * stride_u_sel_0; asm("" : "+l"(u_sel_h));
#pragma unroll 1
  for (int word = warp; word < words; word += kWarps) {
    uint32_t full_word, open_word, partial_tiles = 0;
    {
      const int q_pos_lo = q_start + (seqlen_k - seqlen_q);
      const int q_pos_hi = q_hi + (seqlen_k - seqlen_q);
      const int candidate = 32 * word + lane;
      const int kv_lo = candidate * kBlockN, kv_hi = min(kv_lo + kBlockN, seqlen_k) - 1;
      const int u_tiles_q_lo_div_64 = q_start / 64;
      const int u_tiles_kv_lo_div_64 = kv_lo / 64;
      const bool u_tiles_sel_h_q_lo_div_64_kv_lo_div_64 = (u_tiles_q_lo_div_64 < extent_u_sel_1 && u_tiles_kv_lo_div_64 < extent_u_sel_2) ? u_sel[static_cast<long long>(h) * stride_u_sel_0 + static_cast<long long>(u_tiles_q_lo_div_64) * stride_u_sel_1 + static_cast<long long>(u_tiles_kv_lo_div_64)] != 0 : false;
      const bool seen = candidate >= visible_lo && candidate < visible_hi && (u_tiles_sel_h_q_lo_div_64_kv_lo_div_64 && q_pos_hi >= kv_lo);
      const uint32_t visible_word = __ballot_sync(~0u, seen);
      const uint32_t partial_word = __ballot_sync(~0u, !((u_tiles_sel_h_q_lo_div_64_kv_lo_div_64 && q_pos_lo >= kv_hi) && (candidate + 1) * kBlockN <= seqlen_k));
      full_word = visible_word & ~partial_word, open_word = visible_word & partial_word;
    }
#pragma unroll 1
    while (__any_sync(~0u, open_word != 0)) {
      const int item = 31 - __clz(open_word), kv_tile = 32 * word + item;
      open_word ^= 1u << item;
      const int kv_start = kv_tile * kBlockN;
      const int queries = min(kMapRows, seqlen_q - q_start), keys = kBlockN;
      bool some = false, all = true;
#pragma unroll 1
      for (int first = 0; first < keys && (all || !some); first += 32) {  // a lane has a key
        const int key = first + lane, kv = min(kv_start + key, seqlen_k - 1);
        const bool exists = key < keys && kv_start + key < seqlen_k;
        const int of_key_0 = kv / 64;
#pragma unroll 1
        for (int i = 0; i < queries; ++i) {
          const int q_row = q_start + i;
          const int u_q_div_64 = q_row / 64;
          const int q_pos = q_row + (seqlen_k - seqlen_q);
          const bool u_sel_h_q_div_64_kv_div_64 = ((u_q_div_64 < extent_u_sel_1 && of_key_0 < extent_u_sel_2) ? u_sel_h[static_cast<unsigned>(u_q_div_64) * stride_u_sel_1 + static_cast<unsigned>(of_key_0)] : 0) != 0;
          const bool pair = exists && (u_sel_h_q_div_64_kv_div_64 && q_pos >= kv);
          some = some || pair, all = all && (pair || key >= keys);
        }
        some = __any_sync(~0u, some), all = __all_sync(~0u, all);
      }
      full_word |= all ? 1u << item : 0, partial_tiles |= some && !all ? 1u << item : 0;
    }
    if (lane == 0) map_row[word] = full_word, map_row[words + word] = partial_tiles;
  }
}
}  // namespace by_queries
