// fwd_sm90a_mla_bf16_d576x512_full_paged_m64n64s2c2
//
// Attention forward, variant full: mask `True`.
// Rendered by `attngen build specs/mla.yaml`, schedule hopper_mla.
//
// V is the first 512 columns of K: a tile of 64 keys is copied once, for S and for O. A block has 64 rows, a row being a head of a
// query, those of one query side by side.
//
// Two consumers hold half of the columns of O each, and compute S = Q K^T and P of every other tile. Each multiplies its own P
// from registers, and the other consumer's P from shared memory:
//
//   consumer 0:  S0      P0        O += P0 V0               O += P1 V1   S2
//   consumer 1:      S1      O += P0 V0 | P1   O += P1 V1            S3
//
// Two tiles are in flight at a time: each consumer has read the columns of a tile before it starts S of its next one.
//
// Where a sequence has more than 64 rows, two neighbouring blocks have 128 of them, and each copies a tile for itself: L2 has what
// the other one reads. A work item is the rows of such a block or pair, with the tiles that they see. The tiles of all work
// items are one list, of which blocks (or pairs) take equal ranges. Where a range ends inside a work item, partial results go
// to global memory, and the blocks that share the item merge them.
#include "cluster.cuh"
#include "divisor.cuh"
#include "few_heads.cuh"
#include "pair.cuh"
#include "pdl.cuh"
#include "quad.cuh"
#include "ring.cuh"
#include "shares.cuh"
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
constexpr int kFirstLoader = 4 * kConsumers;  // of the four warps that copy
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
  static constexpr int kWholeTiles = 512;  // of a worker: with more, idle workers cost more than merging
  static constexpr int kOneOf = 16;  // one of so many: tiles more than an equal share, and workers that are idle
};
using Division = Exact;
using Cutting = CutBy<Limits, Division>;
// The regions of shared memory that hold where a range begins, and what each warp has counted.
static_assert(sizeof(Walk) <= 24);
static_assert(kThreads / 32 * sizeof(Count) <= 144);
using Partial = PartialRow<kHeadDimV>;
constexpr int kRowThreads = kHeadDimV / 4;       // of a row of partial results
constexpr long long kPatience = 1 << 17;         // clocks that a block waits for parts of others
constexpr uint32_t kGaveUp = 1 << 16;            // counts a block that has waited in vain
// Shared memory. Addresses are constants, so that they cost no instruction; the kernel checks where it begins.
constexpr uint32_t kShared = 1024;
constexpr uint32_t kQ = kShared + 0;  // 65536 B: Q, or the columns of Q that V has
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
constexpr uint32_t kUnfinished = kShared + 230608;  // 32 B: work items that other workers have parts of, too
// Memory of a merge: chunks of all parts where values were, words of their rows in the place of Q, and a barrier in that of counts.
constexpr uint32_t kMerged = kValues, kWords = kQ, kCopied = kCounts;
constexpr int kPartBytes = 4 * kRows * Partial::kFloats;  // of a block's rows
constexpr int kWordsAt = 2 * kRows * kHeadDimV;           // bytes before the words of its rows
constexpr int kMostParts = 256;
static_assert(kCopied % 8 == 0 && kMerged + 64 * (kRows * kHeadDimV / 32 + kMostParts) <= kRowMax && kWords + kWordBytes * (kRows + 2 * kMostParts) <= kMerged);

// Rings: who fills the stages -> who empties them.
using ValuesRing = Ring<kValuesFull, kValuesEmpty, 16>;  // a loader -> both consumers
using MoreRing = Ring<kMoreFull, kMoreEmpty, 2>;  // a loader -> the consumer of the tile

// Named barriers of the hardware; 0 is __syncthreads.
enum class Named {
  kConsumers = 1,  // 1 of them: Q and row sums are there, or have been read
  kPublished = 2,  // 2 of them: P of a consumer's tile is in shared memory
  kZeroed = 4,  // 2 of them: a consumer has cleared the values after the last key
  kScored = 6,  // 1 of them: S of the first consumer's tile is issued
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

constexpr int kFewRows = 16;  // of a work item whose products are transposed, at most
constexpr uint32_t kFewBox = kFewRows * kBoxBytes;  // bytes of a box of its Q and P
constexpr uint32_t kSharedSums = 4 * 4 * kFewRows;  // bytes of four warps' row maxima, after which their row sums lie
static_assert(2 * kFewRows <= kRows);

// Layouts of wgmma's operands: Q, P and, for S, K are K-major; for O, K is MN-major, since its rows are keys.
using RowMatrix = Matrix<16, 8 * kBoxBytes, 1>;
using ValueMatrix = Matrix<kBox, 8 * kBoxBytes, 1>;

// KV tiles of which some of the rows see some key, and those of which every row sees every key.
struct Spans {
  int visible_lo, visible_hi;
  int full_lo, full_hi;
};

// A work item: rows of one KV head of a sequence, and the KV tiles that they see.
struct Work {
  int b, hk, row_start;
  int q_begin, seqlen_q, seqlen_k;
  int tiles;  // -1: the sequence has no such rows
  Spans spans;
};

using Part = PartOf<Work>;

extern __shared__ char shared_memory[];

template <typename Value>
__device__ __forceinline__ Value& shared_at(uint32_t address) {
  return *reinterpret_cast<Value*>(shared_memory + (address - kShared));
}

// Whether a block has waited in vain, and left its share to others: the last word of its partial results.
__device__ __forceinline__ volatile int& left_by(char* of_part) { return *reinterpret_cast<volatile int*>(of_part + kPartBytes - 4); }

extern "C" __global__ void __launch_bounds__(kThreads, 1) fwd_sm90a_mla_bf16_d576x512_full_paged_m64n64s2c2(
    const bf16* q_ptr,
    const __grid_constant__ TensorMap k_map,
    const bf16* k_ptr, bf16* out_ptr, float* lse_ptr, float* partials_ptr, uint32_t* counters_ptr,
    const int* cu_seqlens_q_ptr, const int* page_table_ptr, const int* seqused_k_ptr,
    long long stride_q_s, long long stride_q_h,
    long long stride_k_page, long long stride_k_s, long long stride_k_h,
    long long stride_out_s, long long stride_out_h,
    int batch, int heads, int kv_heads, int group, int row_bits, int row_units, int split_tiles, int max_splits,
    int batch_reciprocal, int group_reciprocal, int row_units_reciprocal, int split_tiles_reciprocal,
    int max_seqlen_q, int max_seqlen_k, int total_q, int total_k,
    long long page_table_stride,
    int page_size, int num_pages, int box_rows, int page_size_reciprocal,
    float softmax_scale,
    int write_lse, int has_cu_seqlens_q
) {
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // uniform across the warp, and the compiler knows
  const int lane = threadIdx.x % 32, warpgroup = warp / 4;
  // Blocks that hold the rows of a work item.
  const int item_rows = kRows << row_bits;
  const int blocks = 1 << row_bits, rank = blockIdx.x % blocks;
  launch_dependents();
  const uint32_t here = mapped(kShared, 0) - kShared;  // barriers and copies take shared::cluster addresses
  if (threadIdx.x == 0 && static_cast<uint32_t>(__cvta_generic_to_shared(shared_memory)) != here + kShared) __trap();
  if (elected()) {  // a thread of each warp, since a warp initializes barriers one after the other
    if (warp == 0) init_barriers(here + kValuesFull, 16, 1);  // a loader, and the bytes of the copy
    if (warp == 1) init_barriers(here + kValuesEmpty, 16, 4);  // each warp of a consumer
    if (warp == 2) init_barriers(here + kMoreFull, 2, 1);  // a loader, and the bytes of the copy
    if (warp == 3) init_barriers(here + kMoreEmpty, 2, 4);  // each warp of a consumer
    fence_barrier_init();
  }
  if (warp == 0 && lane < 2) shared_at<Unfinished>(kUnfinished + lane * static_cast<uint32_t>(sizeof(Unfinished))) = {};
  if (threadIdx.x == 32) prefetch_map(k_map);
  __syncthreads();
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
    const int q_begin = has_cu_seqlens_q ? cu_seqlens_q_ptr[b] : b * max_seqlen_q;
    const int seqlen_q = has_cu_seqlens_q ? cu_seqlens_q_ptr[b + 1] - q_begin : max_seqlen_q;
    const int seqlen_k = seqused_k_ptr[b];
    if (row_start >= seqlen_q * group) return Work{.tiles = -1};  // a shorter sequence than the longest
    const int whole_tiles = seqlen_k / kBlockN;
    const int visible_hi = (seqlen_k + kBlockN - 1) / kBlockN;
    const Spans spans = {0, visible_hi, 0, whole_tiles};
    return Work{b, hk, row_start, q_begin, seqlen_q, seqlen_k, max(spans.visible_hi - spans.visible_lo, 0), spans};
  };
  // The KV tile that is number `number` of those that the rows see.
  const auto tile_of = [&](const Work& work, int number) {
    return work.spans.visible_lo + number;
  };

  const Chunks<true> chunks_of(split_tiles, split_tiles_reciprocal);
  const bool listed_splits = chunks_of.are_splits();
  const int items = batch * kv_heads * row_units;
  // A worker is a block, or the blocks that have the rows of an item.
  const int worker = blockIdx.x >> row_bits, most_workers = gridDim.x >> row_bits;
  int splits = 0, range_end = 0;
  EvenRanges ranges(0, 1);
  Walk begin = {};
  // The first part, and whether it is found without the list.
  Part part;
  bool found = false;
  // Up to 32 items, and enough workers to cut each evenly: a lane looks at one of them. Else the list is counted, below.
  if (!listed_splits && items <= 32) {
    const Work own = work_of(place_of_item(min(lane, items - 1)));
    const FewItems<Cutting> few(lane < items ? own.tiles : -1, most_workers);
    splits = few.splits;
    if (splits > 0) {
      if (worker >= few.count * splits) return;
      const int number = Exact::quotient(worker, splits), from = few.lane_of(number, lane);
      static_cast<Work&>(part) = of_lane(own, from);
      found = cut_part<Division>(part, worker - number * splits, splits);
    }
  }
  if (splits == 0) {
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
    if (worker >= cut.workers || range_begin == range_end) return;
    {
      if (own_items.by_warp) before = count_before(own, lane);
      const bool begins = find_begin(begin, range_begin, range_end, own_items, place_first, before, splits, chunks_of, work_of, advance);
      begin = own_items.by_warp ? begin_of_warp(begin, begins) : begin_of_block(begin, begins, shared_at<Walk>(kBegin));
    }
  }
  // Takes the next part of this worker's range; false if nothing is left.
  const auto take = [&](Walk& walk, Part& part) {
    return take_part<Division>(walk, part, splits, range_end, kv_heads, chunks_of, work_of, advance);
  };

  // All warps take the first part by the same instructions: code that runs once waits for L2.
  Walk walk = begin;
  if (!__any_sync(~0u, found || take(walk, part))) return;

  if (warpgroup == kConsumers) {
    shrink_registers<kProducerRegisters>();
    // Four warps load: each copies one half of the values of every other tile, once both consumers have released the stages. Of
    // the two loaders of a tile, the one of the other consumer's half also copies the columns that only S needs.
    const int half = (warp - kFirstLoader) % kConsumers, consumer = (warp - kFirstLoader) / kConsumers;
    const bool read_once = row_units == 1;  // keys are read by one work item only, so that L2 need not keep them
    const uint64_t policy = read_once && blocks == 1 ? kEvictFirst : kEvictNormal;
    const auto uniform = [](int value) { return __shfl_sync(~0u, value, 0); };  // and the compiler knows
    const Divisor by_page(page_size, page_size_reciprocal);
    const int row_boxes = kBlockN >> __ffs(box_rows) - 1;  // of a tile, each of rows of one page: a power of two
    // If these blocks are the only ones to read these keys, they prefetch whole rows of a page to L2 before they copy their boxes.
    const bool prefetches = blocks > 1 && read_once && stride_k_s == kHeadDimQk;
    int round = 0;  // tiles so far
    for (bool taken = true; taken; taken = __any_sync(~0u, take(walk, part))) {
      // The pages of a tile: a lane has those of two boxes.
      int pages[2];
      const auto look_up = [&](int number) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (i == 1 && row_boxes <= 32) continue;
          const int box = lane + 32 * i, key = tile_of(part, number) * kBlockN + box * box_rows;
          const bool there = number < part.end && box < row_boxes && key < part.seqlen_k;
          pages[i] = there ? page_table_ptr[part.b * page_table_stride + by_page.quotient(key)] : num_pages;  // no page of the cache: zeros
        }
      };
      look_up(part.first + consumer);
      const int hk = uniform(part.hk);
      // Consumers load Q of the next item when they have finished this one, and keys of it are on their way before.
      if (round > 0) {
        const Work& work = part;
        const int first_row = kRows * rank, rows = min(work.seqlen_q * group - work.row_start - first_row, kRows);
        // Q of a row; those that do not exist repeat the last one.
        const auto row_of_q = [&](int row) {
          const int packed = work.row_start + first_row + min(row, rows - 1), q = by_group.quotient(packed);
          const int h = work.hk * group + by_group.remainder(packed);
          return (q_ptr + (work.q_begin + q) * stride_q_s + h * stride_q_h);
        };
        const int row = threadIdx.x - 32 * kFirstLoader;
        if (row < rows) prefetch_bytes(row_of_q(row), kHeadDimQk * sizeof(Element));
      }
      for (int number = part.first + consumer; __any_sync(~0u, number < part.end); number += kTiles) {
        const int key = uniform(tile_of(part, number) * kBlockN);
        const uint32_t phase = round++ & 1;
        struct Rows {
          int in_page, page;
        };
        const auto rows_of = [&](int row_box) {
          const int low = __shfl_sync(~0u, pages[0], row_box), high = __shfl_sync(~0u, pages[1], row_box);
          return Rows{by_page.remainder(key + row_box * box_rows), row_box < 32 ? low : high};
        };
        const Rows first_rows{uniform(by_page.remainder(key)), __shfl_sync(~0u, pages[0], 0)};
        // Copies boxes of columns of a tile to consecutive stages of a ring. All that a copy needs is known before the stage is free,
        // and its bytes are announced after it is issued: consumers wait for the copy from the moment that they release a stage.
        const auto load = [&](auto boxes, auto ring, uint32_t to, int first_column) {
          constexpr int kBoxes = boxes.kValue;
          const uint32_t first = here + to + ring.stage * kBox, first_full = ring.full();
          const auto copy = [&](uint32_t before, const Rows& rows) {
            if (elected()) {
#pragma unroll
              for (int box = 0; box < kBoxes; ++box) {
                const int column = first_column + box * kBoxColumns;
                load_box_kept(first + box * kBox + before, k_map, first_full + 8 * box, policy, column, rows.in_page, hk, rows.page);
              }
            }
            __syncwarp();
          };
          ring.stage += lane & kBoxes - 1;  // each lane waits for one stage
          ring.acquire();
          copy(0, first_rows);
#pragma unroll 1
          for (int row_box = 1; row_box < row_boxes; ++row_box) copy(row_box * box_rows * kBoxBytes, rows_of(row_box));
          if (lane < kBoxes) ring.arrive_expecting(kBox);
        };
        if (half != consumer) {
          load(Constant<1>(), MoreRing(consumer, phase, here), kMore, kHeadDimV);
          if (prefetches && round > 1 && lane < row_boxes && pages[0] >= 0 && pages[0] < num_pages) {
            const Element* const from = k_ptr + pages[0] * stride_k_page + by_page.remainder(key + lane * box_rows) * stride_k_s + hk * stride_k_h;
            const int elements = box_rows * kHeadDimQk >> row_bits;  // each block has a part
            prefetch_bytes(from + rank * elements, elements * sizeof(Element));
          }
        }
        load(Constant<kHalfBoxes>(), ValuesRing(box_of(half, consumer, 0), phase, here), kValues, half * kHalf);
        look_up(number + kTiles);  // the answers come while the loader waits for stages
      }
    }
  } else {
    grow_registers<kConsumerRegisters>();
    // What is done once for each part of an item is code that both consumers share: instructions come from L2.
    const auto consume = [&] {
      const int group_thread = threadIdx.x % 128;
      const int own_row = 16 * (warp % 4) + lane / 4;  // of the block's; the other one of a lane is 8 rows below
      const auto place_of = [&](int half, int stage, int box) { return kValues + box_of(half, stage, box) * kBox; };
      const auto sync_consumers = [] { named_sync(Named::kConsumers, 0, 128 * kConsumers); };

      const int half = warpgroup;
      int round = 0;  // tiles of this consumer so far, all of them in stage `half`
      for (bool taken = true; taken; taken = __any_sync(~0u, take(walk, part))) {
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
        const int seqlen_k = work.seqlen_k;
        const float scale_log2e = softmax_scale * kLog2e;

        // Half of the columns of O, the running max of each row, and the row sums of this consumer's tiles.
        float acc[kHalf / 2] = {};
        float row_max[2] = {kUnseen, kUnseen}, row_sum[2] = {};
        const int tiles = part.end - part.first;

        const auto multiply = [&](auto consumer) {
          constexpr int half = consumer.half;  // a constant, so that descriptors of products are constants, too
          constexpr int stage = half;  // of this consumer's tiles
          // Each consumer stores P in a place of its own.
          constexpr uint32_t kOwnP = kP + half * kBox, kOtherP = kOwnP + (1 - 2 * half) * kBox;

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
            if (lane < kHalfBoxes) arrive(here + ValuesRing::empty_of(box_of(half, stage, lane)));
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
            const int tile = tile_of(work, part.first + step);
            const int phase = round++ & 1;

            // S = Q K^T, once the other consumer has issued that of the tile before: so its softmax runs beside this product.
            if constexpr (half == 1) named_sync(Named::kScored, 0, 128 * kConsumers);
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
            // Looks for the next box before it issues products with one: the answer comes while these run.
            const auto ring_of = [&](int i) { return ValuesRing(box_of(i < kHalfBoxes ? half : 1 - half, half, i % kHalfBoxes), phase, here); };
            MoreRing(half, phase, here).wait();
            bool landed = ring_of(0).is_full();
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
              if (!__all_sync(~0u, landed)) ring_of(i).wait();
              if (i + 1 < 2 * kHalfBoxes) landed = ring_of(i + 1).is_full();
              multiply_box(kQ + (of * kHalfBoxes + box) * kBox, place_of(of, half, box));
            }
            commit_products();
            if constexpr (half == 0) {
              if (__any_sync(~0u, step + 1 < tiles)) named_arrive(Named::kScored, 0, 128 * kConsumers);
            }
            wait_products<0>();
            fence_registers(s);
            if (lane == 0) arrive(here + MoreRing::empty_of(half));
            if constexpr (half == 1) {  // the tile before is the other one's
              take_row_max();
              issue_other();
            }
            const int left = work.seqlen_k - tile * kBlockN;
            if (__builtin_expect(left < kBlockN, 0)) {  // V after the end may be NaN, and 0 * NaN is NaN
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
            if (__builtin_expect(__any_sync(~0u, !(tile >= work.spans.full_lo && tile < work.spans.full_hi)), 0)) {
              const int visible_to = seqlen_k - kv_first;
#pragma unroll
              for (int i = 0; i < kBlockN / 4; ++i) {
                const int key = 8 * (i / 2) + i % 2;  // from the first one of the lane
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
            // The other consumer has multiplied what is in this buffer, P of two tiles ago: it released the stage of that tile after
            // the product, and this tile has been loaded to the same stage since.
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
              finish_other(step + 1);  // before S of the next tile, which waits for its keys
            }
          }
          if constexpr (half == 1) {
            if (tiles % kConsumers == 1) finish_other(tiles - 1);
          }
        };
        if (half == 0) {
          multiply(Consumer<0>());
        } else {
          multiply(Consumer<1>());
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
          using Rows = ShortRows<kHeadDimV>;
          const int first_worker = listed_splits ? 0 : splits > 0 ? worker - part.chunk : ranges.worker_of(part.list_begin);
          const int parts = listed_splits || splits > 0 ? part.chunks : ranges.worker_of(part.list_begin + part.chunks - 1) - first_worker + 1;
          const int item = (part.hk * batch + part.b) * row_units + (part.row_start / kRows >> row_bits);
          const auto of_worker = [&](int number) {
            const int slot = listed_splits ? item * max_splits + number : slot_of_worker(first_worker, number);
            return partials_ptr + (slot * static_cast<long long>(item_rows) + first_row) * Partial::kFloats;
          };
          // With equal parts no keys follow, so that rows that this block merges itself may stay in shared memory, where values were.
          char* const own_part = reinterpret_cast<char*>(of_worker(listed_splits ? part.chunk : worker - first_worker));
          const auto kept = Rows::kKept && splits > 0 ? KeptRows<Rows>(Shares<Rows>(max(rows, 0), parts), worker - first_worker, kMerged) : KeptRows<Rows>();
          const auto place_of_row = [&](int row) { return kept.has(row) ? &shared_at<char>(kept.place_of(row)) : own_part + row * 16 * Rows::kChunks; };
          const auto words_of = [&](int row) { return own_part + kWordsAt + row * kWordBytes; };
          if (listed_splits) {
            store_half<kHeadDimV>(reinterpret_cast<float*>(own_part), own_row, rows, kHalf * half, lane, acc, row_max, row_sum);
          } else {
            Rows::store_half(place_of_row, words_of, own_row, rows, half, lane, acc, row_max, row_sum);
          }
          if (!listed_splits) {
            sync_consumers();  // both consumers have stored their columns
            if (threadIdx.x == 0) {
              shared_at<Unfinished>(kUnfinished + (part.chunk == 0) * static_cast<uint32_t>(sizeof(Unfinished))) = {item, parts, first_worker, worker - first_worker};
              left_by(own_part) = 0;
              arrive_counted(counters_ptr + 2 * (item * blocks + rank));
            }
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
    };
    const auto merge_shares = [&](auto format) {
      using Rows = decltype(format);
      // Merge of partial results where other blocks have parts of this one's first or last item: each merges some of the rows once all parts are there.
      // No block depends on others being resident: one that has waited in vain leaves, and the last one to leave does what is left.
      if (!listed_splits) {
        constexpr int kMergers = 128 * kConsumers;  // threads
        const auto sync_consumers = [] { named_sync(Named::kConsumers, 0, kMergers); };
        if (threadIdx.x == 0) {
          init_barrier(here + kCopied, 1);
          fence_barrier_init();
        }
        uint32_t phase = 0;
#pragma unroll 1
        for (int i = 0; i < 2; ++i) {
          sync_consumers();
          const Unfinished shared = shared_at<Unfinished>(kUnfinished + i * static_cast<uint32_t>(sizeof(Unfinished)));
          const int parts = shared.parts;
          if (parts == 0) continue;
          uint32_t* const counter = counters_ptr + 2 * (shared.item * blocks + rank);  // how many parts are there, how many blocks have left
          const Work work = work_of(place_of_item(shared.item));
          const int first_row = kRows * rank;
          const Shares<Rows> shares(max(min(work.seqlen_q * group - work.row_start - first_row, kRows), 0), parts);  // a block may have no rows
          Share<Rows> share(shares, shared.own);
          const auto kept = Rows::kKept && splits > 0 ? KeptRows<Rows>(shares, shared.own, kMerged) : KeptRows<Rows>();
          const int slot_bytes = item_rows * (kPartBytes / kRows);
          char* const slots = reinterpret_cast<char*>(partials_ptr) + 2ll * shared.first_worker * slot_bytes + rank * kPartBytes;
          const auto part_of = [&](int part) { return slots + static_cast<long long>(slot_of_worker(0, part)) * slot_bytes; };
          bool own_share = true;
#pragma unroll 1
          for (int number = -1;;) {
            if (warp == 0) {
              int there = 1;
              if (own_share) {
                if (lane == 0) shared_at<int>(kLast) = there = await_count(counter, parts, kPatience);
                there = __shfl_sync(~0u, there, 0);
                __syncwarp();  // one lane has waited for what all copy
              }
              if (there) share.copy(here + kMerged, here + kWords, here + kCopied, kWordsAt, parts, own_share && kept.end > kept.first ? shared.own : -1, lane, part_of);
            }
            sync_consumers();
            const bool merges = !own_share || shared_at<int>(kLast);
            if (!merges) {  // others may merge the rows of this block
              for (int chunk = threadIdx.x; chunk < (kept.end - kept.first) * Rows::kChunks; chunk += kMergers) {
                reinterpret_cast<uint4*>(part_of(shared.own))[kept.first * Rows::kChunks + chunk] = shared_at<uint4>(kept.place_of(kept.first) + 16 * chunk);
              }
              if (threadIdx.x == 0) left_by(part_of(shared.own)) = 1;
              sync_consumers();
            }
            if (own_share && threadIdx.x == 0) {  // while copies are under way
              if (!merges) __threadfence();
              const uint32_t own = merges ? 1 : 1 + kGaveUp, left = count_left(counter + 1, own) + own;
              const bool last = left % kGaveUp == parts;
              shared_at<int>(kLast + 4) = last && left >= kGaveUp;
              if (last) counter[0] = counter[1] = 0;  // as the next launch expects them
            }
            __syncwarp();
            if (merges) {
              wait(here + kCopied, phase);
              phase ^= 1;
              // Eight lanes have a row or, with so many parts that a block has at most eight rows, a warp.
              const int lanes = parts <= 8 ? 8 : 32, of_share = threadIdx.x / lanes, row = first_row + share.first_row + of_share;
              const auto words_of = [&](int part) { return &shared_at<float>(kWords + kWordBytes * (part * share.rows + of_share)); };
              weigh_row<Rows>(of_share < share.rows ? parts : 0, lane % lanes, lanes, words_of, [&](auto& sum) {
                if (of_share >= share.rows) return;
                const int packed = work.row_start + row, q = by_group.quotient(packed), h = work.hk * group + by_group.remainder(packed);
                const bool writes_lse = write_lse && lane % lanes == 0 && (share.first_row + of_share) * Rows::kChunks >= share.first;
                if (writes_lse) lse_ptr[h * static_cast<long long>(total_q) + work.q_begin + q] = log_sum_exp(sum.row_max, sum.sum);
              });
            }
            sync_consumers();
            const bool goes_on = shared_at<int>(kLast + 4);
#pragma unroll 1
            for (int chunk = threadIdx.x; merges && __any_sync(~0u, chunk < share.chunks); chunk += kMergers) {
              const bool exists = chunk < share.chunks;
              const int place = share.first + (exists ? chunk : 0), row = place / Rows::kChunks, of_row = place % Rows::kChunks;
              uint32_t from = kMerged + 16 * (place - share.first), weight_at = kWords + kWordBytes * (row - share.first_row) + 4 * Rows::weight_of(of_row);
              float sum[Rows::kColumns] = {};
#pragma unroll 4
              for (int part = 0; part < parts; ++part) {
                Rows::add(sum, shared_at<uint4>(from), shared_at<float>(weight_at));
                from += 16 * share.chunks;
                weight_at += kWordBytes * share.rows;
              }
              const int packed = work.row_start + first_row + row, q = by_group.quotient(packed), h = work.hk * group + by_group.remainder(packed);
              OutElement* const to = (out_ptr + (work.q_begin + q) * stride_out_s + h * stride_out_h) + Rows::kColumns * of_row;
              uint32_t two_columns[Rows::kColumns / 2];
#pragma unroll
              for (int i = 0; i < Rows::kColumns / 2; ++i) two_columns[i] = pack<OutElement>(sum[2 * i], sum[2 * i + 1]);
              if constexpr (Rows::kColumns == 8) {
                gather_block(two_columns);
                if (exists) *reinterpret_cast<uint4*>(to) = {two_columns[0], two_columns[1], two_columns[2], two_columns[3]};
              } else {
                if (exists) *reinterpret_cast<uint2*>(to) = {two_columns[0], two_columns[1]};
              }
            }
            if (!goes_on) break;
            __threadfence();
            do ++number;
            while (number < parts && left_by(part_of(number)) == 0);
            if (number == parts) break;
            share = Share<Rows>(shares, number);
            own_share = false;
            sync_consumers();  // all have read what this block has merged before
          }
        }
      }
    };
    const auto consume_few = [&](auto most) {
      constexpr int kHeads = most.kValue;
      // Both products are transposed: S^T = K Q^T and O^T += V^T P^T, whose rows are keys, then columns of V, and whose columns are
      // query rows. A consumer has all of O for every other tile; the two are merged at the end of a part of a work item.
      const int half = warpgroup;
      const int own_key = 16 * (warp % 4) + lane / 4;  // of a tile, and column of a box of V; the other one of a lane is 8 on
      const int own_head = 2 * (lane % 4);             // and the next one, of each 8
      const int group_thread = threadIdx.x % 128;
      constexpr int kLaneHeads = kHeads / 4;
      const auto sync_consumers = [] { named_sync(Named::kConsumers, 0, 128 * kConsumers); };
      const auto sync_warpgroup = [&] { named_sync(Named::kPublished, half, 128); };
      // The number of a lane's head that an element of its accumulators belongs to, and that head.
      const auto number_of = [](int i) { return i / 4 * 2 + i % 2; };
      const auto head_of = [&](int number) { return 8 * (number / 2) + own_head + number % 2; };
      const uint32_t own_spare = kP + half * kBox + kFewBox;  // behind P, of which query rows are rows, and keys columns
      const auto place_of = [&](int half, int stage, int box) { return kValues + box_of(half, stage, box) * kBox; };
      const auto release_values = [&](int of) {
        if (lane < kHalfBoxes) arrive(here + ValuesRing::empty_of(box_of(of, half, lane)));
      };

      int round = 0;  // tiles of this consumer so far, all of them in stage `half`
      for (bool taken = true; taken; taken = __any_sync(~0u, take(walk, part))) {
        const Work& work = part;
        constexpr int first_row = 0;
        const int rows = min(work.seqlen_q * group - work.row_start, kHeads);  // of the item that exist
        // Q of a row; those that do not exist repeat the last one.
        const auto row_of_q = [&](int row) {
          const int packed = work.row_start + first_row + min(row, rows - 1), q = by_group.quotient(packed);
          const int h = work.hk * group + by_group.remainder(packed);
          return (q_ptr + (work.q_begin + q) * stride_q_s + h * stride_q_h);
        };
        {
          constexpr int kRowChunks = kHeadDimQk * sizeof(Element) / 16, kChunksOfBox = kBoxBytes / 16;
          constexpr int kThreadsOfRow = 128 * kConsumers / kHeads, kCopies = (kRowChunks + kThreadsOfRow - 1) / kThreadsOfRow;
          const int row = threadIdx.x / kThreadsOfRow, first = threadIdx.x % kThreadsOfRow;
          const int4* const from = reinterpret_cast<const int4*>(row_of_q(row));
          int4 chunks[kCopies];  // all are loaded before any is stored, so that latencies overlap
#pragma unroll
          for (int i = 0; i < kCopies; ++i) {
            const int chunk = first + i * kThreadsOfRow;
            if (chunk < kRowChunks) chunks[i] = from[chunk];
          }
          sync_consumers();  // what the item before has exchanged has been read
#pragma unroll
          for (int i = 0; i < kCopies; ++i) {
            const int chunk = first + i * kThreadsOfRow;
            if (chunk < kRowChunks) {
              shared_at<int4>(kQ + chunk / kChunksOfBox * kFewBox + row * kBoxBytes + 16 * (chunk % kChunksOfBox ^ (row % 8))) = chunks[i];
            }
          }
        }
        // Query and head of each column of a lane; those that do not exist repeat the last one.
        const auto packed_of = [&](int number) { return work.row_start + min(head_of(number), rows - 1); };
        const Computed query([&](int number) { return by_group.quotient(packed_of(number)); });
        const Computed head([&](int number) { return work.hk * group + by_group.remainder(packed_of(number)); });
        fence_async_proxy();
        sync_consumers();
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
        const auto multiply = [&](auto consumer) {
          constexpr int half = consumer.half;  // a constant, so that descriptors of products are constants, too
          constexpr uint32_t kOwnP = kP + half * kBox, kOwnSpare = kOwnP + kFewBox;
          for (int step = half; __any_sync(~0u, step < tiles); step += kConsumers) {
            const int tile = tile_of(work, part.first + step), phase = round++ & 1;

            // S^T = K Q^T
            float s[kHeads / 2];
            int accumulate = 0;
            const auto multiply_box = [&](uint32_t q_box, uint32_t k_box) {
              const RowMatrix q(q_box), k(k_box);
              fence_products();
#pragma unroll
              for (int column = 0; column < kBoxColumns; column += kMmaK) {
                Product<Element, kHeads>::template ss<0>(s, k.at(column * sizeof(Element)), q.at(column * sizeof(Element)), accumulate);
                accumulate = 1;
              }
            };
            MoreRing(half, phase, here).wait();
            multiply_box(kQ + 2 * kHalfBoxes * kFewBox, kMore + half * kBox);
#pragma unroll
            for (int i = 0; i < 2 * kHalfBoxes; ++i) {
              const int of = i < kHalfBoxes ? half : 1 - half, box = i % kHalfBoxes;
              ValuesRing(box_of(of, half, box), phase, here).wait();
              multiply_box(kQ + (of * kHalfBoxes + box) * kFewBox, place_of(of, half, box));
            }
            commit_products();
            wait_products<0>();
            fence_registers(s);
            if (lane == 0) arrive(here + MoreRing::empty_of(half));
            const int left = work.seqlen_k - tile * kBlockN;
            if (__builtin_expect(left < kBlockN, 0)) {  // V after the end may be NaN, and 0 * NaN is NaN
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
            const int kv_first = tile * kBlockN + own_key;  // and 8 on
            if (__any_sync(~0u, !(tile >= work.spans.full_lo && tile < work.spans.full_hi))) {
              const int visible_to = seqlen_k - kv_first;
#pragma unroll
              for (int row = 0; row < kLaneHeads; ++row) {
#pragma unroll
                for (int i = 0; i < 4; i += 2) {
                  const int key = 8 * (i / 2) + i % 2;  // from the first one of the lane
                  float& x = s[row / 2 * 4 + i + row % 2];
                  if (key >= visible_to) x = kMasked;
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
          if constexpr (half == 1) {  // its own half of the columns comes first
#pragma unroll
            for (int box = 0; box < kHalfBoxes; ++box) {
#pragma unroll
              for (int i = 0; i < kHeads / 2; ++i) {
                const float other = acc[box][i];
                acc[box][i] = acc[kHalfBoxes + box][i];
                acc[kHalfBoxes + box][i] = other;
              }
            }
          }
        };
        if (half == 0) {
          multiply(Consumer<0>());
        } else {
          multiply(Consumer<1>());
        }

        // Both consumers take the larger row max, and add up row sums and O: each of them half of the columns.
        share(own_spare + kSharedSums, row_sum, [](float a, float b) { return a + b; });
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
        // After the barrier, all products that read Q are done: the consumers exchange O in its place.
        constexpr uint32_t kExchanged = kHalfBoxes * (kHeads / 8) * 128 * 16;
        static_assert(kConsumers * kExchanged <= kRows * kHeadDimV * sizeof(Element));
        const auto place_of_four = [&](int of, int box, int i) {
          return kQ + of * kExchanged + ((box * (kHeads / 8) + i / 4) * 128 + group_thread) * 16;
        };
#pragma unroll
        for (int box = 0; box < kHalfBoxes; ++box) {
          const auto& from = acc[kHalfBoxes + box];
#pragma unroll
          for (int i = 0; i < kHeads / 2; i += 4) {
            shared_at<float4>(place_of_four(half, box, i)) = {from[i], from[i + 1], from[i + 2], from[i + 3]};
          }
        }
        sync_consumers();
#pragma unroll
        for (int box = 0; box < kHalfBoxes; ++box) {
          auto& own = acc[box];
#pragma unroll
          for (int i = 0; i < kHeads / 2; i += 4) {
            const float4 more = shared_at<float4>(place_of_four(1 - half, box, i));
            own[i] += more.x;
            own[i + 1] += more.y;
            own[i + 2] += more.z;
            own[i + 3] += more.w;
          }
        }
        // Calls a function with the column, the head and the value of each element that a lane has.
        const auto for_each = [&](auto write) {
#pragma unroll
          for (int box = 0; box < kHalfBoxes; ++box) {
#pragma unroll
            for (int i = 0; i < kHeads / 2; ++i) {
              const int number = number_of(i);
              if (head_of(number) < rows) write(kHalf * half + box * kBoxColumns + own_key + 8 * row_of(i), number, acc[0 * kHalfBoxes + box][i]);
            }
          }
        };

        if (part.end - part.first == part.tiles) {
          float normalize[kLaneHeads];
          OutElement* to[kLaneHeads];
#pragma unroll
          for (int number = 0; number < kLaneHeads; ++number) {
            const int q = query[number], h = head[number];
            float sum = row_sum[number];
            normalize[number] = sum == 0.0f ? 0.0f : __frcp_rn(sum);
            to[number] = (out_ptr + (work.q_begin + q) * stride_out_s + h * stride_out_h);
            if (write_lse && half == 0 && warp % 4 == 0 && lane < 4 && head_of(number) < rows) lse_ptr[h * static_cast<long long>(total_q) + work.q_begin + q] = log_sum_exp(row_max[number], sum);
          }
          for_each([&](int column, int number, float value) { to[number][column] = to_element<OutElement>(value * normalize[number]); });
        } else {  // other blocks have the rest of the keys: a second launch merges, or, with splits of a fixed size, the last block
          using Rows = FloatRows<kHeadDimV>;
          const int first_worker = listed_splits ? 0 : splits > 0 ? worker - part.chunk : ranges.worker_of(part.list_begin);
          const int parts = listed_splits || splits > 0 ? part.chunks : ranges.worker_of(part.list_begin + part.chunks - 1) - first_worker + 1;
          const int item = (part.hk * batch + part.b) * row_units + (part.row_start / kRows >> row_bits);
          const auto of_worker = [&](int number) {
            const int slot = listed_splits ? item * max_splits + number : slot_of_worker(first_worker, number);
            return partials_ptr + (slot * static_cast<long long>(item_rows) + first_row) * Partial::kFloats;
          };
          // With equal parts no keys follow, so that rows that this block merges itself may stay in shared memory, where values were.
          char* const own_part = reinterpret_cast<char*>(of_worker(listed_splits ? part.chunk : worker - first_worker));
          const auto kept = Rows::kKept && splits > 0 ? KeptRows<Rows>(Shares<Rows>(max(rows, 0), parts), worker - first_worker, kMerged) : KeptRows<Rows>();
          const auto place_of_row = [&](int row) { return kept.has(row) ? &shared_at<char>(kept.place_of(row)) : own_part + row * 16 * Rows::kChunks; };
          const auto words_of = [&](int row) { return own_part + kWordsAt + row * kWordBytes; };
          float* places[kLaneHeads];
#pragma unroll
          for (int number = 0; number < kLaneHeads; ++number) places[number] = reinterpret_cast<float*>(listed_splits ? own_part + head_of(number) * 4 * Partial::kFloats : place_of_row(head_of(number)));
          for_each([&](int column, int number, float value) { places[number][column] = value; });
          if (half == 0 && warp % 4 == 0 && lane < 4) {
#pragma unroll
            for (int number = 0; number < kLaneHeads; ++number) {
              if (head_of(number) < rows) {
                *reinterpret_cast<float2*>(listed_splits ? reinterpret_cast<char*>(places[number] + kHeadDimV) : words_of(head_of(number)) + kRowMaxAt) = {row_max[number], row_sum[number]};
              }
            }
          }
          if (!listed_splits) {
            sync_consumers();  // both consumers have stored their columns
            if (threadIdx.x == 0) {
              shared_at<Unfinished>(kUnfinished + (part.chunk == 0) * static_cast<uint32_t>(sizeof(Unfinished))) = {item, parts, first_worker, worker - first_worker};
              left_by(own_part) = 0;
              arrive_counted(counters_ptr + 2 * (item * blocks + rank));
            }
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
    };
    // With splits of a fixed size the bits of a row do not depend on the longest sequence.
    const int most_rows = split_tiles > 0 ? kRows : max_seqlen_q * group;
    if (most_rows <= 16) {
      consume_few(Constant<16>());
      merge_shares(FloatRows<kHeadDimV>());
    } else {
      consume();
      merge_shares(ShortRows<kHeadDimV>());
    }
  }
}
