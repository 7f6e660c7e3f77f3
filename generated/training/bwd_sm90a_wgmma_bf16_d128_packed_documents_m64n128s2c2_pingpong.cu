// bwd_sm90a_wgmma_bf16_d128_packed_documents_m64n128s2c2_pingpong
//
// Attention backward, variant packed_documents: mask `q_pos >= kv and doc[b, q_pos] == doc[b, kv]`.
// Rendered by `attngen build specs/training.yaml`, schedule hopper_backward.
//
// P = exp2(logit - LSE) and dP = dO V^T are recomputed, tile by tile; dS = P (dP - D), dV = P^T dO, dK = dS^T Q
// and dQ = dS K, the latter two times the scale (Dao et al. 2022, "FlashAttention", algorithm 4). Two kernels run
// one after the other: preprocess (D and LSE of each query row) and dqkv (all products).
#include "blocks.cuh"
#include "expression.cuh"
#include "first_writer.cuh"
#include "gradient.cuh"
#include "parts.cuh"
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
constexpr int kRowsAhead = 2;  // times 16 rows, whose LSE and D a consumer loads before it needs them
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
constexpr uint32_t kK = kShared + 0;  // 32768 B: K, a tile per stage
constexpr uint32_t kV = kShared + 32768;  // 32768 B: V, a tile per stage
constexpr uint32_t kQ = kShared + 65536;  // 49152 B: Q, a tile per stage
constexpr uint32_t kDout = kShared + 114688;  // 32768 B: dO, a tile per stage
constexpr uint32_t kDs = kShared + 147456;  // 32768 B: dS of two steps, then dK and dV for their stores
constexpr uint32_t kDq = kShared + 180224;  // 32768 B: dQ on its way to the dQ accumulator
constexpr uint32_t kDqBlock = kShared + 212992;  // 16384 B: two blocks of the dQ accumulator: the one that is rounded and the next
constexpr uint32_t kLse = kShared + 229376;  // 768 B: log-sum-exp of the rows of each stage
constexpr uint32_t kDelta = kShared + 230144;  // 768 B: D of the rows of each stage
constexpr uint32_t kQueryValues = kShared + 230912;  // 768 B: what the mask reads of the queries of each stage
constexpr uint32_t kWork = kShared + 231680;  // 88 B: two work tiles: the one that is computed and the next
constexpr uint32_t kStep = kShared + 231768;  // 24 B: the step of each stage of Q: its queries and its head
constexpr uint32_t kKFull = kShared + 231792;  // 8 B: barriers
constexpr uint32_t kKEmpty = kShared + 231800;  // 8 B: barriers
constexpr uint32_t kVFull = kShared + 231808;  // 8 B: barriers
constexpr uint32_t kVEmpty = kShared + 231816;  // 8 B: barriers
constexpr uint32_t kQFull = kShared + 231824;  // 24 B: barriers
constexpr uint32_t kQEmpty = kShared + 231848;  // 24 B: barriers
constexpr uint32_t kDoutFull = kShared + 231872;  // 16 B: barriers
constexpr uint32_t kDoutEmpty = kShared + 231888;  // 16 B: barriers
constexpr uint32_t kDqFull = kShared + 231904;  // 16 B: barriers
constexpr uint32_t kDqEmpty = kShared + 231920;  // 16 B: barriers
constexpr uint32_t kWorkEmpty = kShared + 231936;  // 16 B: barriers
constexpr uint32_t kDqBlockFull = kShared + 231952;  // 16 B: barriers
constexpr uint32_t kDsFull = kShared + 231968;  // 16 B: barriers
constexpr uint32_t kDqBlockTaken = kShared + 231984;  // 64 B: which these are
constexpr uint32_t kSumTile = kShared + 232048;  // 96 B: where dQ of the last steps goes

// Rings: who fills the stages -> who empties them.
using KRing = Ring<kKFull, kKEmpty, 1>;  // the loader -> each consumer
using VRing = Ring<kVFull, kVEmpty, 1>;  // the loader -> each consumer
using QRing = Ring<kQFull, kQEmpty, 3>;  // the loader -> each consumer
using DoutRing = Ring<kDoutFull, kDoutEmpty, 2>;  // the loader -> each consumer
using DqRing = Ring<kDqFull, kDqEmpty, 2>;  // each consumer -> the warp that adds
using WorkRing = Pair<kNoBarrier, kWorkEmpty>;  // the loader -> each consumer
using DqBlockRing = Pair<kDqBlockFull, kNoBarrier>;  // the warp that rounds -> the warp that rounds
using DsRing = Pair<kDsFull, kNoBarrier>;  // each consumer -> each consumer

// Named barriers of the hardware; 0 is __syncthreads.
enum class Named {
  kAll = 1,  // 1 of them: all consumers meet, around dS and their outputs
  kGroup = 2,  // 2 of them: threads of a consumer meet around dK and dV
  kPingpong = 4,  // 2 of them: turns at the tensor cores
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
  int part;              // its number among those of all tiles that are cut; negative: all steps of a tile
  int last[kConsumers];  // of a part: whether all others of its tile were done, as each consumer finds out
};
constexpr int kPartOfDk = 64 * kHeadDimQk, kPartOfDv = 64 * kHeadDimV;  // floats of a part that a consumer has
// A step: a tile of queries and their head. Two bits for each consumer say whether it applies the mask, and whether no query
// sees its keys.
struct Step {
  int tile, h;
};
constexpr int kPartial = 1 << 24, kHidden = 1 << 26;  // of consumer 0; those of the other follow
constexpr int kOwnKeys = kBlockN / kConsumers;        // of one consumer
static_assert(16777215 < kPartial);  // the last tile of the longest sequence
constexpr int kEndOfTile = -1, kEndOfAll = -2;

// Destination of a step's dQ: its tile of the dQ accumulator. The last step of a tile of keys, or of a part of one, names its KV
// head, others -1, and says how many parts of a tile are done then.
struct Sum {
  int tile, unit, parts;
};
// A block of dQ that is rounded at once: its part of the dQ accumulator, its factor, and its destination.
struct DqBlock {
  const float* sums;
  GradElement* to;
  int rows;
  float factor;
  bool begun;
};
// Values that the mask reads of a query; they come with the tile of Q.
struct QueryValues {
  int u_doc_q_pos;
};
static_assert(QRing::kStages * kBlockM * sizeof(QueryValues) == 768);

constexpr int kSums = 8;  // steps whose `Sum` is kept; the warp that adds dQ lags by fewer

static_assert(kKBytes == 32768 && kVBytes == 32768);
static_assert(QRing::kStages * kQBytes == 49152 && DoutRing::kStages * kDoutBytes == 32768);
static_assert(DsRing::kStages * kDsBytes == 32768 && DqRing::kStages * kDqBytes <= 32768);
static_assert(kWork % alignof(Work) == 0 && WorkRing::kStages * sizeof(Work) == 88);
static_assert(kStep % alignof(Step) == 0 && QRing::kStages * sizeof(Step) == 24);
static_assert(kSumTile % alignof(Sum) == 0 && kSums * sizeof(Sum) == 96);
static_assert(kDqBlockTaken % alignof(DqBlock) == 0 && DqBlockRing::kStages * sizeof(DqBlock) <= 64);
static_assert(kLse % sizeof(float4) == 0 && kDelta % sizeof(float4) == 0 && kDqBlock % sizeof(float4) == 0);

extern __shared__ char shared_memory[];

template <typename Value>
__device__ __forceinline__ Value& shared_at(uint32_t address) {
  return *reinterpret_cast<Value*>(shared_memory + (address - kShared));
}

// D = rowsum(dO * O) - dLSE of each query row, its log-sum-exp in units of log2, and zeros for the counters and states of dQ.
extern "C" __global__ void __launch_bounds__(128) bwd_sm90a_wgmma_bf16_d128_packed_documents_m64n128s2c2_pingpong_preprocess(
    const bf16* out_ptr, const bf16* dout_ptr, const float* lse_ptr, const float* dlse_ptr, float* lse_log2_ptr,
    float* delta_ptr, float* dq_state_ptr,
    long long stride_out_b, long long stride_out_s, long long stride_out_h,
    long long stride_dout_b, long long stride_dout_s, long long stride_dout_h,
    int heads, int rows, int row_tiles, long long state_chunks,
    int has_dlse
) {
  wait_dependencies();  // nothing in global memory is read or written before
  launch_dependents();
  constexpr int kLanes = 16, kRows = 16 * kLanes / 128;  // lanes of a row, 16 bytes each; rows of a thread
  const int chunk = threadIdx.x % kLanes;
  const int h = blockIdx.x % heads, row_tile = blockIdx.x / heads % row_tiles, b = blockIdx.x / heads / row_tiles;
  const int first = row_tile * 16 + threadIdx.x / kLanes;
  // A block clears its share of the counters and states while its rows arrive.
  const long long share = (state_chunks + gridDim.x - 1) / gridDim.x, share_end = min(share * (blockIdx.x + 1), state_chunks);
  for (long long i = share * blockIdx.x + threadIdx.x; i < share_end; i += 128) {
    reinterpret_cast<float4*>(dq_state_ptr)[i] = {};
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
extern "C" __global__ void __launch_bounds__(kThreads, 1) bwd_sm90a_wgmma_bf16_d128_packed_documents_m64n128s2c2_pingpong_dqkv(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap dout_map,
    float* dq_sum_ptr, float* dq_state_ptr, float* partials_ptr, bf16* dq_ptr, bf16* dk_ptr, bf16* dv_ptr,
    const float* lse_log2_ptr, const float* delta_ptr, const int* seqused_k_ptr, uint32_t* tile_counter,
    const int* u_doc,
    long long stride_dq_b, long long stride_dq_s, long long stride_dq_h,
    long long stride_dk_b, long long stride_dk_s, long long stride_dk_h,
    long long stride_dv_b, long long stride_dv_s, long long stride_dv_h,
    long long stride_u_doc_0,
    int extent_u_doc_0, int extent_u_doc_1,
    int batch, int heads, int kv_heads, int group, int heads_in_l2, int kv_tiles, int seqlen_q, int max_seqlen_k,
    int total_q, int total_k, int q_tiles, int uncut_tiles, int parts, int work_items, int sum_tiles,
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
    init_barriers(kKFull, 1, 1);  // the loader, and the bytes of the copy
    init_barriers(kKEmpty, 1, 2);  // each consumer
    init_barriers(kVFull, 1, 1);  // the loader, and the bytes of the copy
    init_barriers(kVEmpty, 1, 2);  // each consumer
    init_barriers(kQFull, 3, 2);  // the loader twice, for Q and for the row statistics, and the bytes of the copy
    init_barriers(kQEmpty, 3, 2);  // each consumer
    init_barriers(kDoutFull, 2, 1);  // the loader, and the bytes of the copy
    init_barriers(kDoutEmpty, 2, 2);  // each consumer
    init_barriers(kDqFull, 2, 4);  // each warp of the consumer
    init_barriers(kDqEmpty, 2, 1);  // the warp that adds
    init_barriers(kWorkEmpty, 2, 2);  // each consumer
    init_barriers(kDqBlockFull, 2, 1);  // the warp that rounds, and the bytes of the copy
    init_barriers(kDsFull, 2, 8);  // each warp of both consumers
    fence_barrier_init();
  }
  __syncthreads();

  // dQ of a KV head's queries is rounded once the last tile of keys has been added: in blocks of 64 rows and 32 columns, in
  // the order in which heads are computed. Whichever warp is free takes the next block.
  // Counters, after the dQ accumulator.
  const auto counter_at = [&](int place) { return reinterpret_cast<uint32_t*>(dq_state_ptr) + place; };
  // Number of parts of tiles of keys of a KV head that have been added; after the last head, number of blocks of dQ that have been taken.
  const auto done = [&](int unit) { return counter_at(unit); };
  // The state of a tile of the dQ accumulator: whether it has been begun, and whether the first sum is in memory.
  const auto state_of = [&](int tile) { return done(batch * kv_heads) + 1 + tile; };
  // Number of finished parts of a tile of keys that is cut, for each consumer.
  const auto parts_done = [&](int cut_tile) { return state_of(sum_tiles) + kConsumers * cut_tile; };
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
      while (__any_sync(~0u, load_acquire(done(unit)) < tiles * parts)) __nanosleep(500);
      dq_block.factor = softmax_scale;
      const int sum_tile = (b * heads + h) * q_tiles + q_tile;
      dq_block.sums = dq_sum_ptr + static_cast<long long>(sum_tile) * kSumsOfTile + part * (kDqBlockBytes / 4);
      dq_block.begun = load_acquire(state_of(sum_tile)) != kUntouched;
      dq_block.to = dq_ptr + b * stride_dq_b + h * stride_dq_h + first_row * stride_dq_s + first_column;
      return true;
    }
  };
  // Writes 16 rows of a block, from sums in the order of a warp's accumulator.
  const auto write_rows = [&](const DqBlock& dq_block, int block, const float4 (&sums)[4]) {
    uint4 upper, lower;
    round_sums<GradElement>(sums, dq_block.factor, lane, upper, lower);
    if (!dq_block.begun) upper = lower = {};  // queries that see no key: nothing was stored
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
      // The last tiles in the order in which they are taken are cut into parts, so that blocks end together.
      const int units = batch * kv_heads;
      DoutRing dout_ring;
      QRing q_ring;
      WorkRing work_ring;
      KRing k_ring;
      VRing v_ring;
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
      int index = take_in_order(tile_counter, work_items, lane);
      while (__any_sync(~0u, index < work_items)) {
        // `heads_in_l2` heads run side by side, the first keys first: most queries see them.
        int unit, kv_tile;
        const int part = index - uncut_tiles;  // negative: all of a tile
        place_tile(part < 0 ? index : uncut_tiles + part / parts, kv_tiles, units, heads_in_l2, unit, kv_tile);
        kv_tile = kv_tiles - 1 - kv_tile;
        const int b = unit / kv_heads, hk = unit % kv_heads, kv_start = kv_tile * kBlockN;
        const int q_begin = b * seqlen_q, k_begin = b * max_seqlen_k, keys = max_seqlen_k;
        const int seqlen_k = has_seqused_k ? seqused_k_ptr[b] : keys;
        work_ring.acquire();
        if (lane == 0) shared_at<Work>(kWork + work_ring.stage * sizeof(Work)) = {b, hk, kv_start, keys, q_begin, k_begin, seqlen_q, seqlen_k, part};
        work_ring.advance();

        bool keys_loaded = false;
        const auto load_step = [&](int h, int tile, int bits) {
          const int q_start = tile * kBlockM;
          // In flight while the stage is still in use.
          QueryValues values[kBlockM / 32];
#pragma unroll
          for (int i = 0; i < kBlockM / 32; ++i) {
            const int q_row = min(q_start + 32 * i + lane, seqlen_q - 1);  // rows after the end repeat the last one
            const auto* u_doc_b = u_doc + static_cast<long long>(b) * stride_u_doc_0;
            const int q_pos = q_row + (seqlen_k - seqlen_q);
            const int u_doc_q_pos = (q_pos >= 0) ? u_doc_b[static_cast<long long>(q_pos)] : 0;
            values[i] = {u_doc_q_pos};
          }
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
            shared_at<Sum>(kSumTile + sums % kSums * sizeof(Sum)) = {(b * heads + h) * q_tiles + tile, -1};
            q_ring.arrive_expecting(kQBytes);
            for (int column = 0; column < kHeadDimQk; column += kBoxColumns) {
              load_box(kQ + q_ring.stage * kQBytes + column * kBlockM * kElementBytes, q_map, q_ring.full(), column, h, q_start, b);
            }
          }
          ++sums;
          if (__any_sync(~0u, !keys_loaded)) {
            const int rows = min(kBlockN, seqlen_k - kv_start);  // rows after the end become 0
            v_ring.acquire();
            if (lane == 0) {
              v_ring.arrive_expecting(kVBytes);
              for (int column = 0; column < kHeadDimV; column += kBoxColumns) {
                load_box(kV + column * kBlockN * kElementBytes, v_map, v_ring.full(), column, hk, kBlockN - rows, kv_start + rows, b);
              }
            }
            v_ring.advance();
            k_ring.acquire();
            if (lane == 0) {
              k_ring.arrive_expecting(kKBytes);
              for (int column = 0; column < kHeadDimQk; column += kBoxColumns) {
                load_box(kK + column * kBlockN * kElementBytes, k_map, k_ring.full(), column, hk, kBlockN - rows, kv_start + rows, b);
              }
            }
            k_ring.advance();
            keys_loaded = true;
          }
#pragma unroll
          for (int i = 0; i < kBlockM / 32; ++i) {
            const uint32_t to = q_ring.stage * kRowBytes + 4 * (32 * i + row_place(lane));
            shared_at<float>(kLse + to) = lse[i];
            shared_at<float>(kDelta + to) = delta[i];
          }
#pragma unroll
          for (int i = 0; i < kBlockM / 32; ++i) {
            shared_at<QueryValues>(kQueryValues + sizeof(QueryValues) * (kBlockM * q_ring.stage + 32 * i + lane)) = values[i];
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
        const int own_start = kv_start + kOwnKeys * (lane / 16);  // each half of the lanes finds what sees the keys of one consumer
        const int kv_hi = max(min(own_start + kOwnKeys, seqlen_k) - 1, own_start);
        const int u_seqlen_q_minus_seqlen_k = seqlen_q - seqlen_k;
        const int visible_lo = max(u_seqlen_q_minus_seqlen_k + own_start, 0) / kBlockM;
        const int u_doc_kv_hi = (kv_hi < extent_u_doc_1) ? u_doc[static_cast<long long>(b) * stride_u_doc_0 + static_cast<long long>(kv_hi)] : 0;
        const int u_doc_after = first_at_least(u_doc + static_cast<long long>(b) * stride_u_doc_0, 1, seqlen_k, u_doc_kv_hi, true);
        const int u_value = u_seqlen_q_minus_seqlen_k + u_doc_after;
        const int full_lo = (max(u_seqlen_q_minus_seqlen_k + kv_hi, 0) + kBlockM - 1) / kBlockM;
        const int u_doc_kv_lo = (own_start < extent_u_doc_1) ? u_doc[static_cast<long long>(b) * stride_u_doc_0 + static_cast<long long>(own_start)] : 0;
        const int full_hi = min(max(u_doc_kv_lo == u_doc_kv_hi ? u_value : 0, 0) / kBlockM, whole_tiles);
        const int visible_hi = static_cast<int>(static_cast<long long>(max(static_cast<long long>(static_cast<long long>(static_cast<long long>(u_value) + kBlockM) - 1), static_cast<long long>(0))) / static_cast<long long>(kBlockM));

        const bool ragged = own_start + kOwnKeys > seqlen_k;  // the last keys end there: every step applies the mask
        const int inner_heads = kv_start < seqlen_k ? group : 0;  // no query sees keys after the used ones
        const int stride = part < 0 ? 1 : parts;  // a part has every so many of the steps of each head
        for (int h = hk * group; __any_sync(~0u, h < hk * group + inner_heads); ++h) {
          const int first_step = part < 0 ? 0 : (part + h) % parts;  // another one of each head, so that parts get equally many
          // Neighbouring blocks begin at different tiles of queries, so that they do not add to the same rows of dQ at once.
          const int own_lo = visible_lo, own_hi = own_start < seqlen_k ? visible_hi : 0;
          const int first = __reduce_min_sync(~0u, own_lo < own_hi ? own_lo : kPartial);
          const int tiles = max(__reduce_max_sync(~0u, own_hi) - first, 0);
          int place = tiles > 0 ? (3 * kv_tile + first_step) % tiles : 0;
          for (int i = first_step; __any_sync(~0u, i < tiles); i += stride) {
            const int tile = first + place;
            const uint32_t partial = __ballot_sync(~0u, ragged || !(tile >= full_lo && tile < full_hi));
            const uint32_t seen = __ballot_sync(~0u, tile >= own_lo && tile < own_hi);
            const int of_first = (partial & 1) * kPartial + (~seen & 1) * kHidden;
            const int of_second = (partial >> 16 & 1) * kPartial + (~seen >> 16 & 1) * kHidden;
            load_step(h, tile, of_first + 2 * of_second);
            place += stride;
            if (place >= tiles) place -= tiles;
          }
        }
        if (lane == 0) {
          const int done_parts = part < 0 ? parts : 1;
          if (keys_loaded) {
            Sum& last = shared_at<Sum>(kSumTile + (sums - 1) % kSums * sizeof(Sum));
            last.unit = unit;
            last.parts = done_parts;
          } else {
            add_release(done(unit), done_parts);
          }
        }
        index = take_in_order(tile_counter, work_items, lane);
        signal(kEndOfTile);
      }
      if (lane == 0) shared_at<Sum>(kSumTile + sums % kSums * sizeof(Sum)).tile = -1;
      __syncwarp();
      signal(kEndOfAll);
    } else if (warp == kAdder) {
      // Adds dQ of each step to the dQ accumulator. The first to have dQ of a tile of queries stores it instead, so that nothing
      // has to clear the accumulator; others wait until that is in memory.
      uint32_t phase = 0;
      for (int i = 0;; ++i) {
        DqRing(0, phase).wait();
        const Sum sum = shared_at<Sum>(kSumTile + i % kSums * sizeof(Sum));
        if (__any_sync(~0u, sum.tile < 0)) break;
        float* const to = dq_sum_ptr + static_cast<long long>(sum.tile) * kSumsOfTile;
        bool first = false;
        if (lane == 0) {
          first = take_first(state_of(sum.tile));
          fence_async_global();
        }
        for (int consumer = 0; consumer < kConsumers; ++consumer) {
          DqRing(consumer, phase).wait();
          if (lane == 0) {
            fence_async_proxy();  // here, where no stores are in flight that it would wait for
            const uint32_t from = kDq + consumer * kDqBytes;
            if (first) {
              store_floats(to + consumer * (kDqBytes / 4), from, kDqBytes);
            } else {
              add_floats(to + consumer * (kDqBytes / 4), from, kDqBytes);
            }
            commit_stores();
          }
          __syncwarp();
        }
        if (lane == 0) wait_stores_read();
        __syncwarp();
        if (lane < kConsumers) DqRing(lane).release();
        if (lane == 0 && (first || sum.unit >= 0)) {
          wait_stores_written();
          if (first) store_release(state_of(sum.tile), kStored);
          if (sum.unit >= 0) add_release(done(sum.unit), sum.parts);
        }
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
    // Packed in pairs, P^T is the A operand of dV += P^T dO as it is, and dS^T that of dK += dS^T Q.
    const int group_thread = threadIdx.x % 128;
    const bool leader = group_thread == 0;
    const uint32_t key_rows = warpgroup * 64 * kBoxBytes;
    const uint32_t row_numbers = 16 * (lane % 4);  // of the first rows of LSE and D that the lane reads
    const float scale_log2e = softmax_scale * kLog2e;
    float s[kBlockM / 2];       // S^T, then P^T
    float dp[kBlockM / 2];      // dP^T
    uint32_t p[kBlockM / 4];    // P^T, in pairs of 16 bits
    uint32_t ds_pairs[kBlockM / 4];  // dS^T, in pairs of 16 bits
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
    const auto issue_dk = [&](int q_stage) {
      const QueryColumns q(kQ + q_stage * kQBytes);
      fence_products();
#pragma unroll
      for (int row = 0; row < kBlockM; row += kMmaK) {
        Product<Element, kHeadDimQk>::template rs<1>(dk, ds_pairs + row / 4, q.at(row * kBoxBytes), 1);
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
    KRing k_ring;
    VRing v_ring;
    DqRing dq_ring(warpgroup);  // this consumer's stage alone
    int buffer = 0;  // of dS
    uint32_t ds_phase = 0;
    // LSE and D, 16 rows each: the first are loaded ahead, the next ones as these have been used.
    float4 lse_rows[kRowsAhead], delta_rows[kRowsAhead];
    const auto load_rows = [&](float4 (&rows)[kRowsAhead], uint32_t from) {
#pragma unroll
      for (int i = 0; i < kRowsAhead; ++i) rows[i] = load_float4(from + q_ring.stage * kRowBytes + row_numbers + 64 * i);
    };
    // Values that the mask reads of a query of the lane.
    const auto of_query = [&](int row) {
      return shared_at<QueryValues>(kQueryValues + sizeof(QueryValues) * (kBlockM * q_ring.stage + row_numbers / 8 + row));
    };
    // P = exp2(logit - LSE); 0 for pairs that are not visible.
    const auto exponentiate_step = [&] {
      const Work& work = shared_at<Work>(kWork + work_ring.stage * sizeof(Work));
      const int b = work.b;
      const int seqlen_k = work.seqlen_k;
      const int kv_first = work.kv_start + 64 * warpgroup + 16 * (warp % 4) + lane / 4;
      const int q_first = (step.tile & kPartial - 1) * kBlockM + 2 * (lane % 4);
      const uint32_t lse_numbers = kLse + q_ring.stage * kRowBytes + row_numbers;
      if (__any_sync(~0u, step.tile & kPartial << warpgroup)) {
        const auto* u_doc_b = u_doc + static_cast<long long>(b) * stride_u_doc_0;
        struct Row {
          int u_doc_kv;
        };
        Row rows[2];
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          const int kv = min(kv_first + 8 * row, seqlen_k - 1);  // keys after the end repeat the last one
          const int u_doc_kv = u_doc_b[static_cast<long long>(kv)];
          rows[row] = {u_doc_kv};
        }
#pragma unroll
        for (int i = 0; i < kBlockM / 8; ++i) {
          const float4 of_rows = lse_rows[i / 2 % kRowsAhead];
          const float2 lse = i % 2 ? make_float2(of_rows.z, of_rows.w) : make_float2(of_rows.x, of_rows.y);
          if (i % 2 && i / 2 + kRowsAhead < kBlockM / 16) {
            lse_rows[i / 2 % kRowsAhead] = load_float4(lse_numbers + 64 * (i / 2 + kRowsAhead));
          }
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const auto [u_doc_q_pos] = of_query(8 * i + j);
            const int q_row = min(q_first + 8 * i + j, seqlen_q - 1);  // rows after the end repeat the last one
            const int q_pos = q_row + (seqlen_k - seqlen_q);
            const int visible_to = min(q_pos + 1, seqlen_k) - kv_first;
#pragma unroll
            for (int row = 0; row < 2; ++row) {
              float& x = s[4 * i + 2 * row + j];
              const auto [u_doc_kv] = rows[row];
              if (!(8 * row < visible_to && u_doc_q_pos == u_doc_kv)) x = kMasked;
              x = exp2_approx(fmaf(x, scale_log2e, -(j == 0 ? lse.x : lse.y)));
            }
          }
          p[2 * i] = pack<Element>(s[4 * i], s[4 * i + 1]);
          p[2 * i + 1] = pack<Element>(s[4 * i + 2], s[4 * i + 3]);
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
          p[2 * i] = pack<Element>(s[4 * i], s[4 * i + 1]);
          p[2 * i + 1] = pack<Element>(s[4 * i + 2], s[4 * i + 3]);
        }
      }
    };
    // dS = P (dP - D), to shared memory, transposed: rows are queries.
    const auto store_ds = [&](int buffer) {
      const uint32_t delta_numbers = kDelta + q_ring.stage * kRowBytes + row_numbers;
      const int q = 8 * (lane / 16) + lane % 8, chunk = 2 * (warp % 4) + lane / 8 % 2;
      const uint32_t to = kDs + buffer * kDsBytes + warpgroup * kBlockM * kDsBoxBytes + q * kDsBoxBytes + 16 * (chunk ^ q % 8);
#pragma unroll
      for (int i = 0; i < kBlockM / 16; ++i) {
        uint32_t* const ds = ds_pairs + 4 * i;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int pair = 4 * i + j;
          const float4 of_rows = delta_rows[i % kRowsAhead];
          const float2 delta = j / 2 ? make_float2(of_rows.z, of_rows.w) : make_float2(of_rows.x, of_rows.y);
          const float2 both = unpack<Element>(p[pair]);
          ds[j] = pack<Element>(both.x * (dp[2 * pair] - delta.x), both.y * (dp[2 * pair + 1] - delta.y));
        }
        if (i + kRowsAhead < kBlockM / 16) {
          delta_rows[i % kRowsAhead] = load_float4(delta_numbers + 64 * (i + kRowsAhead));
        }
        store_transposed(to + 16 * i * kDsBoxBytes, ds[0], ds[1], ds[2], ds[3]);
      }
    };
    // dS of keys that no query of a tile sees.
    const auto clear_ds = [&](int buffer) {
      const uint32_t to = kDs + buffer * kDsBytes + warpgroup * kBlockM * kDsBoxBytes + 512 * (warp % 4) + 16 * lane;
#pragma unroll
      for (int i = 0; i < kBlockM * kDsBoxBytes / 2048; ++i) store_float4(to + 2048 * i, 0.0f, 0.0f, 0.0f, 0.0f);
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
    // Stores dK and dV of a part of a tile. Who is the last one gets those of all parts, added in their order, and true.
    const auto add_parts = [&](int part) {
      const int thread = 32 * (warp % 4) + lane_of_warp();
      const auto part_at = [&](int part) {
        return partials_ptr + (static_cast<long long>(part) * kConsumers + warpgroup) * (kPartOfDk + kPartOfDv);
      };
      store_part<128>(part_at(part), dk, thread);
      store_part<128>(part_at(part) + kPartOfDk, dv, thread);
      named_sync(Named::kGroup, warpgroup, 128);
      int& last = shared_at<Work>(kWork + work_ring.stage * sizeof(Work)).last[warpgroup];
      if (leader) last = arrive_counted(parts_done(part / parts) + warpgroup) == parts - 1;
      named_sync(Named::kGroup, warpgroup, 128);
      if (__any_sync(~0u, last == 0)) return false;
#pragma unroll
      for (int i = 0; i < kHeadDimQk / 2; ++i) dk[i] = 0.0f;
#pragma unroll
      for (int i = 0; i < kHeadDimV / 2; ++i) dv[i] = 0.0f;
      const int first = part / parts * parts;
#pragma unroll 1
      for (int i = 0; i < parts; ++i) {
        add_part<128>(dk, part_at(first + i), thread);
        add_part<128>(dv, part_at(first + i) + kPartOfDk, thread);
      }
      return true;
    };

    if (warpgroup == 1) named_arrive(Named::kPingpong, 0, 128 * kConsumers);  // the first turn is consumer 0's
    while (true) {
      step = next_step();
      if (__any_sync(~0u, step.tile == kEndOfAll)) break;
#pragma unroll
      for (int i = 0; i < kHeadDimQk / 2; ++i) dk[i] = 0.0f;
#pragma unroll
      for (int i = 0; i < kHeadDimV / 2; ++i) dv[i] = 0.0f;
      if (__any_sync(~0u, step.tile >= 0)) {
        k_ring.wait();
        v_ring.wait();
        // Ping-pong: the consumers take turns at the tensor cores, so that the softmax of one runs under the MMAs of the other.
        // dQ of a step is computed in the next step, so that neither waits for dS of the other.
        const auto pingpong_wait = [&] { named_sync(Named::kPingpong, warpgroup, 128 * kConsumers); };
        const auto pingpong_arrive = [&] { named_arrive(Named::kPingpong, 1 - warpgroup, 128 * kConsumers); };
        bool more = true;
        QRing used;
        // Of a step that this consumer's keys do not see, the other alone has products; this one has dS = 0.
        const auto hidden = [&] { return __any_sync(~0u, step.tile & kHidden << warpgroup); };
        pingpong_wait();
        if (hidden()) {
          pingpong_arrive();
          buffer ^= 1;
          clear_ds(buffer);
          __syncwarp();
          if (lane == 0) DsRing(buffer).arrive();
          dout_ring.wait();  // in all warps before it is given back, behind the turn
          pingpong_wait();
          release_dout();
          used = q_ring;
          q_ring.advance();
          step = next_step();
          more = step.tile >= 0;
          if (leader) used.release();
        } else {
          issue_s(q_ring.stage);  // S^T = K Q^T
          load_rows(lse_rows, kLse);
          dout_ring.wait();
          issue_dp(dout_ring.stage);  // dP^T = V dO^T
          wait_products<1>();
          fence_registers(s);
          pingpong_arrive();
          exponentiate_step();
          load_rows(delta_rows, kDelta);
          wait_products<0>();
          fence_registers(dp);
          buffer ^= 1;
          store_ds(buffer);  // dS = P (dP - D)
          __syncwarp();
          if (lane == 0) DsRing(buffer).arrive();
          pingpong_wait();
          issue_dv(dout_ring.stage);  // dV += P^T dO
          issue_dk(q_ring.stage);     // dK += dS^T Q
          wait_products<1>();
          fence_registers(dv);
          release_dout();
          used = q_ring;
          q_ring.advance();
          step = next_step();
          more = step.tile >= 0;
          wait_products<0>();
          fence_registers(dk);
          if (leader) used.release();
        }
        while (__any_sync(~0u, more)) {
          if (hidden()) {
            pingpong_arrive();
            DsRing(buffer, ds_phase).wait();  // dS of both is complete
            fence_async_proxy();  // by who reads: who has just stored would wait for its stores
            ds_phase ^= buffer ^ 1;
            issue_dq(buffer);  // dQ = dS K, of the step before
            buffer ^= 1;
            clear_ds(buffer);
            wait_products<0>();
            fence_registers(dq);
            store_dq();
            __syncwarp();
            if (lane == 0) DsRing(buffer).arrive();
            dout_ring.wait();  // in all warps before it is given back, behind the turn
            pingpong_wait();
            release_dout();
            used = q_ring;
            q_ring.advance();
            step = next_step();
            more = step.tile >= 0;
            if (leader) used.release();
            continue;
          }
          issue_s(q_ring.stage);  // S^T = K Q^T
          load_rows(lse_rows, kLse);
          dout_ring.wait();
          issue_dp(dout_ring.stage);  // dP^T = V dO^T
          wait_products<1>();
          fence_registers(s);
          pingpong_arrive();
          exponentiate_step();
          load_rows(delta_rows, kDelta);
          DsRing(buffer, ds_phase).wait();  // dS of both is complete
          fence_async_proxy();  // by who reads: who has just stored would wait for its stores
          ds_phase ^= buffer ^ 1;
          issue_dq(buffer);  // dQ = dS K, of the step before
          wait_products<1>();
          fence_registers(dp);
          buffer ^= 1;
          store_ds(buffer);  // dS = P (dP - D)
          wait_products<0>();
          fence_registers(dq);
          store_dq();
          __syncwarp();
          if (lane == 0) DsRing(buffer).arrive();
          pingpong_wait();
          issue_dv(dout_ring.stage);  // dV += P^T dO
          issue_dk(q_ring.stage);     // dK += dS^T Q
          wait_products<1>();
          fence_registers(dv);
          release_dout();
          used = q_ring;
          q_ring.advance();
          step = next_step();
          more = step.tile >= 0;
          wait_products<0>();
          fence_registers(dk);
          if (leader) used.release();
        }
        pingpong_arrive();
        if (leader) v_ring.release();
        v_ring.advance();
        DsRing(buffer, ds_phase).wait();  // dS of both is complete
        fence_async_proxy();  // by who reads: who has just stored would wait for its stores
        ds_phase ^= buffer ^ 1;
        issue_dq(buffer);  // dQ = dS K, of the step before
        wait_products<0>();
        fence_registers(dq);
        store_dq();
        if (leader) k_ring.release();  // here: before, ptxas keeps the buffer of dS in vector registers
        k_ring.advance();
      }
      // dK and dV leave through this consumer's part of the dS that comes next, which both have multiplied: neither waits for
      // the other, nor for the warp that adds dQ.
      named_sync(Named::kGroup, warpgroup, 128);
      // The end of the work tile took a stage of Q. By now all warps have seen it.
      if (leader) q_ring.release();
      q_ring.advance();
      const Work work = shared_at<Work>(kWork + work_ring.stage * sizeof(Work));
      const int b = work.b, hk = work.hk, key = work.kv_start + 64 * warpgroup;
      const int count = min(64, work.keys - work.kv_start - 64 * warpgroup);
      const uint32_t staged = kDs + (buffer ^ 1) * kDsBytes + warpgroup * kBlockM * kDsBoxBytes;
      if (__any_sync(~0u, work.part < 0) || add_parts(work.part)) {
        stage_rows.template operator()<0, 64>(dk, softmax_scale, staged + 0);
        named_sync(Named::kGroup, warpgroup, 128);
        store_rows.template operator()<64>(staged + 0, dk_ptr + b * stride_dk_b + hk * stride_dk_h + key * stride_dk_s + 0, stride_dk_s, count, 64);
        named_sync(Named::kGroup, warpgroup, 128);  // all of the round before has been read
        stage_rows.template operator()<64, 64>(dk, softmax_scale, staged + 0);
        named_sync(Named::kGroup, warpgroup, 128);
        store_rows.template operator()<64>(staged + 0, dk_ptr + b * stride_dk_b + hk * stride_dk_h + key * stride_dk_s + 64, stride_dk_s, count, 64);
        named_sync(Named::kGroup, warpgroup, 128);  // all of the round before has been read
        stage_rows.template operator()<0, 64>(dv, 1.0f, staged + 0);
        named_sync(Named::kGroup, warpgroup, 128);
        store_rows.template operator()<64>(staged + 0, dv_ptr + b * stride_dv_b + hk * stride_dv_h + key * stride_dv_s + 0, stride_dv_s, count, 64);
        named_sync(Named::kGroup, warpgroup, 128);  // all of the round before has been read
        stage_rows.template operator()<64, 64>(dv, 1.0f, staged + 0);
        named_sync(Named::kGroup, warpgroup, 128);
        store_rows.template operator()<64>(staged + 0, dv_ptr + b * stride_dv_b + hk * stride_dv_h + key * stride_dv_s + 64, stride_dv_s, count, 64);
      }
      named_sync(Named::kGroup, warpgroup, 128);
      if (leader) work_ring.release();
      work_ring.advance();
    }
    if (warpgroup == 0) named_sync(Named::kPingpong, 0, 128 * kConsumers);  // the last turn, which the other consumer does not take
    dq_ring.acquire();
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
