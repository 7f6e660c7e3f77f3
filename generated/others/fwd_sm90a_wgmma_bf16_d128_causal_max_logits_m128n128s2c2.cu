// fwd_sm90a_wgmma_bf16_d128_causal_max_logits_m128n128s2c2
//
// Attention forward, variant causal_max_logits: mask `q_pos >= kv`.
// Rendered by `attngen build tests/render/others.yaml`, schedule hopper_forward.
//
// A block of 3 warpgroups. The last one produces: one warp schedules work tiles, and two load Q, and K and V,
// by TMA. The others consume: each computes O of 64 query rows, S = Q K^T, P = exp2(S), O += P V, tile by tile of keys
// from the last to the first, and keeps S, P and O in registers.
#include "expression.cuh"
#include "pdl.cuh"
#include "ring.cuh"
#include "schedule.cuh"
#include "largest_p.cuh"
#include "softmax.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

using Element = bf16;  // of Q, K, V and P
using OutElement = bf16;  // of O

constexpr int kBlockM = 128;  // query rows of a work tile
constexpr int kBlockN = 128;  // keys of one step
constexpr int kHeadDimQk = 128;
constexpr int kHeadDimV = 128;
constexpr int kConsumers = 2;  // warpgroups that multiply
constexpr int kThreads = 384;
// Info of a KV tile for consumers, in one word: its number, a bit for each consumer that must apply the mask, and a bit
// for each that sees nothing of it.
constexpr int kTileMask = (1 << 23) - 1;  // holds the last tile of the longest sequence
constexpr int kPartialBit = 23, kSkippedBit = kPartialBit + kConsumers;
static_assert(kSkippedBit + kConsumers <= 32);
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
constexpr int kElementBytes = sizeof(Element), kOutElementBytes = sizeof(OutElement);
static_assert(kOutElementBytes == 2);  // O leaves its registers in pairs of 16 bits
constexpr int kMmaK = 16;  // K of one wgmma: the elements that it sums over
static_assert(kMmaK == Product<Element, kBlockN>::kK);
constexpr int kPacked = 4 / kElementBytes;  // probabilities in a register
constexpr int kBoxBytes = 128;  // of a row of one copy, swizzled
constexpr int kBoxColumns = kBoxBytes / kElementBytes;  // columns that one copy brings
constexpr int kOutBoxColumns = kBoxBytes / kOutElementBytes;  // the same of O
constexpr int kOutColumns = 128;  // columns of O that are staged at once
constexpr int kOutChunk = 16 / kOutElementBytes;  // columns of O in 16 bytes
constexpr int kLookahead = 2;  // steps before the end of a work tile at which the next one is taken
constexpr float kRecomputeAbove = 0x1p40f;  // a lane recomputes the row max where its sum of probabilities exceeds this,
constexpr float kRecomputeGrowth = 4.0f;  // or a step adds this many times the sum before it
// Shared memory. Addresses are constants, so that they cost no instruction; the kernel checks where it begins.
constexpr uint32_t kShared = 1024;
constexpr uint32_t kQ = kShared + 0;  // 65536 B: Q
constexpr uint32_t kK = kShared + 65536;  // 65536 B: K, a tile per stage
constexpr uint32_t kV = kShared + 131072;  // 65536 B: V, a tile per stage
constexpr uint32_t kOut = kShared + 196608;  // 32768 B: O, for its store
constexpr uint32_t kWork = kShared + 229376;  // 640 B: two work tiles: the one that is loaded and the next
constexpr uint32_t kQFull = kShared + 230016;  // 16 B: barriers
constexpr uint32_t kQEmpty = kShared + 230032;  // 16 B: barriers
constexpr uint32_t kKFull = kShared + 230048;  // 16 B: barriers
constexpr uint32_t kKEmpty = kShared + 230064;  // 16 B: barriers
constexpr uint32_t kVFull = kShared + 230080;  // 16 B: barriers
constexpr uint32_t kVEmpty = kShared + 230096;  // 16 B: barriers
constexpr uint32_t kWorkFull = kShared + 230112;  // 16 B: barriers
constexpr uint32_t kWorkEmpty = kShared + 230128;  // 16 B: barriers
constexpr uint32_t kWorkAsked = kShared + 230144;  // 8 B: barriers
constexpr uint32_t kTileInfo = kShared + 230152;  // 8 B: which tile is in each stage of K

// Rings: who fills the stages -> who empties them.
using QRing = Ring<kQFull, kQEmpty, 2>;  // the loader of Q -> each consumer
using KRing = Ring<kKFull, kKEmpty, 2>;  // the loader of K and V -> each consumer
using VRing = Ring<kVFull, kVEmpty, 2>;  // the loader of K and V -> each consumer
using WorkRing = Pair<kWorkFull, kWorkEmpty>;  // the scheduler -> the consumers and both loaders

// Named barriers of the hardware; 0 is __syncthreads.
enum class Named {
  kGroup = 1,  // 2 of them: threads of a consumer wait for each other around O
  kPingpong = 3,  // 2 of them: turns at the tensor cores: a consumer waits, the one before it arrives
};

constexpr int kScheduler = 8, kLoader = 9, kQueryLoader = 10;  // warps with a role of their own

constexpr uint32_t kQBytes = kBlockM * kHeadDimQk * kElementBytes;
constexpr uint32_t kKBytes = kBlockN * kHeadDimQk * kElementBytes;
constexpr uint32_t kVBytes = kBlockN * kHeadDimV * kElementBytes;
constexpr uint32_t kOutBytes = 64 * kOutColumns * kOutElementBytes;  // of one consumer
static_assert(kConsumers * kOutBytes == 32768);
static_assert(QRing::kStages * kQBytes == 65536);
static_assert(KRing::kStages * kKBytes == 65536 && VRing::kStages * kVBytes == 65536);

// Layouts of wgmma's operands: Q and K are K-major; V is MN-major, since its rows are keys.
using QMatrix = Matrix<16, 8 * kBoxBytes, 1>;
using KMatrix = Matrix<16, 8 * kBoxBytes, 1>;
using VMatrix = Matrix<kBlockN * kBoxBytes, 8 * kBoxBytes, 1>;

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

extern "C" __global__ void __launch_bounds__(kThreads, 1) fwd_sm90a_wgmma_bf16_d128_causal_max_logits_m128n128s2c2(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap out_map,
    bf16* out_ptr, float* lse_ptr,
    long long lse_rows,
    const int* seqused_k_ptr, uint32_t* tile_counter,
    long long stride_out_b, long long stride_out_s, long long stride_out_h,
    int batch, int heads, int kv_heads, int group, int heads_in_l2, int q_tiles, int seqlen_q, int max_seqlen_k,
    int total_q, int total_k,
    float softmax_scale,
    int write_lse, int has_seqused_k
) {
  launch_dependents();
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // uniform across the warp, and the compiler knows
  const int lane = threadIdx.x % 32;
  const int warpgroup = warp / 4;

  if (threadIdx.x == 0) {
    if (static_cast<uint32_t>(__cvta_generic_to_shared(shared_memory)) != kShared) __trap();
    init_barriers(kQFull, 2, 1);  // the loader of Q, and the bytes of the copy
    init_barriers(kQEmpty, 2, 2);  // each consumer
    init_barriers(kKFull, 2, 1);  // the loader of K and V, and the bytes of the copy
    init_barriers(kKEmpty, 2, 2);  // each consumer
    init_barriers(kVFull, 2, 1);  // the loader of K and V, and the bytes of the copy
    init_barriers(kVEmpty, 2, 2);  // each consumer
    init_barriers(kWorkFull, 2, 3);  // the scheduler's lanes that write the record
    init_barriers(kWorkEmpty, 2, 9);  // each warp of the consumers, and the loader of Q
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
      WorkRing work_ring;
      Event<kWorkAsked> asked;
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
          for (int i = lane; i < rows * 16; i += 32) {
            const int q = work.q_start + i / 16;
            *reinterpret_cast<int4*>((out_ptr + work.b * stride_out_b + work.h * stride_out_h + (q) * stride_out_s) + kOutChunk * (i % 16)) = {};
          }
          for (int i = lane; write_lse && i < rows; i += 32) {
            const int q = work.q_start + i;
            lse_ptr[(work.b * static_cast<long long>(heads) + work.h) * seqlen_q + q] = kMasked;
            lse_ptr[lse_rows + (work.b * static_cast<long long>(heads) + work.h) * seqlen_q + q] = kUnseen <= kUnseen ? kMasked : kUnseen * kLn2;
          }
          index = next_tile();
          continue;
        }
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
        work_ring.advance();
        if (index >= q_tiles_of_all) break;
        asked.wait();
        index = next_tile();
      }
    } else if (warp == kLoader) {
      // The loader of K and V: a tile of keys that all rows see, since nothing runs under the first softmax, then the others from
      // the last to the first. V follows K one step later, as consumers read it.
      WorkRing work_ring;
      KRing k_ring;
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
        VRing v_ring;
        const auto load_v = [&] {
          v_ring.acquire();
          if (lane == 0) {
            v_ring.arrive_expecting(kVBytes);
            const int start = v_tile * kBlockN, rows = min(kBlockN, seqlen_k - start);  // rows after the end become 0
            for (int column = 0; column < kHeadDimV; column += kBoxColumns) {
              load_box(kV + v_ring.stage * kVBytes + column * kBlockN * kElementBytes, v_map, v_ring.full(), column, hk,
                       kBlockN - rows, start + rows, b);
            }
          }
          __syncwarp();
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
          v_ring = {k_ring.stage, k_ring.phase};
          v_tile = tile;
          --remaining;
          k_ring.advance();
        };

        const bool any_whole = min(all.full_hi, all.visible_hi) > max(all.full_lo, all.visible_lo);
        const int first = (any_whole ? min(all.full_hi, all.visible_hi) : all.visible_hi) - 1;
        while (__any_sync(~0u, remaining > 0)) {
          const int place = all.visible_lo + remaining - 1;
          const int tile = remaining == tiles ? first : place + (place >= first);
          const uint32_t partial = ~__ballot_sync(~0u, tile >= mine.full_lo && tile < mine.full_hi) & (1u << kConsumers) - 1;
          load_step(tile, tile | partial << kPartialBit);
        }
        load_v();
      }
    } else if (warp == kQueryLoader) {
      // The loader of Q: a warp of its own, so that K never waits for room for the next Q.
      WorkRing work_ring;
      QRing q_ring;
      while (true) {
        work_ring.wait();
        const Place work = shared_at<Place>(kWork + work_ring.stage * sizeof(Work));
        __syncwarp();
        if (lane == 0) work_ring.release();
        work_ring.advance();
        if (__any_sync(~0u, work.tiles < 0)) break;

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
        Product<Element, kHeadDimV>::rs<1>(acc, p + key / 2 / kPacked, v.at(key * kBoxBytes), 1);
      }
      commit_products();
    };
    const auto sync_group = [&] { named_sync(Named::kGroup, warpgroup, 128); };
    // Ping-pong: consumers take turns at the tensor cores, so that the softmax of one runs under the MMAs of another.
    const auto pingpong_wait = [&] { named_sync(Named::kPingpong, warpgroup, 256); };
    const auto pingpong_arrive = [&] { named_arrive(Named::kPingpong, (warpgroup + 1) % kConsumers, 256); };
    if (warpgroup == kConsumers - 1) pingpong_arrive();
    WorkRing work_ring;
    QRing q_ring;
    KRing k_ring;
    VRing v_ring;
    int tile_info = 0;
    int left = 0;  // tiles of K that remain, this one included
    const auto release_k = [&] {
      if (leader) k_ring.release();
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
    const auto next_work = [&] {
      work_ring.wait();
      const Place work = shared_at<Place>(kWork + work_ring.stage * sizeof(Work));
      __syncwarp();
      if (lane == 0) work_ring.release();
      work_ring.advance();
      return work;
    };

    Place work = next_work();
    bool more = __any_sync(~0u, work.tiles > 0);
    left = work.tiles;
    const auto wait_operands = [&] {
      q_ring.wait();
      wait_k();
    };
    const auto start = [&] {
      wait_operands();
      pingpong_wait();
      issue_qk(k_ring.stage, q_ring.stage);
      pingpong_arrive();
      wait_products<0>();
      fence_registers(s);
    };
    if (more) start();
    while (more) {
      const int seqlen_k = work.seqlen_k;
      const int q_first = work.q_start + 64 * warpgroup + row_in_group;
      const float scale_log2e = softmax_scale * kLog2e;
      float row_max[2] = {kUnseen, kUnseen}, row_sum[2] = {0.0f, 0.0f}, maximum[2], alpha[2];
      constexpr int kOne = __builtin_bit_cast(int, 1.0f);
      int largest_p[2] = {kOne, kOne};  // of the two rows: P of the row max, and what came since
#pragma unroll
      for (int i = 0; i < kHeadDimV / 2; ++i) acc[i] = 0.0f;

      // S becomes logits; pairs that are not visible get -inf.
      const auto finish_logits = [&] {
        const int kv_first = (tile_info & kTileMask) * kBlockN + 2 * (lane % 4);
        if (__any_sync(~0u, tile_info >> (kPartialBit + warpgroup) & 1)) {
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

      // The first tile. Its S is there.
      release_k();
      finish_logits();
      // The running max of the first tile; P = exp2(S - max)
      find_maximum(s, scale_log2e, maximum);
      raise_row_max(maximum, row_max, alpha);
      exponentiate<Element>(s, scale_log2e, row_max, p, row_sum);

      // The other tiles: O += P V of the tile before is issued right after S = Q K^T of this one.
      while (__any_sync(~0u, --left > 0)) {
        wait_k();
        pingpong_wait();
        issue_qk(k_ring.stage, q_ring.stage);  // S = Q K^T of this tile
        wait_v();
        issue_pv(v_ring.stage);  // O += P V of the tile before
        pingpong_arrive();
        wait_products<1>();
        fence_registers(s);
        release_k();
        finish_logits();
        // P of this tile, with the row max of the step before. S is kept until the sums show that P stayed in range.
        float sum[2] = {0.0f, 0.0f};
        int step_p[2] = {0, 0};
        wait_products<0>();
        fence_registers(acc);
        release_v();
        exponentiate_largest<Element>(s, scale_log2e, row_max, p, sum, step_p);
        const auto kept = [&](int row) { return sum[row] <= fminf(kRecomputeGrowth * row_sum[row], kRecomputeAbove); };
        if (__any_sync(~0u, !(kept(0) && kept(1)))) {
          find_maximum(s, scale_log2e, maximum);
          keep_row_max({kept(0), kept(1)}, row_max, maximum);
          raise_row_max(maximum, row_max, alpha);
          rescale(acc, alpha);
#pragma unroll
          for (int row = 0; row < 2; ++row) {
            row_sum[row] *= alpha[row];
            largest_p[row] = rescaled_p(largest_p[row], alpha[row]);
            sum[row] = 0.0f;
            step_p[row] = 0;
          }
          exponentiate_largest<Element>(s, scale_log2e, row_max, p, sum, step_p);
        }
        row_sum[0] += sum[0];
        row_sum[1] += sum[1];
        largest_p[0] = max(largest_p[0], step_p[0]);
        largest_p[1] = max(largest_p[1], step_p[1]);
      }

      if (leader) q_ring.release();
      q_ring.advance();
      float largest[2], normalize[2];
      largest_of_p(largest_p, row_max, largest);
      finish_sum(row_sum, normalize);

      // O leaves through shared memory, so that stores are whole rows.
      const auto stage_out = [&](int from) {
        const int row = 16 * (warp % 4) + lane % 16;
#pragma unroll
        for (int column = 0; column < kOutColumns; column += 2 * kOutChunk) {
          const int chunk = column % kOutBoxColumns / kOutChunk + lane / 16, swizzled = chunk ^ (row % 8);
          const int i = (from + column) / 2;
          store_blocks(out_rows + column / kOutBoxColumns * 64 * kBoxBytes + row * kBoxBytes + 16 * swizzled,
                       pack<OutElement>(acc[i], acc[i + 1]), pack<OutElement>(acc[i + 2], acc[i + 3]),
                       pack<OutElement>(acc[i + 4], acc[i + 5]), pack<OutElement>(acc[i + 6], acc[i + 7]));
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
      const auto write_out = [&] {
        fence_registers(acc);
        release_v();
        rescale(acc, normalize);
        stage_out(0);
        sync_group();
        wait_products<0>();
        fence_registers(s);
        store_out(0);
      };

      // The last O += P V, and after it the first S = Q K^T of the next work tile.
      const Place next = next_work();
      more = __any_sync(~0u, next.tiles > 0);
      left = next.tiles;
      if (more) wait_operands();
      wait_v();
      pingpong_wait();
      issue_pv(v_ring.stage);
      issue_qk(k_ring.stage, q_ring.stage);
      pingpong_arrive();
      free_out();
      wait_products<1>();
      write_out();
      if (write_lse && lane % 4 == 0) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          const int q = work.q_start + 64 * warpgroup + row_in_group + 8 * row;
          if (q < seqlen_q) lse_ptr[(work.b * static_cast<long long>(heads) + work.h) * seqlen_q + q] = log_sum_exp(row_max[row], row_sum[row]);
          if (q < seqlen_q) lse_ptr[lse_rows + (work.b * static_cast<long long>(heads) + work.h) * seqlen_q + q] = largest[row] <= kUnseen ? kMasked : largest[row] * kLn2;
        }
      }
      work = next;
    }
    if (leader) wait_stores_read();
    if (warpgroup == 0) pingpong_wait();  // the last turn, which no other consumer takes
  }
}
