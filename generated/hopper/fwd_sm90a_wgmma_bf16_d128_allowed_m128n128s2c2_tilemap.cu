// fwd_sm90a_wgmma_bf16_d128_allowed_m128n128s2c2_tilemap
//
// Attention forward, variant allowed: mask `allowed[b, q, kv]`.
// Rendered by `attngen build specs/hopper.yaml`, schedule hopper_forward.
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
constexpr uint32_t kQFull = kShared + 230016;  // 16 B: barriers
constexpr uint32_t kQEmpty = kShared + 230032;  // 16 B: barriers
constexpr uint32_t kKFull = kShared + 230048;  // 16 B: barriers
constexpr uint32_t kKEmpty = kShared + 230064;  // 16 B: barriers
constexpr uint32_t kVFull = kShared + 230080;  // 16 B: barriers
constexpr uint32_t kVEmpty = kShared + 230096;  // 16 B: barriers
constexpr uint32_t kWorkFull = kShared + 230112;  // 16 B: barriers
constexpr uint32_t kWorkEmpty = kShared + 230128;  // 16 B: barriers
constexpr uint32_t kWorkAsked = kShared + 230144;  // 8 B: barriers
constexpr uint32_t kTileInfo = kShared + 230152;  // 16 B: which tile is in each stage of K

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

// A work tile: which rows of which head, and over how many KV tiles they go. Negative: there is no other.
struct Place {
  int b, h, q_start, tiles;
  int q_begin, k_begin, seqlen_q, seqlen_k;
};

// Its record, written by the scheduler.
struct Work : Place {
  int visible_lo, visible_hi;  // the KV tiles between the first and the last visible key
};
static_assert(kWork % alignof(Work) == 0 && WorkRing::kStages * sizeof(Work) <= 640);

extern __shared__ char shared_memory[];

template <typename Value>
__device__ __forceinline__ Value& shared_at(uint32_t address) {
  return *reinterpret_cast<Value*>(shared_memory + (address - kShared));
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) fwd_sm90a_wgmma_bf16_d128_allowed_m128n128s2c2_tilemap(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap out_map,
    bf16* out_ptr, float* lse_ptr, const int* seqused_k_ptr, const int* tile_map_ptr, uint32_t* tile_counter,
    const unsigned char* u_allowed,
    long long stride_out_b, long long stride_out_s, long long stride_out_h,
    long long stride_tile_map_b, long long stride_tile_map_h, long long stride_tile_map_q,
    long long stride_u_allowed_0, long long stride_u_allowed_1,
    int extent_u_allowed_0, int extent_u_allowed_1, int extent_u_allowed_2,
    int batch, int heads, int kv_heads, int group, int heads_in_l2, int q_tiles, int seqlen_q, int max_seqlen_k,
    int total_q, int total_k, int words, long long map_words,
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
          // in the order of the map, which may begin with the tiles of queries that see most keys
          q_tile = tile_map_ptr[map_words - q_tiles * (stride_tile_map_b > 0 ? batch - unit / heads : 1) - 2 + q_tiles - q_tile];
          const int b = unit / heads, h = unit % heads;
          const int q_begin = b * seqlen_q, k_begin = b * max_seqlen_k;
          const int seqlen_k = has_seqused_k ? seqused_k_ptr[b] : max_seqlen_k;
          const int q_start = q_tile * kBlockM;
          const int visible_hi = (seqlen_k + kBlockN - 1) / kBlockN;
          const int visible_lo = 0;
          int tiles = 0, last_word = 0;
#pragma unroll 1
          for (int word = visible_lo / 32 + lane; word < (visible_hi + 31) / 32; word += 32) {  // a lane has a word
            const int* tile_map = tile_map_ptr + b * stride_tile_map_b + h * stride_tile_map_h + q_start / kBlockM * stride_tile_map_q;
            const uint32_t partial_word = tile_map[words + word];
            const uint32_t visible_word = tile_map[word] | partial_word;
            tiles += __popc(visible_word);
            if (visible_word) last_word = word;
          }
          tiles = __reduce_add_sync(~0u, tiles);
          last_word = __reduce_max_sync(~0u, last_word);  // the loader begins there
          work = {{b, h, q_start, tiles, q_begin, k_begin, seqlen_q, seqlen_k}, visible_lo, 32 * (last_word + 1)};
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
      // The loader of K and V: from the last tile of keys to the first. V follows K one step later, as consumers read it.
      WorkRing work_ring;
      KRing k_ring;
      while (true) {
        work_ring.wait();
        const Work& work = shared_at<Work>(kWork + work_ring.stage * sizeof(Work));
        const int b = work.b, h = work.h, q_start = work.q_start, tiles = work.tiles, seqlen_k = work.seqlen_k, visible_hi = work.visible_hi;
        const int hk = h / group;
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
        const auto load_step = [&](int tile, int tile_info, int slot) {
          k_ring.acquire();
          if (lane == 0) {
            if (remaining == kLookahead && tiles > kLookahead) Event<kWorkAsked>::arrive();
            shared_at<int2>(kTileInfo + 8 * k_ring.stage) = {tile_info, slot};
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

        for (int word = (visible_hi + 31) / 32 - 1; __any_sync(~0u, remaining > 0); --word) {
          const int* tile_map = tile_map_ptr + b * stride_tile_map_b + h * stride_tile_map_h + q_start / kBlockM * stride_tile_map_q;
          const uint32_t partial_word = tile_map[words + word];
          const uint32_t visible_word = tile_map[word] | partial_word;
          const int lane_slot = tile_map_ptr[map_words + kSlotsOfWord * (tile_map - tile_map_ptr) + 32 * word + lane];
          uint32_t left = visible_word;
          while (__any_sync(~0u, left != 0)) {
            const int bit = 31 - __clz(left);
            left ^= 1u << bit;
            const bool partial = partial_word >> bit & 1;
            const int tile = 32 * word + bit;
            load_step(tile, tile | (partial ? (1 << kConsumers) - 1 : 0) << kPartialBit, __shfl_sync(~0u, lane_slot, bit));
          }
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
    // Visible pairs of a partial tile, a bit for each element of the lane. `slot` says where the tile map has them; -1: nowhere.
    uint32_t visible[kMaskWords];
    int slot = -1;
    const auto read_tile_info = [&] {
      const int2 info = shared_at<int2>(kTileInfo + 8 * k_ring.stage);
      tile_info = info.x;
      slot = info.y;
      if (__any_sync(~0u, slot >= 0)) {
        const int* const from = tile_map_ptr + (1 + kSlotsOfWord) * map_words + (static_cast<long long>(slot) * kConsumers + warpgroup) * (128 * kMaskWords);
#pragma unroll
        for (int word = 0; word < kMaskWords; ++word) visible[word] = from[128 * word + group_thread];
      }
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
      read_tile_info();
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
      const int b = work.b;
      const int q_first = work.q_start + 64 * warpgroup + row_in_group;
      const float scale_log2e = softmax_scale * kLog2e;
      float row_max[2] = {kUnseen, kUnseen}, row_sum[2] = {0.0f, 0.0f}, maximum[2], alpha[2];
#pragma unroll
      for (int i = 0; i < kHeadDimV / 2; ++i) acc[i] = 0.0f;

      // Evaluates the mask of a tile that has no bits in the map. The loop is rolled, so that it takes few registers.
      const auto find_visible = [&] {
        const int kv_first = (tile_info & kTileMask) * kBlockN + 2 * (lane % 4);
        const auto* u_allowed_b = u_allowed + static_cast<long long>(b) * stride_u_allowed_0;
        const int visible_to = seqlen_k - kv_first;
        struct Row {
          int q_row;
        };
        Row rows[2];
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          const int q_row = min(q_first + 8 * row, seqlen_q - 1);  // rows after the end repeat the last one
          rows[row] = {q_row};
        }
#pragma unroll
        for (int word = 0; word < kMaskWords; ++word) {
          uint32_t bits = 0;
#pragma unroll 1
          for (int i = 16 * word; i < min(16 * word + 16, kBlockN / 4); ++i) {
            const int key = 8 * (i / 2) + i % 2;  // from the first one of the lane
            const int kv = kv_first + key;
#pragma unroll
            for (int row = 0; row < 2; ++row) {
              const auto [q_row] = rows[row];
              const bool u_allowed_q_kv = (kv < extent_u_allowed_2) ? u_allowed_b[static_cast<long long>(q_row) * stride_u_allowed_1 + static_cast<long long>(kv)] != 0 : false;
              bits |= static_cast<uint32_t>(!(!(key < visible_to && u_allowed_q_kv))) << (4 * (i % 16 / 2) + 2 * row + i % 2);
            }
          }
          visible[word] = bits;
        }
      };

      // S becomes logits; pairs that are not visible get -inf.
      const auto finish_logits = [&] {
        if (__any_sync(~0u, tile_info >> (kPartialBit + warpgroup) & 1)) {
          if (__any_sync(~0u, slot < 0)) find_visible();
#pragma unroll
          for (int i = 0; i < kBlockN / 4; ++i) {
#pragma unroll
            for (int row = 0; row < 2; ++row) {
              float& x = s[4 * (i / 2) + 2 * row + i % 2];
              if (!(visible[i / 16] >> 4 * (i % 16 / 2) + 2 * row + i % 2 & 1)) x = kMasked;
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
        wait_products<0>();
        fence_registers(acc);
        release_v();
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
        }
      }
      work = next;
    }
    if (leader) wait_stores_read();
    if (warpgroup == 0) pingpong_wait();  // the last turn, which no other consumer takes
  }
}
// Makes the tile map, in up to three launches. The first one classifies: a block has 32 tiles, of which a bit says that a tile is
// full, since every query sees every key, another that it is partial, since some query sees some key. Given hashes to write, a
// block hashes its partial tiles: those with the same visible pairs have the same hash. Given a list of slots, blocks write the
// visible pairs of their tiles, a bit for each element of a lane of a consumer.
extern "C" __global__ void __launch_bounds__(512, 2) classify_fwd_sm90a_wgmma_bf16_d128_allowed_m128n128s2c2_tilemap(
    int* tile_map_ptr, long long* tile_hashes_ptr, const int* tile_list_ptr, const int* seqused_k_ptr,
    const unsigned char* u_allowed,
    long long stride_u_allowed_0, long long stride_u_allowed_1,
    int extent_u_allowed_0, int extent_u_allowed_1, int extent_u_allowed_2,
    int batch, int heads, int kv_heads, int group, int heads_in_l2, int q_tiles, int seqlen_q, int max_seqlen_k,
    int total_q, int total_k, int words, long long map_words, int map_heads,
    int has_seqused_k
) {
  constexpr int kWarps = 16;
  constexpr int kKeyParts = (kBlockN + 31) / 32, kQueryParts = (kBlockM + 31) / 32, kParts = kKeyParts * kQueryParts;  // of a tile, 32 x 32 pairs
  constexpr int kCellRows = 32, kCellKeys = 32;  // of a tile, decided by bounds
  constexpr int kCellsBeside = (kBlockN + kCellKeys - 1) / kCellKeys, kCells = (kBlockM + kCellRows - 1) / kCellRows * kCellsBeside;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool listed = tile_list_ptr != nullptr, hashes = tile_hashes_ptr != nullptr;
  const int own_row = blockIdx.x / words, word = blockIdx.x % words;
  int* const map_row = tile_map_ptr + 2LL * words * own_row;
  const int own_unit = own_row / q_tiles;
  int q_tile = own_row % q_tiles, h = own_unit % map_heads, b = own_unit / map_heads;  // a list has others
  __shared__ uint32_t seen_bits[kBlockN * kQueryParts];
  // A bit for each tile: whether a pair is known to be visible, and one to be hidden, by bounds of each warp's cells and from looks
  // at pairs; and cells that bounds leave open.
  __shared__ uint32_t seen_of[kWarps];
  __shared__ uint32_t hidden_of[kWarps];
  __shared__ uint32_t none_seen_of[kWarps];
  __shared__ uint32_t none_hidden_of[kWarps];
  __shared__ uint32_t every_seen_of[kWarps];
  __shared__ uint32_t every_hidden_of[kWarps];
  __shared__ uint32_t later_seen, later_hidden;
  __shared__ uint32_t open_parts[kParts];
  __shared__ uint32_t some_true, some_false;  // a bit for each tile: of its bools
  __shared__ unsigned long long hash_of[32];
  launch_dependents();
  wait_dependencies();  // nothing in global memory is read or written before
  if (threadIdx.x == 0) {
    later_seen = later_hidden = 0;
    some_true = some_false = 0;
  }
  if (threadIdx.x < 32) hash_of[threadIdx.x] = 0;
  uint32_t seen = 0, hidden = 0, every_part = 0;  // of which tiles all parts are open
  uint32_t scanned = 0;  // tiles that bools decide
  if (!listed && !hashes) {
    if (threadIdx.x < 32) tile_map_ptr[map_words + 32LL * blockIdx.x + threadIdx.x] = -1;
    const int seqlen_k = has_seqused_k ? seqused_k_ptr[b] : max_seqlen_k;
    {
      const int q_start = q_tile * kBlockM;
      const int kv_start = (32 * word + lane) * kBlockN;  // a lane has a tile
      uint32_t seen = 0, hidden = 0;
      uint32_t none_seen = 0, none_hidden = 0, every_seen = 0, every_hidden = 0;
      if (seqlen_q > 0 && seqlen_k > 0) {
#pragma unroll 4
        for (int cell = warp; cell < kCells; cell += kWarps) {
          const int row = cell / kCellsBeside * kCellRows, key = cell % kCellsBeside * kCellKeys;
          const bool exists = q_start + row < seqlen_q, inside = exists && kv_start + key < seqlen_k;
          const bool whole = kv_start + min(key + kCellKeys, kBlockN) <= seqlen_k;  // keys after the end count as hidden
          const int q_lo = min(q_start + row, seqlen_q - 1), q_end = min(q_start + min(row + kCellRows, kBlockM), seqlen_q);
          const int kv_lo = min(kv_start + key, seqlen_k - 1), kv_end = min(kv_start + min(key + kCellKeys, kBlockN), seqlen_k);
          {
            const bool may = inside && (true);
            const bool must = inside && (false);
            seen |= __ballot_sync(~0u, must), hidden |= __ballot_sync(~0u, exists && !(may && whole));
            const uint32_t open = __ballot_sync(~0u, may && !must);
            if (lane == 0) open_parts[cell] = open;
          }
          {  // if nothing of the tensor is true
            const bool may = inside && (false);
            const bool must = inside && (false);
            none_seen |= __ballot_sync(~0u, may), none_hidden |= __ballot_sync(~0u, exists && !(must && whole));
          }
          {  // if everything of the tensor is true
            const bool may = inside && (true);
            const bool must = inside && (true);
            every_seen |= __ballot_sync(~0u, may), every_hidden |= __ballot_sync(~0u, exists && !(must && whole));
          }
        }
      } else if (threadIdx.x < kParts) {
        open_parts[threadIdx.x] = 0;
      }
      if (lane == 0) {
        seen_of[warp] = seen;
        hidden_of[warp] = hidden;
        none_seen_of[warp] = none_seen;
        none_hidden_of[warp] = none_hidden;
        every_seen_of[warp] = every_seen;
        every_hidden_of[warp] = every_hidden;
      }
    }
    __syncthreads();
    const auto of_all_warps = [&](const uint32_t* words_of) { return __reduce_or_sync(~0u, lane < kWarps ? words_of[lane] : 0); };
    seen = of_all_warps(seen_of), hidden = of_all_warps(hidden_of);
    using Rows = Bands<kBlockM, kBlockN>;
    uint32_t unknown = every_part;
    for (int part = lane; part < kParts; part += 32) unknown |= open_parts[part];
    unknown = __reduce_or_sync(~0u, unknown);
    {  // a lane has a tile
      const int kv_tile = 32 * word + lane, kv_start = kv_tile * kBlockN, kv = kv_start;
      const long long first = kv;
      bool whole = (reinterpret_cast<unsigned long long>(u_allowed) | stride_u_allowed_0 | stride_u_allowed_1 | first) % 16 == 0 && first >= 0 && first + kBlockN <= extent_u_allowed_2 && kv_start + kBlockN <= seqlen_k;
      const auto has_row = [&](int q_row) {
        return q_row >= 0 && q_row < extent_u_allowed_1;
      };
      whole = whole && has_row(q_tile * kBlockM) && has_row(min((q_tile + 1) * kBlockM, seqlen_q) - 1);
      unknown &= __ballot_sync(~0u, whole) & ~(seen & hidden);
    }
    if (unknown != 0) {
      const auto look = [&](int bit, int step, bool asks, Bools& bools) {
        const int kv_tile = 32 * word + bit, kv = kv_tile * kBlockN;
        const int q_row = min(q_tile * kBlockM + Rows::row(step), seqlen_q - 1);  // rows after the end repeat the last one
        const auto* keys = u_allowed + static_cast<long long>(b) * stride_u_allowed_0 + static_cast<long long>(q_row) * stride_u_allowed_1 + kv + Rows::key();
        bools.take(asks ? *reinterpret_cast<const uint4*>(keys) : uint4{0, 0, 0, 0});
      };
      Bools first[32 / kWarps];  // a row of each band first, by which most tiles that have both are known
#pragma unroll
      for (int i = 0; i < 32 / kWarps; ++i) look(kWarps * i + warp, 0, unknown >> (kWarps * i + warp) & 1, first[i]);
#pragma unroll
      for (int i = 0; i < 32 / kWarps; ++i) first[i].note(kWarps * i + warp, some_true, some_false);
      __syncthreads();
      const uint32_t left = unknown & ~(some_true & some_false);
      const int tiles = __popc(left);
      __syncthreads();  // these words change from here on
#pragma unroll 1
      for (int number = warp, step = 0; tiles > 0; number += kWarps) {  // some rows of each tile, then the next ones
        while (number >= tiles) number -= tiles, step += Rows::kAtOnce;
        if (step >= Rows::kSteps) break;
        const int bit = place_of_bit(left, number);
        if (__shfl_sync(~0u, at_once(some_true) & at_once(some_false), 0) >> bit & 1) continue;
        Bools bools;
#pragma unroll
        for (int i = 0; i < Rows::kAtOnce; ++i) look(bit, step + i, true, bools);
        bools.note(bit, some_true, some_false);
      }
      __syncthreads();
      // Pairs of which the tensor is false, and those of which it is true, may be visible or hidden as the bounds say.
      const uint32_t none_seen = of_all_warps(none_seen_of), none_hidden = of_all_warps(none_hidden_of);
      const uint32_t every_seen = of_all_warps(every_seen_of), every_hidden = of_all_warps(every_hidden_of);
      const uint32_t sees = some_false & none_seen | some_true & every_seen, hides = some_false & none_hidden | some_true & every_hidden;
      const uint32_t mixed = some_true & some_false & ~((none_seen | every_hidden) & (every_seen | none_hidden));  // as the tensor says
      scanned = unknown & (~(sees & hides) | mixed);
      seen |= scanned & sees, hidden |= scanned & hides;
    }
  } else {
    every_part = listed ? 1 : map_row[words + word];
    __syncthreads();
  }
  const int items = listed ? tile_list_ptr[0] : blockIdx.x + 1;  // a block without a list has its own tiles
#pragma unroll 1
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    int first_tile = 32 * word;
    if (listed) {
      const int slot = tile_list_ptr[1 + item];  // among all of the map
      const int row = slot / (32 * words), unit = row / q_tiles;
      first_tile = slot % (32 * words), q_tile = row % q_tiles, h = unit % map_heads, b = unit / map_heads;
    }
    const int seqlen_k = has_seqused_k ? seqused_k_ptr[b] : max_seqlen_k;
    const auto* u_allowed_b = u_allowed + static_cast<long long>(b) * stride_u_allowed_0;
    int before = 0;  // open parts of the block, of which its warps take turns
#pragma unroll 1
    for (int first_part = 0; first_part < kParts; first_part += 32) {
      uint32_t lane_open = first_part + lane < kParts ? every_part : 0;  // a lane has a part
      if (!listed && !hashes && first_part + lane < kParts) lane_open = open_parts[first_part + lane];
      lane_open &= ~(seen & hidden);
      lane_open &= ~scanned;
      uint32_t parts_left = __ballot_sync(~0u, lane_open != 0), left = 0;
      int part = 0;
#pragma unroll 1
      while (__any_sync(~0u, (parts_left | left) != 0)) {
        if (left == 0) {
          const int place = __ffs(parts_left) - 1;
          parts_left &= parts_left - 1;
          part = first_part + place;
          const uint32_t open = __shfl_sync(~0u, lane_open, place);
          const int turn = before + __popc(open & (1u << lane) - 1) + 2 * part;  // parts of a tile go to many warps
          left = __ballot_sync(~0u, open >> lane & 1 && turn % kWarps == warp);
          before += __popc(open);
          continue;
        }
        const int bit = __ffs(left) - 1, kv_tile = first_tile + bit;
        left &= left - 1;
        const uint32_t mixed_tiles = (seen | at_once(later_seen)) & (hidden | at_once(later_hidden));  // partial, whatever other pairs say
        if (__shfl_sync(~0u, mixed_tiles, 0) >> bit & 1) continue;
        const int q_start = q_tile * kBlockM, kv_start = kv_tile * kBlockN;
        const int key = 32 * (part % kKeyParts) + lane, query_part = part / kKeyParts, q_first = q_start + 32 * query_part;
        if (!listed && q_first >= seqlen_q) continue;  // a list asks for all of a tile, a map for the queries that exist
        const int kv = kv_start + key;
        const int queries = min(min(kBlockM - 32 * query_part, seqlen_q - q_first), 32);
        const uint32_t inside = queries > 0 ? ~0u >> (32 - queries) : 0;
        int writes_pairs = listed, adds_hashes = hashes;
        asm volatile("" : "+r"(writes_pairs), "+r"(adds_hashes));  // else the loop is compiled for each value
        uint32_t bits = 0;
#pragma unroll 8
        for (int i = 0; i < 32; ++i) {
          const int q_row = min(q_first + i, seqlen_q - 1);
          const bool u_allowed_q_kv = ((kv < extent_u_allowed_2) ? u_allowed_b[static_cast<long long>(q_row) * stride_u_allowed_1 + static_cast<long long>(kv)] : 0) != 0;
          bits |= static_cast<uint32_t>(u_allowed_q_kv) << i;
        }
        bits &= inside;
        if (kv >= seqlen_k) bits = 0;
        const bool own = kBlockN % 32 == 0 || key < kBlockN;
        if (writes_pairs) {
          if (own) seen_bits[kQueryParts * key + query_part] = bits;
        } else if (adds_hashes) {
          const unsigned long long hash = own && bits ? mixed(static_cast<unsigned long long>(kQueryParts * key + query_part) << 32 | bits) : 0;
          const unsigned long long sum = sum_of_lanes(hash);
          if (lane == 0) atomicAdd(&hash_of[bit], sum);
        } else {
          const bool some = __any_sync(~0u, own && bits), all = __all_sync(~0u, !own || bits == inside);  // only a whole tile of keys is full
          if (lane == 0 && some) atomicOr(&later_seen, 1u << bit);
          if (lane == 0 && !all) atomicOr(&later_hidden, 1u << bit);
        }
      }
    }
    if (!listed) break;
    __syncthreads();
#pragma unroll 1
    for (int place = threadIdx.x; place < 128 * 4; place += 32 * kWarps) {  // a lane of a consumer's word
      const int part = place / 128, own = 64 * (part / 2) + 16 * (place % 128 / 32) + place % 32 / 4;
      uint32_t bits = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int other = 64 * (part % 2) + 8 * i + 2 * (place % 4);
        if (other >= kBlockN) break;
#pragma unroll
        for (int second = 0; second < 2; ++second) {
          const uint32_t pair = seen_bits[kQueryParts * (other + second) + own / 32] >> own % 32;
          bits |= ((pair & 1) | (pair >> 8 & 1) << 2) << (4 * i + second);
        }
      }
      tile_map_ptr[(1 + kSlotsOfWord) * map_words + static_cast<long long>(item) * 512 + place] = bits;
    }
    __syncthreads();
  }
  if (listed) return;
  __syncthreads();
  if (hashes) {
    if (threadIdx.x < 32 && every_part >> lane & 1) {
      const unsigned long long hash = hash_of[lane];
      tile_hashes_ptr[32LL * blockIdx.x + lane] = hash ? hash : 1;  // 0: not partial
    }
    return;
  }
  if (threadIdx.x == 0) {
    seen |= later_seen, hidden |= later_hidden;
    map_row[word] = seen & ~hidden;
    map_row[words + word] = seen & hidden;
    // the order in which blocks take rows, first without long ones (`_long_rows_first` may change it)
    const int place = q_tiles - 1 - q_tile;
    if (word == 0 && h == 0) tile_map_ptr[2LL * gridDim.x + b * q_tiles + place] = q_tile;
    if (blockIdx.x == 0) tile_map_ptr[map_words - 1] = 0;
  }
}
