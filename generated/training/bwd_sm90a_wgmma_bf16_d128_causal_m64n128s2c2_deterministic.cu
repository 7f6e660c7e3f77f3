// bwd_sm90a_wgmma_bf16_d128_causal_m64n128s2c2_deterministic
//
// Attention backward, variant causal: mask `q_pos >= kv`.
// Rendered by `attngen build specs/training.yaml`, schedule hopper_backward.
//
// P = exp2(logit - LSE) and dP = dO V^T are recomputed, tile by tile; dS = P (dP - D), dV = P^T dO, dK = dS^T Q
// and dQ = dS K, the latter two times the scale (Dao et al. 2022, "FlashAttention", algorithm 4). Two kernels run
// one after the other: preprocess (D and LSE of each query row) and dqkv (all products).
#include "blocks.cuh"
#include "expression.cuh"
#include "gradient.cuh"
#include "order.cuh"
#include "pdl.cuh"
#include "ring.cuh"
#include "schedule.cuh"
#include "softmax.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

using Element = bf16;  // of Q, K, V, dO, P and dS
using GradElement = bf16;  // of dQ, dK and dV

constexpr int kBlockM = 64;  // query rows of one step
constexpr int kBlockN = 128;  // keys of a block
constexpr int kHeadDimQk = 128;
constexpr int kHeadDimV = 128;
constexpr int kConsumers = 2;  // warpgroups that multiply
constexpr int kThreads = 384;
constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
constexpr int kRowsAhead = 4;  // times 16 rows, whose LSE and D a consumer loads before it needs them
constexpr int kElementBytes = sizeof(Element);
static_assert(kElementBytes == 2);  // P and dS are packed in pairs, which stmatrix moves
constexpr int kMmaK = 16;  // K of one wgmma: the elements that it sums over
static_assert(kMmaK == Product<Element, kBlockM>::kK);
constexpr int kBoxBytes = 128;  // of a row of one copy, swizzled
constexpr int kBoxColumns = kBoxBytes / kElementBytes;  // columns that one copy brings
constexpr int kDsBoxBytes = 64 * kElementBytes;  // of a row of dS: the keys of a consumer, swizzled
constexpr int kChunk = 16 / kElementBytes, kGradChunk = 16 / sizeof(GradElement);  // columns in 16 bytes
constexpr int kDqColumns = 64;  // columns of dQ of a consumer, which has all rows

// Shared memory. Addresses are constants, so that they cost no instruction; the kernel checks where it begins.
constexpr uint32_t kShared = 1024;
constexpr uint32_t kK = kShared + 0;  // 32768 B: K
constexpr uint32_t kV = kShared + 32768;  // 32768 B: V
constexpr uint32_t kQ = kShared + 65536;  // 49152 B: Q, a tile per stage
constexpr uint32_t kDout = kShared + 114688;  // 32768 B: dO, a tile per stage
constexpr uint32_t kDs = kShared + 147456;  // 32768 B: dS of two steps, then dK for its store
constexpr uint32_t kDq = kShared + 180224;  // 32768 B: dQ on its way to the dQ accumulator, then dV for its store
constexpr uint32_t kDqBlock = kShared + 212992;  // 16384 B: two blocks of the dQ accumulator: the one that is rounded and the next
constexpr uint32_t kLse = kShared + 229376;  // 768 B: log-sum-exp of the rows of each stage
constexpr uint32_t kDelta = kShared + 230144;  // 768 B: D of the rows of each stage
constexpr uint32_t kWork = kShared + 230912;  // 64 B: two work tiles: the one that is computed and the next
constexpr uint32_t kStep = kShared + 230976;  // 24 B: the step of each stage of Q: its queries and its head
constexpr uint32_t kKvFull = kShared + 231000;  // 8 B: barriers
constexpr uint32_t kKvEmpty = kShared + 231008;  // 8 B: barriers
constexpr uint32_t kQFull = kShared + 231016;  // 24 B: barriers
constexpr uint32_t kQEmpty = kShared + 231040;  // 24 B: barriers
constexpr uint32_t kDoutFull = kShared + 231064;  // 16 B: barriers
constexpr uint32_t kDoutEmpty = kShared + 231080;  // 16 B: barriers
constexpr uint32_t kDqFull = kShared + 231096;  // 16 B: barriers
constexpr uint32_t kDqEmpty = kShared + 231112;  // 16 B: barriers
constexpr uint32_t kWorkEmpty = kShared + 231128;  // 16 B: barriers
constexpr uint32_t kDqBlockFull = kShared + 231144;  // 16 B: barriers
constexpr uint32_t kDqBlockTaken = kShared + 231160;  // 64 B: which these are
constexpr uint32_t kSumTile = kShared + 231224;  // 160 B: where dQ of the last steps goes

// Rings: who fills the stages -> who empties them.
using KvRing = Ring<kKvFull, kKvEmpty, 1>;  // the loader -> each consumer
using QRing = Ring<kQFull, kQEmpty, 3>;  // the loader -> each consumer
using DoutRing = Ring<kDoutFull, kDoutEmpty, 2>;  // the loader -> each consumer
using DqRing = Ring<kDqFull, kDqEmpty, 2>;  // each consumer -> the warp that adds
using WorkRing = Pair<kNoBarrier, kWorkEmpty>;  // the loader -> each consumer
using DqBlockRing = Pair<kDqBlockFull, kNoBarrier>;  // the warp that rounds -> the warp that rounds
using DsRing = Pair<kNoBarrier, kNoBarrier>;  // each consumer -> each consumer

// Named barriers of the hardware; 0 is __syncthreads.
enum class Named {
  kAll = 1,  // 1 of them: all consumers meet, around dS and their outputs
  kGroup = 2,  // 2 of them: threads of a consumer meet around dK and dV
};

constexpr int kLoader = 8, kAdder = 9, kRounder = 11;  // warps with a role of their own

constexpr uint32_t kQBytes = kBlockM * kHeadDimQk * kElementBytes;
constexpr uint32_t kDoutBytes = kBlockM * kHeadDimV * kElementBytes;
constexpr uint32_t kKBytes = kBlockN * kHeadDimQk * kElementBytes;
constexpr uint32_t kVBytes = kBlockN * kHeadDimV * kElementBytes;
constexpr uint32_t kDsBytes = kBlockM * kBlockN * kElementBytes;
constexpr uint32_t kDqBytes = 64 * kDqColumns * 4;  // of one consumer
constexpr uint32_t kRowBytes = kBlockM * 4;
constexpr int kDqBlockBytes = 8192;  // of the dQ accumulator that are rounded at once: 64 rows and 32 columns
constexpr int kSumsOfTile = kConsumers * kDqBytes / 4;  // floats of dQ of a tile of queries, in the order of registers
constexpr int kDqBlocksOfTile = 4 * kSumsOfTile / kDqBlockBytes;

// Layouts of wgmma's operands: by rows (K-major) for S and dP, and the same memory by columns (MN-major) for the other products.
// dS has rows of queries, in boxes of the 64 keys of a consumer.
using KeyRows = Matrix<16, 8 * kBoxBytes, 1>;
using QueryRows = Matrix<16, 8 * kBoxBytes, 1>;
using KeyColumns = Matrix<kBlockN * kBoxBytes, 8 * kBoxBytes, 1>;
using QueryColumns = Matrix<kBlockM * kBoxBytes, 8 * kBoxBytes, 1>;
using DsRows = Matrix<16, 8 * kDsBoxBytes, 1>;
using DsColumns = Matrix<kBlockM * kDsBoxBytes, 8 * kDsBoxBytes, 1>;

// A work tile: which keys of which KV head. All keys of a sequence have gradients, even those that are not used.
struct Work {
  int b, hk, kv_start, keys;
  int q_begin, k_begin, seqlen_q, seqlen_k;
};
// A step: a tile of queries, with a bit that says whether the mask is applied, and their head.
struct Step {
  int tile, h;
};
constexpr int kPartial = 1 << 24;
static_assert(16777215 < kPartial);  // the last tile of the longest sequence
constexpr int kEndOfTile = -1, kEndOfAll = -2;

// Destination of a step's dQ: its tile of the dQ accumulator, the counter of its tile of keys (those of earlier keys precede
// it), and its turn among the steps of the KV head. The last step of a tile of keys names that head, others -1.
struct Sum {
  int tile, counter, kv_tile;
  uint32_t turn;
  int unit;
};
// A block of dQ that is rounded at once: its part of the dQ accumulator, its factor, and its destination.
struct DqBlock {
  const float* sums;
  GradElement* to;
  int rows;
  float factor;
};
constexpr int kSums = 8;  // steps whose `Sum` is kept; the warp that adds dQ lags by fewer

static_assert(kKBytes == 32768 && kVBytes == 32768);
static_assert(QRing::kStages * kQBytes == 49152 && DoutRing::kStages * kDoutBytes == 32768);
static_assert(DsRing::kStages * kDsBytes == 32768 && DqRing::kStages * kDqBytes <= 32768);
static_assert(kWork % alignof(Work) == 0 && WorkRing::kStages * sizeof(Work) == 64);
static_assert(kStep % alignof(Step) == 0 && QRing::kStages * sizeof(Step) == 24);
static_assert(kSumTile % alignof(Sum) == 0 && kSums * sizeof(Sum) == 160);
static_assert(kDqBlockTaken % alignof(DqBlock) == 0 && DqBlockRing::kStages * sizeof(DqBlock) <= 64);
static_assert(kLse % sizeof(float4) == 0 && kDelta % sizeof(float4) == 0 && kDqBlock % sizeof(float4) == 0);

extern __shared__ char shared_memory[];

template <typename Value>
__device__ __forceinline__ Value& shared_at(uint32_t address) {
  return *reinterpret_cast<Value*>(shared_memory + (address - kShared));
}

// D = rowsum(dO * O) - dLSE of each query row, its log-sum-exp in units of log2, and zeros for the dQ accumulator.
extern "C" __global__ void __launch_bounds__(128) bwd_sm90a_wgmma_bf16_d128_causal_m64n128s2c2_deterministic_preprocess(
    const bf16* out_ptr, const bf16* dout_ptr, const float* lse_ptr, const float* dlse_ptr, float* lse_log2_ptr,
    float* delta_ptr, float* dq_sum_ptr,
    long long stride_out_b, long long stride_out_s, long long stride_out_h,
    long long stride_dout_b, long long stride_dout_s, long long stride_dout_h,
    int heads, int rows, int row_tiles, long long sum_chunks,
    int has_dlse
) {
  wait_dependencies();  // nothing in global memory is read or written before
  launch_dependents();
  constexpr int kLanes = 16, kRows = 16 * kLanes / 128;  // lanes of a row, 16 bytes each; rows of a thread
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

// A block of 3 warpgroups takes one tile of keys and values after the other, and goes through the queries of all heads
// that share them. The last warpgroup produces: one warp finds the tiles and loads them by TMA, one adds dQ to the dQ
// accumulator in global memory, and one rounds what is complete there. The others consume: each has 64 keys, computes
// S^T = K Q^T and dP^T = V dO^T, and keeps dK += dS^T Q and dV += P^T dO in registers. dS goes through shared memory, since
// dQ = dS K sums over the keys of both.
extern "C" __global__ void __launch_bounds__(kThreads, 1) bwd_sm90a_wgmma_bf16_d128_causal_m64n128s2c2_deterministic_dqkv(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap dout_map,
    float* dq_sum_ptr, bf16* dq_ptr, bf16* dk_ptr, bf16* dv_ptr, const float* lse_log2_ptr, const float* delta_ptr,
    const int* seqused_k_ptr, uint32_t* tile_counter,
    long long stride_dq_b, long long stride_dq_s, long long stride_dq_h,
    long long stride_dk_b, long long stride_dk_s, long long stride_dk_h,
    long long stride_dv_b, long long stride_dv_s, long long stride_dv_h,
    int batch, int heads, int kv_heads, int group, int heads_in_l2, int kv_tiles, int seqlen_q, int max_seqlen_k,
    int total_q, int total_k, int q_tiles,
    float softmax_scale,
    int has_seqused_k
) {
  // The compiler sees from __shfl_sync that the warp is the same in all lanes. Below, __any_sync(~0u, condition) does this
  // for a condition that all lanes share: it becomes a uniform branch, as wgmma and barriers need.
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const int lane = threadIdx.x % 32;
  const int warpgroup = warp / 4;

  if (threadIdx.x == 0) {
    if (static_cast<uint32_t>(__cvta_generic_to_shared(shared_memory)) != kShared) __trap();
    init_barriers(kKvFull, 1, 1);  // the loader, and the bytes of the copy
    init_barriers(kKvEmpty, 1, 2);  // each consumer
    init_barriers(kQFull, 3, 2);  // the loader twice, for Q and for the row statistics, and the bytes of the copy
    init_barriers(kQEmpty, 3, 2);  // each consumer
    init_barriers(kDoutFull, 2, 1);  // the loader, and the bytes of the copy
    init_barriers(kDoutEmpty, 2, 2);  // each consumer
    init_barriers(kDqFull, 2, 4);  // each warp of the consumer
    init_barriers(kDqEmpty, 2, 1);  // the warp that adds
    init_barriers(kWorkEmpty, 2, 2);  // each consumer
    init_barriers(kDqBlockFull, 2, 1);  // the warp that rounds, and the bytes of the copy
    fence_barrier_init();
  }
  __syncthreads();

  // dQ of a KV head's queries is rounded once the last tile of keys has been added: in blocks of 64 rows and 32 columns, in
  // the order in which heads are computed. Whichever warp is free takes the next block.
  // Counters, after the dQ accumulator: of tiles of keys, for the order.
  const auto counter_at = [&](int place) { return reinterpret_cast<uint32_t*>(dq_sum_ptr + static_cast<long long>(batch * heads * q_tiles) * kSumsOfTile) + place; };
  // Number of tiles of keys of a KV head that have been added; after the last head, number of blocks of dQ that have been taken.
  const auto done = [&](int unit) { return counter_at(batch * kv_heads * kv_tiles + unit); };
  // Takes a block of dQ and waits until it is complete. False if none is left.
  const auto take_dq_block = [&](DqBlock& dq_block) {
    const int units = batch * kv_heads, dq_blocks = group * q_tiles * kDqBlocksOfTile, all_dq_blocks = units * dq_blocks;
    while (true) {
      const int index = take_number(done(units), lane);
      if (__any_sync(~0u, index >= all_dq_blocks)) return false;
      int unit, place;
      place_tile(index, dq_blocks, units, heads_in_l2, unit, place);
      const int b = unit / kv_heads, hk = unit % kv_heads, h = hk * group + place / kDqBlocksOfTile / q_tiles;
      const int q_tile = place / kDqBlocksOfTile % q_tiles, part = place % kDqBlocksOfTile;
      const int first_row = q_tile * kBlockM, first_column = 32 * part;
      dq_block.rows = seqlen_q - first_row;
      if (__any_sync(~0u, dq_block.rows <= 0)) continue;
      const uint32_t tiles = kv_tiles;
      while (__any_sync(~0u, load_acquire(done(unit)) < tiles)) __nanosleep(500);
      dq_block.factor = softmax_scale;
      const int sum_tile = (b * heads + h) * q_tiles + q_tile;
      dq_block.sums = dq_sum_ptr + static_cast<long long>(sum_tile) * kSumsOfTile + part * (kDqBlockBytes / 4);
      dq_block.to = dq_ptr + b * stride_dq_b + h * stride_dq_h + first_row * stride_dq_s + first_column;
      return true;
    }
  };
  // Writes 16 rows of a block, from sums in the order of a warp's accumulator.
  const auto write_rows = [&](const DqBlock& dq_block, int block, const float4 (&sums)[4]) {
    uint4 upper, lower;
    round_sums<GradElement>(sums, dq_block.factor, lane, upper, lower);
    const int row = 16 * block + lane / 4, column = 8 * (lane % 4);
    GradElement* const to = dq_block.to + row * stride_dq_s + column;
    if (row < dq_block.rows) *reinterpret_cast<uint4*>(to) = upper;
    if (row + 8 < dq_block.rows) *reinterpret_cast<uint4*>(to + 8 * stride_dq_s) = lower;
  };

  if (warpgroup == kConsumers) {
    shrink_registers<kProducerRegisters>();
    if (warp == kLoader) {
      // The loader: takes work tiles, loads K and V of each, and for each step Q, dO, LSE and D.
      if (lane == 0) {
        prefetch_map(q_map);
        prefetch_map(k_map);
        prefetch_map(v_map);
        prefetch_map(dout_map);
      }
      wait_dependencies();  // for preprocess, and for the counter of tiles: another thread's kernel may come between, and take from it
      const int units = batch * kv_heads, tiles_of_all = kv_tiles * units;
      DoutRing dout_ring;
      QRing q_ring;
      WorkRing work_ring;
      KvRing kv_ring;
      int sums = 0;
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
      int index = take_in_order(tile_counter, tiles_of_all, lane);
      while (__any_sync(~0u, index < tiles_of_all)) {
        // `heads_in_l2` heads run side by side, the first keys first: most queries see them.
        int unit, kv_tile;
        place_tile(index, kv_tiles, units, heads_in_l2, unit, kv_tile);
        kv_tile = kv_tiles - 1 - kv_tile;
        const int b = unit / kv_heads, hk = unit % kv_heads, kv_start = kv_tile * kBlockN;
        const int q_begin = b * seqlen_q, k_begin = b * max_seqlen_k, keys = max_seqlen_k;
        const int seqlen_k = has_seqused_k ? seqused_k_ptr[b] : keys;
        work_ring.acquire();
        if (lane == 0) shared_at<Work>(kWork + work_ring.stage * sizeof(Work)) = {b, hk, kv_start, keys, q_begin, k_begin, seqlen_q, seqlen_k};
        work_ring.advance();

        const uint32_t last_tile = (seqlen_q - 1) / kBlockM;  // of queries: turns are counted from it
        bool keys_loaded = false;
        const auto load_step = [&](int h, int tile, bool partial) {
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
            shared_at<Step>(kStep + q_ring.stage * sizeof(Step)) = {tile | (partial ? kPartial : 0), h};
            const uint32_t turn = (last_tile - tile) * group + h - hk * group;
            if (!keys_loaded) store_relaxed(counter_at(unit * kv_tiles + kv_tile), kNoneBefore | turn);
            shared_at<Sum>(kSumTile + sums % kSums * sizeof(Sum)) = {(b * heads + h) * q_tiles + tile, unit * kv_tiles + kv_tile, kv_tile, turn, -1};
            q_ring.arrive_expecting(kQBytes);
            for (int column = 0; column < kHeadDimQk; column += kBoxColumns) {
              load_box(kQ + q_ring.stage * kQBytes + column * kBlockM * kElementBytes, q_map, q_ring.full(), column, h, q_start, b);
            }
          }
          ++sums;
          if (__any_sync(~0u, !keys_loaded)) {
            kv_ring.acquire();
            if (lane == 0) {
              const int rows = min(kBlockN, seqlen_k - kv_start);  // rows after the end become 0
              kv_ring.arrive_expecting(kKBytes + kVBytes);
              for (int column = 0; column < kHeadDimQk; column += kBoxColumns) {
                load_box(kK + column * kBlockN * kElementBytes, k_map, kv_ring.full(), column, hk, kBlockN - rows, kv_start + rows, b);
              }
              for (int column = 0; column < kHeadDimV; column += kBoxColumns) {
                load_box(kV + column * kBlockN * kElementBytes, v_map, kv_ring.full(), column, hk, kBlockN - rows, kv_start + rows, b);
              }
            }
            kv_ring.advance();
            keys_loaded = true;
          }
#pragma unroll
          for (int i = 0; i < kBlockM / 32; ++i) {
            const uint32_t to = q_ring.stage * kRowBytes + 4 * (32 * i + row_place(lane));
            shared_at<float>(kLse + to) = lse[i];
            shared_at<float>(kDelta + to) = delta[i];
          }
          __syncwarp();
          if (lane == 0) q_ring.arrive();
          dout_ring.acquire();
          if (lane == 0) {
            dout_ring.arrive_expecting(kDoutBytes);
            for (int column = 0; column < kHeadDimV; column += kBoxColumns) {
              load_box(kDout + dout_ring.stage * kDoutBytes + column * kBlockM * kElementBytes, dout_map, dout_ring.full(), column, h, q_start, b);
            }
          }
          __syncwarp();
          q_ring.advance();
          dout_ring.advance();
        };

        const int whole_tiles = seqlen_q / kBlockM;
        const int kv_hi = max(min(kv_start + kBlockN, seqlen_k) - 1, kv_start);
        const int u_seqlen_q_minus_seqlen_k = seqlen_q - seqlen_k;
        const int visible_lo = max(u_seqlen_q_minus_seqlen_k + kv_start, 0) / kBlockM;
        const int visible_hi = (seqlen_q + kBlockM - 1) / kBlockM;
        const int full_lo = (max(u_seqlen_q_minus_seqlen_k + kv_hi, 0) + kBlockM - 1) / kBlockM;

        const bool ragged = kv_start + kBlockN > seqlen_k;  // the last keys end in this tile: every step applies the mask
        const int inner_heads = kv_start < seqlen_k ? group : 0;  // no query sees keys after the used ones
        // Every tile of keys goes from the last queries to the first, so that those that begin together seldom wait.
        int h = hk * group;
        const int tiles = inner_heads > 0 ? max(visible_hi - visible_lo, 0) : 0;
        for (int place = tiles - 1; __any_sync(~0u, place >= 0);) {
          const int tile = visible_lo + place;
          load_step(h, tile, ragged || !(tile >= full_lo && tile < whole_tiles));
          if (++h == hk * group + group) {  // one loop, since two would take the consumers' registers
            h = hk * group;
            --place;
          }
        }

        if (lane == 0) {
          if (keys_loaded) {
            shared_at<Sum>(kSumTile + (sums - 1) % kSums * sizeof(Sum)).unit = unit;
          } else {
            store_relaxed(counter_at(unit * kv_tiles + kv_tile), kAllPassed);
            add_release(done(unit), 1);
          }
        }
        index = take_in_order(tile_counter, tiles_of_all, lane);
        signal(kEndOfTile);
      }
      if (lane == 0) shared_at<Sum>(kSumTile + sums % kSums * sizeof(Sum)).tile = -1;
      __syncwarp();
      signal(kEndOfAll);
    } else if (warp == kAdder) {
      // Adds dQ of each step to the dQ accumulator, after all tiles of earlier keys.
      Earlier earlier = {};
      uint32_t phase = 0, published = 0;  // turns that its counter has published
      int counter = -1;
      for (int i = 0;; ++i) {
        DqRing(0, phase).wait();
        const Sum sum = shared_at<Sum>(kSumTile + i % kSums * sizeof(Sum));
        if (__any_sync(~0u, sum.tile < 0)) break;
        if (__any_sync(~0u, sum.counter != counter)) {
          counter = sum.counter;
          earlier = {counter_at(counter - sum.kv_tile), sum.kv_tile, 0};
          published = 0;
        }
        await_turn(earlier, sum.turn, lane);
        if (lane == 0) {
          if (published < sum.turn) store_release(counter_at(counter), sum.turn);  // this tile has no step in the turns between
          fence_async_global();
        }
        float* const to = dq_sum_ptr + static_cast<long long>(sum.tile) * kSumsOfTile;
        for (int consumer = 0; consumer < kConsumers; ++consumer) {
          DqRing(consumer, phase).wait();
          if (lane == 0) {
            fence_async_proxy();  // here, where no stores are in flight that it would wait for
            add_floats(to + consumer * (kDqBytes / 4), kDq + consumer * kDqBytes, kDqBytes);
            commit_stores();
          }
          __syncwarp();
        }
        if (lane == 0) wait_stores_read();
        __syncwarp();
        if (lane < kConsumers) DqRing(lane).release();
        if (lane == 0) {
          wait_stores_written();
          store_release(counter_at(counter), sum.unit >= 0 ? kAllPassed : sum.turn + 1);
          if (sum.unit >= 0) add_release(done(sum.unit), 1);
        }
        published = sum.turn + 1;
        __syncwarp();
        phase ^= 1;
      }
    } else if (warp == kRounder) {
      wait_dependencies();  // for the counters that preprocess clears
      // Rounds dQ: the next block arrives while one is written. Its description is in shared memory, since this role has
      // few registers; all lanes write the same.
      bool more = true;
      for (int count = 0; __any_sync(~0u, more); ++count) {
        DqBlock& next = shared_at<DqBlock>(kDqBlockTaken + count % 2 * sizeof(DqBlock));
        more = take_dq_block(next);
        if (lane == 0 && more) {
          fence_async_global();
          const DqBlockRing place(count % 2);
          place.arrive_expecting(kDqBlockBytes);
          load_floats(kDqBlock + place.stage * kDqBlockBytes, next.sums, kDqBlockBytes, place.full());
        }
        __syncwarp();
        if (count == 0) continue;
        const int slot = (count - 1) % 2;
        DqBlockRing(slot, (count - 1) / 2 % 2).wait();
#pragma unroll 1  // for the same reason
        for (int block = 0; block < 4; ++block) {
          const DqBlock dq_block = shared_at<DqBlock>(not_hoisted(kDqBlockTaken + slot * sizeof(DqBlock)));
          float4 sums[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) sums[i] = shared_at<float4>(kDqBlock + slot * kDqBlockBytes + 16 * (128 * i + 32 * block + lane));
          write_rows(dq_block, not_hoisted(block), sums);
        }
        __syncwarp();
      }
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
    // Packed in pairs, P^T is the A operand of dV += P^T dO as it is.
    const int group_thread = threadIdx.x % 128;
    const bool leader = group_thread == 0;
    const uint32_t key_rows = warpgroup * 64 * kBoxBytes;
    const uint32_t row_numbers = 16 * (lane % 4);  // of the first rows of LSE and D that the lane reads
    const float scale_log2e = softmax_scale * kLog2e;
    float s[kBlockM / 2];       // S^T, then P^T
    float dp[kBlockM / 2];      // dP^T
    uint32_t p[kBlockM / 4];    // P^T, in pairs of 16 bits
    float dq[kDqColumns / 2];
    float dk[kHeadDimQk / 2], dv[kHeadDimV / 2];

    // S^T = K Q^T
    const auto issue_s = [&](int q_stage) {
      const KeyRows k(kK + key_rows);
      const QueryRows q(kQ + q_stage * kQBytes);
      fence_products();
#pragma unroll
      for (int column = 0; column < kHeadDimQk; column += kMmaK) {
        const uint32_t box = column / kBoxColumns * kBoxBytes, inside = column % kBoxColumns * kElementBytes;
        Product<Element, kBlockM>::ss<0>(s, k.at(box * kBlockN + inside), q.at(box * kBlockM + inside), column > 0);
      }
      commit_products();
    };
    // dP^T = V dO^T
    const auto issue_dp = [&](int stage) {
      const KeyRows v(kV + not_hoisted(key_rows));
      const QueryRows dout(kDout + stage * kDoutBytes);
      fence_products();
#pragma unroll
      for (int column = 0; column < kHeadDimV; column += kMmaK) {
        const uint32_t box = column / kBoxColumns * kBoxBytes, inside = column % kBoxColumns * kElementBytes;
        Product<Element, kBlockM>::ss<0>(dp, v.at(box * kBlockN + inside), dout.at(box * kBlockM + inside), column > 0);
      }
      commit_products();
    };
    // dV += P^T dO
    const auto issue_dv = [&](int stage) {
      const QueryColumns dout(kDout + stage * kDoutBytes);
      fence_products();
#pragma unroll
      for (int row = 0; row < kBlockM; row += kMmaK) {
        Product<Element, kHeadDimV>::rs<1>(dv, p + row / 4, dout.at(row * kBoxBytes), 1);
      }
      commit_products();
    };
    // dK += dS^T Q
    const auto issue_dk = [&](int q_stage, int buffer) {
      const DsColumns ds(kDs + buffer * kDsBytes + warpgroup * kBlockM * kDsBoxBytes);
      const QueryColumns q(kQ + q_stage * kQBytes);
      fence_products();
#pragma unroll
      for (int row = 0; row < kBlockM; row += kMmaK) {
        Product<Element, kHeadDimQk>::ss<1, 1>(dk, ds.at(row * kDsBoxBytes), q.at(row * kBoxBytes), 1);
      }
      commit_products();
    };
    // dQ = dS K
    const auto issue_dq = [&](int buffer) {
      const DsRows ds(kDs + buffer * kDsBytes);
      const KeyColumns k(kK + warpgroup * (kDqColumns / kBoxColumns) * kBlockN * kBoxBytes);
      fence_products();
#pragma unroll
      for (int key = 0; key < kBlockN; key += kMmaK) {
        const uint32_t box = key / 64 * kBlockM * kDsBoxBytes, inside = key % 64 * kElementBytes;
        Product<Element, kDqColumns>::ss<1>(dq, ds.at(box + inside), k.at(key * kBoxBytes), key > 0);
      }
      commit_products();
    };

    Step step = {};
    DoutRing dout_ring;
    QRing q_ring;
    WorkRing work_ring;
    KvRing kv_ring;
    DqRing dq_ring(warpgroup);  // this consumer's stage alone
    int buffer = 0;  // of dS
    // LSE and D, 16 rows each: the first are loaded ahead, the next ones as these have been used.
    float4 lse_rows[kRowsAhead], delta_rows[kRowsAhead];
    const auto load_rows = [&](float4 (&rows)[kRowsAhead], uint32_t from) {
#pragma unroll
      for (int i = 0; i < kRowsAhead; ++i) rows[i] = load_float4(from + q_ring.stage * kRowBytes + row_numbers + 64 * i);
    };
    // P = exp2(logit - LSE); 0 for pairs that are not visible.
    const auto exponentiate_step = [&] {
      const Work& work = shared_at<Work>(kWork + work_ring.stage * sizeof(Work));
      const int seqlen_k = work.seqlen_k;
      const int kv_first = work.kv_start + 64 * warpgroup + 16 * (warp % 4) + lane / 4;
      const int q_first = (step.tile & kPartial - 1) * kBlockM + 2 * (lane % 4);
      const uint32_t lse_numbers = kLse + q_ring.stage * kRowBytes + row_numbers;
      if (__any_sync(~0u, step.tile & kPartial)) {
#pragma unroll
        for (int i = 0; i < kBlockM / 8; ++i) {
          const float4 of_rows = lse_rows[i / 2 % kRowsAhead];
          const float2 lse = i % 2 ? make_float2(of_rows.z, of_rows.w) : make_float2(of_rows.x, of_rows.y);
          if (i % 2 && i / 2 + kRowsAhead < kBlockM / 16) {
            lse_rows[i / 2 % kRowsAhead] = load_float4(lse_numbers + 64 * (i / 2 + kRowsAhead));
          }
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const int q_row = min(q_first + 8 * i + j, seqlen_q - 1);  // rows after the end repeat the last one
            const int q_pos = q_row + (seqlen_k - seqlen_q);
            const int visible_to = min(q_pos + 1, seqlen_k) - kv_first;
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
          const float4 of_rows = lse_rows[i / 2 % kRowsAhead];
          const float2 lse = i % 2 ? make_float2(of_rows.z, of_rows.w) : make_float2(of_rows.x, of_rows.y);
          if (i % 2 && i / 2 + kRowsAhead < kBlockM / 16) {
            lse_rows[i / 2 % kRowsAhead] = load_float4(lse_numbers + 64 * (i / 2 + kRowsAhead));
          }
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
    };
    const auto pack_probabilities = [&] {
#pragma unroll
      for (int i = 0; i < kBlockM / 4; ++i) p[i] = pack<Element>(s[2 * i], s[2 * i + 1]);
    };
    // dS = P (dP - D), to shared memory, transposed: rows are queries.
    const auto store_ds = [&](int buffer) {
      const uint32_t delta_numbers = kDelta + q_ring.stage * kRowBytes + row_numbers;
      const int q = 8 * (lane / 16) + lane % 8, chunk = 2 * (warp % 4) + lane / 8 % 2;
      const uint32_t to = kDs + buffer * kDsBytes + warpgroup * kBlockM * kDsBoxBytes + q * kDsBoxBytes + 16 * (chunk ^ q % 8);
#pragma unroll
      for (int i = 0; i < kBlockM / 16; ++i) {
        uint32_t ds[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int pair = 4 * i + j;
          const float4 of_rows = delta_rows[i % kRowsAhead];
          const float2 delta = j / 2 ? make_float2(of_rows.z, of_rows.w) : make_float2(of_rows.x, of_rows.y);
          ds[j] = pack<Element>(s[2 * pair] * (dp[2 * pair] - delta.x), s[2 * pair + 1] * (dp[2 * pair + 1] - delta.y));
        }
        if (i + kRowsAhead < kBlockM / 16) {
          delta_rows[i % kRowsAhead] = load_float4(delta_numbers + 64 * (i + kRowsAhead));
        }
        store_transposed(to + 16 * i * kDsBoxBytes, ds[0], ds[1], ds[2], ds[3]);
      }
      fence_async_proxy();
    };
    // dQ, in the order of registers, to the shared memory from which it is added to the dQ accumulator.
    const auto store_dq = [&] {
      dq_ring.acquire();
      dq_ring.phase ^= 1;
      const uint32_t to = kDq + warpgroup * kDqBytes + 16 * group_thread;
#pragma unroll
      for (int i = 0; i < kDqColumns / 8; ++i) {
        store_float4(to + 2048 * i, dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
      }
      __syncwarp();
      if (lane == 0) dq_ring.arrive();
    };
    const auto sync_consumers = [&] { named_sync(Named::kAll, 0, 128 * kConsumers); };
    const auto release_dout = [&] {
      if (leader) dout_ring.release();
      dout_ring.advance();
    };
    const auto next_step = [&] {
      q_ring.wait();
      return shared_at<Step>(kStep + q_ring.stage * sizeof(Step));
    };
    // dK and dV leave through shared memory, so that stores are whole rows.
    const auto store_rows = [&](const auto& acc, float factor, uint32_t region, GradElement* rows, long long stride, int count, int columns) {
      constexpr int kChunks = sizeof(acc) / sizeof(float) * 2 / kGradChunk;
      const uint32_t own = region + warpgroup * 64 * 16 * kChunks;
      const int own_lane = not_hoisted(lane), row = 16 * (warp % 4) + own_lane % 16;
#pragma unroll
      for (int i = 0; i < kChunks; i += 2) {
        const int chunk = i + own_lane / 16, swizzled = chunk ^ (row % 8);
        const auto pair = [&](int j) { return pack<GradElement>(acc[4 * i + j] * factor, acc[4 * i + j + 1] * factor); };
        store_blocks(own + 16 * (row * kChunks + swizzled), pair(0), pair(2), pair(4), pair(6));
      }
      named_sync(Named::kGroup, warpgroup, 128);
      for (int i = group_thread; i < 64 * kChunks; i += 128) {
        const int row = i / kChunks, chunk = i % kChunks, swizzled = chunk ^ (row % 8);
        if (row < count && chunk < columns / kGradChunk) {
          *reinterpret_cast<int4*>(rows + row * stride + kGradChunk * chunk) = shared_at<int4>(own + 16 * (row * kChunks + swizzled));
        }
      }
    };

    while (true) {
      step = next_step();
      if (__any_sync(~0u, step.tile == kEndOfAll)) break;
#pragma unroll
      for (int i = 0; i < kHeadDimQk / 2; ++i) dk[i] = 0.0f;
#pragma unroll
      for (int i = 0; i < kHeadDimV / 2; ++i) dv[i] = 0.0f;
      if (__any_sync(~0u, step.tile >= 0)) {
        kv_ring.wait();
        issue_s(q_ring.stage);  // S^T = K Q^T
        load_rows(lse_rows, kLse);
        wait_products<0>();
        fence_registers(s);
        exponentiate_step();
        bool more = true, first = true;
        while (__any_sync(~0u, more)) {
          // P of this step is there; dK of the step before is in flight.
          dout_ring.wait();
          issue_dp(dout_ring.stage);  // dP^T = V dO^T
          load_rows(delta_rows, kDelta);
          wait_products<1>();
          fence_registers(dk);
          if (leader && !first) q_ring.release_last();
          first = false;
          pack_probabilities();
          issue_dv(dout_ring.stage);  // dV += P^T dO
          wait_products<1>();
          fence_registers(dp);
          buffer ^= 1;
          store_ds(buffer);  // dS = P (dP - D)

          // S of the next step; after the last step, of stale data, which is not used.
          const QRing used = q_ring;
          q_ring.advance();
          step = next_step();
          more = step.tile >= 0;
          issue_s(q_ring.stage);  // S^T = K Q^T
          load_rows(lse_rows, kLse);
          wait_products<1>();
          fence_registers(dv);
          release_dout();
          sync_consumers();  // dS of both is complete
          issue_dq(buffer);              // dQ = dS K
          issue_dk(used.stage, buffer);  // dK += dS^T Q

          // The softmax of the next step runs under dQ and dK.
          wait_products<2>();
          fence_registers(s);
          if (__any_sync(~0u, more)) exponentiate_step();
          wait_products<1>();
          fence_registers(dq);
          store_dq();
        }
        wait_products<0>();
        fence_registers(dk);
        fence_registers(s);
        if (leader) q_ring.release_last();
        if (leader) kv_ring.release();
        kv_ring.advance();
      }
      // dK leaves through the memory of dS, dV through that of dQ, so that the next K and V may arrive.
      dq_ring.acquire();
      sync_consumers();
      // The end of the work tile took a stage of Q. By now all warps have seen it.
      if (leader) q_ring.release();
      q_ring.advance();
      const Work work = shared_at<Work>(kWork + work_ring.stage * sizeof(Work));
      const int b = work.b, hk = work.hk, key = work.kv_start + 64 * warpgroup;
      const int count = min(64, work.keys - work.kv_start - 64 * warpgroup);
      store_rows(dk, softmax_scale, kDs, dk_ptr + b * stride_dk_b + hk * stride_dk_h + key * stride_dk_s, stride_dk_s, count, 128);
      store_rows(dv, 1.0f, kDq, dv_ptr + b * stride_dv_b + hk * stride_dv_h + key * stride_dv_s, stride_dv_s, count, 128);
      sync_consumers();
      if (leader) work_ring.release();
      work_ring.advance();
    }
    // Tells the warp that adds dQ that there is no other step.
    if (lane == 0) dq_ring.arrive();
    // No tile of keys is left: helps to round dQ of the last heads, straight from L2.
    DqBlock dq_block;
    while (__any_sync(~0u, take_dq_block(dq_block))) {
      const float4* const from = reinterpret_cast<const float4*>(dq_block.sums);
      float4 sums[4][4];
#pragma unroll
      for (int i = 0; i < 16; ++i) sums[i / 4][i % 4] = __ldcg(from + 128 * (i % 4) + 32 * (i / 4) + lane);
#pragma unroll
      for (int block = 0; block < 4; ++block) write_rows(dq_block, block, sums[block]);
    }
  }
}
