// fwd_sm90a_wgmma_bf16_d32_triangle_m128n64s3c2_entries2
//
// Attention forward, variant triangle: mask `True`, score `s + bias[b // rows, h, q, kv] + (0.0 if real[b, kv] else -1000000000.0)`.
// Rendered by `attngen build tests/render/others.yaml`, schedule hopper_forward.
//
// A block of 3 warpgroups. The last one produces: one warp schedules work tiles, and two load Q, and K and V,
// by TMA. The others consume: each computes O of 64 query rows, S = Q K^T, P = exp2(S), O += P V, tile by tile of keys
// from the last to the first, and keeps S, P and O in registers.
//
// Batch entries that share biases go through their keys together: each consumer has 64 query rows of kEntries of them.
#include "biases.cuh"
#include "division.cuh"
#include "entries.cuh"
#include "expression.cuh"
#include "least_logit.cuh"
#include "pdl.cuh"
#include "ring.cuh"
#include "schedule.cuh"
#include "softmax.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

using Element = bf16;  // of Q, K, V and P
using OutElement = bf16;  // of O

constexpr int kBlockM = 128;  // query rows of a work tile
constexpr int kBlockN = 64;  // keys of one step
constexpr int kHeadDimQk = 32;
constexpr int kHeadDimV = 32;
constexpr int kEntries = 2;  // of the batch in a work tile, which share biases
constexpr int kConsumers = 2;  // warpgroups that multiply
constexpr int kThreads = 384;
// Info of a KV tile for consumers, in one word: its number, a bit for each consumer that must apply the mask, and a bit
// for each that sees nothing of it.
constexpr int kTileMask = (1 << 24) - 1;  // holds the last tile of the longest sequence
constexpr int kPartialBit = 24, kSkippedBit = kPartialBit + kConsumers;
static_assert(kSkippedBit + kConsumers <= 32);
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
constexpr int kElementBytes = sizeof(Element), kOutElementBytes = sizeof(OutElement);
static_assert(kOutElementBytes == 2);  // O leaves its registers in pairs of 16 bits
constexpr int kMmaK = 16;  // K of one wgmma: the elements that it sums over
static_assert(kMmaK == Product<Element, kBlockN>::kK);
constexpr int kPacked = 4 / kElementBytes;  // probabilities in a register
constexpr int kBoxBytes = 64;  // of a row of one copy, swizzled
constexpr int kBoxColumns = kBoxBytes / kElementBytes;  // columns that one copy brings
constexpr int kOutBoxColumns = kBoxBytes / kOutElementBytes;  // the same of O
constexpr int kOutColumns = 32;  // columns of O that are staged at once
constexpr int kOutChunk = 16 / kOutElementBytes;  // columns of O in 16 bytes
constexpr int kLookahead = 2;  // steps before the end of a work tile at which the next one is taken
constexpr float kRecomputeAbove = 0x1p40f;  // a lane recomputes the row max where its sum of probabilities exceeds this,
constexpr float kRecomputeGrowth = 4.0f;  // or a step adds this many times the sum before it
constexpr float kLeastLogit = -131072.0f;  // of a key: a row that has nothing else gives the mean of its values
// Shared memory. Addresses are constants, so that they cost no instruction; the kernel checks where it begins.
constexpr uint32_t kShared = 1024;
constexpr uint32_t kQ = kShared + 0;  // 32768 B: Q
constexpr uint32_t kK = kShared + 32768;  // 24576 B: K, a tile per stage
constexpr uint32_t kV = kShared + 57344;  // 24576 B: V, a tile per stage
constexpr uint32_t kBiases = kShared + 81920;  // 98304 B: tiles of biases that belong to a tile of K
constexpr uint32_t kOut = kShared + 180224;  // 16384 B: O, for its store
constexpr uint32_t kWork = kShared + 196608;  // 640 B: two work tiles: the one that is loaded and the next
constexpr uint32_t kQFull = kShared + 197248;  // 16 B: barriers
constexpr uint32_t kQEmpty = kShared + 197264;  // 16 B: barriers
constexpr uint32_t kKFull = kShared + 197280;  // 24 B: barriers
constexpr uint32_t kKEmpty = kShared + 197304;  // 24 B: barriers
constexpr uint32_t kVFull = kShared + 197328;  // 24 B: barriers
constexpr uint32_t kVEmpty = kShared + 197352;  // 24 B: barriers
constexpr uint32_t kBiasesFull = kShared + 197376;  // 24 B: barriers
constexpr uint32_t kBiasesEmpty = kShared + 197400;  // 24 B: barriers
constexpr uint32_t kWorkFull = kShared + 197424;  // 16 B: barriers
constexpr uint32_t kWorkEmpty = kShared + 197440;  // 16 B: barriers
constexpr uint32_t kWorkAsked = kShared + 197456;  // 8 B: barriers
constexpr uint32_t kKeyValues = kShared + 197464;  // 3072 B: values of the keys of two tiles in each stage of K, which the score reads
constexpr uint32_t kTileInfo = kShared + 200536;  // 12 B: which tile is in each stage of K

// Rings: who fills the stages -> who empties them.
using QRing = Ring<kQFull, kQEmpty, 2>;  // the loader of Q -> each consumer
using KRing = Ring<kKFull, kKEmpty, 3>;  // the loader of K and V -> each consumer
using VRing = Ring<kVFull, kVEmpty, 3>;  // the loader of K and V -> each consumer
using BiasesRing = Ring<kBiasesFull, kBiasesEmpty, 3>;  // the loader of K and V -> each consumer
using WorkRing = Pair<kWorkFull, kWorkEmpty>;  // the scheduler -> the consumers and both loaders

// Named barriers of the hardware; 0 is __syncthreads.
enum class Named {
  kGroup = 1,  // 2 of them: threads of a consumer wait for each other around O
  kPingpong = 3,  // 2 of them: turns at the tensor cores: a consumer waits, the one before it arrives
};

constexpr int kScheduler = 8, kLoader = 9, kQueryLoader = 10;  // warps with a role of their own

constexpr uint32_t kEntryQ = kBlockM * kHeadDimQk * kElementBytes, kQBytes = kEntries * kEntryQ;
constexpr uint32_t kEntryK = kBlockN * kHeadDimQk * kElementBytes, kKBytes = kEntries * kEntryK;
constexpr uint32_t kEntryV = kBlockN * kHeadDimV * kElementBytes, kVBytes = kEntries * kEntryV;
constexpr uint32_t kEntryOut = 64 * kOutColumns * kOutElementBytes, kOutBytes = kEntries * kEntryOut;  // of one consumer
static_assert(kConsumers * kOutBytes == 16384);
constexpr uint32_t kBiasesBytes = kBlockM * kBlockN * 4;
static_assert(BiasesRing::kStages * kBiasesBytes == 98304);
static_assert(QRing::kStages * kQBytes == 32768);
static_assert(KRing::kStages * kKBytes == 24576 && VRing::kStages * kVBytes == 24576);

// Layouts of wgmma's operands: Q and K are K-major; V is MN-major, since its rows are keys.
using QMatrix = Matrix<16, 8 * kBoxBytes, 2>;
using KMatrix = Matrix<16, 8 * kBoxBytes, 2>;
using VMatrix = Matrix<kBlockN * kBoxBytes, 8 * kBoxBytes, 2>;

// Values that the score reads of a key; they come with the tile of K.
struct KeyValues {
  float u_value_of_key;
};
static_assert(2 * KRing::kStages * kEntries * kBlockN * sizeof(KeyValues) == 3072);

// A work tile: which rows of which head, and over how many KV tiles they go. Negative: there is no other.
struct Place {
  int b, h, q_start, tiles;
  int q_begin, k_begin, seqlen_q, seqlen_k;
  int length;  // keys of the batch entry of a lane, the first from b on; negative: it is not there
};

// Its record, written by the scheduler. Two are adjacent.
struct Work : Place {
  int lengths[kEntries];  // of all batch entries
};
static_assert(kWork % alignof(Work) == 0 && WorkRing::kStages * sizeof(Work) <= 640);

extern __shared__ char shared_memory[];

template <typename Value>
__device__ __forceinline__ Value& shared_at(uint32_t address) {
  return *reinterpret_cast<Value*>(shared_memory + (address - kShared));
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) fwd_sm90a_wgmma_bf16_d32_triangle_m128n64s3c2_entries2(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap out_map,
    const __grid_constant__ TensorMap map_u_bias,
    bf16* out_ptr, float* lse_ptr, const int* seqused_k_ptr, uint32_t* tile_counter, const float* u_bias,
    const unsigned char* u_real,
    long long stride_out_b, long long stride_out_s, long long stride_out_h,
    long long stride_u_bias_0, long long stride_u_bias_1, long long stride_u_bias_2,
    int extent_u_bias_0, int extent_u_bias_1, int extent_u_bias_2, int extent_u_bias_3,
    long long stride_u_real_0,
    int extent_u_real_0, int extent_u_real_1,
    int batch, int heads, int kv_heads, int group, int heads_in_l2, int q_tiles, int seqlen_q, int max_seqlen_k,
    int total_q, int total_k,
    float softmax_scale,
    int u_rows,
    const Divisor by_u_rows,
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
    init_barriers(kKFull, 3, 1);  // the loader of K and V, and the bytes of the copy
    init_barriers(kKEmpty, 3, 2);  // each consumer
    init_barriers(kVFull, 3, 1);  // the loader of K and V, and the bytes of the copy
    init_barriers(kVEmpty, 3, 2);  // each consumer
    init_barriers(kBiasesFull, 3, 1);  // the loader of K and V, and the bytes of the copy
    init_barriers(kBiasesEmpty, 3, 8);  // each warp of each consumer
    init_barriers(kWorkFull, 2, 2);  // the scheduler's lanes that write the record
    init_barriers(kWorkEmpty, 2, 9);  // each warp of the consumers, and the loader of Q
    init_barriers(kWorkAsked, 1, 1);  // the loader of K and V
    fence_barrier_init();
  }
  if (threadIdx.x == 32) {
    prefetch_map(q_map);
    prefetch_map(k_map);
    prefetch_map(v_map);
    prefetch_map(map_u_bias);
  }
  __syncthreads();
  wait_dependencies();  // nothing in global memory is read or written before

  if (warpgroup == kConsumers) {
    shrink_registers<kProducerRegisters>();
    if (warp == kScheduler) {
      // The tile scheduler: takes work tiles. `u_rows` batch entries in a row share biases; a work tile has kEntries of them, or those that
      // are left over.
      const int together = min(u_rows, batch), portions = (together - 1) / kEntries + 1;
      const int units = ((batch - 1) / together + 1) * portions * heads;
      const int q_tiles_of_all = q_tiles * units;
      int index = blockIdx.x;
      WorkRing work_ring;
      Event<kWorkAsked> asked;
      const auto next_tile = [&] { return take_tile(tile_counter, q_tiles_of_all, lane); };
      while (true) {
        Place work = {};
        work.tiles = -1;
        work.length = -1;
        int entries = 0;
        if (index < q_tiles_of_all) {
          int unit, q_tile;
          place_tile(index, q_tiles, units, heads_in_l2, unit, q_tile);
          const int portion = unit / heads, first = portion % portions * kEntries;
          const int b = portion / portions * together + first;
          entries = max(min(min(kEntries, together - first), batch - b), 0);
          const int length = lane < entries ? has_seqused_k ? seqused_k_ptr[b + lane] : max_seqlen_k : -1;
          const int most = __reduce_max_sync(~0u, length);
          work = {b, unit % heads, q_tile * kBlockM, (max(most, 0) + kBlockN - 1) / kBlockN, 0, 0, seqlen_q, most, length};
        }
        if (__any_sync(~0u, work.tiles == 0)) {  // no row sees a key: writes O = 0 and its LSE
          for (; __any_sync(~0u, entries > 0); ++work.b, --entries) {
            const int rows = min(kBlockM, work.seqlen_q - work.q_start);
            for (int i = lane; i < rows * 4; i += 32) {
              const int q = work.q_start + i / 4;
              *reinterpret_cast<int4*>((out_ptr + work.b * stride_out_b + work.h * stride_out_h + (q) * stride_out_s) + kOutChunk * (i % 4)) = {};
            }
            for (int i = lane; write_lse && i < rows; i += 32) {
              const int q = work.q_start + i;
              lse_ptr[(work.b * static_cast<long long>(heads) + work.h) * seqlen_q + q] = kMasked;
            }
          }
          index = next_tile();
          continue;
        }
        work_ring.acquire();
        Work& shared_work = shared_at<Work>(kWork + work_ring.stage * sizeof(Work));
        if (lane == 0) static_cast<Place&>(shared_work) = work;
        __syncwarp();
        if (lane < kEntries) {
          shared_work.lengths[lane] = work.length;
          work_ring.arrive();
        }
        __syncwarp();
        work_ring.advance();
        if (index >= q_tiles_of_all) break;
        asked.wait();
        index = next_tile();
      }
    } else if (warp == kLoader) {
      // The loader of K and V: from the last tile of keys to the first, a tile of each batch entry at a time, and the tiles of biases that
      // these share. V follows K one step later, as consumers read it.
      WorkRing work_ring;
      KRing k_ring;
      BiasesRing biases_ring;
      while (true) {
        work_ring.wait();
        const Work& work = shared_at<Work>(kWork + work_ring.stage * sizeof(Work));
        const int first = work.b, h = work.h, q_start = work.q_start, tiles = work.tiles;
        const int hk = h / group;
        const int length = work.lengths[lane % kEntries];  // of a lane's batch entry
        work_ring.advance();
        if (__any_sync(~0u, tiles < 0)) break;
        const int least = __reduce_min_sync(~0u, length), entries = __popc(__ballot_sync(~0u, lane < kEntries && length >= 0));
        // One that is not there has the keys of the last one, which no row sees.
        const auto batch_entry = [&](int entry) { return first + min(entry, entries - 1); };
        const int b = first;
        const int bias_b_div_rows = stride_u_bias_0 == 0 && extent_u_bias_0 > 1 ? 0 : b / by_u_rows;
        const int bias_h = stride_u_bias_1 == 0 && extent_u_bias_1 > 1 ? 0 : h;
        __syncwarp();
        if (lane == 0 && tiles <= kLookahead) Event<kWorkAsked>::arrive();
        int remaining = tiles, v_tile = 0;
        VRing v_ring;
        const auto load_v = [&] {
          v_ring.acquire();
          const int start = v_tile * kBlockN;
          // V of keys after the last one is 0, since P is, too. No copy may bring that where its box would show nothing.
          const uint32_t absent = __ballot_sync(~0u, lane < kEntries && start >= length);  // a bit for each entry
          for (uint32_t left = absent; __any_sync(~0u, left != 0); left &= left - 1) {
            const uint32_t to = kV + v_ring.stage * kVBytes + __popc((left & -left) - 1) * kEntryV;
            for (int i = 16 * lane; i < kEntryV; i += 16 * 32) shared_at<int4>(to + i) = {};
            fence_async_proxy();
          }
          __syncwarp();
          if (lane == 0) v_ring.arrive_expecting(kVBytes - __popc(absent) * kEntryV);
          for (int entry = 0; entry < kEntries; ++entry) {
            const int rows = min(kBlockN, __shfl_sync(~0u, length, entry) - start);  // rows after the end become 0
            for (int column = 0; lane == 0 && rows > 0 && column < kHeadDimV; column += kBoxColumns) {
              load_box(kV + v_ring.stage * kVBytes + entry * kEntryV + column * kBlockN * kElementBytes, v_map, v_ring.full(), column, hk,
                       kBlockN - rows, start + rows, first + entry);
            }
          }
          __syncwarp();
        };
        while (__any_sync(~0u, remaining > 0)) {
          const int tile = remaining - 1;
          // Before waiting for room, so that they come meanwhile.
          KeyValues key_values[kEntries][(kBlockN + 31) / 32];
#pragma unroll
          for (int entry = 0; entry < kEntries; ++entry) {
            const int b = batch_entry(entry);
            const auto* u_real_b = u_real + static_cast<long long>(b) * stride_u_real_0;
#pragma unroll
            for (int i = 0; i < (kBlockN + 31) / 32; ++i) {
              const int kv = tile * kBlockN + 32 * i + lane;
              const bool u_real_kv = (kv < extent_u_real_1) ? u_real_b[static_cast<long long>(kv)] != 0 : false;
              const float u_value_of_key = choose(u_real_kv, 0.0f, -1000000000.0f);
              key_values[entry][i] = {u_value_of_key};
            }
          }
          k_ring.acquire();
#pragma unroll
          for (int entry = 0; entry < kEntries; ++entry) {
            const uint32_t to = kKeyValues + sizeof(KeyValues) * kBlockN * (kEntries * (k_ring.stage + KRing::kStages * k_ring.phase) + entry);
#pragma unroll
            for (int i = 0; i < (kBlockN + 31) / 32; ++i) {
              const int key = 32 * i + lane;
              if (key < kBlockN) shared_at<KeyValues>(to + sizeof(KeyValues) * key) = key_values[entry][i];
            }
          }
          __syncwarp();
          if (lane == 0) {
            const int tile_info = tile | (tile * kBlockN + kBlockN > least ? (1 << kConsumers) - 1 : 0) << kPartialBit;
            if (remaining == kLookahead && tiles > kLookahead) Event<kWorkAsked>::arrive();
            shared_at<int>(kTileInfo + 4 * k_ring.stage) = tile_info;
            k_ring.arrive_expecting(kKBytes);
            for (int entry = 0; entry < kEntries; ++entry) {
              for (int column = 0; column < kHeadDimQk; column += kBoxColumns) {
                load_box(kK + k_ring.stage * kKBytes + entry * kEntryK + column * kBlockN * kElementBytes, k_map, k_ring.full(), column, hk,
                         tile * kBlockN, batch_entry(entry));
              }
            }
          }
          __syncwarp();
          biases_ring.acquire();
          if (lane == 0) {
            biases_ring.arrive_expecting(kBiasesBytes);
            const uint32_t to = kBiases + biases_ring.stage * kBiasesBytes;
            for (int key = 0; key < kBlockN; key += 32) {
              load_box(to + key * 4 * kBlockM, map_u_bias, biases_ring.full(), tile * kBlockN + key, q_start, bias_h, bias_b_div_rows);
            }
          }
          __syncwarp();
          biases_ring.advance();
          if (remaining < tiles) load_v();
          v_ring = {k_ring.stage, k_ring.phase};
          v_tile = tile;
          --remaining;
          k_ring.advance();
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
          for (int entry = 0; entry < kEntries; ++entry) {
            for (int column = 0; column < kHeadDimQk; column += kBoxColumns) {
              load_box(kQ + q_ring.stage * kQBytes + entry * kEntryQ + column * kBlockM * kElementBytes, q_map, q_ring.full(), column, work.h,
                       work.q_start, work.b + entry);
            }
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

    float s[kEntries][kBlockN / 2];      // S, then the logits
    uint32_t p[kEntries][kBlockN / 2 / kPacked];  // P, packed
    float acc[kEntries][kHeadDimV / 2];  // O, not yet divided by the row sum

    // S = Q K^T
    const auto issue_qk = [&](int stage, int q_stage) {
      fence_products();
#pragma unroll
      for (int entry = 0; entry < kEntries; ++entry) {
        const QMatrix q(q_rows + q_stage * kQBytes + entry * kEntryQ);
        const KMatrix k(kK + stage * kKBytes + entry * kEntryK);
#pragma unroll
        for (int column = 0; column < kHeadDimQk; column += kMmaK) {
          const uint32_t box = column / kBoxColumns * kBoxBytes, inside = column % kBoxColumns * kElementBytes;
          Product<Element, kBlockN>::ss<0>(s[entry], q.at(box * kBlockM + inside), k.at(box * kBlockN + inside), column > 0);
        }
      }
      commit_products();
    };
    // O += P V
    const auto issue_pv = [&](int stage) {
      fence_products();
#pragma unroll
      for (int entry = 0; entry < kEntries; ++entry) {
        const VMatrix v(kV + stage * kVBytes + entry * kEntryV);
#pragma unroll
        for (int key = 0; key < kBlockN; key += kMmaK) {
          Product<Element, kHeadDimV>::rs<1>(acc[entry], p[entry] + key / 2 / kPacked, v.at(key * kBoxBytes), 1);
        }
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
    uint32_t key_values = 0;  // where those of the lane's keys begin
    const auto of_key = [&](int key) { return shared_at<KeyValues>(key_values + sizeof(KeyValues) * key); };
    BiasesRing biases_ring;
    // Each warp reads the biases of its own rows, and does not wait for others.
    const auto release_biases = [&] {
      __syncwarp();
      if (lane == 0) biases_ring.release();
      biases_ring.advance();
    };
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
      key_values = kKeyValues + sizeof(KeyValues) * (kEntries * kBlockN * (k_ring.stage + KRing::kStages * k_ring.phase) + 2 * (lane % 4));
    };
    const auto next_work = [&] {
      work_ring.wait();
      const Work& record = shared_at<Work>(kWork + work_ring.stage * sizeof(Work));
      Place work = record;
      work.length = record.lengths[lane % kEntries];
      __syncwarp();
      if (lane == 0) work_ring.release();
      work_ring.advance();
      return work;
    };

    Place work = next_work();
    bool more = __any_sync(~0u, work.tiles > 0);
    left = work.tiles;
    // Whether a work tile has several entries, of which some may be missing; of one alone the others take no time.
    const auto has_several = [&] { return __popc(__ballot_sync(~0u, work.length >= 0)) > 32 / kEntries; };
    const auto length_of = [&](int entry) { return __shfl_sync(~0u, work.length, entry); };
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
      float row_max[kEntries][2], row_sum[kEntries][2], maximum[2], alpha[2];
#pragma unroll
      for (int i = 0; i < 2 * kEntries; ++i) row_max[i / 2][i % 2] = kUnseen, row_sum[i / 2][i % 2] = 0.0f;
      const bool several = has_several();
#pragma unroll
      for (int entry = 0; entry < kEntries; ++entry) {
#pragma unroll
        for (int i = 0; i < kHeadDimV / 2; ++i) acc[entry][i] = 0.0f;
      }
      if (__any_sync(~0u, !several)) {
#pragma unroll
        for (int entry = 1; entry < kEntries; ++entry) {
#pragma unroll
          for (int i = 0; i < kBlockN / 2 / kPacked; ++i) p[entry][i] = 0;
        }
      }

      // S becomes logits.
      const auto finish_logits = [&] {
        const int kv_first = any_number((tile_info & kTileMask) * kBlockN + 2 * (lane % 4));
        biases_ring.wait();
        const BiasTile<float, kBlockM, 128> bias(kBiases + biases_ring.stage * kBiasesBytes, 16 * warp, lane);
        uint32_t bias_pairs[8];  // of one key each
        if (__any_sync(~0u, !several)) {
          int lengths[kEntries];
#pragma unroll
          for (int entry = 0; entry < kEntries; ++entry) lengths[entry] = length_of(entry);
#pragma unroll
          for (int i = 0; i < kBlockN / 4; ++i) {
            if (i % 4 == 0) bias.read(bias_pairs, 4 * i);
#pragma unroll
            for (int entry = 0; entry < 1; ++entry) {
              const int seqlen_k = lengths[entry];
              const int visible_to = seqlen_k - kv_first;
              const auto of_key = [&](int key) { return shared_at<KeyValues>(key_values + sizeof(KeyValues) * (entry * kBlockN + key)); };
              const int key = 8 * (i / 2) + i % 2;  // from the first one of the lane
              const auto [u_value_of_key] = of_key(key);
#pragma unroll
              for (int row = 0; row < 2; ++row) {
                float& x = s[entry][4 * (i / 2) + 2 * row + i % 2];
                x = x * softmax_scale + element_of<float>(bias_pairs, i, row) + u_value_of_key;
                if (key >= visible_to) x = kMasked;
              }
            }
          }
        } else if (__any_sync(~0u, tile_info >> (kPartialBit + warpgroup) & 1)) {
          int lengths[kEntries];
#pragma unroll
          for (int entry = 0; entry < kEntries; ++entry) lengths[entry] = length_of(entry);
#pragma unroll
          for (int i = 0; i < kBlockN / 4; ++i) {
            if (i % 4 == 0) bias.read(bias_pairs, 4 * i);
#pragma unroll
            for (int entry = 0; entry < kEntries; ++entry) {
              const int seqlen_k = lengths[entry];
              const int visible_to = seqlen_k - kv_first;
              const auto of_key = [&](int key) { return shared_at<KeyValues>(key_values + sizeof(KeyValues) * (entry * kBlockN + key)); };
              const int key = 8 * (i / 2) + i % 2;  // from the first one of the lane
              const auto [u_value_of_key] = of_key(key);
#pragma unroll
              for (int row = 0; row < 2; ++row) {
                float& x = s[entry][4 * (i / 2) + 2 * row + i % 2];
                x = x * softmax_scale + element_of<float>(bias_pairs, i, row) + u_value_of_key;
                if (key >= visible_to) x = kMasked;
              }
            }
          }
        } else {
#pragma unroll
          for (int i = 0; i < kBlockN / 4; ++i) {
            if (i % 4 == 0) bias.read(bias_pairs, 4 * i);
#pragma unroll
            for (int entry = 0; entry < kEntries; ++entry) {
              const auto of_key = [&](int key) { return shared_at<KeyValues>(key_values + sizeof(KeyValues) * (entry * kBlockN + key)); };
              const int key = 8 * (i / 2) + i % 2;  // from the first one of the lane
              const auto [u_value_of_key] = of_key(key);
#pragma unroll
              for (int row = 0; row < 2; ++row) {
                float& x = s[entry][4 * (i / 2) + 2 * row + i % 2];
                x = x * softmax_scale + element_of<float>(bias_pairs, i, row) + u_value_of_key;
              }
            }
          }
        }
        release_biases();
        // What is far below the row max vanishes as it is; a row that has seen nothing else counts it as the least logit.
#pragma unroll
        for (int entry = 0; entry < kEntries; ++entry) {
          if (entry > 0 && __any_sync(~0u, !several)) break;
          if (__any_sync(~0u, fminf(row_max[entry][0], row_max[entry][1]) < kLeastLogit)) bound_below(s[entry], kLeastLogit);
        }
      };

      // The first tile. Its S is there.
      release_k();
      finish_logits();
      // The running max of the first tile; P = exp2(S - max)
#pragma unroll
      for (int entry = 0; entry < kEntries; ++entry) {
        if (entry > 0 && __any_sync(~0u, !several)) break;
        find_maximum(s[entry], kLog2e, maximum);
        raise_row_max(maximum, row_max[entry], alpha);
        exponentiate<Element>(s[entry], kLog2e, row_max[entry], p[entry], row_sum[entry]);
      }

      // The other tiles: O += P V of the tile before is issued right after S = Q K^T of this one.
      while (__any_sync(~0u, --left > 0)) {
        wait_k();
        pingpong_wait();
        issue_qk(k_ring.stage, q_ring.stage);  // S = Q K^T of this tile
        wait_v();
        issue_pv(v_ring.stage);  // O += P V of the tile before
        wait_products<1>();
        fence_registers(s);
        release_k();
        finish_logits();
        // P of this tile, with the row max of the step before. S is kept until the sums show that P stayed in range.
        float sum[kEntries][2] = {};
        wait_products<0>();
        pingpong_arrive();  // the products are done
        fence_registers(acc);
        release_v();
        bool all_kept = true;
        const auto kept = [&](int entry, int row) { return sum[entry][row] <= fminf(kRecomputeGrowth * row_sum[entry][row], kRecomputeAbove); };
#pragma unroll
        for (int entry = 0; entry < kEntries; ++entry) {
          if (entry > 0 && __any_sync(~0u, !several)) break;
          exponentiate<Element>(s[entry], kLog2e, row_max[entry], p[entry], sum[entry]);
          all_kept = all_kept && kept(entry, 0) && kept(entry, 1);
        }
        if (__any_sync(~0u, !all_kept)) {
#pragma unroll
          for (int entry = 0; entry < kEntries; ++entry) {
            if (entry > 0 && __any_sync(~0u, !several)) break;
            find_maximum(s[entry], kLog2e, maximum);
            keep_row_max({kept(entry, 0), kept(entry, 1)}, row_max[entry], maximum);
            raise_row_max(maximum, row_max[entry], alpha);
            rescale(acc[entry], alpha);
#pragma unroll
            for (int row = 0; row < 2; ++row) {
              row_sum[entry][row] *= alpha[row];
              sum[entry][row] = 0.0f;
            }
            exponentiate<Element>(s[entry], kLog2e, row_max[entry], p[entry], sum[entry]);
          }
        }
#pragma unroll
        for (int i = 0; i < 2 * kEntries; ++i) row_sum[i / 2][i % 2] += sum[i / 2][i % 2];
      }

      if (leader) q_ring.release();
      q_ring.advance();
      float normalize[kEntries][2];
#pragma unroll
      for (int entry = 0; entry < kEntries; ++entry) finish_sum(row_sum[entry], normalize[entry]);

      // O leaves through shared memory, so that stores are whole rows.
      const auto stage_out = [&](int) {
        const int row = 16 * (warp % 4) + lane % 16;
#pragma unroll
        for (int entry = 0; entry < kEntries; ++entry) {
          const auto& o = acc[entry];
#pragma unroll
          for (int column = 0; column < kOutColumns; column += 2 * kOutChunk) {
            const int chunk = column % kOutBoxColumns / kOutChunk + lane / 16, swizzled = chunk ^ (row / 2 % 4);
            const int i = column / 2;
            store_blocks(out_rows + entry * kEntryOut + column / kOutBoxColumns * 64 * kBoxBytes + row * kBoxBytes + 16 * swizzled,
                         pack<OutElement>(o[i], o[i + 1]), pack<OutElement>(o[i + 2], o[i + 3]),
                         pack<OutElement>(o[i + 4], o[i + 5]), pack<OutElement>(o[i + 6], o[i + 7]));
          }
        }
        fence_async_proxy();
      };
      const auto store_out = [&](int) {
        const uint32_t there = __ballot_sync(~0u, work.length >= 0);  // a bit for each entry
        if (leader) {
#pragma unroll
          for (int entry = 0; entry < kEntries; ++entry) {
            for (int column = 0; there >> entry & 1 && column < kOutColumns; column += kOutBoxColumns) {
              store_box(out_map, out_rows + entry * kEntryOut + column * 64 * kOutElementBytes, column, work.h, work.q_start + 64 * warpgroup,
                        work.b + entry);
            }
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
      if (const uint32_t there = __ballot_sync(~0u, work.length >= 0); write_lse && lane % 4 == 0) {
#pragma unroll
        for (int entry = 0; entry < kEntries; ++entry) {
#pragma unroll
          for (int row = 0; row < 2; ++row) {
            const int q = work.q_start + 64 * warpgroup + row_in_group + 8 * row;
            if (q < seqlen_q && there >> entry & 1) {
              lse_ptr[((work.b + entry) * static_cast<long long>(heads) + work.h) * seqlen_q + q] = log_sum_exp(row_max[entry][row], row_sum[entry][row]);
            }
          }
        }
      }
      work = next;
    }
    if (leader) wait_stores_read();
    if (warpgroup == 0) pingpong_wait();  // the last turn, which no other consumer takes
  }
}
