// fwd_sm90a_wgmma_bf16_d128_blocks_m128n128s2c2_tilemap_cooperative
//
// Attention forward, variant blocks: mask `sel[h, q // 64, kv // 64] and q_pos >= kv`.
// Rendered by `attngen build tests/render/others.yaml`, schedule hopper_forward.
//
// A block of 3 warpgroups. The last one produces: one warp schedules work tiles, and two load Q, and K and V,
// by TMA. The others consume: each computes O of 64 query rows, S = Q K^T, P = exp2(S), O += P V, tile by tile of keys
// from the last to the first, and keeps S, P and O in registers.
#include "expression.cuh"
#include "pdl.cuh"
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
constexpr int kHeadDimQk = 128;
constexpr int kHeadDimV = 128;
constexpr int kConsumers = 2;  // warpgroups that multiply
constexpr int kThreads = 384;
// Info of a step for consumers, in one word: its first block, a bit for each consumer that must apply the mask, and whether all
// consumers see the next step, too.
constexpr int kTileMask = (1 << 24) - 1;  // holds the last block of the longest sequence
constexpr int kPartialBit = 24, kHoldsBit = kPartialBit + kConsumers;
static_assert(kHoldsBit < 32 && kConsumers == 2);
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
constexpr int kMaskWords = 2;  // of a lane, with a bit for each of its elements of a partial tile
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
constexpr uint32_t kOwnSteps = kShared + 230016;  // 64 B: blocks of the next steps of each consumer, and their stage
constexpr uint32_t kQFull = kShared + 230080;  // 16 B: barriers
constexpr uint32_t kQEmpty = kShared + 230096;  // 16 B: barriers
constexpr uint32_t kOwnStepsFull = kShared + 230112;  // 32 B: barriers
constexpr uint32_t kOwnValuesFull = kShared + 230144;  // 32 B: barriers
constexpr uint32_t kKFull = kShared + 230176;  // 16 B: barriers
constexpr uint32_t kKEmpty = kShared + 230192;  // 16 B: barriers
constexpr uint32_t kVFull = kShared + 230208;  // 16 B: barriers
constexpr uint32_t kVEmpty = kShared + 230224;  // 16 B: barriers
constexpr uint32_t kWorkFull = kShared + 230240;  // 16 B: barriers
constexpr uint32_t kWorkEmpty = kShared + 230256;  // 16 B: barriers
constexpr uint32_t kWorkAsked = kShared + 230272;  // 8 B: barriers

// Rings: who fills the stages -> who empties them.
using QRing = Ring<kQFull, kQEmpty, 2>;  // the loader of Q -> each consumer
using OwnStepsRing = Ring<kOwnStepsFull, kNoBarrier, 2>;  // the loader of K and V -> each consumer
using OwnValuesRing = Ring<kOwnValuesFull, kNoBarrier, 2>;  // the loader of K and V -> each consumer
using KRing = Ring<kKFull, kKEmpty, 2>;  // the loader of K and V -> each consumer
using VRing = Ring<kVFull, kVEmpty, 2>;  // the loader of K and V -> each consumer
using WorkRing = Pair<kWorkFull, kWorkEmpty>;  // the scheduler -> the consumers and both loaders

// Named barriers of the hardware; 0 is __syncthreads.
enum class Named {
  kGroup = 1,  // 2 of them: threads of a consumer wait for each other around O
};

constexpr int kScheduler = 8, kLoader = 9, kQueryLoader = 10;  // warps with a role of their own

constexpr uint32_t kOwnStepsApart = 8 * OwnStepsRing::kStages;  // bytes from a consumer's barriers of own steps, and of values, to the next one's

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

// A work tile: which rows of which head, and over how many KV tiles they go. Negative: there is no other.
struct Place {
  int b, h, q_start, tiles;
  int q_begin, k_begin, seqlen_q, seqlen_k;
};

// Its record, written by the scheduler.
struct Work : Place {
  int visible_lo, visible_hi;  // the blocks between the first and the last that any row sees
  int steps[kConsumers];       // of each consumer
};
static_assert(kWork % alignof(Work) == 0 && WorkRing::kStages * sizeof(Work) <= 640);

extern __shared__ char shared_memory[];

template <typename Value>
__device__ __forceinline__ Value& shared_at(uint32_t address) {
  return *reinterpret_cast<Value*>(shared_memory + (address - kShared));
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) fwd_sm90a_wgmma_bf16_d128_blocks_m128n128s2c2_tilemap_cooperative(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap out_map,
    bf16* out_ptr, float* lse_ptr, const int* seqused_k_ptr, const int* tile_map_ptr, uint32_t* tile_counter,
    const unsigned char* u_sel,
    long long stride_out_b, long long stride_out_s, long long stride_out_h,
    long long stride_tile_map_b, long long stride_tile_map_h, long long stride_tile_map_q,
    long long stride_u_sel_0, long long stride_u_sel_1,
    int extent_u_sel_0, int extent_u_sel_1, int extent_u_sel_2,
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
    init_barriers(kQFull, 2, 1);  // the loader of Q, and the bytes of the copy
    init_barriers(kQEmpty, 2, 2);  // each consumer
    init_barriers(kOwnStepsFull, 4, 1);  // the loader of K and V
    init_barriers(kOwnValuesFull, 4, 1);  // the loader of K and V
    init_barriers(kKFull, 2, 1);  // the loader of K and V, and the bytes of the copy
    init_barriers(kKEmpty, 2, 2);  // each consumer, or the loader of K and V for one that does not see it
    init_barriers(kVFull, 2, 1);  // the loader of K and V, and the bytes of the copy
    init_barriers(kVEmpty, 2, 2);  // each consumer, or the loader of K and V for one that does not see it
    init_barriers(kWorkFull, 2, 1);  // the scheduler's lanes that write the record
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
          const int q_start = q_tile * kBlockM, rows_of_map = min((seqlen_q - q_start + kMapRows - 1) / kMapRows, 2);
          int of_both = 0, of_first = 0, of_second = 0, last_word = 0;
#pragma unroll 1
          for (int word = lane; word < words; word += 32) {  // a lane has a word
            uint32_t seen[2] = {};
#pragma unroll
            for (int consumer = 0; consumer < 2; ++consumer) {
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
          last_word = __reduce_max_sync(~0u, last_word);  // the loader begins there
          // A step of its own for each consumer that has a block left over; one without any block has a step in which it sees nothing.
          const int shared = of_both / 2, odd = of_both % 2, least = shared == 0;
          const int in_two = odd & (of_first | of_second), together = odd & ~in_two;
          const int first_steps = max((of_first + 1) / 2 + (odd & ~of_first), least), second_steps = max((of_second + 1) / 2 + (odd & ~of_second), least);
          const int tiles = of_both + of_first + of_second > 0 ? shared + first_steps + second_steps - together : 0;
          work = {{b, h, q_start, tiles, q_begin, k_begin, seqlen_q, seqlen_k}, 0, 32 * (last_word + 1), {shared + first_steps, shared + second_steps}};
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
    } else if (warp == kLoader) {
      // The loader of K and V: steps of blocks that consumers see, from the last word of the map to the first. V follows K one step
      // later, as consumers read it.
      WorkRing work_ring;
      KRing k_ring;
      // A lane has those of a consumer.
      OwnStepsRing own_steps(0, 0, kOwnStepsApart * min(lane, kConsumers - 1));
      OwnValuesRing own_values(0, 0, kOwnStepsApart * min(lane, kConsumers - 1));
      while (true) {
        work_ring.wait();
        const Work& work = shared_at<Work>(kWork + work_ring.stage * sizeof(Work));
        const int b = work.b, h = work.h, q_start = work.q_start, tiles = work.tiles, seqlen_k = work.seqlen_k, visible_hi = work.visible_hi;
        const int hk = h / group;
        work_ring.advance();
        if (__any_sync(~0u, tiles < 0)) break;
        __syncwarp();
        if (lane == 0 && tiles <= kLookahead) Event<kWorkAsked>::arrive();
        int remaining = tiles, v_tile = 0, v_second = 0, v_skipped = 0;
        VRing v_ring;
        const auto load_v = [&] {
          v_ring.acquire();
          if (lane < kConsumers) {
            if (v_skipped >> lane & 1) {
              v_ring.release();
            } else {
              own_values.arrive();
              own_values.advance();
            }
          }
          // V of a block after the last key is 0, since P is, too. No copy may bring that: its box would show nothing.
          int bytes = kVBytes;  // of copies
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int start = (half == 0 ? v_tile : v_second) * kBlockKeys;
            if (__any_sync(~0u, start >= seqlen_k)) {
              bytes -= kBlockKeys * kHeadDimV * kElementBytes;
              for (int column = 0; column < kHeadDimV; column += kBoxColumns) {
                for (int i = 16 * lane; i < kBlockKeys * kBoxBytes; i += 16 * 32) shared_at<int4>(kV + v_ring.stage * kVBytes + column * kBlockN * kElementBytes + half * kBlockKeys * kBoxBytes + i) = {};
              }
              fence_async_proxy();
            }
          }
          __syncwarp();
          if (lane == 0) {
            v_ring.arrive_expecting(bytes);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const int start = (half == 0 ? v_tile : v_second) * kBlockKeys;
              const int rows = min(kBlockKeys, seqlen_k - start);  // rows after the end become 0
              for (int column = 0; rows > 0 && column < kHeadDimV; column += kBoxColumns) {
                load_box(kV + v_ring.stage * kVBytes + column * kBlockN * kElementBytes + half * kBlockKeys * kBoxBytes, v_map, v_ring.full(), column, hk,
                         kBlockKeys - rows, start + rows, b);
              }
            }
          }
          __syncwarp();
        };
        // `tile_info` is the tile, above it a bit for each consumer that needs the mask.
        const auto load_step = [&](int tile, int tile_info, int second, int skipped) {
          k_ring.acquire();
          if (lane < kConsumers) {
            if (skipped >> lane & 1) {
              k_ring.release();
            } else {
              shared_at<int4>(kOwnSteps + 16 * (OwnStepsRing::kStages * lane + own_steps.stage)) = {tile_info, second, k_ring.stage, static_cast<int>(k_ring.phase)};
              own_steps.arrive();
              own_steps.advance();
            }
          }
          __syncwarp();
          if (lane == 0) {
            if (remaining == kLookahead && tiles > kLookahead) Event<kWorkAsked>::arrive();
            k_ring.arrive_expecting(kKBytes);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const int start = (half == 0 ? tile : second) * kBlockKeys;
              for (int column = 0; column < kHeadDimQk; column += kBoxColumns) {
                load_box(kK + k_ring.stage * kKBytes + column * kBlockN * kElementBytes + half * kBlockKeys * kBoxBytes, k_map, k_ring.full(), column, hk,
                         start, b);
              }
            }
          }
          __syncwarp();
          if (remaining < tiles) load_v();
          v_ring = {k_ring.stage, k_ring.phase};
          v_tile = tile;
          v_second = second, v_skipped = skipped;
          --remaining;
          k_ring.advance();
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
        const int absent = (seqlen_k + kBlockKeys - 1) / kBlockKeys;  // a block after the last key
        // A block that waits for a second one, and whether a consumer needs the mask: of both in lane 0, of one in lanes 1 and 2.
        int waiting = -1, waiting_partial = 0;
        uint32_t without = 3;  // a bit for each consumer that has had no step
        const auto load_blocks = [&](int first, int second, int partial, int who, bool holds) {
          const int skipped = who == 0 ? 0 : 3 - who;  // a bit for each consumer
          without &= skipped;
          load_step(first, first | partial << kPartialBit | holds << kHoldsBit, second, skipped);
        };
        int word = visible_hi / 32 - 1, turn = 1;
        uint2 next_words = read_words(word);  // they come while the steps of others are loaded
#pragma unroll 1
        for (; word >= 0; --word) {
          const auto [visible_word, partial_word] = next_words;
          next_words = read_words(max(word - 1, 0));
          const uint32_t first_sees = __shfl_sync(~0u, visible_word, 0), second_sees = __shfl_sync(~0u, visible_word, 1);
          const int then = word > 0 ? __popc(__shfl_sync(~0u, next_words.x, 0) & __shfl_sync(~0u, next_words.x, 1)) : 0;  // that both see there
          uint32_t left = first_sees | second_sees;
#pragma unroll 1
          while (__any_sync(~0u, left != 0)) {
            const uint32_t of_both = left & first_sees & second_sees, of_first = left & ~second_sees, of_second = left & ~first_sees;
            const int who = of_both ? 0 : (turn == 1 && of_first) || !of_second ? 1 : 2;
            if (who > 0) turn = 3 - who;
            const int bit = 31 - __clz(who == 0 ? of_both : who == 1 ? of_first : of_second), block = 32 * word + bit;
            left ^= 1u << bit;
            const int partial = __ballot_sync(~0u, partial_word >> bit & 1) & 3;
            const int before = __shfl_sync(~0u, waiting, who), before_partial = __shfl_sync(~0u, waiting_partial, who);
            if (lane == who) waiting = before < 0 ? block : -1, waiting_partial = partial;
            // Both see the next step, too, if they see two more blocks here, or if nothing else is left here and two are in both words.
            const int more_here = __popc(left & first_sees & second_sees);
            const bool holds = who == 0 && (more_here >= 2 || (left == (left & first_sees & second_sees) && more_here + then >= 2));
            if (__any_sync(~0u, before >= 0)) load_blocks(before, block, before_partial | partial, who, holds);
          }
        }
        // What is left over.
        const int of_both = __shfl_sync(~0u, waiting, 0), of_first = __shfl_sync(~0u, waiting, 1), of_second = __shfl_sync(~0u, waiting, 2);
        const bool in_two = of_both >= 0 && (of_first >= 0 || of_second >= 0);
        if (__any_sync(~0u, of_both >= 0 && !in_two)) load_blocks(of_both, absent, 3, 0, false);
#pragma unroll 1
        for (int who = 1; who <= 2; ++who) {
          const int own = who == 1 ? of_first : of_second, first = in_two ? of_both : own;
          if (__any_sync(~0u, first >= 0 || without >> (who - 1) & 1)) load_blocks(first >= 0 ? first : absent, in_two && own >= 0 ? own : absent, 3, who, false);
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
    WorkRing work_ring;
    QRing q_ring;
    KRing k_ring;
    VRing v_ring;
    int tile_info = 0, second = 0;
    uint32_t visible[kMaskWords];  // pairs of a partial tile, a bit for each element of the lane
    int left = 0;  // tiles of K that remain, this one included
    const auto release_k = [&] {
      if (leader) k_ring.release();
    };
    VRing held;          // V of the step whose O += P V comes next,
    bool holds = false;  // with S = Q K^T of the next step
    OwnValuesRing own_values(0, 0, kOwnStepsApart * warpgroup);
    const auto wait_v = [&] {
      own_values.wait();  // the stage may have been another consumer's before
      own_values.advance();
      held.wait();
    };
    const auto release_v = [&] {
      if (leader) held.release();
    };
    const auto finish_pv = [&] {
      wait_v();
      issue_pv(held.stage);
      wait_products<0>();
      fence_registers(acc);
      release_v();
    };
    OwnStepsRing own_steps(0, 0, kOwnStepsApart * warpgroup);
    // Reads what the loader says of the next step: its blocks, and the stage where they lie.
    const auto next_step = [&] {
      own_steps.wait();
      const int4 step = shared_at<int4>(kOwnSteps + 16 * (OwnStepsRing::kStages * warpgroup + own_steps.stage));
      own_steps.advance();
      tile_info = step.x, second = step.y;
      k_ring = KRing(step.z, step.w), v_ring = VRing(step.z, step.w);
    };
    const auto wait_k = [&] {
      k_ring.wait();
    };
    const auto next_work = [&] {
      work_ring.wait();
      Place work = shared_at<Place>(kWork + work_ring.stage * sizeof(Work));
      if (__any_sync(~0u, work.tiles > 0)) work.tiles = shared_at<Work>(kWork + work_ring.stage * sizeof(Work)).steps[warpgroup];
      __syncwarp();
      if (lane == 0) work_ring.release();
      work_ring.advance();
      return work;
    };

    Place work = next_work();
    bool more = __any_sync(~0u, work.tiles > 0);
    left = work.tiles;
    while (more) {
      const int seqlen_k = work.seqlen_k;
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

      // The first step.
      next_step();
      q_ring.wait();
      wait_k();
      issue_qk(k_ring.stage, q_ring.stage);
      wait_products<0>();
      fence_registers(s);
      release_k();
      finish_logits();
      // The running max of the first tile; P = exp2(S - max)
      find_maximum(s, scale_log2e, maximum);
      raise_row_max(maximum, row_max, alpha);
      exponentiate<Element>(s, scale_log2e, row_max, p, row_sum);

      // O += P V of a step waits for S = Q K^T of the next one, if all consumers see that, too; else it is done at once, since steps of
      // others may come before.
      while (true) {
        held = v_ring, holds = tile_info >> kHoldsBit & 1;
        if (__any_sync(~0u, !holds)) finish_pv();
        if (__any_sync(~0u, --left <= 0)) break;
        next_step();
        wait_k();
        issue_qk(k_ring.stage, q_ring.stage);  // S = Q K^T of this step
        if (__any_sync(~0u, holds)) {
          wait_v();
          issue_pv(held.stage);  // O += P V of the step before
          wait_products<1>();
        } else {
          wait_products<0>();
        }
        fence_registers(s);
        release_k();
        finish_logits();
        // P of this tile, with the row max of the step before. S is kept until the sums show that P stayed in range.
        float sum[2] = {0.0f, 0.0f};
        wait_products<0>();
        fence_registers(acc);
        if (leader && holds) held.release();
        exponentiate<Element>(s, scale_log2e, row_max, p, sum);
        const auto kept = [&](int row) { return sum[row] <= fminf(kRecomputeGrowth * row_sum[row], kRecomputeAbove); };
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
      }

      if (leader) q_ring.release();
      q_ring.advance();
      float normalize[2];
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
      free_out();
      rescale(acc, normalize);
      stage_out(0);
      sync_group();
      wait_products<0>();
      fence_registers(s);
      store_out(0);
      if (write_lse && lane % 4 == 0) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          const int q = work.q_start + 64 * warpgroup + row_in_group + 8 * row;
          if (q < seqlen_q) lse_ptr[(work.b * static_cast<long long>(heads) + work.h) * seqlen_q + q] = log_sum_exp(row_max[row], row_sum[row]);
        }
      }
      const Place next = next_work();
      more = __any_sync(~0u, next.tiles > 0);
      left = next.tiles;
      work = next;
    }
    if (leader) wait_stores_read();
  }
}
// Makes the tile map. A block of threads has a row, the queries of one consumer; a warp makes words of it, a lane a bit for a tile of
// keys: full, since every query sees every key, or partial, since some query sees some key. The mask reads tensors at one element
// for all pairs of a tile; what bounds leave open is evaluated for each pair.
extern "C" __global__ void __launch_bounds__(128) classify_fwd_sm90a_wgmma_bf16_d128_blocks_m128n128s2c2_tilemap_cooperative(
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
  launch_dependents();
  wait_dependencies();  // nothing in global memory is read or written before
  const int seqlen_k = has_seqused_k ? seqused_k_ptr[b] : max_seqlen_k;
  const int q_start = q_tile * kMapRows;
  const int visible_lo = 0, visible_hi = q_start < seqlen_q ? (seqlen_k + kBlockKeys - 1) / kBlockKeys : 0;
  const int q_hi = min(q_start + kMapRows, seqlen_q) - 1;
  const auto* u_sel_h = u_sel + static_cast<long long>(h) * stride_u_sel_0; asm("" : "+l"(u_sel_h));
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
      const bool u_tiles_sel_h_q_lo_div_64_kv_lo_div_64 = (u_tiles_q_lo_div_64 < extent_u_sel_1 && u_tiles_kv_lo_div_64 < extent_u_sel_2) ? u_sel[static_cast<long long>(h) * stride_u_sel_0 + static_cast<long long>(u_tiles_q_lo_div_64) * stride_u_sel_1 + static_cast<long long>(u_tiles_kv_lo_div_64)] != 0 : false;
      const bool seen = candidate >= visible_lo && candidate < visible_hi && (u_tiles_sel_h_q_lo_div_64_kv_lo_div_64 && q_pos_hi >= kv_lo);
      const uint32_t visible_word = __ballot_sync(~0u, seen);
      const uint32_t partial_word = __ballot_sync(~0u, !((u_tiles_sel_h_q_lo_div_64_kv_lo_div_64 && q_pos_lo >= kv_hi) && (candidate + 1) * kBlockKeys <= seqlen_k));
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
