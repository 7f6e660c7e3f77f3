// fwd_sm90a_wide_bf16_d512_causal_paged_m64n64s2c2
//
// Attention forward, variant causal: mask `q_pos >= kv`.
// Rendered by `attngen build tests/render/others.yaml`, schedule hopper_wide.
//
// A block has 64 rows, a row being a head of a query, those of one query side by side. One warpgroup, the scorer, computes S = Q K^T
// and P of each tile of 64 keys, with some of Q in registers. Two consumers hold half of the columns of O each. P goes to them through
// shared memory, which has room for that of two tiles. They begin when S of the next tile is half done, so that the tensor cores
// are busy while the scorer is at the softmax:
//
//   scorer:     S0   P0   S1   P1          S2   P2
//   consumers:              O += P0 V0       O += P1 V1
//
// Where a sequence has more than 64 rows, two blocks of a cluster have 128 of them, and each loads half of the columns of a
// tile for both. A work item is the rows of such a block or cluster, with the tiles that they see. The tiles of all work items
// are one list, of which blocks (or clusters) take equal ranges. Where a range ends inside a work item, partial results go to
// global memory, and a second launch merges them.
#include "cluster.cuh"
#include "divisor.cuh"
#include "expression.cuh"
#include "lane_max.cuh"
#include "pair.cuh"
#include "pdl.cuh"
#include "quad.cuh"
#include "ring.cuh"
#include "softmax.cuh"
#include "split.cuh"
#include "tma.cuh"
#include "wgmma.cuh"
#include "work_list.cuh"

using Element = bf16;  // of Q, K, V and P
using OutElement = bf16;  // of O

constexpr int kRows = 64;    // query rows of a block
constexpr int kBlockN = 64;  // keys of a step
constexpr int kHeadDimQk = 512;
constexpr int kHeadDimV = 512;
constexpr int kConsumers = 2;  // warpgroups that hold O
constexpr int kThreads = 512;
constexpr int kFirstLoader = 4 * (kConsumers + 1);  // of the four warps that copy
constexpr int kLoaderRegisters = 48, kScorerRegisters = 144, kConsumerRegisters = 160;
constexpr int kMmaK = Product<Element, kBlockN>::kK;  // K of one wgmma: the elements that it sums over

// Columns come in boxes of 128 bytes. The first boxes of Q are in registers, the others in shared memory.
constexpr int kBoxBytes = 128, kBoxColumns = kBoxBytes / sizeof(Element);
constexpr int kBoxes = kHeadDimQk / kBoxColumns, kRegisterBoxes = 3;
constexpr int kHalfBoxes = kBoxes / 2;  // of K: half of its columns
constexpr int kHalf = kHeadDimV / 2;  // columns of O of a consumer, which are two products
constexpr int kPartBoxes = kHalf / 2 / kBoxColumns;  // of V: the columns of one of them
constexpr uint32_t kBox = kBlockN * kBoxBytes, kPartBytes = kPartBoxes * kBox;  // bytes of a box of a tile, and of a part of V
constexpr uint32_t kRowFloats = kRows * sizeof(float);  // bytes of a number for each row
static_assert(kBoxes % 2 == 0 && kPartBoxes * kBoxColumns * 4 == kHeadDimV);
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
static_assert(kThreads / 32 * sizeof(Count) <= 192);

using Partial = PartialRow<kHeadDimV>;
constexpr int kMergedRows = 4, kRowThreads = kHeadDimV / 4;  // of a block that merges, and the threads of a row

// Shared memory. Addresses are constants, so that they cost no instruction; the kernel checks where it begins.
constexpr uint32_t kShared = 1024;
constexpr uint32_t kQ = kShared + 0;  // 40960 B: the columns of Q that are not in registers
constexpr uint32_t kKeys = kShared + 40960;  // 65536 B: a tile of K, a box of columns per stage
constexpr uint32_t kValues = kShared + 106496;  // 98304 B: two tiles of V, a box of columns per stage
constexpr uint32_t kP = kShared + 204800;  // 16384 B: P of a tile
constexpr uint32_t kAlpha = kShared + 221184;  // 512 B: what its row max rescales O by
constexpr uint32_t kRowMax = kShared + 221696;  // 512 B: the row max after all tiles
constexpr uint32_t kSums = kShared + 222208;  // 512 B: row sums
constexpr uint32_t kKeysFull = kShared + 222720;  // 16 B: barriers
constexpr uint32_t kKeysEmpty = kShared + 222736;  // 16 B: barriers
constexpr uint32_t kValuesFull = kShared + 222752;  // 48 B: barriers
constexpr uint32_t kValuesEmpty = kShared + 222800;  // 48 B: barriers
constexpr uint32_t kBegin = kShared + 222848;  // 24 B: where the worker's range of the list begins
constexpr uint32_t kLast = kShared + 222872;  // 8 B: whether this block is the last of its item
constexpr uint32_t kCounts = kShared + 222880;  // 192 B: chunks and items that each warp has counted

// Rings: who fills the stages -> who empties them.
using KeysRing = Ring<kKeysFull, kKeysEmpty, 2>;  // a loader -> the scorer
using ValuesRing = Ring<kValuesFull, kValuesEmpty, 6>;  // a loader -> a consumer

// Named barriers of the hardware; 0 is __syncthreads.
enum class Named {
  kConsumers = 1,  // 1 of them: partial results are stored, or have been merged
  kQueries = 2,  // 1 of them: columns of Q are in shared memory, or have been multiplied
  kPublished = 3,  // 2 of them: P of a tile is there, and S of the next one half done
  kMultiplied = 5,  // 2 of them: both consumers have multiplied P
  kZeroed = 7,  // 2 of them: a consumer has cleared the values after the last key
};

// A number as a type, which a generic lambda can use as a constant.
template <int kNumber>
struct Constant {
  static constexpr int kValue = kNumber;
};

// Part `number` of V of a consumer, two of each tile: its stage among those of that consumer.
__device__ __forceinline__ ValuesRing part_of_values(int half, int number, uint32_t here) {
  constexpr int kParts = ValuesRing::kStages / kConsumers;
  return {half * kParts + number % kParts, static_cast<uint32_t>(number / kParts & 1), here};
}

// Layouts of wgmma's operands: Q, K and P are K-major; V is MN-major, since its rows are keys.
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

// Before its range of the list a worker takes whole items.
struct WholeWalk : Walk {
  int taken = 0;  // whole items so far
};

extern __shared__ char shared_memory[];

template <typename Value>
__device__ __forceinline__ Value& shared_at(uint32_t address) {
  return *reinterpret_cast<Value*>(shared_memory + (address - kShared));
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) fwd_sm90a_wide_bf16_d512_causal_paged_m64n64s2c2(
    const bf16* q_ptr,
    const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
    bf16* out_ptr, float* lse_ptr, float* partials_ptr, int* begun_ptr, uint32_t* counters_ptr,
    const int* cu_seqlens_q_ptr, const int* page_table_ptr, const int* seqused_k_ptr,
    long long stride_q_s, long long stride_q_h,
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
  const int blocks = cluster_size(), rank = cluster_rank(), item_rows = kRows << row_bits;
  // Lets the next launch start early, unless it may have clusters: these would crowd the part of the chip that is free first.
  // The launch that merges has none; it follows unless the call fixes the size of splits.
  if (blocks == 1 || split_tiles == 0) launch_dependents();
  const uint32_t here = mapped(kShared, rank) - kShared;  // barriers and copies take shared::cluster addresses

  if (threadIdx.x == 0) {
    if (static_cast<uint32_t>(__cvta_generic_to_shared(shared_memory)) != here + kShared) __trap();
    init_barriers(here + kKeysFull, 2, 1);  // a loader, and the bytes of the copy
    init_barriers(here + kKeysEmpty, 2, 8);  // each warp of the readers, of both blocks of a cluster, or twice of a single block
    init_barriers(here + kValuesFull, 6, 1);  // a loader, and the bytes of the copy
    init_barriers(here + kValuesEmpty, 6, 8);  // each warp of the readers, of both blocks of a cluster, or twice of a single block
    fence_barrier_init();
    prefetch_map(k_map);
    prefetch_map(v_map);
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
    const int b = place.b, hk = place.hk, row_start = (place.row_block % 2 ? place.row_block / 2 : row_units - 1 - place.row_block / 2) * item_rows;
    const int q_begin = has_cu_seqlens_q ? cu_seqlens_q_ptr[b] : b * max_seqlen_q;
    const int seqlen_q = has_cu_seqlens_q ? cu_seqlens_q_ptr[b + 1] - q_begin : max_seqlen_q;
    const int seqlen_k = seqused_k_ptr[b];
    if (row_start >= seqlen_q * group) return Work{.tiles = -1};  // a shorter sequence than the longest
    const int q_start = by_group.quotient(row_start);
    const int q_hi = min(by_group.quotient(row_start + item_rows - 1), seqlen_q - 1);
    const int whole_tiles = seqlen_k / kBlockN;
    const int q_pos_lo = q_start + (seqlen_k - seqlen_q);
    const int q_pos_hi = q_hi + (seqlen_k - seqlen_q);
    const int visible_hi = (max(q_pos_hi + 1, 0) + kBlockN - 1) / kBlockN;
    const int full_hi = min(max(q_pos_lo + 1, 0) / kBlockN, whole_tiles);
    const Spans spans = {0, visible_hi, 0, full_hi};
    return Work{b, hk, row_start, q_begin, seqlen_q, seqlen_k, max(spans.visible_hi - spans.visible_lo, 0), spans};
  };
  // The KV tile that is number `number` of those that the rows see.
  const auto tile_of = [&](const Work& work, int number) {
    return work.spans.visible_lo + number;
  };

  const Chunks<true> chunks_of(split_tiles, split_tiles_reciprocal);
  const bool listed_splits = chunks_of.are_splits();
  const int items = batch * kv_heads * row_units;
  const auto position_of = [&](int row_block) { return 2 * row_block + 1 < row_units ? 2 * row_block + 1 : 2 * (row_units - 1 - row_block); };
  // A worker is a block, or a cluster whose blocks have the rows of an item. If there are two items or more for each, worker w
  // first takes whole items, pair w of every `most_workers` pairs: blocks that run at the same time then read keys of the same
  // head, which L2 holds, and pairs take equally long. The other items are the list.
  const int worker = blockIdx.x >> row_bits, most_workers = gridDim.x >> row_bits;
  const bool dense = items * static_cast<long long>(item_rows) < 2 * static_cast<long long>(total_q) * group;  // most items exist
  const int rounds = dense && !listed_splits ? items / (2 * most_workers) : 0;
  const OwnItems<kThreads, false> own_items(2 * rounds * most_workers, items, lane);
  const Place place_first = place_of_item(own_items.first);
  const Count own = count_items(own_items, place_first, chunks_of, work_of, advance);
  Count before = {};
  const auto count_at = [&](int warp) -> Count& { return shared_at<Count>(kCounts + sizeof(Count) * warp); };
  const Count all = count_of_block<kThreads / 32, kThreads / 32>(own, warp, lane, count_at, before);
  const Cut cut = Cutting::of(all, split_tiles, most_workers);
  const int splits = cut.splits;
  const EvenRanges ranges = Cutting::ranges(all, cut);
  const int range_begin = ranges.first(min(worker, cut.workers)), range_end = ranges.first(min(worker + 1, cut.workers));
  const auto begun_of = [&](int worker) -> Begun& { return reinterpret_cast<Begun*>(begun_ptr)[worker]; };
  if (rounds == 0 && range_begin == range_end) {
    if (threadIdx.x == 0 && rank == 0 && !listed_splits) begun_of(worker) = {-1, 0};
    return;
  }
  Walk begin = {};
  if (range_begin < range_end) {
    const bool begins = find_begin(begin, range_begin, range_end, own_items, place_first, before, splits, chunks_of, work_of, advance);
    begin = begin_of_block(begin, begins, shared_at<Walk>(kBegin));
  }

  // Takes the next part of this worker; false if nothing is left.
  const auto take = [&](WholeWalk& walk, Part& part) {
    while (walk.taken < 2 * rounds) {  // a whole item
      static_cast<Work&>(part) = work_of(place_of_item(2 * (walk.taken / 2 * most_workers + worker) + walk.taken % 2));
      ++walk.taken;
      if (part.tiles < 0) continue;
      part.chunk = part.list_begin = part.first = 0;
      part.chunks = 1;
      part.end = part.tiles;
      return true;
    }
    return take_part<Division>(walk, part, splits, range_end, kv_heads, chunks_of, work_of, advance);
  };

  const int own_row = 16 * (warp % 4) + lane / 4;  // of the block's; the other one of a lane is 8 rows below
  if (warpgroup == kConsumers + 1) {
    shrink_registers<kLoaderRegisters>();
    // Four warps load, half of the columns of each tile of K or of V.
    const int loader = warp - kFirstLoader, half = loader % 2;
    const bool read_once = row_units == 1;  // keys are read by one work item only, so that L2 need not keep them
    const Divisor by_page(page_size, page_size_reciprocal);
    const int row_boxes = kBlockN / box_rows;  // of a tile, each of rows of one page
    int round = 0;  // tiles so far
    WholeWalk walk = {begin};
    Part part;
    while (__any_sync(~0u, take(walk, part))) {
      // The pages of a tile and of the next one: a lane has those of two boxes of each.
      int pages[2], next_pages[2];
      const auto look_up = [&](int number, int (&of_tile)[2]) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int box = lane + 32 * i, key = tile_of(part, number) * kBlockN + box * box_rows;
          const bool there = number < part.end && box < row_boxes && key < part.seqlen_k;
          of_tile[i] = there ? page_table_ptr[part.b * page_table_stride + by_page.quotient(key)] : num_pages;  // no page of the cache: zeros
        }
      };
      look_up(part.first, pages);
      for (int number = part.first; __any_sync(~0u, number < part.end); ++number) {
        const int key = tile_of(part, number) * kBlockN;
        look_up(number + 1, next_pages);
        struct Rows {
          int in_page, page;
        };
        const auto rows_of = [&](int row_box) {
          const int low = __shfl_sync(~0u, pages[0], row_box), high = __shfl_sync(~0u, pages[1], row_box);
          return Rows{by_page.remainder(key + row_box * box_rows), row_box < 32 ? low : high};
        };
        // Copies neighbouring boxes of columns of a tile to a stage of a ring. Each block of a cluster copies every other box, to both.
        const auto load = [&](auto boxes, const TensorMap& map, auto ring, uint32_t to, int first_column) {
          constexpr int kCopied = boxes.kValue;
          const uint32_t first = here + to + ring.stage * kCopied * kBox;
          ring.acquire();
          if (lane == 0) ring.arrive_expecting(kCopied * kBox);
          __syncwarp();
          const auto copy = [&](auto step, int first_box, const auto& copy_box) {
            constexpr int kStep = step.kValue;
            for (int row_box = 0; row_box < row_boxes; ++row_box) {
              const Rows rows = rows_of(row_box);
              const uint32_t before = row_box * box_rows * kBoxBytes;
              if (lane == 0) {
#pragma unroll
                for (int i = 0; i < kCopied; i += kStep) {
                  const int box = i + first_box, column = first_column + box * kBoxColumns;
                  if (kCopied % kStep == 0 || box < kCopied) copy_box(first + box * kBox + before, ring.full(), column, rows.in_page, part.hk, rows.page);
                }
              }
              __syncwarp();
            }
          };
          if (blocks > 1) {
            copy(Constant<2>(), rank, [&](uint32_t to, uint32_t full, auto... at) { load_box_to(3, to, map, full, at...); });
          } else if (read_once) {
            copy(Constant<1>(), 0, [&](uint32_t to, uint32_t full, auto... at) { load_box_once(to, map, full, at...); });
          } else {
            copy(Constant<1>(), 0, [&](uint32_t to, uint32_t full, auto... at) { load_box(to, map, full, at...); });
          }
        };
        if (loader < 2) {
          load(Constant<kHalfBoxes>(), k_map, KeysRing::at(2 * round + half, here), kKeys, half * kHeadDimQk / 2);
        } else {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            load(Constant<kPartBoxes>(), v_map, part_of_values(half, 2 * round + i, here), kValues, (2 * half + i) * kPartBoxes * kBoxColumns);
          }
        }
        ++round;
        pages[0] = next_pages[0];
        pages[1] = next_pages[1];
      }
    }
  } else if (warpgroup == kConsumers) {
    grow_registers<kScorerRegisters>();
    const int group_thread = threadIdx.x % 128;
    KeysRing keys_ring(0, 0, here);
    int round = 0;  // tiles so far
    WholeWalk walk = {begin};
    Part part;
    while (__any_sync(~0u, take(walk, part))) {
      const Work& work = part;
      const int first_row = kRows * rank;  // of the block's, among those of the item
      const int rows = min(work.seqlen_q * group - work.row_start - first_row, kRows);  // of the block's that exist

      // The two rows of a lane.
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
      uint32_t q_registers[kRegisterBoxes * kBoxColumns / 4];  // the first columns of Q, as the A operand of wgmma
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const Element* const from = row_of_q(own_row + 8 * row) + 2 * (lane % 4);
#pragma unroll
        for (int column = 0; column < kRegisterBoxes * kBoxColumns; column += 8) {
          q_registers[column / 4 + row] = *reinterpret_cast<const uint32_t*>(from + column);
        }
      }
      named_sync(Named::kQueries, 0, 128);  // all warps have multiplied the Q of the item before
      {  // two threads copy the other columns of a row
        const int row = group_thread / 2, part_of_two = group_thread % 2;
        constexpr int kFirstColumn = kRegisterBoxes * kBoxColumns, kChunks = (kBoxes - kRegisterBoxes) * kBoxBytes / 32;
        const Element* const from = row_of_q(row) + kFirstColumn + 8 * part_of_two;
        int4 chunks[kChunks];  // all are loaded before any is stored, so that latencies overlap
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
          chunks[i] = *reinterpret_cast<const int4*>(from + 16 * i);
        }
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
          const int chunk = i % 4 * 2 + part_of_two;
          shared_at<int4>(kQ + i / 4 * kBox + row * kBoxBytes + 16 * (chunk ^ (row % 8))) = chunks[i];
        }
      }
      fence_async_proxy();
      named_sync(Named::kQueries, 0, 128);
      const int seqlen_q = work.seqlen_q;
      const int seqlen_k = work.seqlen_k;
      const float scale_log2e = softmax_scale * kLog2e;
      float row_max[2] = {kUnseen, kUnseen}, row_sum[2] = {};
      const int tiles = part.end - part.first;
      for (int step = 0; __any_sync(~0u, step < tiles); ++step) {
        const int tile = tile_of(work, part.first + step), buffer = round++ & 1;  // of P

        // S = Q K^T, of one half of the columns and then of the other
        float s[kBlockN / 2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          keys_ring.wait();
          const uint32_t keys = kKeys + keys_ring.stage * kHalfBoxes * kBox;
          fence_products();
#pragma unroll
          for (int i = 0; i < kHalfBoxes; ++i) {
            const int box = half * kHalfBoxes + i;
            const RowMatrix k(keys + i * kBox), q(kQ + (box - kRegisterBoxes) * kBox);
#pragma unroll
            for (int column = 0; column < kBoxColumns; column += kMmaK) {
              const int accumulate = box + column > 0;
              if (box < kRegisterBoxes) {
                Product<Element, kBlockN>::template rs<0>(s, q_registers + (box * kBoxColumns + column) / 4, k.at(column * sizeof(Element)), accumulate);
              } else {
                Product<Element, kBlockN>::template ss<0>(s, q.at(column * sizeof(Element)), k.at(column * sizeof(Element)), accumulate);
              }
            }
          }
          commit_products();
          keys_ring.advance();
        }
        wait_products<1>();
        // O += P V of the tile before may begin: most of it runs beside the softmax of this tile.
        if (step > 0) named_arrive(Named::kPublished, buffer ^ 1, 128 * (kConsumers + 1));
        release_stages<0>(KeysRing::empty_of(keys_ring.before(2)), blocks, lane);
        wait_products<0>();
        fence_registers(s);
        release_stages<0>(KeysRing::empty_of(keys_ring.before(1)), blocks, lane);

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
        float maximum[2], alpha[2] = {1.0f, 1.0f};
        find_lane_maximum(s, maximum);
        const auto is_kept = [&](int row) { return scale_log2e * maximum[row] <= row_max[row] + kRaiseAbove; };
        const bool kept[2] = {is_kept(0), is_kept(1)};
        if (__any_sync(~0u, !(kept[0] && kept[1]))) {
          join_lane_maxima(maximum, scale_log2e);
          keep_row_max(kept, row_max, maximum);
          raise_row_max(maximum, row_max, alpha);
          row_sum[0] *= alpha[0];
          row_sum[1] *= alpha[1];
        }
        uint32_t p[kBlockN / 4];
        exponentiate<Element>(s, scale_log2e, row_max, p, row_sum);

        named_sync(Named::kMultiplied, buffer, 128 * (kConsumers + 1));  // P of two tiles before, by both consumers
#pragma unroll
        for (int column = 0; column < kBlockN; column += kMmaK) {
          const int row = 16 * (warp % 4) + lane % 16, chunk = column / 8 + lane / 16;
          const uint32_t* const of_column = p + column / 4;
          store_blocks(here + kP + buffer * kBox + row * kBoxBytes + 16 * (chunk ^ (row % 8)), of_column[0], of_column[1], of_column[2], of_column[3]);
        }
        if (lane % 4 == 0) {
          shared_at<float>(kAlpha + buffer * kRowFloats + 4 * own_row) = alpha[0];
          shared_at<float>(kAlpha + buffer * kRowFloats + 4 * own_row + 4 * 8) = alpha[1];
        }
        fence_async_proxy();
      }
      if (tiles > 0) {  // the last P, with the sums
        const int buffer = (round - 1) & 1;
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          row_sum[row] += __shfl_xor_sync(~0u, row_sum[row], 1);
          row_sum[row] += __shfl_xor_sync(~0u, row_sum[row], 2);
          if (lane % 4 == 0) {
            shared_at<float>(kRowMax + buffer * kRowFloats + 4 * (own_row + 8 * row)) = row_max[row];
            shared_at<float>(kSums + buffer * kRowFloats + 4 * (own_row + 8 * row)) = row_sum[row];
          }
        }
        named_arrive(Named::kPublished, buffer, 128 * (kConsumers + 1));
      }
    }
  } else {
    grow_registers<kConsumerRegisters>();
    const int half = warpgroup, group_thread = threadIdx.x % 128;
    const auto sync_consumers = [] { named_sync(Named::kConsumers, 0, 128 * kConsumers); };
    for (int buffer = 0; buffer < 2; ++buffer) named_arrive(Named::kMultiplied, buffer, 128 * (kConsumers + 1));  // there is no P yet

    int round = 0;  // tiles so far
    Begun begun = {-1, 0};
    WholeWalk walk = {begin};
    Part part;
    while (__any_sync(~0u, take(walk, part))) {
      const Work& work = part;
      const int first_row = kRows * rank;  // of the block's, among those of the item
      const int rows = min(work.seqlen_q * group - work.row_start - first_row, kRows);  // of the block's that exist

      float low[kHalf / 4] = {}, high[kHalf / 4] = {};  // half of the columns of O, in two parts
      float row_max[2] = {kUnseen, kUnseen}, row_sum[2] = {};  // of all tiles, from the scorer
      const int tiles = part.end - part.first;
      for (int step = 0; __any_sync(~0u, step < tiles); ++step) {
        const int buffer = round & 1;  // of P
        const ValuesRing of_low = part_of_values(half, 2 * round, here), of_high = part_of_values(half, 2 * round + 1, here);
        ++round;
        named_sync(Named::kPublished, buffer, 128 * (kConsumers + 1));
        const float alpha[2] = {shared_at<float>(kAlpha + buffer * kRowFloats + 4 * own_row), shared_at<float>(kAlpha + buffer * kRowFloats + 4 * own_row + 4 * 8)};
        if (__any_sync(~0u, alpha[0] != 1.0f || alpha[1] != 1.0f)) {
          rescale(low, alpha);
          rescale(high, alpha);
        }
        const uint32_t at_low = kValues + of_low.stage * kPartBytes, at_high = kValues + of_high.stage * kPartBytes;
        of_low.wait();
        const int left = work.seqlen_k - tile_of(work, part.first + step) * kBlockN;
        if (left < kBlockN) {  // V after the end may be NaN, and 0 * NaN is NaN
          of_high.wait();
          for (int i = max(left, 0) * kBoxBytes + 16 * group_thread; i < static_cast<int>(kBox); i += 128 * 16) {
#pragma unroll
            for (int box = 0; box < kPartBoxes; ++box) {
              shared_at<int4>(at_low + box * kBox + i) = {};
              shared_at<int4>(at_high + box * kBox + i) = {};
            }
          }
          fence_async_proxy();
          named_sync(Named::kZeroed, half, 128);
        }

        // O += P V
        const RowMatrix p(kP + buffer * kBox);
        const ValueMatrix v_low(at_low), v_high(at_high);
        fence_registers(low);
        fence_registers(high);
        fence_products();
#pragma unroll
        for (int key = 0; key < kBlockN; key += kMmaK) {
          Product<Element, kHalf / 2>::template ss<1>(low, p.at(key * sizeof(Element)), v_low.at(key * kBoxBytes), 1);
        }
        commit_products();
        of_high.wait();
        fence_products();
#pragma unroll
        for (int key = 0; key < kBlockN; key += kMmaK) {
          Product<Element, kHalf / 2>::template ss<1>(high, p.at(key * sizeof(Element)), v_high.at(key * kBoxBytes), 1);
        }
        commit_products();
        wait_products<1>();
        release_stages<0>(ValuesRing::empty_of(of_low.stage), blocks, lane);
        wait_products<0>();
        fence_registers(low);
        fence_registers(high);
        release_stages<0>(ValuesRing::empty_of(of_high.stage), blocks, lane);
        if (step == tiles - 1) {  // the scorer may then overwrite these, too
#pragma unroll
          for (int row = 0; row < 2; ++row) {
            row_max[row] = shared_at<float>(kRowMax + buffer * kRowFloats + 4 * (own_row + 8 * row));
            row_sum[row] = shared_at<float>(kSums + buffer * kRowFloats + 4 * (own_row + 8 * row));
          }
        }
        named_arrive(Named::kMultiplied, buffer, 128 * (kConsumers + 1));
      }

      float acc[kHalf / 2];
#pragma unroll
      for (int i = 0; i < kHalf / 4; ++i) {
        acc[i] = low[i];
        acc[kHalf / 4 + i] = high[i];
      }
      // The two rows of a lane.
      int query[2], head[2];
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const int packed = work.row_start + first_row + own_row + 8 * row;
        query[row] = by_group.quotient(packed);
        head[row] = work.hk * group + by_group.remainder(packed);
      }
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
        const int item = (part.hk * batch + part.b) * row_units + position_of(part.row_start / kRows >> row_bits);
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
  }
  if (blocks > 1) leave_cluster();  // once the other block has released what this one copies
}

// Merges the partial results of work items that several workers have parts of. kRowThreads threads have a row, four columns
// each; the grid has rows for the item that each worker may have begun.
extern "C" __global__ void __launch_bounds__(kMergedRows * kRowThreads) fwd_sm90a_wide_bf16_d512_causal_paged_m64n64s2c2_merge(
    const bf16* q_ptr,
    const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
    bf16* out_ptr, float* lse_ptr, float* partials_ptr, int* begun_ptr, uint32_t* counters_ptr,
    const int* cu_seqlens_q_ptr, const int* page_table_ptr, const int* seqused_k_ptr,
    long long stride_q_s, long long stride_q_h,
    long long stride_out_s, long long stride_out_h,
    int batch, int heads, int kv_heads, int group, int row_bits, int row_units, int split_tiles, int max_splits,
    int batch_reciprocal, int group_reciprocal, int row_units_reciprocal, int split_tiles_reciprocal,
    int max_seqlen_q, int max_seqlen_k, int total_q, int total_k,
    long long page_table_stride,
    int page_size, int num_pages, int box_rows, int page_size_reciprocal,
    float softmax_scale,
    int write_lse, int has_cu_seqlens_q
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
    const int b = place.b, hk = place.hk, row_start = (place.row_block % 2 ? place.row_block / 2 : row_units - 1 - place.row_block / 2) * item_rows;
    const int q_begin = has_cu_seqlens_q ? cu_seqlens_q_ptr[b] : b * max_seqlen_q;
    const int seqlen_q = has_cu_seqlens_q ? cu_seqlens_q_ptr[b + 1] - q_begin : max_seqlen_q;
    const int seqlen_k = seqused_k_ptr[b];
    if (row_start >= seqlen_q * group) return Work{.tiles = -1};  // a shorter sequence than the longest
    const int q_start = by_group.quotient(row_start);
    const int q_hi = min(by_group.quotient(row_start + item_rows - 1), seqlen_q - 1);
    const int whole_tiles = seqlen_k / kBlockN;
    const int q_pos_lo = q_start + (seqlen_k - seqlen_q);
    const int q_pos_hi = q_hi + (seqlen_k - seqlen_q);
    const int visible_hi = (max(q_pos_hi + 1, 0) + kBlockN - 1) / kBlockN;
    const int full_hi = min(max(q_pos_lo + 1, 0) / kBlockN, whole_tiles);
    const Spans spans = {0, visible_hi, 0, full_hi};
    return Work{b, hk, row_start, q_begin, seqlen_q, seqlen_k, max(spans.visible_hi - spans.visible_lo, 0), spans};
  };
  // The KV tile that is number `number` of those that the rows see.
  const auto tile_of = [&](const Work& work, int number) {
    return work.spans.visible_lo + number;
  };

  const Chunks<true> chunks_of(split_tiles, split_tiles_reciprocal);
  const bool listed_splits = chunks_of.are_splits();
  const int items = batch * kv_heads * row_units;
  const Work work = work_of(place_of_item(begun.item));
  if (work.row_start + row >= work.seqlen_q * group) return;
  const auto of_worker = [&](int part) {
    const int slot = slot_of_worker(worker, part);
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
