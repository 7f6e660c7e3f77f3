// bwd_sm90a_cluster_bf16_d256_full_m64n128s3c2_dvoverlap
//
// Attention backward, variant full: mask `True`.
// Rendered by `attngen build specs/training.yaml`, schedule hopper_cluster.
//
// P = exp2(logit - LSE) and dP = dO V^T are recomputed, tile by tile; dS = P (dP - D), dV = P^T dO, dK = dS^T Q
// and dQ = dS K, the latter two times the scale (Dao et al. 2022, "FlashAttention", algorithm 4). Three kernels run
// one after the other: preprocess (D and LSE of each query row), dqkv (all products), postprocess (scales and rounds dQ).
#include "cluster.cuh"
#include "gradient.cuh"
#include "ring.cuh"
#include "schedule.cuh"
#include "softmax.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

using Element = bf16;  // of Q, K, V, dO, P and dS
using GradElement = bf16;  // of dQ, dK and dV

constexpr int kBlockM = 64;  // query rows of one step
constexpr int kBlockN = 128;  // keys of a cluster
constexpr int kKeys = 64;  // keys of a block
constexpr int kHeadDimQk = 256;
constexpr int kHeadDimV = 256;
constexpr int kThreads = 512;
constexpr int kConsumerRegisters = 208;
constexpr int kQueriesRegisters = 64, kProducerRegisters = 32;
constexpr int kElementBytes = sizeof(Element);
static_assert(kElementBytes == 2);  // P and dS are packed in pairs, which stmatrix moves
constexpr int kMmaK = 16;  // K of one wgmma: the elements that it sums over
static_assert(kMmaK == Product<Element, kBlockM>::kK);
constexpr int kBoxBytes = 128;  // of a row of one copy, swizzled
constexpr int kBoxColumns = kBoxBytes / kElementBytes;  // columns that one copy brings
constexpr int kDsBoxBytes = kKeys * kElementBytes;  // of a row of dS, swizzled
constexpr int kChunk = 16 / kElementBytes, kGradChunk = 16 / sizeof(GradElement);  // columns in 16 bytes
constexpr int kQkParts = 2, kQkPart = kHeadDimQk / kQkParts;  // columns of a product of dK
constexpr int kVParts = 2, kVPart = kHeadDimV / kVParts;  // of dV, and of a stage of dO
constexpr int kDqColumns = 128;  // columns of dQ of a block, which has all rows of them
constexpr int kDqPart = 64;  // columns of a product of dQ

// Shared memory. Addresses are constants, so that they cost no instruction; the kernel checks where it begins.
constexpr uint32_t kShared = 1024;
constexpr uint32_t kK = kShared + 0;  // 32768 B: K
constexpr uint32_t kV = kShared + 32768;  // 32768 B: V
constexpr uint32_t kOtherK = kShared + 65536;  // 16384 B: half of the columns of the other block's K
constexpr uint32_t kQ = kShared + 81920;  // 65536 B: Q, a tile per stage, then dK for its store
constexpr uint32_t kDout = kShared + 147456;  // 49152 B: dO, half a tile per stage, then dV for its store
constexpr uint32_t kDs = kShared + 196608;  // 16384 B: P, then dS, of two steps
constexpr uint32_t kOtherDs = kShared + 212992;  // 16384 B: dS of the other block, of two steps
constexpr uint32_t kLse = kShared + 229376;  // 512 B: log-sum-exp of the rows of each stage
constexpr uint32_t kDelta = kShared + 229888;  // 512 B: D of the rows of each stage
constexpr uint32_t kStep = kShared + 230400;  // 16 B: the step of each stage of Q: its queries and its head
constexpr uint32_t kKFull = kShared + 230416;  // 8 B: barriers
constexpr uint32_t kVFull = kShared + 230424;  // 8 B: barriers
constexpr uint32_t kOtherKFull = kShared + 230432;  // 8 B: barriers
constexpr uint32_t kQFull = kShared + 230440;  // 16 B: barriers
constexpr uint32_t kQEmpty = kShared + 230456;  // 16 B: barriers
constexpr uint32_t kDoutFull = kShared + 230472;  // 24 B: barriers
constexpr uint32_t kDoutEmpty = kShared + 230496;  // 24 B: barriers
constexpr uint32_t kPFull = kShared + 230520;  // 16 B: barriers
constexpr uint32_t kDsFull = kShared + 230536;  // 16 B: barriers
constexpr uint32_t kDsEmpty = kShared + 230552;  // 16 B: barriers
constexpr uint32_t kOtherDsFull = kShared + 230568;  // 16 B: barriers
constexpr uint32_t kSumTile = kShared + 230584;  // 32 B: where dQ of the last steps goes

// Rings: who fills the stages -> who empties them.
using KRing = Ring<kKFull, kNoBarrier, 1>;  // the loader of Q -> the warpgroups of values and of queries
using VRing = Ring<kVFull, kNoBarrier, 1>;  // the loader of dO -> the warpgroup of keys
using OtherKRing = Ring<kOtherKFull, kNoBarrier, 1>;  // the loader of dO -> the warpgroup of queries
// the loader of Q of both blocks, and the loader of rows -> the warpgroups of values and of keys, of both blocks
using QRing = Ring<kQFull, kQEmpty, 2>;
// the loader of dO of both blocks -> the warpgroups of values and of keys, of both blocks
using DoutRing = Ring<kDoutFull, kDoutEmpty, 3>;
using PRing = Pair<kPFull, kNoBarrier>;  // the warpgroup of values -> the warpgroup of keys
using DsRing = Pair<kDsFull, kDsEmpty>;  // the warpgroup of keys -> the warpgroups of queries, of both blocks
// the warpgroup of keys of the other block -> the warpgroup of queries
using OtherDsRing = Pair<kOtherDsFull, kNoBarrier>;

// Named barriers of the hardware; 0 is __syncthreads.
enum class Named {
  kGroup = 1,  // 2 of them: threads of a warpgroup meet around dS, dK and dV
};

constexpr int kQueryLoader = 12, kDoutLoader = 13, kRowLoader = 14;  // warps with a role of their own

constexpr uint32_t kQBytes = kBlockM * kHeadDimQk * kElementBytes;
constexpr uint32_t kDoutBytes = kBlockM * kVPart * kElementBytes;
constexpr uint32_t kDsBytes = kBlockM * kKeys * kElementBytes;
constexpr uint32_t kRowBytes = kBlockM * 4;
constexpr int kSumsOfBlock = kBlockM * kDqColumns;  // floats of dQ of a block and a tile of queries, in the order of registers
constexpr int kSumsOfTile = 2 * kSumsOfBlock;

// Layouts of wgmma's operands: by rows (K-major) for S and dP, and the same memory by columns (MN-major) for the other products.
// dS has rows of queries.
using KeyRows = Matrix<16, 8 * kBoxBytes, 1>;
using QueryRows = Matrix<16, 8 * kBoxBytes, 1>;
using KeyColumns = Matrix<kKeys * kBoxBytes, 8 * kBoxBytes, 1>;
using QueryColumns = Matrix<kBlockM * kBoxBytes, 8 * kBoxBytes, 1>;
using DsRows = Matrix<16, 8 * kDsBoxBytes, 1>;

// A step: a tile of queries, with a bit that says whether the mask is applied, and their head.
struct Step {
  int tile, h;
};
constexpr int kPartial = 1 << 24;
static_assert(16777215 < kPartial);  // the last tile of the longest sequence
constexpr int kEnd = -1;
constexpr int kSums = 8;  // steps whose tile of the dQ accumulator is kept; the warpgroup that adds dQ lags by fewer

static_assert(kKeys * kHeadDimQk * kElementBytes == 32768 && kKeys * kHeadDimV * kElementBytes == 32768);
static_assert(kKeys * kDqColumns * kElementBytes == 16384);
static_assert(QRing::kStages * kQBytes == 65536 && DoutRing::kStages * kDoutBytes == 49152);
static_assert(DsRing::kStages * kDsBytes == 16384 && OtherDsRing::kStages * kDsBytes == 16384);
static_assert(kStep % alignof(Step) == 0 && QRing::kStages * sizeof(Step) == 16);
static_assert(kSumTile % alignof(int) == 0 && kSums * sizeof(int) == 32);
static_assert(kLse % sizeof(float4) == 0 && kDelta % sizeof(float4) == 0);

extern __shared__ char shared_memory[];

template <typename Value>
__device__ __forceinline__ Value& shared_at(uint32_t address) {
  return *reinterpret_cast<Value*>(shared_memory + (address - kShared));
}

// D = rowsum(dO * O) - dLSE of each query row, its log-sum-exp in units of log2, and zeros for the dQ accumulator.
extern "C" __global__ void __launch_bounds__(128) bwd_sm90a_cluster_bf16_d256_full_m64n128s3c2_dvoverlap_preprocess(
    const bf16* out_ptr, const bf16* dout_ptr, const float* lse_ptr, const float* dlse_ptr, float* lse_log2_ptr,
    float* delta_ptr, float* dq_sum_ptr,
    long long stride_out_b, long long stride_out_s, long long stride_out_h,
    long long stride_dout_b, long long stride_dout_s, long long stride_dout_h,
    int heads, int rows, int row_tiles, long long sum_chunks,
    int has_dlse
) {
  constexpr int kLanes = 32, kRows = 16 * kLanes / 128;  // lanes of a row, 16 bytes each; rows of a thread
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

// Two blocks share a tile of keys and values, one half each, and go through the queries of all heads that share them.
// dQ = dS K sums over the keys of both: each block gives the other its dS, and computes half of the columns of dQ. The
// warpgroups of a block have roles, since a thread cannot hold dK and dV of wide heads: one computes S^T = K Q^T and
// dV += P^T dO, one dP^T = V dO^T and dK += dS^T Q, one dQ, and one loads by TMA, half of Q and dO for both blocks.
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1) bwd_sm90a_cluster_bf16_d256_full_m64n128s3c2_dvoverlap_dqkv(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap dout_map,
    float* dq_sum_ptr, bf16* dk_ptr, bf16* dv_ptr, const float* lse_log2_ptr, const float* delta_ptr,
    const int* seqused_k_ptr,
    long long stride_dk_b, long long stride_dk_s, long long stride_dk_h,
    long long stride_dv_b, long long stride_dv_s, long long stride_dv_h,
    int batch, int heads, int kv_heads, int group, int heads_in_l2, int kv_tiles, int seqlen_q, int max_seqlen_k,
    int total_q, int total_k, int q_tiles,
    float softmax_scale,
    int has_seqused_k
) {
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // uniform across the warp, and the compiler knows
  const int lane = threadIdx.x % 32;
  const int warpgroup = warp / 4;
  const int rank = cluster_rank(), other = rank ^ 1;
  const uint32_t here = mapped(kShared, rank) - kShared;  // barriers and copies take shared::cluster addresses

  // `heads_in_l2` heads run side by side, the first keys first: most queries see them.
  const int units = batch * kv_heads;
  int unit, kv_tile;
  place_tile(blockIdx.x / 2, kv_tiles, units, heads_in_l2, unit, kv_tile);
  kv_tile = kv_tiles - 1 - kv_tile;
  const int b = unit / kv_heads, hk = unit % kv_heads, kv_start = kv_tile * kBlockN, own_start = kv_start + kKeys * rank;
  const int keys = max_seqlen_k;
  const int seqlen_k = has_seqused_k ? seqused_k_ptr[b] : keys;

  if (threadIdx.x == 0) {
    if (static_cast<uint32_t>(__cvta_generic_to_shared(shared_memory)) != here + kShared) __trap();
    init_barriers(here + kKFull, 1, 1);  // the loader of Q, and the bytes of the copy
    init_barriers(here + kVFull, 1, 1);  // the loader of dO, and the bytes of the copy
    init_barriers(here + kOtherKFull, 1, 1);  // the loader of dO, and the bytes of the copy
    init_barriers(here + kQFull, 2, 2);  // the loader of Q, and the loader of rows, and the bytes of the copy
    init_barriers(here + kQEmpty, 2, 4);  // the warpgroups of values and of keys, of both blocks
    init_barriers(here + kDoutFull, 3, 1);  // the loader of dO, and the bytes of the copy
    init_barriers(here + kDoutEmpty, 3, 4);  // the warpgroups of values and of keys, of both blocks
    init_barriers(here + kPFull, 2, 4);  // each warp of the warpgroup of values
    init_barriers(here + kDsFull, 2, 1);  // the warpgroup of keys
    init_barriers(here + kDsEmpty, 2, 2);  // the warpgroup of queries of each block
    init_barriers(here + kOtherDsFull, 2, 1);  // the warpgroup of queries, before it waits, and the bytes of the copy
    fence_barrier_init();
  }
  sync_cluster();

  if (warpgroup == 3) {
    shrink_registers<kProducerRegisters>();
    if (warp <= kRowLoader) {  // the last warp has nothing to do
      // Three warps load, and find the same steps: one Q and K, one dO, V and the other block's K, and one LSE and D. Of Q and dO
      // each block loads half a tile for both. No warp waits for another.
      const bool loads_q = warp == kQueryLoader, loads_dout = warp == kDoutLoader;
      QRing q_ring(0, 0, here);
      DoutRing dout_ring(0, 0, here);
      int sums = 0;  // steps so far, each with its tile of the dQ accumulator
      // Half a tile of keys; rows after the end become 0. No copy may lie wholly outside: it would read where the descriptor
      // begins, which is before the tensor.
      const auto load_keys = [&](uint32_t to, const TensorMap& map, const auto& ring, int first_column, int columns, int start) {
        const int rows = min(kKeys, seqlen_k - start);
        const int inside = rows > 0 ? columns : 0;
        for (int i = inside * kKeys / kChunk + lane; i < columns * kKeys / kChunk; i += 32) shared_at<int4>(to + 16 * i) = {};
        fence_async_proxy();
        __syncwarp();
        if (lane == 0) {
          ring.arrive_expecting(inside * kKeys * kElementBytes);
          for (int column = 0; column < inside; column += kBoxColumns) {
            load_box(here + to + column * kKeys * kElementBytes, map, ring.full(), first_column + column, hk, kKeys - rows, start + rows, b);
          }
        }
      };
      if (loads_q) {
        if (lane == 0) prefetch_map(q_map);
        load_keys(kK, k_map, KRing(0, 0, here), 0, kHeadDimQk, own_start);
      } else if (loads_dout) {
        if (lane == 0) prefetch_map(dout_map);
        load_keys(kV, v_map, VRing(0, 0, here), 0, kHeadDimV, own_start);
        load_keys(kOtherK, k_map, OtherKRing(0, 0, here), kDqColumns * rank, kDqColumns, kv_start + kKeys * other);
      }
      __syncwarp();
      const auto load_q = [&](int h, int tile, bool partial) {
        const int q_start = tile * kBlockM;
        q_ring.acquire();
        if (lane == 0) {
          shared_at<Step>(kStep + q_ring.stage * sizeof(Step)) = {tile | (partial ? kPartial : 0), h};
          shared_at<int>(kSumTile + 4 * (sums % kSums)) = (b * heads + h) * q_tiles + tile;
          q_ring.arrive_expecting(kQBytes);
          for (int column = rank * kBoxColumns; column < kHeadDimQk; column += 2 * kBoxColumns) {
            load_box_to(
                3, here + kQ + q_ring.stage * kQBytes + column * kBlockM * kElementBytes, q_map, q_ring.full(),
                column, h,
                q_start, b);
          }
        }
        __syncwarp();
        ++sums;
        q_ring.advance();
      };
      const auto load_rows = [&](int h, int tile) {
        float lse[kBlockM / 32], delta[kBlockM / 32];  // in flight while the stage is still in use
#pragma unroll
        for (int i = 0; i < kBlockM / 32; ++i) {
          const int q = tile * kBlockM + 32 * i + lane;
          const long long entry = (b * static_cast<long long>(heads) + h) * seqlen_q + q;
          lse[i] = q < seqlen_q ? lse_log2_ptr[entry] : -kMasked;
          delta[i] = q < seqlen_q ? delta_ptr[entry] : 0.0f;
        }
        q_ring.acquire();
#pragma unroll
        for (int i = 0; i < kBlockM / 32; ++i) {
          shared_at<float>(kLse + q_ring.stage * kRowBytes + 4 * (32 * i + lane)) = lse[i];
          shared_at<float>(kDelta + q_ring.stage * kRowBytes + 4 * (32 * i + lane)) = delta[i];
        }
        __syncwarp();
        if (lane == 0) q_ring.arrive();
        q_ring.advance();
      };
      const auto load_dout = [&](int h, int tile) {
        const int q_start = tile * kBlockM;
        for (int part = 0; part < kVParts; ++part) {
          dout_ring.acquire();
          if (lane == 0) {
            dout_ring.arrive_expecting(kDoutBytes);
            for (int column = rank * kBoxColumns; column < kVPart; column += 2 * kBoxColumns) {
              load_box_to(
                  3, here + kDout + dout_ring.stage * kDoutBytes + column * kBlockM * kElementBytes, dout_map, dout_ring.full(),
                  part * kVPart + column, h, q_start, b);
            }
          }
          __syncwarp();
          dout_ring.advance();
        }
      };
      const auto load_step = [&](int h, int tile, bool partial) {
        if (loads_q) {
          load_q(h, tile, partial);
        } else if (loads_dout) {
          load_dout(h, tile);
        } else {
          load_rows(h, tile);
        }
      };

      const int whole_tiles = seqlen_q / kBlockM;
      const int visible_hi = (seqlen_q + kBlockM - 1) / kBlockM;

      const bool ragged = kv_start + kBlockN > seqlen_k;  // the last keys end in this tile: every step applies the mask
      const int inner_heads = kv_start < seqlen_k ? group : 0;  // no query sees keys after the used ones
      for (int h = hk * group; __any_sync(~0u, h < hk * group + inner_heads); ++h) {
        // Neighbouring blocks begin at different tiles of queries, so that they do not add to the same rows of dQ at once.
        const int tiles = max(visible_hi, 0);
        int place = tiles > 0 ? 3 * kv_tile % tiles : 0;
        for (int i = 0; __any_sync(~0u, i < tiles); ++i) {
          const int tile = place;
          load_step(h, tile, ragged || !(tile < whole_tiles));
          if (++place == tiles) place = 0;
        }
      }
      if (loads_q) {  // tells consumers that there is no other step
        q_ring.acquire();
        if (lane == 0) {
          shared_at<int>(kSumTile + 4 * (sums % kSums)) = kEnd;
          shared_at<Step>(kStep + q_ring.stage * sizeof(Step)) = {kEnd, 0};
          q_ring.arrive();
          q_ring.arrive();  // and in place of LSE and D
        }
        KRing(0, 0, here).wait();  // no copy may arrive after the block has exited
      } else if (loads_dout) {
        VRing(0, 0, here).wait();
        OtherKRing(0, 0, here).wait();
      }
    }
  } else if (warpgroup == 2) {
    shrink_registers<kQueriesRegisters>();
    // The warpgroup of queries: dQ = dS K over the keys of both blocks, in this block's half of the columns.
    float dq[kDqPart / 2];
    DsRing ds_ring(0, 0, here);
    const int group_thread = threadIdx.x % 128;
    // dQ = dS K
    const auto issue_dq = [&](uint32_t ds_region, uint32_t keys, int accumulate) {
      const DsRows ds(ds_region);
      const KeyColumns k(keys);
      fence_products();
#pragma unroll
      for (int key = 0; key < kKeys; key += kMmaK) {
        Product<Element, kDqPart>::ss<1>(dq, ds.at(key * kElementBytes), k.at(key * kBoxBytes), key > 0 || accumulate);
      }
      commit_products();
    };
    for (int i = 0;; ++i) {
      ds_ring.wait();
      const OtherDsRing other_ds_ring(ds_ring.stage, ds_ring.phase, here);
      const int sum_tile = shared_at<int>(kSumTile + 4 * (i % kSums));
      if (__any_sync(~0u, sum_tile < 0)) break;
      if (group_thread == 0) other_ds_ring.arrive_expecting(kDsBytes);
      if (__any_sync(~0u, i == 0)) {
        KRing(0, 0, here).wait();
        OtherKRing(0, 0, here).wait();
      }
      float* const to = dq_sum_ptr + static_cast<long long>(sum_tile) * kSumsOfTile + rank * kSumsOfBlock + 4 * group_thread;
#pragma unroll
      for (int column = 0; column < kDqColumns; column += kDqPart) {
        issue_dq(kDs + ds_ring.stage * kDsBytes, kK + (rank * kDqColumns + column) * kKeys * kElementBytes, 0);
        if (column == 0) other_ds_ring.wait();
        issue_dq(kOtherDs + ds_ring.stage * kDsBytes, kOtherK + column * kKeys * kElementBytes, 1);
        wait_products<0>();
        fence_registers(dq);
        // After the last product both stages of dS are free: this block's for P again, and the copy of the other's.
        if (column + kDqPart == kDqColumns && group_thread < 2) arrive_at(DsRing::empty_of(ds_ring.stage), group_thread);
#pragma unroll
        for (int j = 0; j < kDqPart / 8; ++j) {
          add_floats(to + 512 * (column / 8 + j), dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]);
        }
      }
      ds_ring.advance();
    }
  } else {
    grow_registers<kConsumerRegisters>();
    // Common state of the warpgroups of values and of keys: the rings of their steps, and the stores of dK and dV.
    const int group_thread = threadIdx.x % 128;
    const bool leader = group_thread == 0;
    const uint32_t row_numbers = 4 * (2 * (lane % 4));  // of the first pair of queries
    const int key = own_start;  // the first of this block
    DoutRing dout_ring(0, 0, here);
    QRing q_ring(0, 0, here);
    DsRing ds_ring(0, 0, here);  // of P, too: dS takes its place
    // Address at which a thread of the warpgroup of values puts four pairs of P for the same thread of that of keys, whose warp then
    // overwrites them with dS.
    const auto place_of_pairs = [&](int i) {
      const int q = 32 * (i / 2) + lane, chunk = 2 * (warp % 4) + i % 2;
      return kDs + ds_ring.stage * kDsBytes + q * kDsBoxBytes + 16 * (chunk ^ q % 8);
    };
    const auto next_step = [&] {
      q_ring.wait();
      return shared_at<Step>(kStep + q_ring.stage * sizeof(Step));
    };
    // Releases a stage to the loaders of both blocks, since each loads half of it for both.
    const auto release = [&](uint32_t empty) {
      if (group_thread < 2) arrive_at(empty, group_thread);
    };
    // The stages of dO that the last product read.
    const auto release_dout = [&] {
#pragma unroll
      for (int part = 1; part <= kVParts; ++part) release(DoutRing::empty_of(dout_ring.before(part)));
    };
    // dK and dV leave through shared memory, so that stores are whole rows.
    const auto store_rows = [&](const auto& acc, float factor, uint32_t region, GradElement* rows, long long stride, int columns) {
      constexpr int kChunks = sizeof(acc) / sizeof(float) * 2 / kGradChunk;
      const float* const values = &acc[0][0];
      const int count = min(kKeys, keys - own_start), row = 16 * (warp % 4) + lane % 16;
#pragma unroll
      for (int i = 0; i < kChunks; i += 2) {
        const int chunk = i + lane / 16, swizzled = chunk ^ (row % 8);
        const auto pair = [&](int j) { return pack<GradElement>(values[4 * i + j] * factor, values[4 * i + j + 1] * factor); };
        store_blocks(here + region + 16 * (row * kChunks + swizzled), pair(0), pair(2), pair(4), pair(6));
      }
      named_sync(Named::kGroup, warpgroup, 128);
      for (int i = group_thread; i < kKeys * kChunks; i += 128) {
        const int row = i / kChunks, chunk = i % kChunks, swizzled = chunk ^ (row % 8);
        if (row < count && chunk < columns / kGradChunk) {
          *reinterpret_cast<int4*>(rows + row * stride + kGradChunk * chunk) = shared_at<int4>(region + 16 * (row * kChunks + swizzled));
        }
      }
    };
    if (warpgroup == 0) {
      // The warpgroup of values: S^T = K Q^T, P = exp2(logit - LSE), and dV += P^T dO.
      float s[kBlockM / 2];     // S^T, then P^T
      uint32_t p[kBlockM / 4];  // P^T, in pairs of 16 bits
      float dv[kVParts][kVPart / 2] = {};
      const float scale_log2e = softmax_scale * kLog2e;
      // S^T = K Q^T
      const auto issue_s = [&] {
        const KeyRows k(kK);
        const QueryRows q(kQ + q_ring.stage * kQBytes);
        fence_products();
#pragma unroll
        for (int column = 0; column < kHeadDimQk; column += kMmaK) {
          const uint32_t box = column / kBoxColumns * kBoxBytes, inside = column % kBoxColumns * kElementBytes;
          Product<Element, kBlockM>::ss<0>(s, k.at(box * kKeys + inside), q.at(box * kBlockM + inside), column > 0);
        }
        commit_products();
      };
      // dV += P^T dO
      const auto issue_dv = [&] {
#pragma unroll
        for (int part = 0; part < kVParts; ++part) {
          dout_ring.wait();
          fence_products();
          const QueryColumns dout(kDout + dout_ring.stage * kDoutBytes);
#pragma unroll
          for (int row = 0; row < kBlockM; row += kMmaK) {
            Product<Element, kVPart>::rs<1>(dv[part], p + row / 4, dout.at(row * kBoxBytes), 1);
          }
          dout_ring.advance();
        }
        commit_products();
      };
      const auto settle_dv = [&] {
#pragma unroll
        for (auto& part : dv) fence_registers(part);
      };
      Step step = next_step();
      bool more = step.tile >= 0, first = true;
      if (__any_sync(~0u, more)) {
        KRing(0, 0, here).wait();
        issue_s();
        wait_products<0>();
        fence_registers(s);
      }
      while (__any_sync(~0u, more)) {
        // S is there; dV of the step before is in flight.
        const int kv_first = own_start + 16 * (warp % 4) + lane / 4;
        const uint32_t lse_numbers = kLse + q_ring.stage * kRowBytes + row_numbers;
        if (__any_sync(~0u, step.tile & kPartial)) {
#pragma unroll
          for (int i = 0; i < kBlockM / 8; ++i) {
            const float2 lse = shared_at<float2>(lse_numbers + 32 * i);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
              const int visible_to = seqlen_k - kv_first;
#pragma unroll
              for (int row = 0; row < 2; ++row) {
                float& x = s[4 * i + 2 * row + j];
                if (8 * row >= visible_to) x = kMasked;
                x = exp2_approx(fmaf(x, scale_log2e, -(j == 0 ? lse.x : lse.y)));
              }
            }
          }
        } else {
#pragma unroll
          for (int i = 0; i < kBlockM / 8; ++i) {
            const float2 lse = shared_at<float2>(lse_numbers + 32 * i);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
#pragma unroll
              for (int row = 0; row < 2; ++row) {
                float& x = s[4 * i + 2 * row + j];
                x = exp2_approx(fmaf(x, scale_log2e, -(j == 0 ? lse.x : lse.y)));
              }
            }
          }
        }
        // Other warps may still read LSE, but do not lose the stage: the warpgroup of keys releases it too, after P of all warps.
        release(QRing::empty_of(q_ring.stage));
        wait_products<0>();
        settle_dv();
        if (__any_sync(~0u, !first)) release_dout();
        first = false;
#pragma unroll
        for (int i = 0; i < kBlockM / 4; ++i) p[i] = pack<Element>(s[2 * i], s[2 * i + 1]);
        // P goes to the warpgroup of keys, through the stage that dS of two steps before has left.
        ds_ring.acquire();
#pragma unroll
        for (int i = 0; i < kBlockM / 16; ++i) {
          shared_at<uint4>(place_of_pairs(i)) = {p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]};
        }
        __syncwarp();
        if (lane == 0) PRing(ds_ring.stage, ds_ring.phase, here).arrive();
        ds_ring.advance();

        // S of the next step before dV of this one; after the last step, of stale data, which is not used.
        q_ring.advance();
        step = next_step();
        more = step.tile >= 0;
        issue_s();
        issue_dv();
        wait_products<1>();
        fence_registers(s);
      }
      wait_products<0>();
      settle_dv();
      // dV leaves through the memory of dO. When dQ of the last step is complete, so is dP, which read dO.
      wait(here + DsRing::empty_of(ds_ring.stage ^ 1), ds_ring.stage == 0 ? ds_ring.phase ^ 1 : ds_ring.phase);
      store_rows(dv, 1.0f, kDout, dv_ptr + b * stride_dv_b + hk * stride_dv_h + key * stride_dv_s, stride_dv_s, 256);
    } else {
      // The warpgroup of keys: dP^T = V dO^T, dS = P (dP - D), and dK += dS^T Q.
      float dp[kBlockM / 2];
      uint32_t ds[kBlockM / 4];  // dS^T, in pairs of 16 bits
      float dk[kQkParts][kQkPart / 2] = {};
      // dP^T = V dO^T
      const auto issue_dp = [&](bool there) {
#pragma unroll
        for (int part = 0; part < kVParts; ++part) {
          if (__any_sync(~0u, there)) dout_ring.wait();
          fence_products();
          const KeyRows v(kV + part * kVPart * kKeys * kElementBytes);
          const QueryRows dout(kDout + dout_ring.stage * kDoutBytes);
#pragma unroll
          for (int column = 0; column < kVPart; column += kMmaK) {
            const uint32_t box = column / kBoxColumns * kBoxBytes, inside = column % kBoxColumns * kElementBytes;
            Product<Element, kBlockM>::ss<0>(dp, v.at(box * kKeys + inside), dout.at(box * kBlockM + inside), part > 0 || column > 0);
          }
          dout_ring.advance();
        }
        commit_products();
      };
      // dK += dS^T Q
      const auto issue_dk = [&] {
        const QueryColumns q(kQ + q_ring.stage * kQBytes);
        fence_products();
#pragma unroll
        for (int row = 0; row < kBlockM; row += kMmaK) {
#pragma unroll
          for (int part = 0; part < kQkParts; ++part) {
            Product<Element, kQkPart>::rs<1>(dk[part], ds + row / 4, q.at(part * kQkPart * kBlockM * kElementBytes + row * kBoxBytes), 1);
          }
        }
        commit_products();
      };
      const int q = 8 * (lane / 16) + lane % 8, chunk = 2 * (warp % 4) + lane / 8 % 2;
      const uint32_t to = here + kDs + q * kDsBoxBytes + 16 * (chunk ^ q % 8);
      Step step = next_step();
      bool more = step.tile >= 0;
      if (__any_sync(~0u, more)) {
        VRing(0, 0, here).wait();
        issue_dp(true);
        wait_products<0>();
        fence_registers(dp);
      }
      while (__any_sync(~0u, more)) {
        // dS = P (dP - D)
        release_dout();
        const uint32_t delta_numbers = kDelta + q_ring.stage * kRowBytes + row_numbers;
        PRing(ds_ring.stage, ds_ring.phase, here).wait();
#pragma unroll
        for (int i = 0; i < kBlockM / 16; ++i) {
          const uint4 four = shared_at<uint4>(place_of_pairs(i));
          const uint32_t p[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const int pair = 4 * i + j;
            const float2 both = unpack<Element>(p[j]), delta = shared_at<float2>(delta_numbers + 32 * (pair / 2));
            ds[pair] = pack<Element>(both.x * (dp[2 * pair] - delta.x), both.y * (dp[2 * pair + 1] - delta.y));
          }
        }
        __syncwarp();  // all lanes have read P, which dS overwrites, transposed: rows are queries
#pragma unroll
        for (int i = 0; i < kBlockM / 16; ++i) {
          store_transposed(to + ds_ring.stage * kDsBytes + 16 * i * kDsBoxBytes, ds[4 * i], ds[4 * i + 1], ds[4 * i + 2], ds[4 * i + 3]);
        }
        fence_async_proxy();
        issue_dk();
        named_sync(Named::kGroup, warpgroup, 128);
        if (leader) {
          ds_ring.arrive();
          const uint32_t place = ds_ring.stage * kDsBytes;
          copy_to(other, kOtherDs + place, here + kDs + place, kDsBytes, OtherDsRing::full_of(ds_ring.stage));
        }
        ds_ring.advance();

        wait_products<0>();
#pragma unroll
        for (auto& part : dk) fence_registers(part);
        release(QRing::empty_of(q_ring.stage));
        q_ring.advance();
        step = next_step();
        more = step.tile >= 0;
        issue_dp(more);  // after the last step, of stale data, which is not used
        wait_products<0>();
        fence_registers(dp);
      }
      // Tells the warpgroup of queries, once it has released this stage of dS, that there is no other step.
      ds_ring.acquire();
      if (leader) ds_ring.arrive();
      // dK leaves through the memory of Q: S and dS of all steps are complete, so nobody reads Q any more.
      store_rows(dk, softmax_scale, kQ, dk_ptr + b * stride_dk_b + hk * stride_dk_h + key * stride_dk_s, stride_dk_s, 256);
    }
  }
  sync_cluster();  // the other block may still arrive at barriers of this one
}

// Scales and rounds dQ of a tile of queries. Its sums lie in the dQ accumulator in the order of two warpgroups' registers.
extern "C" __global__ void __launch_bounds__(256) bwd_sm90a_cluster_bf16_d256_full_m64n128s3c2_dvoverlap_postprocess(
    const float* dq_sum_ptr, bf16* dq_ptr,
    long long stride_dq_b, long long stride_dq_s, long long stride_dq_h,
    int batch, int heads, int kv_heads, int group, int heads_in_l2, int q_tiles, int seqlen_q, int max_seqlen_k,
    int total_q, int total_k,
    float softmax_scale
) {
  // The rows that were written last are read first, while L2 holds them.
  int unit, q_tile;
  place_tile(gridDim.x - 1 - blockIdx.x, q_tiles, batch * heads, heads_in_l2, unit, q_tile);
  const int b = unit / heads, h = unit % heads, q_start = q_tile * kBlockM;
  const float4* const sums = reinterpret_cast<const float4*>(dq_sum_ptr + static_cast<long long>((b * heads + h) * q_tiles + q_tile) * kSumsOfTile);
  const int warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32;
  const int row = 16 * (threadIdx.x / 32 % 4) + lane / 4;
#pragma unroll
  for (int i = 0; i < kDqColumns / 8; i += 4) {
    float4 own[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) own[j] = sums[(warpgroup * (kDqColumns / 8) + i + j) * 128 + threadIdx.x % 128];
    uint4 upper, lower;
    round_sums<GradElement>(own, softmax_scale, lane, upper, lower);
    const int column = kDqColumns * warpgroup + 8 * (i + lane % 4);
    GradElement* const to = dq_ptr + b * stride_dq_b + h * stride_dq_h + (q_start + row) * stride_dq_s + column;
    if (q_start + row < seqlen_q) *reinterpret_cast<uint4*>(to) = upper;
    if (q_start + row + 8 < seqlen_q) *reinterpret_cast<uint4*>(to + 8 * stride_dq_s) = lower;
  }
}
