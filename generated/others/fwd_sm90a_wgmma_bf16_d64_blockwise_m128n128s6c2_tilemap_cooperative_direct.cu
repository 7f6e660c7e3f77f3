// fwd_sm90a_wgmma_bf16_d64_blockwise_m128n128s6c2_tilemap_cooperative_direct
//
// Attention forward, variant blockwise: mask `block_mask[b, h, q // 64, kv // 64] and q_pos >= kv`.
// Rendered by `attngen build tests/render/others.yaml`, schedule hopper_forward.
//
// A block of 3 warpgroups. The last one produces: one warp schedules work tiles, and two load Q, and K and V,
// by TMA. The others consume: each computes O of 64 query rows, S = Q K^T, P = exp2(S), O += P V, tile by tile of keys
// from the last to the first, and keeps S, P and O in registers.
#include "expression.cuh"
#include "own_rings.cuh"
#include "pdl.cuh"
#include "quad.cuh"
#include "ring.cuh"
#include "schedule.cuh"
#include "softmax.cuh"
#include "tile_map.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

using Element = bf16;  // of Q, K, V and P
using OutElement = bf16;  // of O

constexpr int kBlockM = 128;  // query rows of a work tile
constexpr int kBlockN = 128;  // keys of one step
constexpr int kBlockKeys = 64;  // keys of a block, of which a step has 2
constexpr int kMapRows = 64;  // query rows of a consumer, which have a row of the tile map
constexpr int kHeadDimQk = 64;
constexpr int kHeadDimV = 64;
constexpr int kConsumers = 2;  // warpgroups that multiply
constexpr int kThreads = 384;
// Info of a step for consumers, in one word: its first block, and a bit for each consumer that must apply the mask.
constexpr int kTileMask = (1 << 24) - 1;  // holds the last block of the longest sequence
constexpr int kPartialBit = 24;
static_assert(kPartialBit + kConsumers <= 32);
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
constexpr int kMaskWords = 2;  // of a lane, with a bit for each of its elements of a partial tile
constexpr int kElementBytes = sizeof(Element), kOutElementBytes = sizeof(OutElement);
static_assert(kOutElementBytes == 2);  // O leaves its registers in pairs of 16 bits
constexpr int kMmaK = 16;  // K of one wgmma: the elements that it sums over
static_assert(kMmaK == Product<Element, kBlockN>::kK);
constexpr int kPacked = 4 / kElementBytes;  // probabilities in a register
constexpr int kBoxBytes = 128;  // of a row of one copy, swizzled
constexpr int kBoxColumns = kBoxBytes / kElementBytes;  // columns that one copy brings
constexpr int kOutChunk = 16 / kOutElementBytes;  // columns of O in 16 bytes
constexpr int kLookahead = 2;  // steps before the end of a work tile at which the next one is taken
constexpr float kRecomputeAbove = 0x1p40f;  // a lane recomputes the row max where its sum of probabilities exceeds this,
constexpr float kRecomputeGrowth = 4.0f;  // or a step adds this many times the sum before it
// Shared memory. Addresses are constants, so that they cost no instruction; the kernel checks where it begins.
constexpr uint32_t kShared = 1024;
constexpr uint32_t kQ = kShared + 0;  // 16384 B: Q
constexpr uint32_t kKv = kShared + 16384;  // 196608 B: K or V, a tile per stage
constexpr uint32_t kWork = kShared + 212992;  // 640 B: two work tiles: the one that is loaded and the next
constexpr uint32_t kQFull = kShared + 213632;  // 8 B: barriers
constexpr uint32_t kQEmpty = kShared + 213640;  // 8 B: barriers
constexpr uint32_t kKvFull = kShared + 213648;  // 96 B: barriers
constexpr uint32_t kKvEmpty = kShared + 213744;  // 96 B: barriers
constexpr uint32_t kWorkFull = kShared + 213840;  // 16 B: barriers
constexpr uint32_t kWorkEmpty = kShared + 213856;  // 16 B: barriers
constexpr uint32_t kWorkAsked = kShared + 213872;  // 8 B: barriers
constexpr uint32_t kTileInfo = kShared + 213880;  // 96 B: which tile is in each stage of K

// Rings: who fills the stages -> who empties them.
using QRing = Ring<kQFull, kQEmpty, 1>;  // the loader of Q -> each consumer
using KvRing = OwnRing<kKvFull, kKvEmpty, 6>;  // each loader of K and V -> each consumer
using WorkRing = Pair<kWorkFull, kWorkEmpty>;  // the scheduler -> the consumers and all loaders

constexpr int kScheduler = 8, kQueryLoader = 9;  // warps with a role of their own

constexpr uint32_t kQBytes = kBlockM * kHeadDimQk * kElementBytes;
constexpr uint32_t kKBytes = kBlockN * kHeadDimQk * kElementBytes;
constexpr uint32_t kVBytes = kBlockN * kHeadDimV * kElementBytes;
static_assert(QRing::kStages * kQBytes == 16384);
// K and V of a step have stages of one ring, of which each consumer has its own.
constexpr uint32_t kK = kKv, kV = kKv, kKvBytes = kKBytes > kVBytes ? kKBytes : kVBytes;
static_assert(kConsumers == 2 && kConsumers * KvRing::kStages * kKvBytes == 196608);

// Layouts of wgmma's operands: Q and K are K-major; V is MN-major, since its rows are keys.
using QMatrix = Matrix<16, 8 * kBoxBytes, 1>;
using KMatrix = Matrix<16, 8 * kBoxBytes, 1>;
using VMatrix = Matrix<kBlockN * kBoxBytes, 8 * kBoxBytes, 1>;

// A work tile: which rows of which head, and over how many KV tiles they go. Negative: there is no other.
struct Place {
  int b, h, q_start, tiles;
  int q_begin, k_begin, seqlen_q, seqlen_k;
};

// Its record, written by the scheduler.
struct Work : Place {
  int visible_hi;       // the block after the last that any row sees
  int shared;           // steps of blocks that both consumers see
  int own[kConsumers];  // those of each alone
};
static_assert(kWork % alignof(Work) == 0 && WorkRing::kStages * sizeof(Work) <= 640);

extern __shared__ char shared_memory[];

template <typename Value>
__device__ __forceinline__ Value& shared_at(uint32_t address) {
  return *reinterpret_cast<Value*>(shared_memory + (address - kShared));
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) fwd_sm90a_wgmma_bf16_d64_blockwise_m128n128s6c2_tilemap_cooperative_direct(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map,
    bf16* out_ptr, float* lse_ptr, const int* seqused_k_ptr, const int* tile_map_ptr, uint32_t* tile_counter,
    const unsigned char* u_block_mask,
    long long stride_out_b, long long stride_out_s, long long stride_out_h,
    long long stride_tile_map_b, long long stride_tile_map_h, long long stride_tile_map_q,
    long long stride_u_block_mask_0, long long stride_u_block_mask_1, long long stride_u_block_mask_2,
    int extent_u_block_mask_0, int extent_u_block_mask_1, int extent_u_block_mask_2, int extent_u_block_mask_3,
    int batch, int heads, int kv_heads, int group, int heads_in_l2, int q_tiles, int seqlen_q, int max_seqlen_k,
    int total_q, int total_k, int words,
    float softmax_scale,
    int write_lse, int has_seqused_k
) {
  launch_dependents();
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // uniform across the warp, and the compiler knows
  const int lane = threadIdx.x % 32;
  const int warpgroup = warp / 4;

  if (threadIdx.x == 0) {
    if (static_cast<uint32_t>(__cvta_generic_to_shared(shared_memory)) != kShared) __trap();
    init_barriers(kQFull, 1, 1);  // the loader of Q, and the bytes of the copy
    init_barriers(kQEmpty, 1, 8);  // each warp of each consumer
    init_barriers(kKvFull, 12, 1);  // each loader of K and V, and the bytes of the copy
    init_barriers(kKvEmpty, 12, 2);  // each consumer, or one for both where the other does not read it
    init_barriers(kWorkFull, 2, 1);  // the scheduler's lanes that write the record
    init_barriers(kWorkEmpty, 2, 9);  // each warp of the consumers, and the loader of Q
    init_barriers(kWorkAsked, 1, 2);  // each loader of K and V
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
      int index = blockIdx.x;
      WorkRing work_ring;
      Event<kWorkAsked> asked;
      const auto next_tile = [&] { return take_tile(tile_counter, q_tiles_of_all, lane); };
      while (true) {
        Work work = {};
        work.tiles = -1;
        if (index < q_tiles_of_all) {
          int unit, q_tile;
          place_tile(index, q_tiles, units, heads_in_l2, unit, q_tile);
          const int b = unit / heads, h = unit % heads;
          const int q_begin = b * seqlen_q, k_begin = b * max_seqlen_k;
          const int seqlen_k = has_seqused_k ? seqused_k_ptr[b] : max_seqlen_k;
          const int q_start = q_tile * kBlockM, rows_of_map = min((seqlen_q - q_start + kMapRows - 1) / kMapRows, kConsumers);
          int of_both = 0, of_first = 0, of_second = 0, last_word = 0;
#pragma unroll 1
          for (int word = lane; word < words; word += 32) {  // a lane has a word
            uint32_t seen[kConsumers] = {};
#pragma unroll
            for (int consumer = 0; consumer < kConsumers; ++consumer) {
              if (consumer >= rows_of_map) break;
              const int* tile_map = tile_map_ptr + b * stride_tile_map_b + h * stride_tile_map_h + (q_start / 64 + consumer) * stride_tile_map_q;
              const uint32_t partial_word = tile_map[words + word];
              const uint32_t visible_word = tile_map[word] | partial_word;
              seen[consumer] = visible_word;
            }
            of_both += __popc(seen[0] & seen[1]), of_first += __popc(seen[0] & ~seen[1]), of_second += __popc(seen[1] & ~seen[0]);
            if (seen[0] | seen[1]) last_word = word;
          }
          of_both = __reduce_add_sync(~0u, of_both), of_first = __reduce_add_sync(~0u, of_first), of_second = __reduce_add_sync(~0u, of_second);
          last_word = __reduce_max_sync(~0u, last_word);  // the loaders begin there
          const int odd = of_both % 2;  // that one comes with a block of each
          work = {{b, h, q_start, of_both + of_first + of_second, q_begin, k_begin, seqlen_q, seqlen_k},
                  32 * (last_word + 1), of_both / 2, {(of_first + odd + 1) / 2, (of_second + odd + 1) / 2}};
        }
        if (__any_sync(~0u, work.tiles == 0)) {  // no row sees a key: writes O = 0 and its LSE
          const int rows = min(kBlockM, work.seqlen_q - work.q_start);
          for (int i = lane; i < rows * 8; i += 32) {
            const int q = work.q_start + i / 8;
            *reinterpret_cast<int4*>((out_ptr + work.b * stride_out_b + work.h * stride_out_h + (q) * stride_out_s) + kOutChunk * (i % 8)) = {};
          }
          for (int i = lane; write_lse && i < rows; i += 32) {
            const int q = work.q_start + i;
            lse_ptr[(work.b * static_cast<long long>(heads) + work.h) * seqlen_q + q] = kMasked;
          }
          index = next_tile();
          continue;
        }
        work_ring.acquire();
        Work& shared_work = shared_at<Work>(kWork + work_ring.stage * sizeof(Work));
        if (lane == 0) {
          shared_work = work;
          work_ring.arrive();
        }
        __syncwarp();
        work_ring.advance();
        if (index >= q_tiles_of_all) break;
        asked.wait();
        index = next_tile();
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
    } else {
      // Two loaders of K and V, for the ring of one consumer each: every second step of blocks that both consumers see, from the last to
      // the first, each with K and then V; then those that only its own one sees, where V follows K one step later, as it is read.
      const int ring = warp % kConsumers;
      WorkRing work_ring;
      KvRing k_ring(ring);
      while (true) {
        work_ring.wait();
        const Work& work = shared_at<Work>(kWork + work_ring.stage * sizeof(Work));
        const int b = work.b, h = work.h, q_start = work.q_start, seqlen_k = work.seqlen_k, visible_hi = work.visible_hi;
        const int hk = h / group;
        const int every = work.tiles, shared = work.shared, own = work.own[ring];
        work_ring.advance();
        if (__any_sync(~0u, every < 0)) break;
        const int tiles = (shared + 1 - ring) / kConsumers + own;  // steps of this loader
        __syncwarp();
        if (lane == 0 && tiles <= kLookahead) Event<kWorkAsked>::arrive();
        const int absent = (seqlen_k + kBlockKeys - 1) / kBlockKeys;  // a block after the last key
        int remaining = tiles, v_tile = -1, v_second = 0;
        const auto load_v = [&] {
          const KvRing v_ring = k_ring;
          v_ring.acquire();
          if (lane == 0) {
            v_ring.arrive_expecting(kVBytes);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const int start = (half == 1 && v_second < absent ? v_second : v_tile) * kBlockKeys;
              const int rows = min(kBlockKeys, seqlen_k - start);  // rows after the end become 0
              for (int column = 0; column < kHeadDimV; column += kBoxColumns) {
                load_box(kV + v_ring.stage * kKvBytes + column * kBlockN * kElementBytes + half * kBlockKeys * kBoxBytes, v_map, v_ring.full(), column, hk,
                         kBlockKeys - rows, start + rows, b);
              }
            }
          }
          __syncwarp();
          k_ring.advance();
        };
        // `tile_info` is the first block, above it a bit for each consumer that needs the mask.
        const auto load_step = [&](int tile, int second, int tile_info, bool is_shared) {
          k_ring.acquire();
          if (lane == 0) {
            if (remaining == kLookahead && tiles > kLookahead) Event<kWorkAsked>::arrive();
            shared_at<int2>(kTileInfo + 8 * k_ring.stage) = {tile_info, second};
            k_ring.arrive_expecting(kKBytes);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const int start = (half == 1 && second < absent ? second : tile) * kBlockKeys;
              for (int column = 0; column < kHeadDimQk; column += kBoxColumns) {
                load_box(kK + k_ring.stage * kKvBytes + column * kBlockN * kElementBytes + half * kBlockKeys * kBoxBytes, k_map, k_ring.full(), column, hk,
                         start, b);
              }
            }
          }
          __syncwarp();
          --remaining;
          k_ring.advance();
          if (__any_sync(~0u, v_tile >= 0)) load_v();
          v_tile = tile, v_second = second;
          if (__any_sync(~0u, is_shared)) {
            load_v();
            v_tile = -1;
          }
        };

        const int consumer = min(lane, kConsumers - 1), rows_of_map = min((seqlen_q - q_start + kMapRows - 1) / kMapRows, kConsumers);
        // The blocks that the rows of a lane's consumer see, and those that need the mask.
        const auto read_words = [&](int word) {
          if (consumer >= rows_of_map) return uint2{};
          const int* tile_map = tile_map_ptr + b * stride_tile_map_b + h * stride_tile_map_h + (q_start / 64 + consumer) * stride_tile_map_q;
          const uint32_t partial_word = tile_map[words + word];
          const uint32_t visible_word = tile_map[word] | partial_word;
          return uint2{visible_word, partial_word};
        };
        int turn = 0;  // which ring has the next step of both
        int waiting = -1, waiting_partial = 0;  // a block that waits for a second one
#pragma unroll 1
        for (int pass = 0; pass < 2; ++pass) {
          int word = visible_hi / 32 - 1;
          uint2 next_words = read_words(word);  // they come while the steps of others are loaded
#pragma unroll 1
          for (; word >= 0; --word) {
            const auto [visible_word, partial_word] = next_words;
            next_words = read_words(max(word - 1, 0));
            const uint32_t mine = __shfl_sync(~0u, visible_word, ring), others = __shfl_sync(~0u, visible_word, 1 - ring);
            uint32_t left = mine & (pass == 0 ? others : ~others);
#pragma unroll 1
            while (__any_sync(~0u, left != 0)) {
              const int bit = 31 - __clz(left), block = 32 * word + bit, partial = __ballot_sync(~0u, partial_word >> bit & 1) & ((1 << kConsumers) - 1);
              left ^= 1u << bit;
              if (__any_sync(~0u, waiting < 0)) {
                waiting = block, waiting_partial = partial;
                continue;
              }
              const int first = waiting, second = block, of_step = waiting_partial | partial;
              waiting = -1;
              const bool loads = pass == 1 || turn == ring;
              turn ^= 1;
              if (__any_sync(~0u, loads)) load_step(first, second, first | of_step << kPartialBit, pass == 0);
            }
          }
        }
        if (__any_sync(~0u, waiting >= 0)) load_step(waiting, absent, waiting | 3 << kPartialBit, false);
        if (__any_sync(~0u, v_tile >= 0)) load_v();
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

    float s[kBlockN / 2];      // S, then the logits
    uint32_t p[kBlockN / 2 / kPacked];  // P, packed
    float acc[kHeadDimV / 2];  // O, not yet divided by the row sum

    // S = Q K^T
    const auto issue_qk = [&](int stage, int q_stage) {
      const QMatrix q(q_rows + q_stage * kQBytes);
      const KMatrix k(kK + stage * kKvBytes);
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
      const VMatrix v(kV + stage * kKvBytes);
      fence_products();
#pragma unroll
      for (int key = 0; key < kBlockN; key += kMmaK) {
        Product<Element, kHeadDimV>::rs<1>(acc, p + key / 2 / kPacked, v.at(key * kBoxBytes), 1);
      }
      commit_products();
    };
    WorkRing work_ring;
    QRing q_ring;
    KvRing next_ring(0), other_ring(1);  // where the next step is, and the other one
    KvRing k_ring(0), v_ring(0);         // K of this step; V of the one before, whose O += P V comes next
    int step = 0, shared = 0, of_other = 0;  // steps of a work tile: those done, those of both consumers, those of the other one alone
    int k_times = 0, v_times = 0;  // how often a consumer gives back a stage: for the other one, too, if that does not read it
    const auto take_ring = [&](int ring) {
      if (__any_sync(~0u, !next_ring.is(ring))) {
        const KvRing other = other_ring;
        other_ring = next_ring;
        next_ring = other;
      }
    };
    const auto next_stage = [&] {
      const KvRing stage = next_ring;
      next_ring.advance();
      return stage;
    };
    int tile_info = 0, second = 0;
    uint32_t visible[kMaskWords];  // pairs of a partial tile, a bit for each element of the lane
    int left = 0;  // tiles of K that remain, this one included
    const auto release_k = [&] {
      if (leader) k_ring.release(k_times);
    };
    const auto wait_v = [&] {
      if (__any_sync(~0u, v_times > 1)) v_ring = next_stage();  // of a step of its own, V comes after K of the next one
      v_ring.wait();
    };
    const auto release_v = [&] {
      if (leader) v_ring.release(v_times);
    };
    const auto wait_k = [&] {
      take_ring(step < shared ? step % kConsumers : warpgroup);
      k_ring = next_stage();
      k_times = step < shared ? 1 : kConsumers;
      ++step;
      k_ring.wait();
      const int2 info = shared_at<int2>(kTileInfo + 8 * k_ring.stage);
      tile_info = info.x, second = info.y;
    };
    // V of this step is the next that is read.
    const auto hold_v = [&] {
      v_times = k_times;
      if (__any_sync(~0u, v_times == 1)) v_ring = next_stage();
    };
    const auto next_work = [&] {
      work_ring.wait();
      const Work& record = shared_at<Work>(kWork + work_ring.stage * sizeof(Work));
      Place work = record;
      if (__any_sync(~0u, work.tiles > 0)) {
        shared = record.shared, of_other = record.own[1 - warpgroup];
        work.tiles = shared + record.own[warpgroup];
      }
      __syncwarp();
      if (lane == 0) work_ring.release();
      work_ring.advance();
      return work;
    };

    Place work = next_work();
    bool more = __any_sync(~0u, work.tiles >= 0);
    left = work.tiles;
    while (more) {
      const int seqlen_k = work.seqlen_k;
      const int b = work.b;
      const int h = work.h;
      const int q_first = work.q_start + 64 * warpgroup + row_in_group;
      const float scale_log2e = softmax_scale * kLog2e;
      float row_max[2] = {kUnseen, kUnseen}, row_sum[2] = {0.0f, 0.0f}, maximum[2], alpha[2];
#pragma unroll
      for (int i = 0; i < kHeadDimV / 2; ++i) acc[i] = 0.0f;

      // Evaluates the mask of a tile. The loop is rolled, so that it takes few registers.
      const auto find_visible = [&] {
#pragma unroll
        for (int word = 0; word < kMaskWords; ++word) {
          const int q_lo = q_first - row_in_group, kv_lo = (word == 0 ? tile_info & kTileMask : second) * kBlockKeys;
          const int kv_first = kv_lo + 2 * (lane % 4);
          const int u_kv_lo_div_64 = kv_lo / 64;
          const auto* u_block_mask_h_kv_lo_div_64 = u_block_mask + static_cast<long long>(b) * stride_u_block_mask_0 + static_cast<long long>(h) * stride_u_block_mask_1 + static_cast<long long>(u_kv_lo_div_64);
          struct Row {
            int visible_to;
          };
          Row rows[2];
#pragma unroll
          for (int row = 0; row < 2; ++row) {
            const int q_row = min(q_first + 8 * row, seqlen_q - 1);  // rows after the end repeat the last one
            const int q_pos = q_row + (seqlen_k - seqlen_q);
            const int u_q_div_64 = q_row / 64;
            const bool u_block_mask_row = (u_q_div_64 < extent_u_block_mask_2 && u_kv_lo_div_64 < extent_u_block_mask_3) ? u_block_mask_h_kv_lo_div_64[static_cast<long long>(u_q_div_64) * stride_u_block_mask_2] != 0 : false;
            const int visible_to = min(u_block_mask_row ? q_pos + 1 : 0, seqlen_k) - kv_first;
            rows[row] = {visible_to};
          }
          uint32_t bits = 0;
#pragma unroll 1
          for (int i = 0; i < 16; ++i) {
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

      // S becomes logits; pairs that are not visible get -inf.
      const auto finish_logits = [&] {
        if (__any_sync(~0u, tile_info >> (kPartialBit + warpgroup) & 1)) {
          find_visible();
#pragma unroll
          for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int i = 0; i < kBlockKeys / 4; ++i) {
#pragma unroll
              for (int row = 0; row < 2; ++row) {
                float& x = s[half * kBlockKeys / 2 + 4 * (i / 2) + 2 * row + i % 2];
                if (!(visible[half] >> 4 * (i % 16 / 2) + 2 * row + i % 2 & 1)) x = kMasked;
              }
            }
          }
        }
      };

      if (__any_sync(~0u, left > 0)) {
        // The first block.
        q_ring.wait();
        wait_k();
        issue_qk(k_ring.stage, q_ring.stage);
        wait_products<0>();
        fence_registers(s);
        release_k();
        hold_v();
        finish_logits();
        // The running max of the first tile; P = exp2(S - max)
        find_maximum(s, scale_log2e, maximum);
        raise_row_max(maximum, row_max, alpha);
        exponentiate<Element>(s, scale_log2e, row_max, p, row_sum);

        // The other blocks: O += P V of the block before is issued right after S = Q K^T of this one.
        while (__any_sync(~0u, --left > 0)) {
          wait_k();
          issue_qk(k_ring.stage, q_ring.stage);  // S = Q K^T of this tile
          wait_v();
          issue_pv(v_ring.stage);  // O += P V of the tile before
          wait_products<1>();
          fence_registers(s);
          release_k();
          finish_logits();
          // P of this tile, with the row max of the step before. S is kept until the sums show that P stayed in range.
          float sum[2] = {0.0f, 0.0f};
          wait_products<0>();
          fence_registers(acc);
          release_v();
          exponentiate<Element>(s, scale_log2e, row_max, p, sum);
          const auto kept = [&](int row) { return sum[row] <= fminf(fmaxf(kRecomputeGrowth * row_sum[row], kBlockN / 4), kRecomputeAbove); };
          if (__any_sync(~0u, !(kept(0) && kept(1)))) {
            find_maximum(s, scale_log2e, maximum);
            keep_row_max({kept(0), kept(1)}, row_max, maximum);
            raise_row_max(maximum, row_max, alpha);
            rescale(acc, alpha);
#pragma unroll
            for (int row = 0; row < 2; ++row) {
              row_sum[row] *= alpha[row];
              sum[row] = 0.0f;
            }
            exponentiate<Element>(s, scale_log2e, row_max, p, sum);
          }
          row_sum[0] += sum[0];
          row_sum[1] += sum[1];
          hold_v();
        }

        // The last O += P V, before any wait for the next work tile: the other consumer may need the stage to come to its end.
        wait_v();
        // The next Q says that both consumers have seen the last stages of their own rings, so that neither takes a phase before for
        // the one that it waits for.
        if (lane == 0) q_ring.release();
        issue_pv(v_ring.stage);
        wait_products<0>();
        fence_registers(acc);
        release_v();
      } else {  // these rows see nothing
        q_ring.wait();
        if (lane == 0) q_ring.release();
      }
      take_ring(warpgroup);
      other_ring.skip(2 * of_other);
      step = 0;

      q_ring.advance();
      float normalize[2];
      finish_sum(row_sum, normalize);

      // Straight from registers: each lane of a quad writes 16 bytes of a row, 64 in all.
      const auto store_rows = [&] {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          const int q = work.q_start + 64 * warpgroup + row_in_group + 8 * row;
          OutElement* const to = (out_ptr + work.b * stride_out_b + work.h * stride_out_h + (q) * stride_out_s) + 8 * (lane % 4);
#pragma unroll
          for (int column = 0; column < 64; column += 32) {
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
      rescale(acc, normalize);
      store_rows();
      wait_products<0>();
      fence_registers(s);
      if (write_lse && lane % 4 == 0) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          const int q = work.q_start + 64 * warpgroup + row_in_group + 8 * row;
          if (q < seqlen_q) lse_ptr[(work.b * static_cast<long long>(heads) + work.h) * seqlen_q + q] = log_sum_exp(row_max[row], row_sum[row]);
        }
      }
      const Place next = next_work();
      more = __any_sync(~0u, next.tiles >= 0);
      left = next.tiles;
      work = next;
    }
  }
}
// Makes the tile map. A block of threads has a row, the queries of one consumer; a warp makes words of it, a lane a bit for a tile of
// keys: full, since every query sees every key, or partial, since some query sees some key. The mask reads tensors at one element
// for all pairs of a tile; what bounds leave open is evaluated for each pair.
extern "C" __global__ void __launch_bounds__(128) classify_fwd_sm90a_wgmma_bf16_d64_blockwise_m128n128s6c2_tilemap_cooperative_direct(
    int* tile_map_ptr, const int* seqused_k_ptr, const unsigned char* u_block_mask,
    long long stride_tile_map_b, long long stride_tile_map_h, long long stride_tile_map_q,
    long long stride_u_block_mask_0, long long stride_u_block_mask_1, long long stride_u_block_mask_2,
    int extent_u_block_mask_0, int extent_u_block_mask_1, int extent_u_block_mask_2, int extent_u_block_mask_3,
    int batch, int heads, int kv_heads, int group, int heads_in_l2, int q_tiles, int seqlen_q, int max_seqlen_k,
    int total_q, int total_k, int words, int map_heads,
    int has_seqused_k
) {
  constexpr int kWarps = 4;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int unit = blockIdx.x / q_tiles, q_tile = blockIdx.x % q_tiles;
  const int h = unit % map_heads, b = unit / map_heads;
  int* const map_row = tile_map_ptr + b * stride_tile_map_b + h * stride_tile_map_h + q_tile * stride_tile_map_q;
  launch_dependents();
  wait_dependencies();  // nothing in global memory is read or written before
  const int seqlen_k = has_seqused_k ? seqused_k_ptr[b] : max_seqlen_k;
  const int q_start = q_tile * kMapRows;
  const int visible_lo = 0, visible_hi = q_start < seqlen_q ? (seqlen_k + kBlockKeys - 1) / kBlockKeys : 0;
  const int q_hi = min(q_start + kMapRows, seqlen_q) - 1;
  const auto* u_block_mask_h = u_block_mask + static_cast<long long>(b) * stride_u_block_mask_0 + static_cast<long long>(h) * stride_u_block_mask_1; asm("" : "+l"(u_block_mask_h));
#pragma unroll 1
  for (int word = warp; word < words; word += kWarps) {
    uint32_t full_word, open_word, partial_tiles = 0;
    {
      const int q_pos_lo = q_start + (seqlen_k - seqlen_q);
      const int q_pos_hi = q_hi + (seqlen_k - seqlen_q);
      const int candidate = 32 * word + lane;
      const int kv_lo = candidate * kBlockKeys, kv_hi = min(kv_lo + kBlockKeys, seqlen_k) - 1;
      const int u_tiles_q_lo_div_64 = q_start / 64;
      const int u_tiles_kv_lo_div_64 = kv_lo / 64;
      const bool u_tiles_block_mask_element = (u_tiles_q_lo_div_64 < extent_u_block_mask_2 && u_tiles_kv_lo_div_64 < extent_u_block_mask_3) ? u_block_mask[static_cast<long long>(b) * stride_u_block_mask_0 + static_cast<long long>(h) * stride_u_block_mask_1 + static_cast<long long>(u_tiles_q_lo_div_64) * stride_u_block_mask_2 + static_cast<long long>(u_tiles_kv_lo_div_64)] != 0 : false;
      const bool seen = candidate >= visible_lo && candidate < visible_hi && (u_tiles_block_mask_element && q_pos_hi >= kv_lo);
      const uint32_t visible_word = __ballot_sync(~0u, seen);
      const uint32_t partial_word = __ballot_sync(~0u, !((u_tiles_block_mask_element && q_pos_lo >= kv_hi) && (candidate + 1) * kBlockKeys <= seqlen_k));
      full_word = visible_word & ~partial_word, open_word = visible_word & partial_word;
    }
#pragma unroll 1
    while (__any_sync(~0u, open_word != 0)) {
      const int item = 31 - __clz(open_word), kv_tile = 32 * word + item;
      open_word ^= 1u << item;
      const int kv_start = kv_tile * kBlockKeys;
      const int queries = min(kMapRows, seqlen_q - q_start), keys = kBlockKeys;
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
          const bool u_block_mask_h_q_div_64_kv_div_64 = ((u_q_div_64 < extent_u_block_mask_2 && of_key_0 < extent_u_block_mask_3) ? u_block_mask_h[static_cast<unsigned>(u_q_div_64) * stride_u_block_mask_2 + static_cast<unsigned>(of_key_0)] : 0) != 0;
          const bool pair = exists && (u_block_mask_h_q_div_64_kv_div_64 && q_pos >= kv);
          some = some || pair, all = all && (pair || key >= keys);
        }
        some = __any_sync(~0u, some), all = __all_sync(~0u, all);
      }
      full_word |= all ? 1u << item : 0, partial_tiles |= some && !all ? 1u << item : 0;
    }
    if (lane == 0) map_row[word] = full_word, map_row[words + word] = partial_tiles;
  }
}
