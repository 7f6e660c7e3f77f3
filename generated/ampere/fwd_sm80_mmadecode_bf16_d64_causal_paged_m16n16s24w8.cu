// fwd_sm80_mmadecode_bf16_d64_causal_paged_m16n16s24w8
//
// Attention forward, variant causal: mask `q_pos >= kv`.
// Rendered by `attngen build specs/ampere.yaml`, schedule mma_decode.
//
// Few query rows against many keys: memory binds, not the products. The rows of a KV head, those of all query heads of its
// group, are cut into row blocks of 16, one for each of `row_warps` warps. These warps go through the same keys, 16 at a
// time. A block has several such groups of warps, which take KV tiles in turn, and loader warps, which prefetch them.
//
// The tiles that rows see, of all sequences and KV heads, form one list. Each block takes an equal range of it; with few
// work items, each cluster does, and its blocks work together. Where a range ends inside an item, blocks leave partial
// results in global memory, and the block that finishes last merges them in order.
#include "alone.cuh"
#include "copy.cuh"
#include "divisor.cuh"
#include "expression.cuh"
#include "mma.cuh"
#include "ring.cuh"
#include "softmax.cuh"
#include "split.cuh"

#include "work_list.cuh"

using Element = bf16;  // of Q, K, V and P
using OutElement = bf16;  // of O

constexpr int kRows = 16;    // query rows of a warp
constexpr int kBlockN = 16;  // keys of a step
constexpr int kHeadDimQk = 64;
constexpr int kHeadDimV = 64;
constexpr int kWarps = 8, kWarpBits = 3;  // that multiply
constexpr int kLoaders = 4;  // warps after them, which copy K and V
constexpr int kThreads = 384;
constexpr int kCluster = 1;  // blocks that can work together
constexpr int kBoxBytes = 128;  // of a row of one copy, swizzled
constexpr int kBoxColumns = kBoxBytes / sizeof(Element);

// Limits by which workers cut the list of work, in tiles of keys; the host computes with the same.
struct Limits {
  static constexpr int kLeastTiles = 8;  // of a worker at least; with fewer, fewer workers have any
  static constexpr int kCutTiles = 12;  // how many more than an equal share a worker may have, if it then works on one work item only
  static constexpr int kWholeTiles = 2048;  // of a worker: with more, idle workers cost more than merging
  static constexpr int kOneOf = 16;  // one of so many: tiles more than an equal share, and workers that are idle
};
using Division = Exact;
using Cutting = CutBy<Limits, Division>;
// The regions of shared memory that hold where a range begins, and what each warp has counted.
static_assert(sizeof(Walk) <= 24);
static_assert(kThreads / 32 * sizeof(Count) <= 144);

constexpr uint32_t kKBytes = kBlockN * kHeadDimQk * sizeof(Element);
constexpr uint32_t kVBytes = kBlockN * kHeadDimV * sizeof(Element);
constexpr uint32_t kStageBytes = kKBytes + kVBytes;
using Partial = PartialRow<kHeadDimV>;

// Shared memory. Addresses are constants, so that they cost no instruction; the kernel checks where it begins.
constexpr uint32_t kShared = 1024;
constexpr uint32_t kKv = kShared + 0;  // 98304 B: K and V, a tile of each per stage
constexpr uint32_t kMerge = kShared + 98304;  // 36864 B: partial results of warps
constexpr uint32_t kKvFull = kShared + 135168;  // 192 B: barriers
constexpr uint32_t kKvEmpty = kShared + 135360;  // 192 B: barriers
constexpr uint32_t kBegin = kShared + 135552;  // 24 B: where the range begins
constexpr uint32_t kLast = kShared + 135576;  // 8 B: whether the block came last
constexpr uint32_t kCounts = kShared + 135584;  // 144 B: what each warp has counted

// Rings: who fills the stages -> who empties them.
using KvRing = Ring<kKvFull, kKvEmpty, 24>;  // a loader -> the warps of a group

// Named barriers of the hardware; 0 is __syncthreads.
enum class Named {
  kConsumers = 1,  // 1 of them: partial results of warps are there, or have been read
  kMade = 2,  // 1 of them: barriers that loaders have made
};

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
// A number that a function knows when it is compiled.
template <int kNumber>
struct Number {};

extern __shared__ char shared_memory[];

template <typename Value>
__device__ __forceinline__ Value& shared_at(uint32_t address) {
  return *reinterpret_cast<Value*>(shared_memory + (address - kShared));
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) fwd_sm80_mmadecode_bf16_d64_causal_paged_m16n16s24w8(
    const bf16* q_ptr, const bf16* k_ptr, const bf16* v_ptr, bf16* out_ptr, float* lse_ptr, float* partials_ptr,
    uint32_t* counters_ptr, const int* cu_seqlens_q_ptr, const int* page_table_ptr, const int* seqused_k_ptr,
    long long stride_q_s, long long stride_q_h,
    long long stride_k_page, long long stride_k_s, long long stride_k_h,
    long long stride_v_page, long long stride_v_s, long long stride_v_h,
    long long stride_out_s, long long stride_out_h,
    int batch, int heads, int kv_heads, int group, int row_bits, int row_units, int split_tiles, int max_splits,
    int batch_reciprocal, int group_reciprocal, int row_units_reciprocal, int split_tiles_reciprocal,
    int max_seqlen_q, int max_seqlen_k, int total_q, int total_k, int most_queries,
    long long page_table_stride,
    int page_size, int num_pages, int box_rows, int page_size_reciprocal,
    float softmax_scale,
    int write_lse, int has_cu_seqlens_q
) {
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // uniform across the warp, and the compiler knows
  const int lane = threadIdx.x % 32;
  const uint32_t here = static_cast<uint32_t>(__cvta_generic_to_shared(shared_memory)) - kShared;

  // Warps that share keys: one for each block of rows, up to half of all.
  const int row_warps = 1 << row_bits, row_warp = warp & row_warps - 1;
  const int groups = kWarps >> row_bits, warp_group = warp >> row_bits;
  const int item_rows = kRows << row_bits;

  if (warp >= kWarps) {  // a loader makes the barriers of its own stages, so that it can begin at once
    const int own = warp - kWarps + lane * kLoaders;
    init_barriers(here + kKvFull, 24, 32, own, 32 * kLoaders);  // each lane of a loader
    init_barriers(here + kKvEmpty, 24, 4, own, 32 * kLoaders);  // each warp of the group, as many times as make half of the warps together
    fence_barrier_init();
    __syncwarp();
  }

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
    // A shorter sequence than the longest, or one that is too long for this launch.
    if (row_start >= seqlen_q * group || seqlen_q > most_queries) return Work{.tiles = -1};
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

  // An item that sees no key, as of a sequence that pads a batch, is no work: a warp of one block writes its results, zeros.
  const auto write_unseen = [&](const Place& place) {
    const Work work = work_of(place);
    const int rows = min(work.seqlen_q * group - work.row_start, item_rows);
#pragma unroll 1
    for (int i = lane; i < rows * (kHeadDimV / 4); i += 32) {
      const int row = i / (kHeadDimV / 4), column = i % (kHeadDimV / 4) * 4;
      Partial sum = {{}, kUnseen, 0.0f};
      const int packed = work.row_start + row, q = by_group.quotient(packed), h = work.hk * group + by_group.remainder(packed);
      const float normalize = sum.sum == 0.0f ? 0.0f : __frcp_rn(sum.sum);
      OutElement* const to = (out_ptr + (work.q_begin + q) * stride_out_s + h * stride_out_h);
      const uint2 four = {
          pack<OutElement>(sum.acc.x * normalize, sum.acc.y * normalize), pack<OutElement>(sum.acc.z * normalize, sum.acc.w * normalize)};
      *reinterpret_cast<uint2*>(to + column) = four;
      if (write_lse && column == 0) lse_ptr[h * static_cast<long long>(total_q) + work.q_begin + q] = log_sum_exp(sum.row_max, sum.sum);
    }
  };

  const Chunks<false> chunks_of(split_tiles, split_tiles_reciprocal);
  const bool listed_splits = chunks_of.are_splits();
  const int items = batch * kv_heads * row_units;
  const OwnItems<kThreads, false> own_items(0, items, lane);
  const Place place_first = place_of_item(own_items.first);
  // Items of one sequence see about the same number of keys, so clusters can begin without counting. Then an item that sees
  // none is in the list, too.
  const bool clustered = cluster_size() > 1, alike = clustered && batch == 1 && row_units == 1;
  Count all = {0, items, 0}, before = {};
  if (!alike) {
    Count own = {};
    Place place = place_first;
#pragma unroll 1
    for (int i = 0; i < own_items.each; ++i) {
      const int item = own_items.first + i, tiles = item < own_items.end ? work_of(place).tiles : -1;
      own += Count{chunks_of(tiles), chunks_of.lists(tiles), tiles};
      for (uint32_t unseen = __ballot_sync(~0u, tiles == 0 && item % gridDim.x == blockIdx.x); unseen != 0; unseen &= unseen - 1) {
        const int from = __ffs(unseen) - 1;
        write_unseen(of_lane(place, from));
      }
      advance(place);
    }
    const auto count_at = [&](int warp) -> Count& { return shared_at<Count>(kCounts + sizeof(Count) * warp); };
    all = count_of_block<kThreads / 32, kThreads / 32>(own, warp, lane, count_at, before);
  }

  // A worker is a cluster, whose blocks work together on one part, or a single block.
  const int clusters = gridDim.x / kCluster;
  int splits = alike ? clusters / items : clustered ? Cutting::splits(all, clusters, Limits::kCutTiles * kCluster) : 0;
  const bool together = splits > 0;
  const int team = together ? kCluster : 1, rank = together ? cluster_rank() : 0;
  const int worker = together ? blockIdx.x / kCluster : blockIdx.x;
  const Cut cut = together ? Cut{all.items * splits, splits} : Cutting::of(all, split_tiles, gridDim.x);
  splits = cut.splits;
  const EvenRanges ranges = Cutting::ranges(all, cut);
  const int range_begin = ranges.first(worker), range_end = ranges.first(worker + 1);
  if (worker >= cut.workers || range_begin == range_end) return;
  Walk begin = {};
  if (alike) {
    begin = {place_of_item(worker / splits), worker % splits, 1};
    if (warp >= kWarps) {
      named_arrive(Named::kMade, 0, kThreads);
    } else {
      named_sync(Named::kMade, 0, kThreads);
    }
  } else {
    const bool begins = find_begin(begin, range_begin, range_end, own_items, place_first, before, splits, chunks_of, work_of, advance);
    begin = begin_of_block(begin, begins, shared_at<Walk>(kBegin));
  }

  // Takes the next part of this worker's range; false if nothing is left.
  const auto take = [&](Walk& walk, Part& part) {
    return take_part<Division>(walk, part, splits, range_end, kv_heads, chunks_of, work_of, advance);
  };

  // The tile of a step: groups of warps take tiles in turn, and so do the blocks of a cluster.
  const int turn_bits = kWarpBits - row_bits;
  const auto number_of = [&](const Part& part, int step) {
    return part.first + ((step >> turn_bits) * team + rank << turn_bits) + (step & groups - 1);
  };

  // Loaders copy K and V for all groups of warps, as far ahead as there are stages. They take stages in turn, since one alone
  // would not keep memory busy; each has stages of its own, so that none gets a whole round of the ring ahead of another.
  if (warp >= kWarps) {
    // A stage is also always the same group's: copies land in any order, and another group could take that of the round before
    // for the one it waits for.
    static_assert(KvRing::kStages % kLoaders == 0 && KvRing::kStages % kWarps == 0);
    const Divisor by_page(page_size, page_size_reciprocal);
    const int box_bits = __ffs(kBlockN) - __ffs(box_rows), boxes = 1 << box_bits;  // of a step
    const int box = lane & boxes - 1, steps_ahead = 32 >> box_bits;
    int position = 0;  // steps of the parts before
    Walk walk = begin;
    Part part;
    while (__any_sync(~0u, take(walk, part))) {
      const int first_step = warp - kWarps - position & kLoaders - 1;
      // The pages of the next steps: each lane looks up that of one box, and that of the same box `steps_ahead` of its own steps later.
      const auto look_up = [&](int from) {
        const int number = number_of(part, from + (lane >> box_bits) * kLoaders);
        if (number >= part.end) return num_pages;
        const int key = tile_of(part, number) * kBlockN + box * box_rows;
        if (key >= part.seqlen_k) return num_pages;  // no page of the cache: zeros
        return page_table_ptr[part.b * page_table_stride + by_page.quotient(key)];
      };
      int pages = look_up(first_step), later_pages = look_up(first_step + steps_ahead * kLoaders), place = 0;
      for (int step = first_step, number; __any_sync(~0u, (number = number_of(part, step)) < part.end); step += kLoaders) {
        const int page = __shfl_sync(~0u, pages, (place << box_bits) + box);
        if (++place == steps_ahead) {
          place = 0;
          pages = later_pages;
          later_pages = look_up(step + (1 + steps_ahead) * kLoaders);
        }
        const KvRing ring = KvRing::at(position + step, here);
        const uint32_t full = ring.full(), k_to = here + kKv + ring.stage * kStageBytes, v_to = k_to + kKBytes;
        const int key = tile_of(part, number) * kBlockN;
        ring.acquire();
        // All lanes copy, 16 bytes each: some of them a row of a box of columns.
        constexpr int kLanes = kBoxBytes / 16, kRowsAtOnce = 32 / kLanes;
        const int own = lane / kLanes, chunk = lane % kLanes;
        const auto copy_row = [&]<int kColumns, int kWidth>(uint32_t to, const Element* from, int row, bool exists, Number<kColumns>, Number<kWidth>) {
#pragma unroll
          for (int column = 0; column < kWidth; column += kBoxColumns) {
            copy_async(to + column * kBlockN * sizeof(Element) + row * kBoxBytes + 16 * swizzled<kBoxBytes>(row, chunk),
                       from + column + 16 / sizeof(Element) * chunk,
                       exists && (kColumns % kBoxColumns == 0 || column + 16 / sizeof(Element) * chunk < kColumns));
          }
        };
        if (boxes == 1) {  // all keys of the step are in one page
          const bool page_exists = static_cast<uint32_t>(page) < num_pages;
          const long long place = page_exists ? page : 0;
          const int row_of_page = by_page.remainder(key) + own, left = page_exists ? part.seqlen_k - key : 0;
          const Element* k_from = k_ptr + place * stride_k_page + row_of_page * stride_k_s + part.hk * stride_k_h;
          const Element* v_from = v_ptr + place * stride_v_page + row_of_page * stride_v_s + part.hk * stride_v_h;
#pragma unroll
          for (int first = 0; first < kBlockN; first += kRowsAtOnce) {
            const int row = first + own;
            copy_row(k_to, k_from, row, row < left, Number<64>(), Number<kKBytes / kBlockN / sizeof(Element)>());
            copy_row(v_to, v_from, row, row < left, Number<64>(), Number<kVBytes / kBlockN / sizeof(Element)>());
            k_from += kRowsAtOnce * stride_k_s;
            v_from += kRowsAtOnce * stride_v_s;
          }
          arrive_when_copied(full);
          continue;
        }
#pragma unroll
        for (int first = 0; first < kBlockN; first += kRowsAtOnce) {
          const int row = first + own;
          const int own_page = __shfl_sync(~0u, page, row >> __ffs(box_rows) - 1);
          const bool exists = key + row < part.seqlen_k && static_cast<uint32_t>(own_page) < num_pages;
          const long long place = exists ? own_page : 0;
          const int row_of_page = by_page.remainder(key + row);
          const Element* const k_from = k_ptr + place * stride_k_page + row_of_page * stride_k_s + part.hk * stride_k_h;
          const Element* const v_from = v_ptr + place * stride_v_page + row_of_page * stride_v_s + part.hk * stride_v_h;
          copy_row(k_to, k_from, row, exists, Number<64>(), Number<kKBytes / kBlockN / sizeof(Element)>());
          copy_row(v_to, v_from, row, exists, Number<64>(), Number<kVBytes / kBlockN / sizeof(Element)>());
        }
        arrive_when_copied(full);
      }
      position += part.end - part.first;
    }
    return;
  }

  // The 8 columns of a key that each lane reads, in swizzled rows.
  const int k_row = lane / 16 * 8 + lane % 8, k_chunk = lane / 8 % 2, v_row = lane / 8 % 2 * 8 + lane % 8, v_chunk = lane / 16;
  const auto place_of = [&](int row, int column, int chunk) {
    return column / kBoxColumns * (kBlockN * kBoxBytes) + row * kBoxBytes + ((column % kBoxColumns / 8 + chunk) ^ (row % 8)) * 16;
  };
  const auto sync_consumers = [] { named_sync(Named::kConsumers, 0, 32 * kWarps); };

  int position = 0;  // steps of the parts before
  bool first_part = true;
  Walk walk = begin;
  Part part;
  while (__any_sync(~0u, take(walk, part))) {
    const Work& work = part;
    const int rows = min(work.seqlen_q * group - work.row_start, item_rows);  // rows of the item that exist
    const int own_row = kRows * row_warp + lane / 4;

    // The two rows of a lane, and Q as the A operand.
    int query[2], head[2];
    uint32_t q_values[kHeadDimQk / 4] = {};
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int packed = work.row_start + own_row + 8 * row;
      query[row] = by_group.quotient(packed);
      head[row] = work.hk * group + by_group.remainder(packed);
      if (own_row + 8 * row < rows) {
        const int q = query[row], h = head[row];
        const uint32_t* const from = reinterpret_cast<const uint32_t*>((q_ptr + (work.q_begin + q) * stride_q_s + h * stride_q_h)) + lane % 4;
#pragma unroll
        for (int column = 0; column < 64; column += 8) q_values[column / 4 + row] = from[column / 2];
      }
    }
    const int seqlen_q = work.seqlen_q;
    const int seqlen_k = work.seqlen_k;
    const float scale_log2e = softmax_scale * kLog2e;
    // Partial results of this warp's keys: O, the running max of each row, and its row sum.
    float acc[kHeadDimV / 2] = {};
    float row_max[2] = {kUnseen, kUnseen}, row_sum[2] = {};
    for (int step = warp_group, number; __any_sync(~0u, (number = number_of(part, step)) < part.end); step += groups) {
      const int tile = tile_of(work, number);
      const KvRing ring = KvRing::at(position + step, here);
      const uint32_t k = kKv + ring.stage * kStageBytes, v = k + kKBytes;
      ring.wait();
      // S = Q K^T
      float s[kBlockN / 2] = {};
#pragma unroll
      for (int column = 0; column < kHeadDimQk; column += kMmaK) {
        uint32_t keys[4];
        load_blocks(keys, here + k + place_of(k_row, column, k_chunk));
        const uint32_t* const q = q_values + column / 4;
        multiply<Element>(s, q, keys[0], keys[1]);
        multiply<Element>(s + 4, q, keys[2], keys[3]);
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

      // P = exp2(S * scale - row max)
      float maximum[2];
      find_maximum(s, scale_log2e, maximum);
      if (__any_sync(~0u, maximum[0] > row_max[0] || maximum[1] > row_max[1])) {
        float alpha[2];
        raise_row_max(maximum, row_max, alpha);
        rescale(acc, alpha);
        row_sum[0] *= alpha[0];
        row_sum[1] *= alpha[1];
      }
      uint32_t p[kBlockN / 4];
      exponentiate<Element>(s, scale_log2e, row_max, p, row_sum);

      // O += P V
#pragma unroll
      for (int column = 0; column < kHeadDimV; column += 2 * kMmaN) {
        uint32_t values[4];
        load_blocks_transposed(values, here + v + place_of(v_row, column, v_chunk));
        multiply<Element>(acc + column / 2, p, values[0], values[1]);
        multiply<Element>(acc + column / 2 + 4, p, values[2], values[3]);
      }
      __syncwarp();
      if (lane == 0) ring.release(kWarps / 2 >> row_bits);
    }
    // Results are added in rounds: those of the groups of a block, then those of the blocks of a cluster, or of all blocks that
    // have keys of the work item. Each thread has four columns of a row at a time.
    const int vectors = rows * (kHeadDimV / 4);
    const auto for_rows = [&](int first, int end, int count, int at, const auto& places_of, const auto& use) {
      for (int i = first + threadIdx.x; i < end; i += 32 * kWarps) {
        const int row = i / (kHeadDimV / 4), column = i % (kHeadDimV / 4) * 4;
        use(Partial::added(count, column, at, [&](int number) { return places_of(number) + row * Partial::kFloats; }), row, column);
      }
    };
    const auto write = [&](Partial sum, int row, int column) {
      const int packed = work.row_start + row, q = by_group.quotient(packed), h = work.hk * group + by_group.remainder(packed);
      const float normalize = sum.sum == 0.0f ? 0.0f : __frcp_rn(sum.sum);
      OutElement* const to = (out_ptr + (work.q_begin + q) * stride_out_s + h * stride_out_h);
      const uint2 four = {
          pack<OutElement>(sum.acc.x * normalize, sum.acc.y * normalize), pack<OutElement>(sum.acc.z * normalize, sum.acc.w * normalize)};
      *reinterpret_cast<uint2*>(to + column) = four;
      if (write_lse && column == 0) lse_ptr[h * static_cast<long long>(total_q) + work.q_begin + q] = log_sum_exp(sum.row_max, sum.sum);
    };
    float* const partials = &shared_at<float>(kMerge);
    const auto of_group = [&](int number) { return partials + number * item_rows * Partial::kFloats; };
    if (!first_part) sync_consumers();  // partial results of the part before have been read
    first_part = false;
    Partial::store(of_group(warp_group), own_row, rows, lane, acc, row_max, row_sum);
    sync_consumers();

    if (together) {  // a worker has one part then
      for_rows(0, vectors, groups, Partial::kOfWarp, of_group, [&](Partial sum, int row, int column) {
        sum.store(partials + row * Partial::kFloats, column, Partial::kOfBlock);
      });
      arrive_cluster();
      wait_cluster();
    }
    const auto of_block = [&](int number) -> const float* { return together ? mapped(partials, number) : of_group(number); };
    const int count = together ? kCluster : groups, at = together ? Partial::kOfBlock : Partial::kOfWarp;
    if (part.end - part.first == part.tiles) {
      const int share = vectors / team;  // of the results to write
      for_rows(rank * share, (rank + 1) * share, count, at, of_block, write);
    } else if (rank == 0) {  // other blocks have the rest of the keys: partial results go to global memory, and the last block to come merges all
      const int first_worker = listed_splits ? 0 : ranges.worker_of(part.list_begin);
      const int parts = listed_splits ? part.chunks : ranges.worker_of(part.list_begin + part.chunks - 1) - first_worker + 1;
      const int item = (part.hk * batch + part.b) * row_units + (part.row_start / kRows >> row_bits);
      const auto of_worker = [&](int number) {
        const int slot = listed_splits ? item * max_splits + number : slot_of_worker(first_worker, number);
        return partials_ptr + slot * static_cast<long long>(item_rows * Partial::kFloats);
      };
      float* const own = of_worker(listed_splits ? part.chunk : worker - first_worker);
      for_rows(0, vectors, count, at, of_block, [&](Partial sum, int row, int column) {
        sum.store(own + row * Partial::kFloats, column, Partial::kOfWarp);
      });
      sync_consumers();
      if (threadIdx.x == 0) {
        uint32_t* const counter = counters_ptr + (listed_splits ? item : first_worker);
        const bool last = arrive_counted(counter) == parts - 1;
        if (last) *counter = 0;  // as the next launch expects it
        shared_at<int>(kLast) = last;
      }
      sync_consumers();
      if (shared_at<int>(kLast)) for_rows(0, vectors, parts, Partial::kOfWarp, of_worker, write);
    }
    if (together) leave_cluster();  // once other blocks have read this one's partial results
    position += part.end - part.first;
  }
}
