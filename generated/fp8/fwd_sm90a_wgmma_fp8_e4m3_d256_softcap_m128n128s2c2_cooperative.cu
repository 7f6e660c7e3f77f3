// fwd_sm90a_wgmma_fp8_e4m3_d256_softcap_m128n128s2c2_cooperative
//
// Attention forward, variant softcap: mask `q_pos >= kv`, score `cap * tanh(s / cap)`.
// Rendered by `attngen build specs/fp8.yaml`, schedule hopper_fp8.
//
// A block of 3 warpgroups. The last one produces: one warp schedules work tiles and loads Q, one loads K
// and V, by TMA, and two transpose V, since products of 8 bits take keys along the rows alone.
// The others consume: each computes O of 64 query rows, S = Q K^T, P = exp2(S), O += P V, tile by tile of keys
// from the last to the first, and keeps S, P and O in registers.
#include "expression.cuh"
#include "pdl.cuh"
#include "ring.cuh"
#include "schedule.cuh"
#include "soft_cap.cuh"
#include "softmax.cuh"
#include "tma.cuh"
#include "transpose.cuh"
#include "wgmma.cuh"

using Element = e4m3;  // of Q, K, V and P
using OutElement = bf16;  // of O

constexpr int kBlockM = 128;  // query rows of a work tile
constexpr int kBlockN = 128;  // keys of one step
constexpr int kHeadDimQk = 256;
constexpr int kHeadDimV = 256;
constexpr int kConsumers = 2;  // warpgroups that multiply
constexpr int kThreads = 384;
// Info of a KV tile for consumers, in one word: its number, a bit for each consumer that must apply the mask, and a bit
// for each that sees nothing of it.
constexpr int kTileMask = (1 << 23) - 1;  // holds the last tile of the longest sequence
constexpr int kPartialBit = 23, kSkippedBit = kPartialBit + kConsumers;
static_assert(kSkippedBit + kConsumers <= 32);
constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
constexpr int kElementBytes = sizeof(Element), kOutElementBytes = sizeof(OutElement);
static_assert(kOutElementBytes == 2);  // O leaves its registers in pairs of 16 bits
constexpr int kMmaK = 32;  // K of one wgmma: the elements that it sums over
static_assert(kMmaK == Product<Element, kBlockN>::kK);
constexpr int kPacked = 4 / kElementBytes;  // probabilities in a register
constexpr int kBoxBytes = 128;  // of a row of one copy, swizzled
constexpr int kBoxColumns = kBoxBytes / kElementBytes;  // columns that one copy brings
constexpr int kOutBoxColumns = kBoxBytes / kOutElementBytes;  // the same of O
constexpr int kOutColumns = 128;  // columns of O that are staged at once
constexpr int kVBoxBytes = 128;  // of a row of V, once it is transposed
constexpr int kAhead = 3;  // fragments of V that a transposer has in flight
constexpr int kOutChunk = 16 / kOutElementBytes;  // columns of O in 16 bytes
constexpr int kLookahead = 2;  // steps before the end of a work tile at which the next one is taken
constexpr float kRecomputeAbove = 448.0f;  // a lane recomputes the row max where its sum of probabilities exceeds this,
constexpr float kRecomputeGrowth = 4.0f;  // or a step adds this many times the sum before it
constexpr int kPeak = 4;  // P of the largest logit is 2^kPeak when the row max is set
constexpr int kLaneSumLog2 = 6;  // log2 of the largest sum of a lane in a step after its row max was recomputed
// Shared memory. Addresses are constants, so that they cost no instruction; the kernel checks where it begins.
constexpr uint32_t kShared = 1024;
constexpr uint32_t kQ = kShared + 0;  // 32768 B: Q
constexpr uint32_t kK = kShared + 32768;  // 65536 B: K, a tile per stage
constexpr uint32_t kVRows = kShared + 98304;  // 32768 B: V as it lies in memory, a box per stage
constexpr uint32_t kV = kShared + 131072;  // 65536 B: V, a tile per stage
constexpr uint32_t kOut = kShared + 196608;  // 32768 B: O, for its store
constexpr uint32_t kWork = kShared + 229376;  // 640 B: two work tiles: the one that is loaded and the next
constexpr uint32_t kQFull = kShared + 230016;  // 8 B: barriers
constexpr uint32_t kQEmpty = kShared + 230024;  // 8 B: barriers
constexpr uint32_t kKFull = kShared + 230032;  // 16 B: barriers
constexpr uint32_t kKEmpty = kShared + 230048;  // 16 B: barriers
constexpr uint32_t kVRowsFull = kShared + 230064;  // 16 B: barriers
constexpr uint32_t kVRowsEmpty = kShared + 230080;  // 16 B: barriers
constexpr uint32_t kVFull = kShared + 230096;  // 16 B: barriers
constexpr uint32_t kVEmpty = kShared + 230112;  // 16 B: barriers
constexpr uint32_t kWorkFull = kShared + 230128;  // 16 B: barriers
constexpr uint32_t kWorkEmpty = kShared + 230144;  // 16 B: barriers
constexpr uint32_t kWorkAsked = kShared + 230160;  // 8 B: barriers
constexpr uint32_t kTileInfo = kShared + 230168;  // 8 B: which tile is in each stage of K

// Rings: who fills the stages -> who empties them.
using QRing = Ring<kQFull, kQEmpty, 1>;  // the scheduler -> each consumer
using KRing = Ring<kKFull, kKEmpty, 2>;  // the loader of K and V -> each consumer
using VRowsRing = Ring<kVRowsFull, kVRowsEmpty, 2>;  // the loader of K and V -> the transposers
using VRing = Ring<kVFull, kVEmpty, 2>;  // the transposers -> each consumer
using WorkRing = Pair<kWorkFull, kWorkEmpty>;  // the scheduler -> the consumers, the loader and the transposers

// Named barriers of the hardware; 0 is __syncthreads.
enum class Named {
  kGroup = 1,  // 2 of them: threads of a consumer wait for each other around O
};

constexpr int kScheduler = 8, kLoader = 9;  // warps with a role of their own

constexpr uint32_t kQBytes = kBlockM * kHeadDimQk * kElementBytes;
constexpr uint32_t kKBytes = kBlockN * kHeadDimQk * kElementBytes;
constexpr uint32_t kVBytes = kBlockN * kHeadDimV * kElementBytes;
constexpr uint32_t kVRowsBytes = kBlockN * kBoxBytes;  // a box of V, before it is transposed
static_assert(VRowsRing::kStages * kVRowsBytes == 32768);
constexpr uint32_t kOutBytes = 64 * kOutColumns * kOutElementBytes;  // of one consumer
static_assert(kConsumers * kOutBytes == 32768);
static_assert(QRing::kStages * kQBytes == 32768);
static_assert(KRing::kStages * kKBytes == 65536 && VRing::kStages * kVBytes == 65536);

// Layouts of wgmma's operands: all are K-major.
using QMatrix = Matrix<16, 8 * kBoxBytes, 1>;
using KMatrix = Matrix<16, 8 * kBoxBytes, 1>;
using VMatrix = Matrix<16, 8 * kVBoxBytes, 1>;

// KV tiles of which some of the rows see some key, and those of which every row sees every key.
struct Spans {
  int visible_lo, visible_hi;
  int full_lo, full_hi;
};

// A work tile: which rows of which head, and over how many KV tiles they go. Negative: there is no other.
struct Place {
  int b, h, q_start, tiles;
  int q_begin, k_begin, seqlen_q, seqlen_k;
};

// Its record, written by the scheduler in words of 16 bytes. Two are adjacent.
struct alignas(16) Work : Place {
  Spans spans[kConsumers + 1];  // of the rows of each consumer, and of all
};
static_assert(kWork % sizeof(int4) == 0 && sizeof(Place) == 2 * sizeof(int4) && sizeof(Work) % sizeof(int4) == 0);
static_assert(kWork % alignof(Work) == 0 && WorkRing::kStages * sizeof(Work) <= 640);

extern __shared__ char shared_memory[];

template <typename Value>
__device__ __forceinline__ Value& shared_at(uint32_t address) {
  return *reinterpret_cast<Value*>(shared_memory + (address - kShared));
}

__device__ __forceinline__ const Place& place_at(int stage) { return shared_at<Place>(kWork + stage * sizeof(Work)); }

extern "C" __global__ void __launch_bounds__(kThreads, 1) fwd_sm90a_wgmma_fp8_e4m3_d256_softcap_m128n128s2c2_cooperative(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap out_map,
    bf16* out_ptr, float* lse_ptr, const float* q_descale_ptr, const float* k_descale_ptr,
    const float* v_descale_ptr,
    long long stride_q_descale_b, long long stride_q_descale_h,
    long long stride_k_descale_b, long long stride_k_descale_h,
    long long stride_v_descale_b, long long stride_v_descale_h,
    const int* seqused_k_ptr, uint32_t* tile_counter,
    long long stride_out_b, long long stride_out_s, long long stride_out_h,
    int batch, int heads, int kv_heads, int group, int heads_in_l2, int q_tiles, int seqlen_q, int max_seqlen_k,
    int total_q, int total_k,
    float softmax_scale,
    float u_cap,
    int write_lse, int has_seqused_k
) {
  launch_dependents();
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // uniform across the warp, and the compiler knows
  const int lane = threadIdx.x % 32;
  const int warpgroup = warp / 4;

  if (threadIdx.x == 0) {
    if (static_cast<uint32_t>(__cvta_generic_to_shared(shared_memory)) != kShared) __trap();
    init_barriers(kQFull, 1, 1);  // the scheduler, and the bytes of the copy
    init_barriers(kQEmpty, 1, 2);  // each consumer
    init_barriers(kKFull, 2, 1);  // the loader of K and V, and the bytes of the copy
    init_barriers(kKEmpty, 2, 2);  // each consumer
    init_barriers(kVRowsFull, 2, 1);  // the loader of K and V, and the bytes of the copy
    init_barriers(kVRowsEmpty, 2, 2);  // the transposers
    init_barriers(kVFull, 2, 2);  // the transposers
    init_barriers(kVEmpty, 2, 2);  // each consumer
    init_barriers(kWorkFull, 2, 3);  // the scheduler's lanes that write the record
    init_barriers(kWorkEmpty, 2, 10);  // each warp of the consumers, and the transposers
    init_barriers(kWorkAsked, 1, 1);  // the loader of K and V
    fence_barrier_init();
  }
  if (threadIdx.x == 32) {
    prefetch_map(q_map);
    prefetch_map(k_map);
    prefetch_map(v_map);
  }
  __syncthreads();
  wait_dependencies();  // nothing in global memory is read or written before

  if (warpgroup == kConsumers) {
    shrink_registers<kProducerRegisters>();
    if (warp == kScheduler) {
      // The tile scheduler: takes work tiles, and finds the KV tiles that their rows see.
      const int units = batch * heads;
      const int q_tiles_of_all = q_tiles * units;
      const int part = lane / 8;  // eight lanes for the rows of each consumer, and eight for all rows
      int index = blockIdx.x;
      int taken = 0;  // work tiles, from which the phases of all barriers follow: few registers are left
      const auto next_tile = [&] { return take_tile(tile_counter, q_tiles_of_all, lane); };
      while (true) {
        Place work = {};
        work.tiles = -1;
        Spans spans = {};
        if (index < q_tiles_of_all) {
          int unit, q_tile;
          place_tile(index, q_tiles, units, heads_in_l2, unit, q_tile);
          const int b = unit / heads, h = unit % heads;
          const int q_begin = b * seqlen_q, k_begin = b * max_seqlen_k;
          const int seqlen_k = has_seqused_k ? seqused_k_ptr[b] : max_seqlen_k;
          const int whole_tiles = seqlen_k / kBlockN;
          const int q_start = q_tile * kBlockM + (part < kConsumers ? 64 * part : 0);
          const int q_hi = min(q_start + (part < kConsumers ? 64 : kBlockM), seqlen_q) - 1;
          const int q_pos_lo = q_start + (seqlen_k - seqlen_q);
          const int q_pos_hi = q_hi + (seqlen_k - seqlen_q);
          const int visible_hi = (max(q_pos_hi + 1, 0) + kBlockN - 1) / kBlockN;
          const int full_hi = min(max(q_pos_lo + 1, 0) / kBlockN, whole_tiles);
          spans = {0, visible_hi, 0, full_hi};
          if (q_start >= seqlen_q) spans = {};
          const int tiles = max(spans.visible_hi - spans.visible_lo, 0);
          work = {b, h, q_tile * kBlockM, __shfl_sync(~0u, tiles, 8 * kConsumers), q_begin, k_begin, seqlen_q, seqlen_k};
        }
        if (__any_sync(~0u, work.tiles == 0)) {  // no row sees a key: writes O = 0 and its LSE
          const int rows = min(kBlockM, work.seqlen_q - work.q_start);
          for (int i = lane; i < rows * 32; i += 32) {
            const int q = work.q_start + i / 32;
            *reinterpret_cast<int4*>((out_ptr + work.b * stride_out_b + work.h * stride_out_h + (q) * stride_out_s) + kOutChunk * (i % 32)) = {};
          }
          for (int i = lane; write_lse && i < rows; i += 32) {
            const int q = work.q_start + i;
            lse_ptr[(work.b * static_cast<long long>(heads) + work.h) * seqlen_q + q] = kMasked;
          }
          index = next_tile();
          continue;
        }
        const auto work_ring = WorkRing::at(taken);
        work_ring.acquire();
        Work& shared_work = shared_at<Work>(kWork + work_ring.stage * sizeof(Work));
        if (lane == 0) {
          shared_at<int4>(kWork + work_ring.stage * sizeof(Work)) = {work.b, work.h, work.q_start, work.tiles};
          shared_at<int4>(kWork + work_ring.stage * sizeof(Work) + 16) = {work.q_begin, work.k_begin, work.seqlen_q, work.seqlen_k};
        }
        if (lane % 8 == 0 && part <= kConsumers) {
          shared_work.spans[part] = spans;
          work_ring.arrive();
        }
        __syncwarp();
        if (index >= q_tiles_of_all) break;
        auto q_ring = QRing::at(taken);
        q_ring.acquire();
        if (lane == 0) {
          q_ring.arrive_expecting(kQBytes);
          for (int column = 0; column < kHeadDimQk; column += kBoxColumns) {
            load_box(kQ + q_ring.stage * kQBytes + column * kBlockM * kElementBytes, q_map, q_ring.full(), column, work.h,
                     work.q_start, work.b);
          }
        }
        __syncwarp();
        q_ring.advance();
        Event<kWorkAsked> asked;
        asked.phase = taken & 1;
        asked.wait();
        ++taken;
        index = next_tile();
      }
    } else if (warp == kLoader) {
      // The loader of K and V: from the last tile of keys to the first. V follows K one step later, as consumers read it.
      WorkRing work_ring;
      KRing k_ring;
      VRowsRing v_rows_ring;
      while (true) {
        work_ring.wait();
        const Work& work = shared_at<Work>(kWork + work_ring.stage * sizeof(Work));
        const int b = work.b, tiles = work.tiles, seqlen_k = work.seqlen_k;
        const int hk = work.h / group;
        const Spans mine = work.spans[min(lane, kConsumers)], all = work.spans[kConsumers];
        work_ring.advance();
        if (__any_sync(~0u, tiles < 0)) break;
        __syncwarp();
        if (lane == 0 && tiles <= kLookahead) Event<kWorkAsked>::arrive();
        int remaining = tiles, v_tile = 0;
        const auto load_v = [&] {
#pragma unroll 1
          for (int column = 0; column < kHeadDimV; column += kBoxColumns) {
            v_rows_ring.acquire();
            if (lane == 0) {
              v_rows_ring.arrive_expecting(kVRowsBytes);
              const int start = v_tile * kBlockN, rows = min(kBlockN, seqlen_k - start);  // rows after the end become 0
              load_box(kVRows + v_rows_ring.stage * kVRowsBytes, v_map, v_rows_ring.full(), column, hk,
                         kBlockN - rows, start + rows, b);
            }
            __syncwarp();
            v_rows_ring.advance();
          }
        };
        // `tile_info` is the tile, above it a bit for each consumer that needs the mask.
        const auto load_step = [&](int tile, int tile_info) {
          k_ring.acquire();
          if (lane == 0) {
            if (remaining == kLookahead && tiles > kLookahead) Event<kWorkAsked>::arrive();
            shared_at<int>(kTileInfo + 4 * k_ring.stage) = tile_info;
            k_ring.arrive_expecting(kKBytes);
            for (int column = 0; column < kHeadDimQk; column += kBoxColumns) {
              load_box(kK + k_ring.stage * kKBytes + column * kBlockN * kElementBytes, k_map, k_ring.full(), column, hk,
                       tile * kBlockN, b);
            }
          }
          __syncwarp();
          if (remaining < tiles) load_v();
          v_tile = tile;
          --remaining;
          k_ring.advance();
        };

        while (__any_sync(~0u, remaining > 0)) {
          const int tile = all.visible_lo + remaining - 1;
          const uint32_t partial = ~__ballot_sync(~0u, tile >= mine.full_lo && tile < mine.full_hi) & (1u << kConsumers) - 1;
          load_step(tile, tile | partial << kPartialBit);
        }
        load_v();
      }
    } else {
      // A transposer: V arrives as rows of keys, and leaves as rows of columns, half of those of a box by each of two warps.
      constexpr int kBoxes = kHeadDimV / kBoxColumns, kStrips = kBoxColumns / 32;
      const uint32_t lane_load = lane % 16 * kBoxBytes + 16 * swizzled<kBoxBytes>(lane % 16, lane / 16);
      const uint32_t lane_store = lane * kVBoxBytes + 16 * swizzled<kVBoxBytes>(lane, 0);
      const int first_strip = warp % 2 * (kStrips / 2);
      int taken = 0, done = 0;  // work tiles and of V, from which all phases follow: few registers are left
      while (true) {
        const auto work_ring = WorkRing::at(taken++);
        work_ring.wait();
        int tiles = place_at(work_ring.stage).tiles;
        __syncwarp();
        if (lane == 0) work_ring.release();
        if (__any_sync(~0u, tiles < 0)) break;
        for (; __any_sync(~0u, tiles > 0); --tiles, ++done) {
          const VRing v_ring = VRing::at(done);
          v_ring.acquire();
#pragma unroll 1
          for (int box = 0; box < kBoxes; ++box) {
            const VRowsRing v_rows_ring = VRowsRing::at(kBoxes * done + box);
            const uint32_t from = kVRows + v_rows_ring.stage * kVRowsBytes;
            const uint32_t to = kV + v_ring.stage * kVBytes + box * kBoxColumns * kVBoxBytes;
            v_rows_ring.wait();
#pragma unroll 1
            for (int strip = first_strip; strip < first_strip + kStrips / 2; ++strip) {
              transpose_strip<kBlockN, kBoxBytes, kVBoxBytes, kHeadDimV, kAhead>(
                  from + (lane_load ^ 32 * strip), to + 32 * strip * kVBoxBytes + lane_store);
            }
            __syncwarp();
            if (lane == 0) v_rows_ring.release();
          }
          fence_async_proxy();  // wgmma reads what was written here
          __syncwarp();
          if (lane == 0) v_ring.arrive();
        }
      }
    }
  } else {
    grow_registers<kConsumerRegisters>();
    // A consumer: 64 query rows. A lane holds elements of two rows, 8 apart. Warp w of the four has these of S, and of O alike:
    //
    //            columns:    0 1     2 3     4 5     6 7  |  8 9  ...
    //   row 16 w           lane 0  lane 1  lane 2  lane 3 | lane 0     s[0], s[1]  |  s[4], s[5]
    //   row 16 w + 1       lane 4  lane 5  lane 6  lane 7 | lane 4
    //   ...
    //   row 16 w + 8       lane 0  lane 1  lane 2  lane 3 | lane 0     s[2], s[3]  |  s[6], s[7]
    //
    // Four lanes share a row: its maximum and its sum take two shuffles. Branches test __any_sync(~0u, x): if x is the same for
    // all lanes, the compiler learns that the warp does not diverge; if it differs by row, the warp does what any row needs.
    const int group_thread = threadIdx.x % 128;
    const bool leader = group_thread == 0;
    const int row_in_group = 16 * (warp % 4) + lane / 4;
    const uint32_t q_rows = kQ + warpgroup * 64 * kBoxBytes;
    const uint32_t out_rows = kOut + warpgroup * kOutBytes;

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
        const uint32_t box = key / kVBoxBytes * kVBoxBytes, inside = key % kVBoxBytes;
        Product<Element, kHeadDimV>::rs<0>(acc, p + key / 2 / kPacked, v.at(box * kHeadDimV + inside), 1);
      }
      commit_products();
    };
    const auto sync_group = [&] { named_sync(Named::kGroup, warpgroup, 128); };
    WorkRing work_ring;
    QRing q_ring;
    KRing k_ring;
    VRing v_ring;
    int tile_info = 0;
    int left = 0;  // tiles of K that remain, this one included
    const auto release_k = [&] {
      if (leader) k_ring.release();
      if (leader && left == 1) q_ring.release();  // that was the last S = Q K^T of this work tile
      k_ring.advance();
    };
    const auto wait_v = [&] { v_ring.wait(); };
    const auto release_v = [&] {
      if (leader) v_ring.release();
      v_ring.advance();
    };
    const auto wait_k = [&] {
      k_ring.wait();
      tile_info = shared_at<int>(kTileInfo + 4 * k_ring.stage);
    };
    // The record of a work tile is read where it lies until O is written: S, P and O leave few registers.
    const auto next_work = [&]() -> const Place& {
      work_ring.wait();
      return place_at(work_ring.stage);
    };
    // Scales that bring products of a work tile back to their units: Q K^T with the softmax scale, and P V.
    const auto read_scales = [&](const Place& work, float (&scales)[2]) {
      const int hk = work.h / group;
      scales[0] = q_descale_ptr[work.b * stride_q_descale_b + hk * stride_q_descale_h];
      scales[1] = k_descale_ptr[work.b * stride_k_descale_b + hk * stride_k_descale_h];
    };
    const auto value_scale_of = [&](const Place& work) {
      const int hk = work.h / group;
      return v_descale_ptr[work.b * stride_v_descale_b + hk * stride_v_descale_h];
    };

    left = next_work().tiles;
    bool more = __any_sync(~0u, left > 0);
    float next_scales[2];
    read_scales(place_at(0), next_scales);
    const auto wait_operands = [&] {
      q_ring.wait();
      wait_k();
    };
    const auto start = [&] {
      wait_operands();
      issue_qk(k_ring.stage, q_ring.stage);
      wait_products<0>();
      fence_registers(s);
    };
    if (more) start();
    while (more) {
      const Place& work = place_at(work_ring.stage);
      const float logit_scale = softmax_scale * next_scales[0] * next_scales[1];
      const int seqlen_k = work.seqlen_k;
      const int q_first = work.q_start + 64 * warpgroup + row_in_group;
      const float u_softmax_scale_over_cap = logit_scale / u_cap;
      const float scale_log2e = u_cap * kLog2e;
      float row_max[2] = {kUnseen, kUnseen}, row_sum[2] = {0.0f, 0.0f}, maximum[2], alpha[2];
#pragma unroll
      for (int i = 0; i < kHeadDimV / 2; ++i) acc[i] = 0.0f;

      // The products of a tile become logits; pairs that are not visible get -inf.
      const auto finish_partial = [&] {
        const int kv_first = (tile_info & kTileMask) * kBlockN + 2 * (lane % 4);
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
            x = tanh_approx(x * u_softmax_scale_over_cap);
            if (key >= visible_to) x = kMasked;
          }
        }
      };
      const auto finish_full = [&] {
#pragma unroll
        for (int i = 0; i < kBlockN / 4; ++i) {
#pragma unroll
          for (int row = 0; row < 2; ++row) {
            float& x = s[4 * (i / 2) + 2 * row + i % 2];
            x = tanh_approx(x * u_softmax_scale_over_cap);
          }
        }
      };
      const SoftCap soft_cap(u_softmax_scale_over_cap, scale_log2e);
      bool polynomial = true;  // whether it was as good as tanh so far: tiles of the same rows are alike

      // The first tile. Its S is there.
      release_k();
      if (__any_sync(~0u, tile_info >> (kPartialBit + warpgroup) & 1)) {
        finish_partial();
      } else {
        finish_full();
      }
      // Few keys predict later logits badly: the tile after a partial one recomputes row maxima.
      bool recomputes = __any_sync(~0u, tile_info >> (kPartialBit + warpgroup) & 1);
      // The running max of the first tile; P = exp2(S - max)
      find_maximum(s, scale_log2e, maximum);
      raise_row_max<kPeak>(maximum, row_max, alpha);
      exponentiate<Element>(s, scale_log2e, row_max, p, row_sum);

      // The other tiles: O += P V of the tile before is issued right after S = Q K^T of this one.
      while (__any_sync(~0u, --left > 0)) {
        wait_k();
        issue_qk(k_ring.stage, q_ring.stage);  // S = Q K^T of this tile
        wait_v();
        issue_pv(v_ring.stage);  // O += P V of the tile before
        wait_products<1>();
        fence_registers(s);
        release_k();

        // P of this tile, straight from the products where a polynomial is as good as tanh. S is kept until that is known and the sums
        // show that P stayed in range.
        float sum[2] = {0.0f, 0.0f};
        const auto begin_p = [&] {
          wait_products<0>();
          fence_registers(acc);
          release_v();
        };
        bool products = false;  // whether S still is the products
        if (__any_sync(~0u, recomputes || tile_info >> (kPartialBit + warpgroup) & 1)) {
          if (__any_sync(~0u, tile_info >> (kPartialBit + warpgroup) & 1)) {
            finish_partial();
          } else {
            finish_full();
          }
          begin_p();
          if (__any_sync(~0u, recomputes)) {
            find_maximum(s, scale_log2e, maximum);
            raise_row_max<kPeak>(maximum, row_max, alpha);
            rescale(acc, alpha);
            row_sum[0] *= alpha[0];
            row_sum[1] *= alpha[1];
          }
          exponentiate<Element>(s, scale_log2e, row_max, p, sum);
        } else {
          begin_p();
          products = polynomial && __all_sync(~0u, exponentiate_capped<Element>(s, soft_cap, row_max, p, sum));
          polynomial = products;
          if (!products) {
            finish_full();
            sum[0] = sum[1] = 0.0f;
            exponentiate<Element>(s, scale_log2e, row_max, p, sum);
          }
        }
        const auto kept = [&](int row) { return sum[row] <= (recomputes ? kRecomputeAbove : fminf(kRecomputeGrowth * row_sum[row], kRecomputeAbove)); };
        if (__any_sync(~0u, !(kept(0) && kept(1)))) {
          if (products) finish_full();
          find_maximum(s, scale_log2e, maximum);
          raise_by_sum<kLaneSumLog2 - kPeak>(sum, row_max, maximum);
          keep_row_max({kept(0), kept(1)}, row_max, maximum);
          raise_row_max<kPeak>(maximum, row_max, alpha);
          rescale(acc, alpha);
#pragma unroll
          for (int row = 0; row < 2; ++row) {
            row_sum[row] *= alpha[row];
            sum[row] = 0.0f;
          }
          exponentiate<Element>(s, scale_log2e, row_max, p, sum);
        }
        recomputes = false;
        row_sum[0] += sum[0];
        row_sum[1] += sum[1];
      }

      q_ring.advance();
      float normalize[2];
      finish_sum(row_sum, normalize);

      // O leaves through shared memory, so that stores are whole rows.
      // Columns are in the order of transpose.cuh: a lane has four neighbours in two blocks of 8.
      const auto stage_out = [&](int from) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          const int row_of_box = row_in_group + 8 * row;
#pragma unroll
          for (int column = 0; column < kOutColumns; column += 2 * kOutChunk) {
            const int chunk = column % kOutBoxColumns / kOutChunk + lane % 4 / 2;
            const uint32_t to = out_rows + column / kOutBoxColumns * 64 * kBoxBytes + row_of_box * kBoxBytes +
                                16 * swizzled<kBoxBytes>(row_of_box, chunk) + 8 * (lane % 2);
            const int i = (from + column) / 2 + 2 * row;
            shared_at<uint2>(to) = {pack<OutElement>(acc[i], acc[i + 4]), pack<OutElement>(acc[i + 1], acc[i + 5])};
          }
        }
        fence_async_proxy();
      };
      const auto store_out = [&](int from) {
        if (leader) {
          for (int column = 0; column < kOutColumns; column += kOutBoxColumns) {
            store_box(out_map, out_rows + column * 64 * kOutElementBytes, from + column, work.h, work.q_start + 64 * warpgroup, work.b);
          }
          commit_stores();
        }
      };
      // Waits until the stores of the last work tile have read their shared memory.
      const auto free_out = [&] {
        if (leader) wait_stores_read();
        sync_group();
      };
      float value_scale;
      const auto write_out = [&] {
        fence_registers(acc);
        release_v();
        normalize[0] *= value_scale;
        normalize[1] *= value_scale;
        rescale(acc, normalize);
        stage_out(0);
        sync_group();
        wait_products<0>();
        fence_registers(s);
        store_out(0);
        if (leader) wait_stores_read();
        sync_group();
        stage_out(128);
        sync_group();
        store_out(128);
      };

      // The last O += P V, and after it the first S = Q K^T of the next work tile.
      const WorkRing last_ring = work_ring;
      work_ring.advance();
      const Place& next = next_work();
      // Early, since loads take their time; what uses them comes after the products are issued.
      value_scale = value_scale_of(work);
      read_scales(next, next_scales);
      more = __any_sync(~0u, next.tiles > 0);
      left = next.tiles;
      if (more) wait_operands();
      wait_v();
      issue_pv(v_ring.stage);
      issue_qk(k_ring.stage, q_ring.stage);
      free_out();
      wait_products<1>();
      write_out();
      if (write_lse && lane % 4 == 0) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          const int q = work.q_start + 64 * warpgroup + row_in_group + 8 * row;
          if (q < seqlen_q) lse_ptr[(work.b * static_cast<long long>(heads) + work.h) * seqlen_q + q] = log_sum_exp(row_max[row], row_sum[row]);
        }
      }
      __syncwarp();
      if (lane == 0) last_ring.release();
    }
    if (leader) wait_stores_read();
  }
}
