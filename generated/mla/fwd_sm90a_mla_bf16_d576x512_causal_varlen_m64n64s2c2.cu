// fwd_sm90a_mla_bf16_d576x512_causal_varlen_m64n64s2c2
//
// Attention forward, variant causal: mask `q_pos >= kv`.
// Rendered from templates/cuda/mla/kernel.cu.j2 by `attngen build specs/mla.yaml`.
//
// V is the first 512 columns of K: a tile of 64 keys is copied once, for S and for O. A block has 64 rows, a row being a head of a
// query, those of one query side by side. Each of two consumers holds half of the columns of O, and computes S = Q K^T and P
// of every other tile. It multiplies its own P from registers, and the other consumer's P from shared memory:
//
//   consumer 0:  S0      P0        O += P0 V0               O += P1 V1   S2
//   consumer 1:      S1      O += P0 V0 | P1   O += P1 V1            S3
//
// Two tiles are in flight at a time: each consumer has read the columns of a tile before it starts S of its next one.
//
// Where a sequence has more than 64 rows, two blocks of a cluster have 128 of them, and each loads half of the columns of a
// tile for both. A work item is the rows of such a block or cluster, with the tiles that they see. The tiles of all work items
// are one list, of which blocks (or clusters) take equal ranges. Where a range ends inside a work item, partial results go to
// global memory, and a second launch merges them.
#include "cluster.cuh"
#include "divisor.cuh"
#include "expression.cuh"
#include "pair.cuh"
#include "pdl.cuh"
#include "quad.cuh"
#include "ring.cuh"
#include "softmax.cuh"
#include "split.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

using Element = bf16;  // of Q, K and P
using OutElement = bf16;  // of O

constexpr int kRows = 64;    // query rows of a block
constexpr int kBlockN = 64;  // keys of a step
constexpr int kHeadDimQk = 576;
constexpr int kHeadDimV = 512;  // the first columns of K
constexpr int kConsumers = 2;  // warpgroups that multiply
constexpr int kThreads = 384;
constexpr int kFirstLoader = 4 * kConsumers;  // of the four warps that copy
constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;
constexpr int kMmaK = Product<Element, kBlockN>::kK;  // K of one wgmma: the elements that it sums over

// Columns come in boxes of 128 bytes: those of V of each consumer, then those that V lacks.
constexpr int kBoxBytes = 128, kBoxColumns = kBoxBytes / sizeof(Element);
constexpr int kHalf = kHeadDimV / 2;                               // columns of O of a consumer
constexpr int kHalfBoxes = kHalf / kBoxColumns, kHalfBits = 2;
constexpr int kMoreBoxes = (kHeadDimQk - kHeadDimV) / kBoxColumns;
constexpr int kTiles = 2;                           // in flight
constexpr uint32_t kBox = kBlockN * kBoxBytes;  // bytes of a box of a tile
static_assert(kHalfBoxes == 1 << kHalfBits && kMoreBoxes <= 1);
static_assert(kRows == kBlockN);  // so that boxes of Q and P have as many bytes

constexpr float kRaiseAbove = 8.0f;  // growth of the running max, in units of log2, at which the row max follows

// How work is distributed, in tiles of keys.
constexpr int kLeastTiles = 2;  // of a block at least; with fewer, fewer blocks work
constexpr int kCutTiles = 2;  // how many more than an equal share a block may have, if it then works on one work item only
constexpr int kWholeTiles = 64;  // of a block: with more, idle blocks cost more than merging

using Partial = PartialRow<kHeadDimV>;
constexpr int kMergedRows = 4, kRowThreads = kHeadDimV / 4;  // of a block that merges, and the threads of a row

// Shared memory. Addresses are constants, so that they cost no instruction; the kernel checks where it begins.
constexpr uint32_t kShared = 1024;
constexpr uint32_t kQ = kShared + 0;  // 65536 B: the first columns of Q, as many as V has
constexpr uint32_t kValues = kShared + 65536;  // 131072 B: the columns of K that are V, a box per stage
constexpr uint32_t kMore = kShared + 196608;  // 16384 B: the columns of K that only S needs
constexpr uint32_t kP = kShared + 212992;  // 16384 B: P of a tile of each consumer, for the other one
constexpr uint32_t kRowMax = kShared + 229376;  // 256 B: the row max of this P
constexpr uint32_t kSums = kShared + 229632;  // 512 B: row sums of both consumers
constexpr uint32_t kValuesFull = kShared + 230144;  // 128 B: barriers
constexpr uint32_t kValuesEmpty = kShared + 230272;  // 128 B: barriers
constexpr uint32_t kMoreFull = kShared + 230400;  // 16 B: barriers
constexpr uint32_t kMoreEmpty = kShared + 230416;  // 16 B: barriers
constexpr uint32_t kBegin = kShared + 230432;  // 24 B: where the worker's range of the list begins
constexpr uint32_t kLast = kShared + 230456;  // 8 B: whether this block is the last of its item
constexpr uint32_t kCounts = kShared + 230464;  // 144 B: chunks and items that each warp has counted

// Rings: who fills the stages -> who empties them.
using ValuesRing = Ring<kValuesFull, kValuesEmpty, 16>;  // a loader -> both consumers
using MoreRing = Ring<kMoreFull, kMoreEmpty, 2>;  // a loader -> the consumer of the tile

// Named barriers of the hardware; 0 is __syncthreads.
enum class Named {
  kConsumers = 1,  // 1 of them: Q and row sums are there, or have been read
  kPublished = 2,  // 2 of them: P of a consumer's tile is in shared memory
  kZeroed = 4,  // 2 of them: a consumer has cleared the values after the last key
};

// A number as a type, which a generic lambda can use as a constant.
template <int kNumber>
struct Constant {
  static constexpr int kValue = kNumber;
};

// The consumer of one half of the columns of O, and of every other tile.
template <int kHalfOfColumns>
struct Consumer {
  static constexpr int half = kHalfOfColumns;
};

// Boxes of the values of two tiles: those of one consumer's half, then those of the other's.
__device__ __forceinline__ int box_of(int half, int stage, int box) { return (2 * half + stage) * kHalfBoxes + box; }
static_assert(ValuesRing::kStages == 4 * kHalfBoxes);

// How wgmma reads these: Q, P and, for S, K are K-major; for O, K is MN-major, since its rows are keys.
using RowMatrix = Matrix<16, 8 * kBoxBytes, 1>;
using ValueMatrix = Matrix<kBox, 8 * kBoxBytes, 1>;

// KV tiles of which some of the rows see some key, and those of which every row sees every key.
struct Spans {
  int visible_lo, visible_hi;
  int full_lo, full_hi;
};

// The place of a work item.
struct Place {
  int hk, b, row_block;
};

// A work item: rows of one KV head of a sequence, and the KV tiles that they see.
struct Work {
  int b, hk, row_start;
  int q_begin, k_begin, seqlen_q, seqlen_k;
  int tiles;  // -1: the sequence has no such rows
  Spans spans;
};

// A part of a work item: its tiles [first, end). It begins with KV chunk number `chunk` of the item's `chunks`.
struct Part : Work {
  int chunk, chunks;
  int list_begin;  // index of the item's first chunk in the list
  int first, end;
};

// The work item that a worker begins and others finish, and how many have a part of it; none: -1.
struct Begun {
  int item, parts;
};

// The next KV chunk, and the number of chunks left in this worker's range of the list.
struct Walk {
  Place place;
  int chunk, left;
};

extern __shared__ char shared_memory[];

template <typename Value>
__device__ __forceinline__ Value& shared_at(uint32_t address) {
  return *reinterpret_cast<Value*>(shared_memory + (address - kShared));
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) fwd_sm90a_mla_bf16_d576x512_causal_varlen_m64n64s2c2(
    const bf16* q_ptr,
    const __grid_constant__ TensorMap k_map,
    bf16* out_ptr, float* lse_ptr, float* partials_ptr, int* begun_ptr, uint32_t* counters_ptr,
    const int* cu_seqlens_q_ptr, const int* cu_seqlens_k_ptr, const int* seqused_k_ptr,
    long long stride_q_s, long long stride_q_h,
    long long stride_out_s, long long stride_out_h,
    int batch, int heads, int kv_heads, int group, int row_bits, int row_units, int split_tiles, int max_splits,
    int batch_reciprocal, int group_reciprocal, int row_units_reciprocal, int split_tiles_reciprocal,
    int max_seqlen_q, int max_seqlen_k, int total_q, int total_k,
    float softmax_scale,
    int write_lse, int has_seqused_k
) {
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // uniform across the warp, and the compiler knows
  const int lane = threadIdx.x % 32, warpgroup = warp / 4;
  // Blocks that hold the rows of a work item.
  const int blocks = cluster_size(), rank = cluster_rank(), item_rows = kRows << row_bits;
  // Lets the next launch start early, unless it may have clusters: these would crowd the part of the chip that is free first.
  // The launch that merges has none; it follows unless the call fixes the size of splits.
  if (blocks == 1 || split_tiles == 0) launch_dependents();
  const uint32_t here = mapped(kShared, rank) - kShared;  // barriers and copies take shared::cluster addresses

  if (threadIdx.x == 0) {
    if (static_cast<uint32_t>(__cvta_generic_to_shared(shared_memory)) != here + kShared) __trap();
    init_barriers(here + kValuesFull, 16, 1);  // a loader, and the bytes of the copy
    init_barriers(here + kValuesEmpty, 16, 8);  // each warp of a consumer, of both blocks of a cluster, or twice of a single block
    init_barriers(here + kMoreFull, 2, 1);  // a loader, and the bytes of the copy
    init_barriers(here + kMoreEmpty, 2, 8);  // each warp of a consumer, of both blocks of a cluster, or twice of a single block
    fence_barrier_init();
    prefetch_map(k_map);
  }
  if (blocks > 1) {
    sync_cluster();
  } else {
    __syncthreads();
  }
  wait_dependencies();  // nothing in global memory is read or written before

  // Work items in order: row blocks of a sequence, then sequences, then KV heads.
  const Divisor by_row_units(row_units, row_units_reciprocal), by_batch(batch, batch_reciprocal);
  const Divisor by_group(group, group_reciprocal);
  const auto place_of_item = [&](int item) {
    const int sequence = by_row_units.quotient(item), hk = by_batch.quotient(sequence);
    return Place{hk, sequence - hk * batch, item - sequence * row_units};
  };
  const auto advance = [&](Place& place) {
    if (++place.row_block < row_units) return;
    place.row_block = 0;
    if (++place.b < batch) return;
    place.b = 0;
    ++place.hk;
  };

  // The rows of a work item, and the keys that they see.
  const auto work_of = [&](const Place& place) {
    const int b = place.b, hk = place.hk, row_start = place.row_block * item_rows;
    const int q_begin = cu_seqlens_q_ptr[b], k_begin = cu_seqlens_k_ptr[b];
    const int seqlen_q = cu_seqlens_q_ptr[b + 1] - q_begin;
    const int seqlen_k = has_seqused_k ? seqused_k_ptr[b] : cu_seqlens_k_ptr[b + 1] - k_begin;
    if (row_start >= seqlen_q * group) return Work{.tiles = -1};  // a shorter sequence than the longest
    const int q_start = by_group.quotient(row_start);
    const int q_hi = min(by_group.quotient(row_start + item_rows - 1), seqlen_q - 1);
    const int whole_tiles = seqlen_k / kBlockN;
    const int q_pos_lo = q_start + (seqlen_k - seqlen_q);
    const int q_pos_hi = q_hi + (seqlen_k - seqlen_q);
    const int visible_hi = (max(q_pos_hi + 1, 0) + kBlockN - 1) / kBlockN;
    const int full_hi = min(max(q_pos_lo + 1, 0) / kBlockN, whole_tiles);
    const Spans spans = {0, visible_hi, 0, full_hi};
    return Work{b, hk, row_start, q_begin, k_begin, seqlen_q, seqlen_k, max(spans.visible_hi - spans.visible_lo, 0), spans};
  };
  // The KV tile that is number `number` of those that the rows see.
  const auto tile_of = [&](const Work& work, int number) {
    return work.spans.visible_lo + number;
  };

  // The list of KV chunks: single tiles, or splits of `split_tiles` tiles if the call fixes their size. Each thread counts the
  // chunks of some items.
  const bool listed_splits = split_tiles > 0;
  const Divisor by_split(split_tiles, split_tiles_reciprocal);
  const auto chunks_of = [&](int tiles) {
    if (tiles <= 0) return tiles + 1;  // an item that sees no key has one chunk, which writes its result
    return listed_splits ? by_split.quotient(tiles + split_tiles - 1) : tiles;
  };
  const int items = batch * kv_heads * row_units;
  const int items_of_thread = (items + kThreads - 1) / kThreads;
  const int item_first = min(threadIdx.x * items_of_thread, items), item_end = min(item_first + items_of_thread, items);
  const Place place_first = place_of_item(item_first);
  Count all = {0, items, 0}, before = {};
  Count own = {};
  Place place = place_first;
  for (int item = item_first; item < item_end; ++item) {
    const int tiles = work_of(place).tiles;
    own += Count{chunks_of(tiles), tiles >= 0, tiles};
    advance(place);
  }
  before = count_before(own, lane);
  if (lane == 31) shared_at<Count>(kCounts + sizeof(Count) * warp) = Count(before) += own;
  __syncthreads();
  all = {};
  for (int other = 0; other < kThreads / 32; ++other) {
    const Count of_warp = shared_at<Count>(kCounts + sizeof(Count) * other);
    if (other < warp) before += of_warp;
    all += of_warp;
  }

  // A worker is a block, or a cluster whose blocks have the rows of an item. With enough workers for all items, each item is cut evenly among its own
  // workers, unless some of these would have much more to do than others; else every worker takes an equal range of the list.
  const int worker = blockIdx.x / blocks, most_workers = gridDim.x / blocks;
  int workers = min(max((listed_splits ? all.chunks * split_tiles : all.chunks) / kLeastTiles, all.items), most_workers);
  int splits = 0;
  if (!listed_splits && all.items > 0 && all.items <= workers) {
    const int cuts = workers / all.items, share = all.chunks / workers;
    if (all.longest <= cuts * (share + max(kCutTiles, share <= kWholeTiles ? share / 16 : 0))) splits = cuts;
  }
  if (splits > 0) {
    workers = all.items * splits;
  } else if (!listed_splits && all.items > workers && all.chunks / workers <= kWholeTiles && all.chunks == all.items * all.longest) {
    // Equal items: if few blocks stay idle, each takes the same number of whole items, and no partial results are merged.
    const int items_each = (all.items + workers - 1) / workers, takers = all.items / items_each;
    if (takers * items_each == all.items && 16 * takers >= 15 * workers) workers = takers;
  }
  const EvenRanges ranges(splits > 0 ? workers : all.chunks, workers);
  const int range_begin = ranges.first(worker), range_end = ranges.first(worker + 1);
  const auto begun_of = [&](int worker) -> Begun& { return reinterpret_cast<Begun*>(begun_ptr)[worker]; };
  if (worker >= workers || range_begin == range_end) {
    if (threadIdx.x == 0 && rank == 0 && !listed_splits) begun_of(worker) = {-1, 0};
    return;
  }
  Walk begin;
  {
    int listed = splits > 0 ? before.items * splits : before.chunks;
    Place place = place_first;
    for (int item = item_first; item < item_end && listed <= range_begin; ++item) {
      const int tiles = work_of(place).tiles;
      const int chunks = splits > 0 ? (tiles < 0 ? 0 : splits) : chunks_of(tiles);
      if (range_begin < listed + chunks) shared_at<Walk>(kBegin) = {place, range_begin - listed, range_end - range_begin};
      listed += chunks;
      advance(place);
    }
  }
  __syncthreads();
  begin = shared_at<Walk>(kBegin);

  // Takes the next part of this worker's range; false if nothing is left.
  const auto take = [&](Walk& walk, Part& part) {
    if (walk.left == 0) return false;
    while ((static_cast<Work&>(part) = work_of(walk.place)).tiles < 0) {
      advance(walk.place);
      if (walk.place.hk == kv_heads) return false;
    }
    part.chunk = walk.chunk;
    part.list_begin = range_end - walk.left - walk.chunk;
    if (splits > 0) {  // the range is one of `splits` equal parts of an item; a short item has fewer parts
      const EvenRanges tiles(part.tiles, splits);
      part.chunks = max(min(part.tiles, splits), 1);
      part.first = tiles.first(walk.chunk);
      part.end = tiles.first(walk.chunk + 1);
      walk.left = 0;
      return walk.chunk < part.chunks;
    }
    part.chunks = chunks_of(part.tiles);
    const int taken = listed_splits ? 1 : min(part.chunks - walk.chunk, walk.left);
    const int chunk_tiles = listed_splits ? split_tiles : 1;
    part.first = walk.chunk * chunk_tiles;
    part.end = min((walk.chunk + taken) * chunk_tiles, part.tiles);
    walk.left -= taken;
    walk.chunk += taken;
    if (walk.chunk == part.chunks) {
      walk.chunk = 0;
      advance(walk.place);
    }
    return true;
  };

  if (warpgroup == kConsumers) {
    shrink_registers<kProducerRegisters>();
    // Four warps load: each copies one half of the values of every other tile, once both consumers have released the stages. Of
    // the two loaders of a tile, the one of the other consumer's half also copies the columns that only S needs.
    const int half = (warp - kFirstLoader) % kConsumers, consumer = (warp - kFirstLoader) / kConsumers;
    const bool read_once = row_units == 1;  // keys are read by one work item only, so that L2 need not keep them
    int round = 0;  // tiles so far
    Walk walk = begin;
    Part part;
    while (__any_sync(~0u, take(walk, part))) {
      for (int number = part.first + consumer; __any_sync(~0u, number < part.end); number += kTiles) {
        const int key = tile_of(part, number) * kBlockN;
        const uint32_t phase = round++ & 1;
        // Copies boxes of columns of a tile to consecutive stages of a ring. Each block of a cluster copies every other box, to both.
        const auto load = [&](auto boxes, auto ring, uint32_t to, int first_column) {
          constexpr int kBoxes = boxes.kValue;
          const uint32_t first = here + to + ring.stage * kBox, first_full = ring.full();
          ring.stage += lane & kBoxes - 1;  // each lane waits for one stage
          ring.acquire();
          if (lane < kBoxes) ring.arrive_expecting(kBox);
          __syncwarp();
          const int first_box = blocks == 1 ? 0 : kBoxes > 1 ? rank : consumer ^ rank;
          const auto copy = [&](auto step, const auto& copy_box) {
            constexpr int kStep = step.kValue;
            {
              constexpr uint32_t before = 0;
              if (lane == 0) {
#pragma unroll
                for (int i = 0; i < kBoxes; i += kStep) {
                  const int box = i + first_box, column = first_column + box * kBoxColumns;
                  if (box < kBoxes) copy_box(first + box * kBox + before, first_full + 8 * box, column, part.hk, part.k_begin + key);
                }
              }
              __syncwarp();
            }
          };
          if (blocks > 1) {
            copy(Constant<2>(), [&](uint32_t to, uint32_t full, auto... at) { load_box_to(3, to, k_map, full, at...); });
          } else if (read_once) {
            copy(Constant<1>(), [&](uint32_t to, uint32_t full, auto... at) { load_box_once(to, k_map, full, at...); });
          } else {
            copy(Constant<1>(), [&](uint32_t to, uint32_t full, auto... at) { load_box(to, k_map, full, at...); });
          }
        };
        if (half != consumer) {
          load(Constant<1>(), MoreRing(consumer, phase, here), kMore, kHeadDimV);
        }
        load(Constant<kHalfBoxes>(), ValuesRing(box_of(half, consumer, 0), phase, here), kValues, half * kHalf);
      }
    }
  } else {
    grow_registers<kConsumerRegisters>();
    const auto consume = [&](auto consumer) {
      constexpr int half = consumer.half;  // a constant, so that descriptors of products are constants, too
      const int group_thread = threadIdx.x % 128;
      const int own_row = 16 * (warp % 4) + lane / 4;  // of the block's; the other one of a lane is 8 rows below
      const auto place_of = [&](int half, int stage, int box) { return kValues + box_of(half, stage, box) * kBox; };
      const auto sync_consumers = [] { named_sync(Named::kConsumers, 0, 128 * kConsumers); };

      int round = 0;  // tiles of this consumer so far, all of them in stage `half`
      Begun begun = {-1, 0};
      Walk walk = begin;
      Part part;
      while (__any_sync(~0u, take(walk, part))) {
        const Work& work = part;
        const int first_row = kRows * rank;  // of the block's, among those of the item
        const int rows = min(work.seqlen_q * group - work.row_start - first_row, kRows);  // of the block's that exist

        // The two rows of a lane. Q goes to shared memory, except for the columns that only S needs, which stay in registers.
        int query[2], head[2];
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          const int packed = work.row_start + first_row + own_row + 8 * row;
          query[row] = by_group.quotient(packed);
          head[row] = work.hk * group + by_group.remainder(packed);
        }
        // Q of a row; those that do not exist repeat the last one.
        const auto row_of_q = [&](int row) {
          const int packed = work.row_start + first_row + min(row, rows - 1), q = by_group.quotient(packed);
          const int h = work.hk * group + by_group.remainder(packed);
          return (q_ptr + (work.q_begin + q) * stride_q_s + h * stride_q_h);
        };
        uint32_t q_more[kMoreBoxes * kBoxColumns / 4];  // these columns, as the A operand of wgmma
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          const uint32_t* const from = reinterpret_cast<const uint32_t*>(row_of_q(own_row + 8 * row) + kHeadDimV) + lane % 4;
#pragma unroll
          for (int column = 0; column < kMoreBoxes * kBoxColumns; column += 8) q_more[column / 4 + row] = from[column / 2];
        }
        // Four threads copy a row, 64 bytes at a time.
        {
          const int row = threadIdx.x / 4, part_of_four = threadIdx.x % 4;
          constexpr int kCopies = kHeadDimV / kBoxColumns;  // a box of the row each, in two parts
          static_assert(4 * kRows == 128 * kConsumers && kBoxBytes == 2 * 64);
          const int4* const from = reinterpret_cast<const int4*>(row_of_q(row)) + part_of_four;
          int4 chunks[2 * kCopies];  // all are loaded before any is stored, so that latencies overlap
#pragma unroll
          for (int i = 0; i < 2 * kCopies; ++i) chunks[i] = from[4 * i];
#pragma unroll
          for (int i = 0; i < 2 * kCopies; ++i) {
            const int chunk = i % 2 * 4 + part_of_four;
            shared_at<int4>(kQ + i / 2 * kBox + row * kBoxBytes + 16 * (chunk ^ (row % 8))) = chunks[i];
          }
        }
        fence_async_proxy();
        sync_consumers();
        const int seqlen_q = work.seqlen_q;
        const int seqlen_k = work.seqlen_k;
        const float scale_log2e = softmax_scale * kLog2e;

        // Half of the columns of O, the running max of each row, and the row sums of this consumer's tiles.
        float acc[kHalf / 2] = {};
        float row_max[2] = {kUnseen, kUnseen}, row_sum[2] = {};
        const int tiles = part.end - part.first;

        // Takes over the row max that the other consumer has published with P of its tile.
        const auto take_row_max = [&] {
          named_sync(Named::kPublished, 1 - half, 128 * kConsumers);
          const float raised[2] = {shared_at<float>(kRowMax + 4 * own_row), shared_at<float>(kRowMax + 4 * own_row + 4 * 8)};
          if (__any_sync(~0u, raised[0] > row_max[0] || raised[1] > row_max[1])) {
            float alpha[2];
            raise_row_max(raised, row_max, alpha);
            rescale(acc, alpha);
            row_sum[0] *= alpha[0];
            row_sum[1] *= alpha[1];
          }
        };
        const auto release_half = [&](int stage) { release_stages<kHalfBits>(ValuesRing::empty_of(box_of(half, stage, 0)), blocks, lane); };
        // Issues O += P V of the other consumer's tile.
        const auto issue_other = [&] {
          const RowMatrix p(kP + (1 - half) * kBox);
          const ValueMatrix v(place_of(half, 1 - half, 0));
          fence_registers(acc);
          fence_products();
#pragma unroll
          for (int key = 0; key < kBlockN; key += kMmaK) {
            Product<Element, kHalf>::template ss<1>(acc, p.at(key * sizeof(Element)), v.at(key * kBoxBytes), 1);
          }
          commit_products();
        };

        // Finishes the other consumer's tile of a step, if there is one: waits for its P, adds P V to O, and releases its columns.
        const auto finish_other = [&](int step) {
          if (!__any_sync(~0u, step < tiles)) return;
          take_row_max();
          issue_other();
          wait_products<0>();
          fence_registers(acc);
          release_half(1 - half);
        };

        for (int step = half; __any_sync(~0u, step < tiles); step += kConsumers) {
          const int tile = tile_of(work, part.first + step), phase = round++ & 1;

          // S = Q K^T
          float s[kBlockN / 2];
          int accumulate = 0;
          const auto multiply_box = [&](uint32_t q_box, uint32_t k_box) {
            const RowMatrix q(q_box), k(k_box);
            fence_products();  // the wait before may have moved S
#pragma unroll
            for (int column = 0; column < kBoxColumns; column += kMmaK) {
              Product<Element, kBlockN>::template ss<0>(s, q.at(column * sizeof(Element)), k.at(column * sizeof(Element)), accumulate);
              accumulate = 1;
            }
          };
          MoreRing(half, phase, here).wait();
          {
            const RowMatrix k(kMore + half * kBox);
            fence_products();
#pragma unroll
            for (int column = 0; column < kBoxColumns; column += kMmaK) {
              Product<Element, kBlockN>::template rs<0>(s, q_more + column / 4, k.at(column * sizeof(Element)), accumulate);
              accumulate = 1;
            }
          }
#pragma unroll
          for (int i = 0; i < 2 * kHalfBoxes; ++i) {  // its own half first
            const int of = i < kHalfBoxes ? half : 1 - half, box = i % kHalfBoxes;
            ValuesRing(box_of(of, half, box), phase, here).wait();
            multiply_box(kQ + (of * kHalfBoxes + box) * kBox, place_of(of, half, box));
          }
          commit_products();
          wait_products<0>();
          fence_registers(s);
          release_stages<0>(MoreRing::empty_of(half), blocks, lane);
          if constexpr (half == 1) {  // the tile before is the other one's
            take_row_max();
            issue_other();
          }
          const int left = work.seqlen_k - tile * kBlockN;
          if (left < kBlockN) {  // V after the end may be NaN, and 0 * NaN is NaN
            for (int i = max(left, 0) * kBoxBytes + 16 * group_thread; i < static_cast<int>(kBox); i += 128 * 16) {
#pragma unroll
              for (int box = 0; box < kHalfBoxes; ++box) {
                shared_at<int4>(place_of(0, half, box) + i) = {};
                shared_at<int4>(place_of(1, half, box) + i) = {};
              }
            }
            fence_async_proxy();
            named_sync(Named::kZeroed, half, 128);
          }
          const int kv_first = tile * kBlockN + 2 * (lane % 4);
          if (__any_sync(~0u, !(tile >= work.spans.full_lo && tile < work.spans.full_hi))) {
            struct Row {
              int visible_to;
            };
            Row rows[2];
#pragma unroll
            for (int row = 0; row < 2; ++row) {
              const int q_row = min(query[row], seqlen_q - 1);  // rows after the end repeat the last one
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

          // P = exp2(S * scale - row_max)
          float maximum[2], alpha[2];
          find_maximum(s, scale_log2e, maximum);
          const bool kept[2] = {maximum[0] <= row_max[0] + kRaiseAbove, maximum[1] <= row_max[1] + kRaiseAbove};
          const bool raised = __any_sync(~0u, !(kept[0] && kept[1]));
          if (raised) {
            keep_row_max(kept, row_max, maximum);
            raise_row_max(maximum, row_max, alpha);
            row_sum[0] *= alpha[0];
            row_sum[1] *= alpha[1];
          }
          uint32_t p[kBlockN / 4];
          exponentiate<Element>(s, scale_log2e, row_max, p, row_sum);
          // The other consumer has multiplied what is in this buffer, P of two tiles ago: it released the stage of that tile after
          // the product, and this tile has been loaded to the same stage since.
#pragma unroll
          for (int column = 0; column < kBlockN; column += kMmaK) {
            const int row = 16 * (warp % 4) + lane % 16, chunk = column / 8 + lane / 16;
            const uint32_t* const of_column = p + column / 4;
            store_blocks(here + kP + half * kBox + row * kBoxBytes + 16 * (chunk ^ (row % 8)), of_column[0], of_column[1], of_column[2], of_column[3]);
          }
          if (lane % 4 == 0) {
            shared_at<float>(kRowMax + 4 * own_row) = row_max[0];
            shared_at<float>(kRowMax + 4 * own_row + 4 * 8) = row_max[1];
          }
          fence_async_proxy();
          named_arrive(Named::kPublished, half, 128 * kConsumers);

          // O += P V
          wait_products<0>();  // on all paths, or ptxas takes O for unfinished below
          fence_registers(acc);
          if constexpr (half == 1) release_half(1 - half);
          if (raised) rescale(acc, alpha);
          {
            const ValueMatrix v(place_of(half, half, 0));
            fence_registers(acc);
            fence_products();
#pragma unroll
            for (int key = 0; key < kBlockN; key += kMmaK) {
              Product<Element, kHalf>::template rs<1>(acc, p + key / 4, v.at(key * kBoxBytes), 1);
            }
            commit_products();
          }
          wait_products<0>();
          fence_registers(acc);
          release_half(half);
          if constexpr (half == 0) finish_other(step + 1);  // before S of the next tile, which waits for its keys
        }
        if constexpr (half == 1) {
          if (tiles % kConsumers == 1) finish_other(tiles - 1);
        }
        // Adds up the row sums of both consumers. After the barrier, all products that read Q are done, too.
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          row_sum[row] += __shfl_xor_sync(~0u, row_sum[row], 1);
          row_sum[row] += __shfl_xor_sync(~0u, row_sum[row], 2);
          if (lane % 4 == 0) shared_at<float>(kSums + 4 * (half * kRows + own_row + 8 * row)) = row_sum[row];
        }
        sync_consumers();
#pragma unroll
        for (int row = 0; row < 2; ++row) row_sum[row] += shared_at<float>(kSums + 4 * ((1 - half) * kRows + own_row + 8 * row));

        if (part.end - part.first == part.tiles) {
          float normalize[2];
#pragma unroll
          for (int row = 0; row < 2; ++row) {
            const int q = query[row], h = head[row];
            float sum = row_sum[row];
            normalize[row] = sum == 0.0f ? 0.0f : __frcp_rn(sum);
            if (write_lse && half == 0 && lane % 4 == 0 && own_row + 8 * row < rows) lse_ptr[h * static_cast<long long>(total_q) + work.q_begin + q] = log_sum_exp(row_max[row], sum);
          }
          rescale(acc, normalize);
          // Each lane of a quad writes 16 bytes of a row, 64 in all.
#pragma unroll
          for (int row = 0; row < 2; ++row) {
            const int q = query[row], h = head[row];
            OutElement* const to = (out_ptr + (work.q_begin + q) * stride_out_s + h * stride_out_h) + kHalf * half + 8 * (lane % 4);
#pragma unroll
            for (int column = 0; column < kHalf; column += 32) {
              uint32_t two_columns[4];
#pragma unroll
              for (int block = 0; block < 4; ++block) {
                const int i = column / 2 + 4 * block + 2 * row;
                two_columns[block] = pack<OutElement>(acc[i], acc[i + 1]);
              }
              gather_block(two_columns);
              if (own_row + 8 * row < rows) {
                *reinterpret_cast<uint4*>(to + column) = {two_columns[0], two_columns[1], two_columns[2], two_columns[3]};
              }
            }
          }
        } else {  // other blocks have the rest of the keys: a second launch merges, or, with splits of a fixed size, the last block
          const int first_worker = listed_splits ? 0 : ranges.worker_of(part.list_begin);
          const int parts = listed_splits ? part.chunks : ranges.worker_of(part.list_begin + part.chunks - 1) - first_worker + 1;
          const int item = (part.hk * batch + part.b) * row_units + (part.row_start / kRows >> row_bits);
          // A split has one slot; a worker has two: for an item that another worker begins, and for one that it begins.
          const auto of_worker = [&](int number) {
            const int slot = listed_splits ? item * max_splits + number : 2 * (first_worker + number) + (number == 0);
            return partials_ptr + (slot * static_cast<long long>(item_rows) + first_row) * Partial::kFloats;
          };
          store_half<kHeadDimV>(
              of_worker(listed_splits ? part.chunk : worker - first_worker), own_row, rows, kHalf * half, lane, acc, row_max, row_sum);
          if (!listed_splits) {
            if (worker == first_worker) begun = {item, parts};
            continue;
          }
          sync_consumers();
          if (threadIdx.x == 0) {
            uint32_t* const counter = counters_ptr + item * blocks + rank;
            const bool last = arrive_counted(counter) == parts - 1;
            if (last) *counter = 0;  // as the next launch expects it
            shared_at<int>(kLast) = last;
          }
          sync_consumers();
          if (shared_at<int>(kLast)) {
            const auto write = [&](Partial sum, int of_block, int column) {
              const int row = first_row + of_block;
              const int packed = work.row_start + row, q = by_group.quotient(packed), h = work.hk * group + by_group.remainder(packed);
              const float normalize = sum.sum == 0.0f ? 0.0f : __frcp_rn(sum.sum);
              OutElement* const to = (out_ptr + (work.q_begin + q) * stride_out_s + h * stride_out_h);
              const uint2 four = {
                  pack<OutElement>(sum.acc.x * normalize, sum.acc.y * normalize), pack<OutElement>(sum.acc.z * normalize, sum.acc.w * normalize)};
              *reinterpret_cast<uint2*>(to + column) = four;
              if (write_lse && column == 0) lse_ptr[h * static_cast<long long>(total_q) + work.q_begin + q] = log_sum_exp(sum.row_max, sum.sum);
            };
            for (int i = threadIdx.x; i < rows * (kHeadDimV / 4); i += 128 * kConsumers) {
              const int row = i / (kHeadDimV / 4), column = i % (kHeadDimV / 4) * 4;
              write(Partial::added(parts, column, Partial::kOfWarp, [&](int number) { return of_worker(number) + row * Partial::kFloats; }), row, column);
            }
          }
        }
      }
      if (threadIdx.x == 0 && rank == 0 && !listed_splits) begun_of(worker) = begun;
      if (blocks > 1) leave_cluster();  // once the other block has released what this one copies
    };
    if (warpgroup == 0) {
      consume(Consumer<0>());
    } else {
      consume(Consumer<1>());
    }
  }
}

// Merges the partial results of work items that several workers have parts of. kRowThreads threads have a row, four columns
// each; the grid has rows for the item that each worker may have begun.
extern "C" __global__ void __launch_bounds__(kMergedRows * kRowThreads) fwd_sm90a_mla_bf16_d576x512_causal_varlen_m64n64s2c2_merge(
    const bf16* q_ptr,
    const __grid_constant__ TensorMap k_map,
    bf16* out_ptr, float* lse_ptr, float* partials_ptr, int* begun_ptr, uint32_t* counters_ptr,
    const int* cu_seqlens_q_ptr, const int* cu_seqlens_k_ptr, const int* seqused_k_ptr,
    long long stride_q_s, long long stride_q_h,
    long long stride_out_s, long long stride_out_h,
    int batch, int heads, int kv_heads, int group, int row_bits, int row_units, int split_tiles, int max_splits,
    int batch_reciprocal, int group_reciprocal, int row_units_reciprocal, int split_tiles_reciprocal,
    int max_seqlen_q, int max_seqlen_k, int total_q, int total_k,
    float softmax_scale,
    int write_lse, int has_seqused_k
) {
  launch_dependents();
  const int item_rows = kRows << row_bits;
  wait_dependencies();
  const int number = blockIdx.x * kMergedRows + threadIdx.x / kRowThreads, worker = number / item_rows;
  const int row = number % item_rows, column = threadIdx.x % kRowThreads * 4;
  const Begun begun = reinterpret_cast<const Begun*>(begun_ptr)[worker];
  if (begun.item < 0) return;
  // Work items in order: row blocks of a sequence, then sequences, then KV heads.
  const Divisor by_row_units(row_units, row_units_reciprocal), by_batch(batch, batch_reciprocal);
  const Divisor by_group(group, group_reciprocal);
  const auto place_of_item = [&](int item) {
    const int sequence = by_row_units.quotient(item), hk = by_batch.quotient(sequence);
    return Place{hk, sequence - hk * batch, item - sequence * row_units};
  };
  const auto advance = [&](Place& place) {
    if (++place.row_block < row_units) return;
    place.row_block = 0;
    if (++place.b < batch) return;
    place.b = 0;
    ++place.hk;
  };

  // The rows of a work item, and the keys that they see.
  const auto work_of = [&](const Place& place) {
    const int b = place.b, hk = place.hk, row_start = place.row_block * item_rows;
    const int q_begin = cu_seqlens_q_ptr[b], k_begin = cu_seqlens_k_ptr[b];
    const int seqlen_q = cu_seqlens_q_ptr[b + 1] - q_begin;
    const int seqlen_k = has_seqused_k ? seqused_k_ptr[b] : cu_seqlens_k_ptr[b + 1] - k_begin;
    if (row_start >= seqlen_q * group) return Work{.tiles = -1};  // a shorter sequence than the longest
    const int q_start = by_group.quotient(row_start);
    const int q_hi = min(by_group.quotient(row_start + item_rows - 1), seqlen_q - 1);
    const int whole_tiles = seqlen_k / kBlockN;
    const int q_pos_lo = q_start + (seqlen_k - seqlen_q);
    const int q_pos_hi = q_hi + (seqlen_k - seqlen_q);
    const int visible_hi = (max(q_pos_hi + 1, 0) + kBlockN - 1) / kBlockN;
    const int full_hi = min(max(q_pos_lo + 1, 0) / kBlockN, whole_tiles);
    const Spans spans = {0, visible_hi, 0, full_hi};
    return Work{b, hk, row_start, q_begin, k_begin, seqlen_q, seqlen_k, max(spans.visible_hi - spans.visible_lo, 0), spans};
  };
  // The KV tile that is number `number` of those that the rows see.
  const auto tile_of = [&](const Work& work, int number) {
    return work.spans.visible_lo + number;
  };

  // The list of KV chunks: single tiles, or splits of `split_tiles` tiles if the call fixes their size. Each thread counts the
  // chunks of some items.
  const bool listed_splits = split_tiles > 0;
  const Divisor by_split(split_tiles, split_tiles_reciprocal);
  const auto chunks_of = [&](int tiles) {
    if (tiles <= 0) return tiles + 1;  // an item that sees no key has one chunk, which writes its result
    return listed_splits ? by_split.quotient(tiles + split_tiles - 1) : tiles;
  };
  const int items = batch * kv_heads * row_units;
  const int items_of_thread = (items + kThreads - 1) / kThreads;
  const int item_first = min(threadIdx.x * items_of_thread, items), item_end = min(item_first + items_of_thread, items);
  const Place place_first = place_of_item(item_first);
  const Work work = work_of(place_of_item(begun.item));
  if (work.row_start + row >= work.seqlen_q * group) return;
  const auto of_worker = [&](int part) {
    const int slot = 2 * (worker + part) + (part == 0);
    return partials_ptr + (slot * static_cast<long long>(item_rows) + row) * Partial::kFloats;
  };
  Partial sum = Partial::added(begun.parts, column, Partial::kOfWarp, of_worker);
  const int packed = work.row_start + row, q = by_group.quotient(packed), h = work.hk * group + by_group.remainder(packed);
  const float normalize = sum.sum == 0.0f ? 0.0f : __frcp_rn(sum.sum);
  OutElement* const to = (out_ptr + (work.q_begin + q) * stride_out_s + h * stride_out_h);
  const uint2 four = {
      pack<OutElement>(sum.acc.x * normalize, sum.acc.y * normalize), pack<OutElement>(sum.acc.z * normalize, sum.acc.w * normalize)};
  *reinterpret_cast<uint2*>(to + column) = four;
  if (write_lse && column == 0) lse_ptr[h * static_cast<long long>(total_q) + work.q_begin + q] = log_sum_exp(sum.row_max, sum.sum);
}
