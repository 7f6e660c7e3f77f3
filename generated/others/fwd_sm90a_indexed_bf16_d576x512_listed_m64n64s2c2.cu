// fwd_sm90a_indexed_bf16_d576x512_listed_m64n64s2c2
//
// Attention forward, variant listed: mask `True`.
// Rendered by `attngen build tests/render/others.yaml`, schedule hopper_indexed.
//
// Each query has a list of keys, which all its heads share. A block has 64 heads of one query, or two blocks of a cluster have
// 128 of them, and goes through its list, 64 keys at a time. Four warps gather their rows, once for S and for O, since V is the
// first 512 columns of K.
//
// Two consumers hold half of the columns of O each, and compute S = Q K^T and P of every other tile. Each multiplies its own P
// from registers, and the other consumer's P from shared memory:
//
//   consumer 0:  S0      P0        O += P0 V0               O += P1 V1   S2
//   consumer 1:      S1      O += P0 V0 | P1   O += P1 V1            S3
//
// With up to 32 heads, both products are transposed instead, and each consumer has all columns of O for every other tile.
//
// An entry that names no key of the sequence is never followed: its row arrives as zeros, and its logits are -inf.
//
// The tiles of all lists are one list, of which blocks (or clusters) take equal ranges. Where a range ends inside a work item,
// partial results stay in global memory, and a second launch merges them.
#include "cluster.cuh"
#include "copy.cuh"
#include "divisor.cuh"
#include "few_heads.cuh"
#include "gather.cuh"
#include "pair.cuh"
#include "pdl.cuh"
#include "quad.cuh"
#include "ring.cuh"
#include "softmax.cuh"
#include "split.cuh"
#include "tma.cuh"
#include "wgmma.cuh"
#include "work_list.cuh"

using Element = bf16;  // of Q, K and P
using OutElement = bf16;  // of O

constexpr int kRows = 64;    // query rows of a block
constexpr int kBlockN = 64;  // keys of a step
constexpr int kHeadDimQk = 576;
constexpr int kHeadDimV = 512;  // the first columns of K
constexpr int kConsumers = 2;  // warpgroups that multiply
constexpr int kThreads = 384;
constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;
constexpr int kMmaK = Product<Element, kBlockN>::kK;  // K of one wgmma: the elements that it sums over

// Columns come in boxes of 128 bytes: those of V of each consumer, then those that V lacks.
constexpr int kBoxBytes = 128, kBoxColumns = kBoxBytes / sizeof(Element);
constexpr int kHalf = kHeadDimV / 2;                               // columns of O of a consumer
constexpr int kHalfBoxes = kHalf / kBoxColumns;
constexpr int kMoreBoxes = (kHeadDimQk - kHeadDimV) / kBoxColumns;
constexpr int kTiles = 2;                           // in flight
constexpr uint32_t kBox = kBlockN * kBoxBytes;  // bytes of a box of a tile
static_assert(kMoreBoxes <= 1);
static_assert(kRows == kBlockN);  // so that boxes of Q and P have as many bytes

constexpr float kRaiseAbove = 8.0f;  // growth of the running max, in units of log2, at which the row max follows

// Limits by which workers cut the list of work, in tiles of keys; the host computes with the same.
struct Limits {
  static constexpr int kLeastTiles = 2;  // of a worker at least; with fewer, fewer workers have any
  static constexpr int kCutTiles = 2;  // how many more than an equal share a worker may have, if it then works on one work item only
  static constexpr int kWholeTiles = 64;  // of a worker: with more, idle workers cost more than merging
  static constexpr int kOneOf = 16;  // one of so many: tiles more than an equal share, and workers that are idle
};
using Division = Exact;
using Cutting = CutBy<Limits, Division>;
// The regions of shared memory that hold where a range begins, and what each warp has counted.
static_assert(sizeof(Walk) <= 24);
static_assert(kThreads / 32 * sizeof(Count) <= 144);
using Partial = PartialRow<kHeadDimV>;
constexpr int kMergedRows = 4, kRowThreads = kHeadDimV / 4;  // of a block that merges, and the threads of a row
// Shared memory. Addresses are constants, so that they cost no instruction; the kernel checks where it begins.
constexpr uint32_t kShared = 1024;
constexpr uint32_t kQ = kShared + 0;  // 73728 B: Q
constexpr uint32_t kValues = kShared + 73728;  // 131072 B: the columns of K that are V, half of them per stage
constexpr uint32_t kMore = kShared + 204800;  // 16384 B: the columns of K that only S needs
constexpr uint32_t kP = kShared + 221184;  // 8192 B: P of a tile, for the other consumer
constexpr uint32_t kRowMax = kShared + 229376;  // 256 B: the row max of this P
constexpr uint32_t kSums = kShared + 229632;  // 512 B: row sums of both consumers
constexpr uint32_t kKeys = kShared + 230144;  // 512 B: entries of the list, or which rows exist
constexpr uint32_t kQFull = kShared + 230656;  // 8 B: barriers
constexpr uint32_t kQEmpty = kShared + 230664;  // 8 B: barriers
constexpr uint32_t kValuesFull = kShared + 230672;  // 32 B: barriers
constexpr uint32_t kValuesEmpty = kShared + 230704;  // 32 B: barriers
constexpr uint32_t kMoreFull = kShared + 230736;  // 16 B: barriers
constexpr uint32_t kMoreEmpty = kShared + 230752;  // 16 B: barriers
constexpr uint32_t kBegin = kShared + 230768;  // 24 B: where the worker's range of the list begins
constexpr uint32_t kParts = kShared + 230792;  // 256 B: two parts of work items: one that consumers work on, and the next
constexpr uint32_t kLast = kShared + 231048;  // 8 B: whether this block is the last of its item
constexpr uint32_t kCounts = kShared + 231056;  // 144 B: chunks and items that each warp has counted

// Rings: who fills the stages -> who empties them.
using QRing = Ring<kQFull, kQEmpty, 1>;  // the loaders -> both consumers
using ValuesRing = Ring<kValuesFull, kValuesEmpty, 4>;  // the loaders -> both consumers
using MoreRing = Ring<kMoreFull, kMoreEmpty, 2>;  // the loaders -> the consumer of the tile

// Named barriers of the hardware; 0 is __syncthreads.
enum class Named {
  kConsumers = 1,  // 1 of them: row sums are there, or have been read
  kPublished = 2,  // 2 of them: P of a consumer's tile is in shared memory
  kMultiplied = 4,  // 2 of them: all warps of a consumer have computed S
};

// The consumer of one half of the columns of O, and of every other tile.
template <int kHalfOfColumns>
struct Consumer {
  static constexpr int half = kHalfOfColumns;
};

// A number of boxes of columns, as a type that a generic lambda can use as a constant.
template <int kNumber>
struct Boxes {
  static constexpr int kCount = kNumber;
};

// Stage of half of the values of a tile: first the half of consumer 0 of both tiles in flight, then that of consumer 1.
__device__ __forceinline__ int stage_of(int half, int tile) { return kTiles * half + tile; }
static_assert(ValuesRing::kStages == kConsumers * kTiles);

constexpr int kFewRows = 32;  // of a work item whose products are transposed, at most
// Such an item leaves the other rows of each box of Q unused: consumers exchange values there.
__device__ constexpr uint32_t spare_of(int box) { return kQ + box * kBox + kFewRows * kBoxBytes; }
constexpr uint32_t kSharedSums = 4 * 4 * kFewRows;  // bytes of four warps' row maxima, after which their row sums lie
static_assert(2 * kFewRows <= kRows);

// Layouts of wgmma's operands: Q, P and, for S, K are K-major; for O, K is MN-major, since its rows are keys.
using RowMatrix = Matrix<16, 8 * kBoxBytes, 1>;
using ValueMatrix = Matrix<kBox, 8 * kBoxBytes, 1>;

// A work item: a query, heads of it that share a KV head, and the list of its keys.
struct Work {
  int b, hk, row_start;
  int seqlen_k;
  int rows_end;  // one after the last of the query's rows
  const int* list;
  int entries;  // of the list
  int tiles;  // of as many keys; -1: the sequence has no such rows
};

using Part = PartOf<Work>;

extern __shared__ char shared_memory[];

template <typename Value>
__device__ __forceinline__ Value& shared_at(uint32_t address) {
  return *reinterpret_cast<Value*>(shared_memory + (address - kShared));
}

// Parts of work items that loaders leave for the consumers: those with even numbers, and those with odd ones.
__device__ __forceinline__ Part& part_at(int number) {
  constexpr uint32_t kBytes = 128;
  static_assert(sizeof(Part) <= kBytes);
  return shared_at<Part>(kParts + kBytes * (number & 1));
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) fwd_sm90a_indexed_bf16_d576x512_listed_m64n64s2c2(
    const bf16* q_ptr, const bf16* k_ptr, bf16* out_ptr, float* lse_ptr, float* partials_ptr, int* begun_ptr,
    uint32_t* counters_ptr, const int* seqused_k_ptr, const int* indices_ptr,
    long long stride_q_b, long long stride_q_s, long long stride_q_h,
    long long stride_k_b, long long stride_k_s, long long stride_k_h,
    long long stride_out_b, long long stride_out_s, long long stride_out_h,
    long long stride_indices_0, long long stride_indices_1,
    int extent_indices_0, int extent_indices_1, int extent_indices_2,
    int batch, int heads, int kv_heads, int group, int query_rows, int row_bits, int row_units, int split_tiles,
    int max_splits, int batch_reciprocal, int query_rows_reciprocal, int row_units_reciprocal,
    int split_tiles_reciprocal, int seqlen_q, int max_seqlen_k, int total_q, int total_k,
    float softmax_scale,
    int write_lse, int has_seqused_k
) {
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // uniform across the warp, and the compiler knows
  const int lane = threadIdx.x % 32, warpgroup = warp / 4;
  // Blocks that hold the rows of a work item.
  const int item_rows = kRows << row_bits;
  const int blocks = cluster_size(), rank = cluster_rank();
  // Lets the next launch start early, unless it may have clusters: these would crowd the part of the chip that is free first.
  if (blocks == 1) launch_dependents();
  const uint32_t here = mapped(kShared, rank) - kShared;  // addresses of the block's own in its cluster
  if (threadIdx.x == 0 && static_cast<uint32_t>(__cvta_generic_to_shared(shared_memory)) != here + kShared) __trap();
  if (warp == 0) {
    init_barriers(here + kQFull, 1, 129, lane, 32);  // each thread of the loaders, when its copies have landed, and one that has left the part for the consumers
    init_barriers(here + kQEmpty, 1, 8, lane, 32);  // each warp of both consumers
    init_barriers(here + kValuesFull, 4, 128, lane, 32);  // each thread of the loaders, when its copies have landed
    init_barriers(here + kValuesEmpty, 4, 4, lane, 32);  // each warp of a consumer
    init_barriers(here + kMoreFull, 2, 128, lane, 32);  // each thread of the loaders, when its copies have landed
    init_barriers(here + kMoreEmpty, 2, 4, lane, 32);  // each warp of a consumer
    fence_barrier_init();
  }
  __syncthreads();
  wait_dependencies();  // nothing in global memory is read or written before
  // Work items in order: groups of heads of a query, then queries of a sequence, then sequences, then KV heads. Rows are numbered
  // as if each query had `query_rows` heads, a multiple of the rows of an item; rows beyond the `group` heads do not exist.
  const Divisor by_row_units(row_units, row_units_reciprocal), by_batch(batch, batch_reciprocal);
  const Divisor by_group(query_rows, query_rows_reciprocal);
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

  // The rows of a work item, and the entries of its query's list.
  const auto work_of = [&](const Place& place) {
    const int b = place.b, hk = place.hk, row_start = place.row_block * item_rows, q = by_group.quotient(row_start);
    const int seqlen_k = has_seqused_k ? seqused_k_ptr[b] : max_seqlen_k;
    if (q >= seqlen_q) return Work{.tiles = -1};  // a shorter sequence than the longest
    const int entries = extent_indices_2;
    const int* const list = indices_ptr + b * stride_indices_0 + q * stride_indices_1;
    return Work{b, hk, row_start, seqlen_k, q * query_rows + group, list, entries, (entries + kBlockN - 1) / kBlockN};
  };
  // The KV tile that is number `number` of those that the rows see.
  const auto tile_of = [&](const Work& work, int number) {
    return number;
  };

  const Chunks<true> chunks_of(split_tiles, split_tiles_reciprocal);
  const bool listed_splits = chunks_of.are_splits();
  const int items = batch * kv_heads * row_units;
  // A worker is a block, or the blocks that have the rows of an item.
  const int worker = blockIdx.x >> row_bits, most_workers = gridDim.x >> row_bits;
  int splits = 0, range_end = 0;
  EvenRanges ranges(0, 1);
  Walk begin = {};
  // Whether the second launch merges; else blocks do so.
  const bool by_launch = !listed_splits;
  const auto begun_of = [&](int worker) -> Begun& { return reinterpret_cast<Begun*>(begun_ptr)[worker]; };
  const OwnItems<kThreads, true> own_items(0, items, lane);
  const Place place_first = place_of_item(own_items.first);
  const Count own = count_items(own_items, place_first, chunks_of, work_of, advance);
  Count before = {};
  const auto count_at = [&](int warp) -> Count& { return shared_at<Count>(kCounts + sizeof(Count) * warp); };
  const Count all = own_items.by_warp ? count_of_warp(own) : count_of_block<kThreads / 32, 1>(own, warp, lane, count_at, before);
  const Cut cut = Cutting::of(all, split_tiles, most_workers);
  splits = cut.splits;
  ranges = Cutting::ranges(all, cut);
  const int range_begin = ranges.first(worker);
  range_end = ranges.first(worker + 1);
  if (worker >= cut.workers || range_begin == range_end) {
    if (threadIdx.x == 0 && rank == 0 && by_launch) begun_of(worker) = {-1, 0};
    return;
  }
  {
    if (own_items.by_warp) before = count_before(own, lane);
    const bool begins = find_begin(begin, range_begin, range_end, own_items, place_first, before, splits, chunks_of, work_of, advance);
    begin = own_items.by_warp ? begin_of_warp(begin, begins) : begin_of_block(begin, begins, shared_at<Walk>(kBegin));
  }
  // Takes the next part of this worker's range; false if nothing is left.
  const auto take = [&](Walk& walk, Part& part) {
    return take_part<Division>(walk, part, splits, range_end, kv_heads, chunks_of, work_of, advance);
  };

  if (warpgroup == kConsumers) {
    shrink_registers<kProducerRegisters>();
    // The loaders gather Q and the listed rows of K. Eight threads copy a row, 16 bytes each of every box of columns, and a thread
    // has four rows of a tile. Columns of K come in the order in which they are released, and the consumer of the tile needs them:
    // first its own half of V, then the other half, then those that only S needs, which come first where P does not take their place.
    constexpr int kLoaderThreads = kThreads - 128 * kConsumers, kRowThreads16 = kBoxBytes / 16;
    constexpr int kRowsAtOnce = kLoaderThreads / kRowThreads16, kRowsOfThread = kBlockN / kRowsAtOnce;
    static_assert(kRowsAtOnce % 8 == 0);  // so that all rows of a thread are swizzled alike
    const int thread = threadIdx.x - 128 * kConsumers, chunk = thread % kRowThreads16, first = thread / kRowThreads16;
    // Offset of the thread's first row in a box.
    const uint32_t place = here + first * kBoxBytes + 16 * swizzled<kBoxBytes>(first, chunk);
    int rounds[kTiles] = {};  // tiles of each consumer so far
    int items_taken = 0;
    const int q_rows = group <= kFewRows ? kFewRows : kRows;
    const bool more_first = group <= kFewRows;
    Walk walk = begin;
    Part part;
    while (__any_sync(~0u, take(walk, part))) {
      const Work& work = part;
      const int head_start = by_group.remainder(work.row_start) + kRows * rank, q = by_group.quotient(work.row_start);

      // Q
      QRing(0, items_taken++ & 1, here).acquire();
#pragma unroll 1
      for (int row = first; row < q_rows; row += kRowsAtOnce) {
        const bool exists = head_start + row < group;
        const int h = work.hk * group + (exists ? head_start + row : 0);
        const Element* const from = (q_ptr + work.b * stride_q_b + q * stride_q_s + h * stride_q_h) + 8 * chunk;
#pragma unroll
        for (int box = 0; box < 2 * kHalfBoxes + kMoreBoxes; ++box) {
          copy_async(kQ + box * kBox + (row - first) * kBoxBytes + place, from + box * kBoxColumns, exists);
        }
      }
      arrive_when_copied(here + QRing::full_of(0));
      if (thread == 0) {  // for the consumers
        part_at(items_taken - 1) = part;
        arrive(here + QRing::full_of(0));
      }

      // Reads the thread's entries of a tile, one tile before its rows are copied.
      const auto read_entries = [&](int number, int (&keys)[kRowsOfThread]) {
#pragma unroll
        for (int i = 0; i < kRowsOfThread; ++i) {
          const int entry = number * kBlockN + first + i * kRowsAtOnce;
          keys[i] = number < part.end && entry < work.entries ? __ldg(work.list + entry) : -1;
        }
      };
      const auto is_key = [&](int key) { return static_cast<uint32_t>(key) < static_cast<uint32_t>(work.seqlen_k); };
      int keys[kRowsOfThread];
      read_entries(part.first, keys);
      for (int number = part.first; __any_sync(~0u, number < part.end); ++number) {
        const int consumer = number - part.first & 1;
        const int phase = (consumer == 0 ? rounds[0]++ : rounds[1]++) & 1;
        const Element* rows[kRowsOfThread];
        bool exists[kRowsOfThread];
#pragma unroll
        for (int i = 0; i < kRowsOfThread; ++i) {
          exists[i] = is_key(keys[i]);
          rows[i] = k_ptr + work.b * stride_k_b + (exists[i] ? keys[i] : 0) * stride_k_s + work.hk * stride_k_h + 8 * chunk;
        }
        read_entries(number + 1, keys);
        // Copies boxes side by side, from a column on. All addresses are computed first: to overwrite the register of an address,
        // a thread would wait for the copy that reads it.
        const auto load_boxes = [&](auto boxes, uint32_t to, int column) {
          const Element* from[kRowsOfThread];
#pragma unroll
          for (int i = 0; i < kRowsOfThread; ++i) from[i] = kept_in_registers(rows[i] + column);
#pragma unroll
          for (int box = 0; box < boxes.kCount; ++box) {
#pragma unroll
            for (int i = 0; i < kRowsOfThread; ++i) {
              copy_async(to + (box * kBlockN + i * kRowsAtOnce) * kBoxBytes + place, from[i] + box * kBoxColumns, exists[i]);
            }
          }
        };
        const auto load_more = [&] {
          MoreRing(consumer, phase, here).acquire();
          load_boxes(Boxes<kMoreBoxes>(), kMore + consumer * kBox, kHeadDimV);
          arrive_when_copied(here + MoreRing::full_of(consumer));
        };
        if (more_first) load_more();
#pragma unroll
        for (int i = 0; i < kConsumers; ++i) {
          const int half = i == 0 ? consumer : 1 - consumer, stage = stage_of(half, consumer);
          ValuesRing(stage, phase, here).acquire();
          if (i == 0 && thread < kBlockN) {  // the entries themselves, for consumers
            const int entry = number * kBlockN + thread;
            if (entry < work.entries) copy_number_async(here + kKeys + 4 * (kBlockN * consumer + thread), work.list + entry);
          }
          load_boxes(Boxes<kHalfBoxes>(), kValues + stage * kHalfBoxes * kBox, half * kHalf);
          arrive_when_copied(here + ValuesRing::full_of(stage));
        }
        if (!more_first) load_more();
      }
    }
    // No more parts
    QRing(0, items_taken & 1, here).acquire();
    if (thread == 0) {
      part_at(items_taken).end = -1;
      arrive(here + QRing::full_of(0));
    }
    arrive(here + QRing::full_of(0));
  } else {
    grow_registers<kConsumerRegisters>();
    const auto consume = [&](auto consumer) {
      constexpr int half = consumer.half;  // a constant, so that descriptors of products are constants, too
      const int own_row = 16 * (warp % 4) + lane / 4;  // of the block's; the other one of a lane is 8 rows below
      const auto place_of = [&](int half, int stage, int box) { return kValues + (stage_of(half, stage) * kHalfBoxes + box) * kBox; };
      const auto sync_consumers = [] { named_sync(Named::kConsumers, 0, 128 * kConsumers); };
      const auto release = [&](uint32_t empty) {
        if (lane == 0) arrive(here + empty);
      };

      int round = 0;  // tiles of this consumer so far, all of them in stage `half`
      Begun begun = {-1, 0};
      int items_taken = 0;
      for (;;) {
        QRing(0, items_taken & 1, here).wait();
        fence_async_proxy();
        const Part part = part_at(items_taken++);
        if (__any_sync(~0u, part.end < 0)) break;
        const Work& work = part;
        const int first_row = kRows * rank;  // of the block's, among those of the item
        // Row sums of the item before have been read: each consumer has since published P of a tile, if both have one.
        if (__any_sync(~0u, part.end - part.first < kConsumers)) sync_consumers();
        const int seqlen_k = work.seqlen_k;
        const float scale_log2e = softmax_scale * kLog2e;
        // Half of the columns of O, the running max of each row, and the row sums of this consumer's tiles.
        float acc[kHalf / 2] = {};
        float row_max[2] = {kUnseen, kUnseen}, row_sum[2] = {};
        const int tiles = part.end - part.first;
        if (tiles <= half) release(QRing::empty_of(0));

        const auto multiply = [&](auto consumer) {
          constexpr int half = consumer.half;  // a constant, so that descriptors of products are constants, too
          constexpr int stage = half;  // of this consumer's tiles
          // Each consumer stores P in a place of its own: where the columns of its tile were that only S needs.
          constexpr uint32_t kOwnP = kMore + half * kBox, kOtherP = kOwnP + (1 - 2 * half) * kBox;

          // Takes over the row max that the other consumer has published with P of its tile.
          const auto take_row_max = [&] {
            named_sync(Named::kPublished, 1 - half, 128 * kConsumers);
            const float raised[2] = {shared_at<float>(kRowMax + 4 * own_row), shared_at<float>(kRowMax + 4 * own_row + 4 * 8)};
            if (__builtin_expect(__any_sync(~0u, raised[0] > row_max[0] || raised[1] > row_max[1]), 0)) {
              float alpha[2];
              raise_row_max(raised, row_max, alpha);
              rescale(acc, alpha);
              row_sum[0] *= alpha[0];
              row_sum[1] *= alpha[1];
            }
          };
          // Issues O += P V of the other consumer's tile.
          const auto issue_other = [&] {
            const RowMatrix p(kOtherP);
            const ValueMatrix v(place_of(half, 1 - half, 0));
            fence_registers(acc);
            fence_products();
#pragma unroll
            for (int key = 0; key < kBlockN; key += kMmaK) {
              Product<Element, kHalf>::template ss<1>(acc, p.at(key * sizeof(Element)), v.at(key * kBoxBytes), 1);
            }
            commit_products();
          };
          const auto release_half = [&](int stage) {
            release(ValuesRing::empty_of(stage_of(half, stage)));
            if (stage != half) release(MoreRing::empty_of(stage));  // the other consumer's P
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

          // S = Q K^T of this consumer's next tile, in two groups: the columns that its own half of O takes, then the others.
          float s[kBlockN / 2];
          const auto multiply_boxes = [&](auto boxes, uint32_t q_boxes, uint32_t k_boxes, bool more) {
            int accumulate = more;
#pragma unroll
            for (int box = 0; box < boxes.kCount; ++box) {
              const RowMatrix q(q_boxes + box * kBox), k(k_boxes + box * kBox);
              fence_products();  // the wait before may have moved S
#pragma unroll
              for (int column = 0; column < kBoxColumns; column += kMmaK) {
                Product<Element, kBlockN>::template ss<0>(s, q.at(column * sizeof(Element)), k.at(column * sizeof(Element)), accumulate);
                accumulate = 1;
              }
            }
          };
          const auto issue_half = [&](int of, int phase, bool more) {
            ValuesRing(stage_of(of, half), phase, here).wait();
            fence_async_proxy();  // the loaders' writes are ordinary ones
            multiply_boxes(Boxes<kHalfBoxes>(), kQ + of * kHalfBoxes * kBox, place_of(of, half, 0), more);
            commit_products();
          };
          const auto issue_own_columns = [&] { issue_half(half, round & 1, false); };
          const auto issue_other_columns = [&] {
            const int phase = round++ & 1;
            issue_half(1 - half, phase, true);
            MoreRing(half, phase, here).wait();
            fence_async_proxy();
            multiply_boxes(Boxes<kMoreBoxes>(), kQ + 2 * kHalfBoxes * kBox, kMore + half * kBox, true);
            commit_products();
          };
          // Waits for it; `step` is that of its tile.
          const auto finish_scores = [&](int step) {
            wait_products<0>();
            fence_registers(s);
            if (step + kConsumers >= tiles) release(QRing::empty_of(0));
          };

          // Whether every entry of a tile names a key, which is found while S is computed.
          bool listed = true;
          const auto find_listed = [&](int step) {
            const int tile = part.first + step;
            uint32_t largest = 0;
#pragma unroll
            for (int i = 0; i < kBlockN / 4; i += 2) {
              const int column = 4 * i + 2 * (lane % 4);
              const int2 two = shared_at<int2>(kKeys + 4 * (kBlockN * half + column));
              largest = max(largest, max(static_cast<uint32_t>(two.x), static_cast<uint32_t>(two.y)));
            }
            listed = largest < static_cast<uint32_t>(work.seqlen_k) && (tile + 1) * kBlockN <= work.entries;
          };
          if constexpr (half == 0) {
            if (__any_sync(~0u, tiles > 0)) {
              issue_own_columns();
              issue_other_columns();
              find_listed(0);
              finish_scores(0);
            }
          }
          for (int step = half; __any_sync(~0u, step < tiles); step += kConsumers) {
            const int tile = part.first + step;
            if constexpr (half == 1) {
              issue_own_columns();
              issue_other_columns();
              find_listed(step);
              finish_scores(step);
            }
            if constexpr (half == 1) {  // the tile before is the other one's
              take_row_max();
              issue_other();
            }
            // The keys of a lane's elements. An entry that names no key becomes seqlen_k, after the last key, which is masked.
            int keys[kBlockN / 4] = {};
            if (__any_sync(~0u, !listed)) {
#pragma unroll
              for (int i = 0; i < kBlockN / 4; i += 2) {
                const int column = 4 * i + 2 * (lane % 4), entry = tile * kBlockN + column;
                const int2 two = shared_at<int2>(kKeys + 4 * (kBlockN * stage + column));
                const auto key_of = [&](int key, int entry) {
                  return entry < work.entries && static_cast<uint32_t>(key) < static_cast<uint32_t>(work.seqlen_k) ? key : work.seqlen_k;
                };
                keys[i] = key_of(two.x, entry);
                keys[i + 1] = key_of(two.y, entry + 1);
              }
            }
            const int kv_first = 0;
            if (__any_sync(~0u, !listed)) {
              const int visible_to = seqlen_k - kv_first;
#pragma unroll
              for (int i = 0; i < kBlockN / 4; ++i) {
                const int key = keys[i];
#pragma unroll
                for (int row = 0; row < 2; ++row) {
                  float& x = s[4 * (i / 2) + 2 * row + i % 2];
                  if (key >= visible_to) x = kMasked;
                }
              }
            }

            // P = exp2(S * scale - row_max). A lane's own maxima say whether the row max must follow: no lane waits for others.
            float maximum[2], alpha[2];
            find_lane_maximum(s, scale_log2e, maximum);
            const bool kept[2] = {maximum[0] <= row_max[0] + kRaiseAbove, maximum[1] <= row_max[1] + kRaiseAbove};
            const bool raised = __any_sync(~0u, !(kept[0] && kept[1]));
            if (__builtin_expect(raised, 0)) {
              share_maximum(maximum);
              keep_row_max(kept, row_max, maximum);
              raise_row_max(maximum, row_max, alpha);
              row_sum[0] *= alpha[0];
              row_sum[1] *= alpha[1];
            }
            uint32_t p[kBlockN / 4];
            exponentiate<Element>(s, scale_log2e, row_max, p, row_sum);
            named_sync(Named::kMultiplied, half, 128);  // the columns in whose place P is stored
            const int p_row = 16 * (warp % 4) + lane % 16;
            const uint32_t p_start = here + kOwnP + p_row * kBoxBytes + 16 * (lane / 16 ^ p_row % 8);
#pragma unroll
            for (int column = 0; column < kBlockN; column += kMmaK) {
              const uint32_t* const of_column = p + column / 4;
              store_blocks(p_start ^ 2 * column, of_column[0], of_column[1], of_column[2], of_column[3]);
            }
            if (lane % 4 == 0) {
              shared_at<float>(kRowMax + 4 * own_row) = row_max[0];
              shared_at<float>(kRowMax + 4 * own_row + 4 * 8) = row_max[1];
            }
            fence_async_proxy();
            named_arrive(Named::kPublished, half, 128 * kConsumers);
            wait_products<0>();  // on all paths, or ptxas takes O for unfinished below
            fence_registers(acc);
            if constexpr (half == 1) release_half(1 - half);

            // O += P V
            if (__builtin_expect(raised, 0)) rescale(acc, alpha);
            {
              const ValueMatrix v(place_of(half, stage, 0));
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
            if constexpr (half == 0) {
              if (__any_sync(~0u, step + kConsumers < tiles)) {  // S of the next tile follows O += P V of the other's at once
                take_row_max();
                issue_other();
                issue_own_columns();
                wait_products<1>();
                fence_registers(acc);
                release_half(1 - half);
                issue_other_columns();
                find_listed(step + kConsumers);
                finish_scores(step + kConsumers);
              } else {
                finish_other(step + 1);
              }
            }
          }
          if constexpr (half == 1) {
            if (tiles % kConsumers == 1) finish_other(tiles - 1);
          }
        };
        multiply(consumer);
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

        {
          const Part part = part_at(items_taken - 1);  // read again, since S, P and O leave no registers to keep it
          const Work& work = part;
          const int rows = min(work.rows_end - work.row_start - first_row, kRows);  // of the block's that exist
          // The two rows of a lane.
          int query[2], head[2];
#pragma unroll
          for (int row = 0; row < 2; ++row) {
            const int packed = work.row_start + first_row + own_row + 8 * row;
            query[row] = by_group.quotient(packed);
            head[row] = work.hk * group + min(by_group.remainder(packed), group - 1);  // rows of no head read what the last one does
          }
          if (part.end - part.first == part.tiles) {
            float normalize[2];
#pragma unroll
            for (int row = 0; row < 2; ++row) {
              const int q = query[row], h = head[row];
              float sum = row_sum[row];
              normalize[row] = sum == 0.0f ? 0.0f : __frcp_rn(sum);
              if (write_lse && half == 0 && lane % 4 == 0 && own_row + 8 * row < rows) lse_ptr[(work.b * static_cast<long long>(heads) + h) * seqlen_q + q] = log_sum_exp(row_max[row], sum);
            }
            rescale(acc, normalize);
            // Each lane of a quad writes 16 bytes of a row, 64 in all.
#pragma unroll
            for (int row = 0; row < 2; ++row) {
              const int q = query[row], h = head[row];
              OutElement* const to = (out_ptr + work.b * stride_out_b + q * stride_out_s + h * stride_out_h) + kHalf * half + 8 * (lane % 4);
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
                  store_block(to + column, two_columns);
                }
              }
            }
          } else {  // other blocks have the rest of the keys: a second launch merges, or, with splits of a fixed size, the last block
            const int first_worker = listed_splits ? 0 : ranges.worker_of(part.list_begin);
            const int parts = listed_splits ? part.chunks : ranges.worker_of(part.list_begin + part.chunks - 1) - first_worker + 1;
            const int item = (part.hk * batch + part.b) * row_units + (part.row_start / kRows >> row_bits);
            const auto of_worker = [&](int number) {
              const int slot = listed_splits ? item * max_splits + number : slot_of_worker(first_worker, number);
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
                OutElement* const to = (out_ptr + work.b * stride_out_b + q * stride_out_s + h * stride_out_h);
                const uint2 four = {
                    pack<OutElement>(sum.acc.x * normalize, sum.acc.y * normalize), pack<OutElement>(sum.acc.z * normalize, sum.acc.w * normalize)};
                *reinterpret_cast<uint2*>(to + column) = four;
                if (write_lse && column == 0) lse_ptr[(work.b * static_cast<long long>(heads) + h) * seqlen_q + q] = log_sum_exp(sum.row_max, sum.sum);
              };
              for (int i = threadIdx.x; i < rows * (kHeadDimV / 4); i += 128 * kConsumers) {
                const int row = i / (kHeadDimV / 4), column = i % (kHeadDimV / 4) * 4;
                write(Partial::added(parts, column, Partial::kOfWarp, [&](int number) { return of_worker(number) + row * Partial::kFloats; }), row, column);
              }
            }
          }
        }
      }
      if (threadIdx.x == 0 && rank == 0 && !listed_splits) begun_of(worker) = begun;
    };
    const auto consume_few = [&](auto consumer) {
      constexpr int half = consumer.half, kHeads = consumer.heads;
      // Both products are transposed: S^T = K Q^T and O^T += V^T P^T, whose rows are keys, then columns of V, and whose columns are
      // heads. A consumer has all of O for every other tile; the two are merged at the end of a work item.
      const int own_key = 16 * (warp % 4) + lane / 4;  // of a tile, and column of a box of V; the other one of a lane is 8 on
      const int own_head = 2 * (lane % 4);             // and the next one, of each 8
      const int group_thread = threadIdx.x % 128;
      constexpr int kLaneHeads = kHeads / 4;
      const auto sync_consumers = [] { named_sync(Named::kConsumers, 0, 128 * kConsumers); };
      const auto sync_warpgroup = [&] { named_sync(Named::kPublished, half, 128); };
      // The number of a lane's head that an element of its accumulators belongs to, and that head.
      const auto number_of = [](int i) { return i / 4 * 2 + i % 2; };
      const auto head_of = [&](int number) { return 8 * (number / 2) + own_head + number % 2; };
      constexpr uint32_t kOwnP = kP + half * kFewRows * kBoxBytes;  // heads are rows, keys columns
      constexpr uint32_t kOwnSpare = spare_of(half * kHalfBoxes);
      const auto place_of = [&](int half, int stage, int box) { return kValues + (stage_of(half, stage) * kHalfBoxes + box) * kBox; };
      const auto release = [&](uint32_t empty) {
        if (lane == 0) arrive(here + empty);
      };
      const auto release_values = [&](int of) { release(ValuesRing::empty_of(stage_of(of, half))); };

      int round = 0;  // tiles of this consumer so far
      int items_taken = 0;
      Begun begun = {-1, 0};
      Walk walk = begin;
      Part part;
      while (__any_sync(~0u, take(walk, part))) {
        const Work& work = part;
        constexpr int first_row = 0;
        const int rows = work.rows_end - work.row_start;  // heads that exist
        sync_consumers();  // what the item before has exchanged has been read
        QRing(0, items_taken++ & 1, here).wait();
        fence_async_proxy();
        const int seqlen_k = work.seqlen_k;
        const float scale_log2e = softmax_scale * kLog2e;
        float acc[2 * kHalfBoxes][kHeads / 2] = {};
        float row_max[kLaneHeads], row_sum[kLaneHeads] = {};
#pragma unroll
        for (int number = 0; number < kLaneHeads; ++number) row_max[number] = kUnseen;
        const auto rescale_all = [&](const auto& alpha) {
#pragma unroll
          for (int box = 0; box < 2 * kHalfBoxes; ++box) {
#pragma unroll
            for (int i = 0; i < kHeads / 2; ++i) acc[box][i] *= alpha[number_of(i)];
          }
        };
        // Of values that each warp has of its heads, those of all warps of the consumer.
        const auto share = [&](uint32_t place, auto& of_head, auto combine) {
#pragma unroll
          for (int number = 0; number < kLaneHeads; ++number) {
#pragma unroll
            for (int lanes = 4; lanes <= 16; lanes *= 2) {
              of_head[number] = combine(of_head[number], __shfl_xor_sync(~0u, of_head[number], lanes));
            }
          }
          if (lane < 4) {
#pragma unroll
            for (int number = 0; number < kLaneHeads; number += 2) {
              shared_at<float2>(place + 4 * (kHeads * (warp % 4) + head_of(number))) = {of_head[number], of_head[number + 1]};
            }
          }
          sync_warpgroup();
#pragma unroll
          for (int number = 0; number < kLaneHeads; number += 2) {
            float2 all = shared_at<float2>(place + 4 * head_of(number));
#pragma unroll
            for (int other = 1; other < 4; ++other) {
              const float2 more = shared_at<float2>(place + 4 * (kHeads * other + head_of(number)));
              all = {combine(all.x, more.x), combine(all.y, more.y)};
            }
            of_head[number] = all.x;
            of_head[number + 1] = all.y;
          }
        };

        const int tiles = part.end - part.first;
        if (tiles <= half) release(QRing::empty_of(0));
        for (int step = half; __any_sync(~0u, step < tiles); step += kConsumers) {
          const int phase = round++ & 1;

          // S^T = K Q^T
          float s[kHeads / 2];
          int accumulate = 0;
          const auto multiply_boxes = [&](auto boxes, uint32_t q_boxes, uint32_t k_boxes) {
            fence_async_proxy();  // the loaders' writes are ordinary ones
            fence_products();
#pragma unroll
            for (int box = 0; box < boxes.kCount; ++box) {
              const RowMatrix q(q_boxes + box * kBox), k(k_boxes + box * kBox);
#pragma unroll
              for (int column = 0; column < kBoxColumns; column += kMmaK) {
                Product<Element, kHeads>::template ss<0>(s, k.at(column * sizeof(Element)), q.at(column * sizeof(Element)), accumulate);
                accumulate = 1;
              }
            }
          };
          MoreRing(half, phase, here).wait();
          multiply_boxes(Boxes<kMoreBoxes>(), kQ + 2 * kHalfBoxes * kBox, kMore + half * kBox);
#pragma unroll
          for (int i = 0; i < kConsumers; ++i) {
            const int of = i == 0 ? half : 1 - half;
            ValuesRing(stage_of(of, half), phase, here).wait();
            multiply_boxes(Boxes<kHalfBoxes>(), kQ + of * kHalfBoxes * kBox, place_of(of, half, 0));
          }
          commit_products();
          wait_products<0>();
          fence_registers(s);
          release(MoreRing::empty_of(half));
          if (step + kConsumers >= tiles) release(QRing::empty_of(0));

          // An entry that names no key has logits of -inf.
#pragma unroll
          for (int row = 0; row < 2; ++row) {
            const int in_tile = own_key + 8 * row, entry = (part.first + step) * kBlockN + in_tile;
            const int key = shared_at<int>(kKeys + 4 * (kBlockN * half + in_tile));
            const bool exists = entry < work.entries && static_cast<uint32_t>(key) < static_cast<uint32_t>(work.seqlen_k);
            if (!exists) {
#pragma unroll
              for (int i = 0; i < kHeads / 2; ++i) {
                if (row_of(i) == row) s[i] = kMasked;
              }
            }
          }

          // P = exp2(S * scale - row_max). The row max of a head follows the running max only beyond kRaiseAbove.
          bool above = false;
#pragma unroll
          for (int i = 0; i < kHeads / 2; ++i) above = above || s[i] * scale_log2e > row_max[number_of(i)] + kRaiseAbove;
          if (named_any(static_cast<int>(Named::kPublished) + half, 128, above)) {
            float maximum[kLaneHeads], alpha[kLaneHeads];
#pragma unroll
            for (int number = 0; number < kLaneHeads; ++number) {
              const int i = number / 2 * 4 + number % 2;
              maximum[number] = fmaxf(s[i], s[i + 2]);
            }
            share(kOwnSpare, maximum, [](float a, float b) { return fmaxf(a, b); });
#pragma unroll
            for (int number = 0; number < kLaneHeads; ++number) {
              const float scaled = maximum[number] * scale_log2e;
              const float raised = scaled > row_max[number] + kRaiseAbove ? scaled : row_max[number];
              alpha[number] = exp2_approx(row_max[number] - raised);
              row_max[number] = raised;
              row_sum[number] *= alpha[number];
            }
            rescale_all(alpha);
          }
          uint32_t p[kHeads / 4];
#pragma unroll
          for (int i = 0; i < kHeads / 2; i += 2) {
            const int number = number_of(i);
            const float first = exp2_approx(fmaf(s[i], scale_log2e, -row_max[number]));
            const float second = exp2_approx(fmaf(s[i + 1], scale_log2e, -row_max[number + 1]));
            row_sum[number] += first;
            row_sum[number + 1] += second;
            p[i / 2] = pack<Element>(first, second);
          }
#pragma unroll
          for (int block = 0; block < kHeads / 8; block += 2) {
            const int row = 8 * (block + lane / 16) + lane % 8, chunk = 2 * (warp % 4) + lane / 8 % 2;
            const uint32_t* const of_heads = p + 2 * block;
            store_transposed(here + kOwnP + row * kBoxBytes + 16 * (chunk ^ (row % 8)), of_heads[0], of_heads[1], of_heads[2], of_heads[3]);
          }
          fence_async_proxy();
          sync_warpgroup();

          // O^T += V^T P^T
          const RowMatrix of_p(kOwnP);
#pragma unroll
          for (int i = 0; i < kConsumers; ++i) {
            const int of = i == 0 ? half : 1 - half;
#pragma unroll
            for (int box = 0; box < kHalfBoxes; ++box) fence_registers(acc[of * kHalfBoxes + box]);
            fence_products();
#pragma unroll
            for (int key = 0; key < kBlockN; key += kMmaK) {
#pragma unroll
              for (int box = 0; box < kHalfBoxes; ++box) {
                const ValueMatrix v(place_of(of, half, box));
                Product<Element, kHeads>::template ss<0, 1>(
                    acc[of * kHalfBoxes + box], v.at(key * kBoxBytes), of_p.at(key * sizeof(Element)), 1);
              }
            }
            commit_products();
          }
          wait_products<1>();
#pragma unroll
          for (int box = 0; box < kHalfBoxes; ++box) fence_registers(acc[half * kHalfBoxes + box]);
          release_values(half);
          wait_products<0>();
#pragma unroll
          for (int box = 0; box < kHalfBoxes; ++box) fence_registers(acc[(1 - half) * kHalfBoxes + box]);
          release_values(1 - half);
        }

        // Both consumers take the larger row max, and add up row sums and O: each of them half of the columns.
        share(kOwnSpare + kSharedSums, row_sum, [](float a, float b) { return a + b; });
        if (warp % 4 == 0 && lane < 4) {
#pragma unroll
          for (int number = 0; number < kLaneHeads; number += 2) {
            const uint32_t place = kSums + 4 * (2 * kFewRows * half + head_of(number));
            shared_at<float2>(place) = {row_max[number], row_max[number + 1]};
            shared_at<float2>(place + 4 * kFewRows) = {row_sum[number], row_sum[number + 1]};
          }
        }
        sync_consumers();
        {
          float alpha[kLaneHeads];
#pragma unroll
          for (int number = 0; number < kLaneHeads; ++number) {
            const uint32_t place = kSums + 4 * (2 * kFewRows * (1 - half) + head_of(number));
            const float other = shared_at<float>(place), raised = fmaxf(row_max[number], other);
            alpha[number] = exp2_approx(row_max[number] - raised);
            row_sum[number] = fmaf(row_sum[number], alpha[number], shared_at<float>(place + 4 * kFewRows) * exp2_approx(other - raised));
            row_max[number] = raised;
          }
          rescale_all(alpha);
        }
        const auto place_of_four = [&](int box, int i) {
          const int number = box * (kHeads / 8) + i / 4;
          return spare_of(number / 2) + number % 2 * 128 * 16 + 16 * group_thread;
        };
#pragma unroll
        for (int to = 0; to < kConsumers; ++to) {
          if (half != to) {
#pragma unroll
            for (int box = 0; box < kHalfBoxes; ++box) {
              const auto& from = acc[to * kHalfBoxes + box];
#pragma unroll
              for (int i = 0; i < kHeads / 2; i += 4) shared_at<float4>(place_of_four(box, i)) = {from[i], from[i + 1], from[i + 2], from[i + 3]};
            }
          }
          sync_consumers();
          if (half == to) {
#pragma unroll
            for (int box = 0; box < kHalfBoxes; ++box) {
              auto& own = acc[to * kHalfBoxes + box];
#pragma unroll
              for (int i = 0; i < kHeads / 2; i += 4) {
                const float4 more = shared_at<float4>(place_of_four(box, i));
                own[i] += more.x;
                own[i + 1] += more.y;
                own[i + 2] += more.z;
                own[i + 3] += more.w;
              }
            }
          }
          if (to == 0) sync_consumers();
        }
        // Calls a function with the column, the head and the value of each element that a lane has.
        const auto for_each = [&](auto write) {
#pragma unroll
          for (int box = 0; box < kHalfBoxes; ++box) {
#pragma unroll
            for (int i = 0; i < kHeads / 2; ++i) {
              const int number = number_of(i);
              if (head_of(number) < rows) write(kHalf * half + box * kBoxColumns + own_key + 8 * row_of(i), number, acc[half * kHalfBoxes + box][i]);
            }
          }
        };

        if (part.end - part.first == part.tiles) {
          const int q = by_group.quotient(work.row_start);
          float normalize[kLaneHeads];
          OutElement* to[kLaneHeads];
#pragma unroll
          for (int number = 0; number < kLaneHeads; ++number) {
            const int h = work.hk * group + min(head_of(number), rows - 1);
            float sum = row_sum[number];
            normalize[number] = sum == 0.0f ? 0.0f : __frcp_rn(sum);
            to[number] = (out_ptr + work.b * stride_out_b + q * stride_out_s + h * stride_out_h);
            if (write_lse && half == 0 && warp % 4 == 0 && lane < 4 && head_of(number) < rows) lse_ptr[(work.b * static_cast<long long>(heads) + h) * seqlen_q + q] = log_sum_exp(row_max[number], sum);
          }
          for_each([&](int column, int number, float value) { to[number][column] = to_element<OutElement>(value * normalize[number]); });
        } else {  // other blocks have the rest of the keys: a second launch merges, or, with splits of a fixed size, the last block
          const int first_worker = listed_splits ? 0 : ranges.worker_of(part.list_begin);
          const int parts = listed_splits ? part.chunks : ranges.worker_of(part.list_begin + part.chunks - 1) - first_worker + 1;
          const int item = (part.hk * batch + part.b) * row_units + (part.row_start / kRows >> row_bits);
          const auto of_worker = [&](int number) {
            const int slot = listed_splits ? item * max_splits + number : slot_of_worker(first_worker, number);
            return partials_ptr + (slot * static_cast<long long>(item_rows) + first_row) * Partial::kFloats;
          };
          float* const own_part = of_worker(listed_splits ? part.chunk : worker - first_worker);
          const auto row_place = [&](int row) { return own_part + row * Partial::kFloats; };
          float* places[kLaneHeads];
#pragma unroll
          for (int number = 0; number < kLaneHeads; ++number) places[number] = row_place(head_of(number));
          for_each([&](int column, int number, float value) { places[number][column] = value; });
          if (half == 0 && warp % 4 == 0 && lane < 4) {
#pragma unroll
            for (int number = 0; number < kLaneHeads; ++number) {
              if (head_of(number) < rows) {
                *reinterpret_cast<float2*>(places[number] + kHeadDimV) = {row_max[number], row_sum[number]};
              }
            }
          }
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
              OutElement* const to = (out_ptr + work.b * stride_out_b + q * stride_out_s + h * stride_out_h);
              const uint2 four = {
                  pack<OutElement>(sum.acc.x * normalize, sum.acc.y * normalize), pack<OutElement>(sum.acc.z * normalize, sum.acc.w * normalize)};
              *reinterpret_cast<uint2*>(to + column) = four;
              if (write_lse && column == 0) lse_ptr[(work.b * static_cast<long long>(heads) + h) * seqlen_q + q] = log_sum_exp(sum.row_max, sum.sum);
            };
            for (int i = threadIdx.x; i < rows * (kHeadDimV / 4); i += 128 * kConsumers) {
              const int row = i / (kHeadDimV / 4), column = i % (kHeadDimV / 4) * 4;
              write(Partial::added(parts, column, Partial::kOfWarp, [&](int number) { return of_worker(number) + row * Partial::kFloats; }), row, column);
            }
          }
        }
      }
      if (threadIdx.x == 0 && rank == 0 && !listed_splits) begun_of(worker) = begun;
    };
    if (group <= 16) {
      if (warpgroup == 0) {
        consume_few(FewHeads<0, 16>());
      } else {
        consume_few(FewHeads<1, 16>());
      }
    } else if (group <= 32) {
      if (warpgroup == 0) {
        consume_few(FewHeads<0, 32>());
      } else {
        consume_few(FewHeads<1, 32>());
      }
    } else if (warpgroup == 0) {
      consume(Consumer<0>());
    } else {
      consume(Consumer<1>());
    }
  }
}
// Merges the partial results of work items that several workers have parts of. kRowThreads threads have a row, four columns
// each; the grid has rows for the item that each worker may have begun.
extern "C" __global__ void __launch_bounds__(kMergedRows * kRowThreads) fwd_sm90a_indexed_bf16_d576x512_listed_m64n64s2c2_merge(
    const bf16* q_ptr, const bf16* k_ptr, bf16* out_ptr, float* lse_ptr, float* partials_ptr, int* begun_ptr,
    uint32_t* counters_ptr, const int* seqused_k_ptr, const int* indices_ptr,
    long long stride_q_b, long long stride_q_s, long long stride_q_h,
    long long stride_k_b, long long stride_k_s, long long stride_k_h,
    long long stride_out_b, long long stride_out_s, long long stride_out_h,
    long long stride_indices_0, long long stride_indices_1,
    int extent_indices_0, int extent_indices_1, int extent_indices_2,
    int batch, int heads, int kv_heads, int group, int query_rows, int row_bits, int row_units, int split_tiles,
    int max_splits, int batch_reciprocal, int query_rows_reciprocal, int row_units_reciprocal,
    int split_tiles_reciprocal, int seqlen_q, int max_seqlen_k, int total_q, int total_k,
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
  // Work items in order: groups of heads of a query, then queries of a sequence, then sequences, then KV heads. Rows are numbered
  // as if each query had `query_rows` heads, a multiple of the rows of an item; rows beyond the `group` heads do not exist.
  const Divisor by_row_units(row_units, row_units_reciprocal), by_batch(batch, batch_reciprocal);
  const Divisor by_group(query_rows, query_rows_reciprocal);
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

  // The rows of a work item, and the entries of its query's list.
  const auto work_of = [&](const Place& place) {
    const int b = place.b, hk = place.hk, row_start = place.row_block * item_rows, q = by_group.quotient(row_start);
    const int seqlen_k = has_seqused_k ? seqused_k_ptr[b] : max_seqlen_k;
    if (q >= seqlen_q) return Work{.tiles = -1};  // a shorter sequence than the longest
    const int entries = extent_indices_2;
    const int* const list = indices_ptr + b * stride_indices_0 + q * stride_indices_1;
    return Work{b, hk, row_start, seqlen_k, q * query_rows + group, list, entries, (entries + kBlockN - 1) / kBlockN};
  };
  // The KV tile that is number `number` of those that the rows see.
  const auto tile_of = [&](const Work& work, int number) {
    return number;
  };

  const Chunks<true> chunks_of(split_tiles, split_tiles_reciprocal);
  const bool listed_splits = chunks_of.are_splits();
  const int items = batch * kv_heads * row_units;
  const Work work = work_of(place_of_item(begun.item));
  if (work.row_start + row >= work.rows_end) return;
  const auto of_worker = [&](int part) {
    const int slot = slot_of_worker(worker, part);
    return partials_ptr + (slot * static_cast<long long>(item_rows) + row) * Partial::kFloats;
  };
  Partial sum = Partial::added(begun.parts, column, Partial::kOfWarp, of_worker);
  const int packed = work.row_start + row, q = by_group.quotient(packed), h = work.hk * group + by_group.remainder(packed);
  const float normalize = sum.sum == 0.0f ? 0.0f : __frcp_rn(sum.sum);
  OutElement* const to = (out_ptr + work.b * stride_out_b + q * stride_out_s + h * stride_out_h);
  const uint2 four = {
      pack<OutElement>(sum.acc.x * normalize, sum.acc.y * normalize), pack<OutElement>(sum.acc.z * normalize, sum.acc.w * normalize)};
  *reinterpret_cast<uint2*>(to + column) = four;
  if (write_lse && column == 0) lse_ptr[(work.b * static_cast<long long>(heads) + h) * seqlen_q + q] = log_sum_exp(sum.row_max, sum.sum);
}
