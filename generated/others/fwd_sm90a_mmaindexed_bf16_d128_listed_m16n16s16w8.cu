// fwd_sm90a_mmaindexed_bf16_d128_listed_m16n16s16w8
//
// Attention forward, variant listed: mask `True`.
// Rendered by `attngen build tests/render/others.yaml`, schedule mma_indexed.
//
// Few query rows against many keys: memory binds, not the products. The rows of a KV head, those of all query heads of its
// group, are cut into row blocks of 16, one for each of `row_warps` warps. These warps go through the same keys, 16 at a
// time. A block has several such groups of warps, which take KV tiles in turn, and loader warps, which prefetch them.
//
// Each query has a list of keys, whose rows loaders gather: rows of a work item are heads of one query. An entry that names no
// key of the sequence is never followed: its row arrives as zeros, and its logits are -inf.
//
// The tiles that rows see, of all sequences and KV heads, form one list. Each block takes an equal range of it; with few
// work items, each cluster does, and its blocks work together. Where a range ends inside an item, blocks leave partial
// results in global memory, and the block that finishes last merges them in order.
#include "alone.cuh"
#include "copy.cuh"
#include "divisor.cuh"
#include "mma.cuh"
#include "pdl.cuh"
#include "ring.cuh"
#include "softmax.cuh"
#include "split.cuh"

#include "work_list.cuh"

using Element = bf16;  // of Q, K, V and P
using OutElement = bf16;  // of O

constexpr int kRows = 16;    // query rows of a warp
constexpr int kBlockN = 16;  // keys of a step
constexpr int kHeadDimQk = 128;
constexpr int kHeadDimV = 128;
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
  static constexpr int kWholeTiles = 1024;  // of a worker: with more, idle workers cost more than merging
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
constexpr uint32_t kKv = kShared + 0;  // 131072 B: K and V, a tile of each per stage
constexpr uint32_t kMerge = kShared + 131072;  // 69632 B: partial results of warps
constexpr uint32_t kEntries = kShared + 200704;  // 1024 B: entries of the list of keys
constexpr uint32_t kKvFull = kShared + 201728;  // 128 B: barriers
constexpr uint32_t kKvEmpty = kShared + 201856;  // 128 B: barriers
constexpr uint32_t kBegin = kShared + 201984;  // 24 B: where the range begins
constexpr uint32_t kLast = kShared + 202008;  // 8 B: whether the block came last
constexpr uint32_t kCounts = kShared + 202016;  // 144 B: what each warp has counted

// Rings: who fills the stages -> who empties them.
using KvRing = Ring<kKvFull, kKvEmpty, 16>;  // a loader -> the warps of a group

// Named barriers of the hardware; 0 is __syncthreads.
enum class Named {
  kConsumers = 1,  // 1 of them: partial results of warps are there, or have been read
  kMade = 2,  // 1 of them: barriers that loaders have made
};

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
// A number that a function knows when it is compiled.
template <int kNumber>
struct Number {};

extern __shared__ char shared_memory[];

template <typename Value>
__device__ __forceinline__ Value& shared_at(uint32_t address) {
  return *reinterpret_cast<Value*>(shared_memory + (address - kShared));
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) fwd_sm90a_mmaindexed_bf16_d128_listed_m16n16s16w8(
    const bf16* q_ptr, const bf16* k_ptr, const bf16* v_ptr, bf16* out_ptr, float* lse_ptr, float* partials_ptr,
    uint32_t* counters_ptr, const int* seqused_k_ptr, const int* indices_ptr,
    long long stride_q_b, long long stride_q_s, long long stride_q_h,
    long long stride_k_b, long long stride_k_s, long long stride_k_h,
    long long stride_v_b, long long stride_v_s, long long stride_v_h,
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
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // uniform across the warp, and the compiler knows
  const int lane = threadIdx.x % 32;
  const uint32_t here = static_cast<uint32_t>(__cvta_generic_to_shared(shared_memory)) - kShared;

  // Warps that share keys: one for each block of rows, up to half of all.
  const int row_warps = 1 << row_bits, row_warp = warp & row_warps - 1;
  const int groups = kWarps >> row_bits, warp_group = warp >> row_bits;
  const int item_rows = kRows << row_bits;

  if (warp >= kWarps) {  // a loader makes the barriers of its own stages, so that it can begin at once
    const int own = warp - kWarps + lane * kLoaders;
    init_barriers(here + kKvFull, 16, 32, own, 32 * kLoaders);  // each lane of a loader
    init_barriers(here + kKvEmpty, 16, 4, own, 32 * kLoaders);  // each warp of the group, as many times as make half of the warps together
    fence_barrier_init();
    __syncwarp();
  }
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

  // An item that sees no key, as of a sequence that pads a batch, is no work: a warp of one block writes its results, zeros.
  const auto write_unseen = [&](const Place& place) {
    const Work work = work_of(place);
    const int rows = min(work.rows_end - work.row_start, item_rows);
#pragma unroll 1
    for (int i = lane; i < rows * (kHeadDimV / 4); i += 32) {
      const int row = i / (kHeadDimV / 4), column = i % (kHeadDimV / 4) * 4;
      Partial sum = {{}, kUnseen, 0.0f};
      const int packed = work.row_start + row, q = by_group.quotient(packed), h = work.hk * group + by_group.remainder(packed);
      const float normalize = sum.sum == 0.0f ? 0.0f : __frcp_rn(sum.sum);
      OutElement* const to = (out_ptr + work.b * stride_out_b + q * stride_out_s + h * stride_out_h);
      const uint2 four = {
          pack<OutElement>(sum.acc.x * normalize, sum.acc.y * normalize), pack<OutElement>(sum.acc.z * normalize, sum.acc.w * normalize)};
      *reinterpret_cast<uint2*>(to + column) = four;
      if (write_lse && column == 0) lse_ptr[(work.b * static_cast<long long>(heads) + h) * seqlen_q + q] = log_sum_exp(sum.row_max, sum.sum);
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

  // Loaders gather the listed rows of K and V for all groups of warps, as far ahead as there are stages. They take stages in turn,
  // and each has stages of its own, so that none gets a whole round of the ring ahead of another.
  if (warp >= kWarps) {
    // A stage is also always the same group's: copies land in any order, and another group could take that of the round before
    // for the one it waits for.
    static_assert(KvRing::kStages % kLoaders == 0 && KvRing::kStages % kWarps == 0);
    constexpr int kLanes = kBoxBytes / 16, kRowsAtOnce = 32 / kLanes, kAhead = 32 / kBlockN;  // steps whose entries a lane of each reads at once
    const int own = lane / kLanes, chunk = lane % kLanes;
    // Some of the lanes copy a row of a box of columns, 16 bytes each.
    const auto copy_row = [&]<int kColumns, int kWidth>(uint32_t to, const Element* from, int row, bool exists, Number<kColumns>, Number<kWidth>) {
#pragma unroll
      for (int column = 0; column < kWidth; column += kBoxColumns) {
        copy_async(to + column * kBlockN * sizeof(Element) + row * kBoxBytes + 16 * swizzled<kBoxBytes>(row, chunk),
                   from + column + 16 / sizeof(Element) * chunk,
                   exists && (kColumns % kBoxColumns == 0 || column + 16 / sizeof(Element) * chunk < kColumns));
      }
    };
    int position = 0;  // steps of the parts before
    Walk walk = begin;
    Part part;
    while (__any_sync(~0u, take(walk, part))) {
      const int first_step = warp - kWarps - position & kLoaders - 1;
      // The entry of a lane, among those of the next steps of this warp.
      const auto entry_of = [&](int from) { return number_of(part, from + lane / kBlockN * kLoaders) * kBlockN + lane % kBlockN; };
      const auto read_entry = [&](int from) {
        const int entry = entry_of(from);
        return entry < part.entries && entry < part.end * kBlockN ? __ldg(part.list + entry) : -1;
      };
      const auto key_of = [](int number, int) { return number; };
      const auto is_key = [&](int key) { return static_cast<uint32_t>(key) < static_cast<uint32_t>(part.seqlen_k); };
      // Entries are read a batch of steps ahead.
      int key = key_of(read_entry(first_step), first_step), later = read_entry(first_step + kAhead * kLoaders);
      int place = 0;
      for (int step = first_step, number; __any_sync(~0u, (number = number_of(part, step)) < part.end); step += kLoaders) {
        if (place == kAhead) {
          place = 0;
          key = key_of(later, step), later = read_entry(step + kAhead * kLoaders);
        }
        const KvRing ring = KvRing::at(position + step, here);
        const uint32_t k_to = here + kKv + ring.stage * kStageBytes, v_to = k_to + kKBytes;
        ring.acquire();
        if (lane < kBlockN) {  // the entries themselves, for the warps that multiply
          const int entry = number * kBlockN + lane;
          if (entry < part.entries) copy_number_async(here + kEntries + 4 * (kBlockN * ring.stage + lane), part.list + entry);
        }
#pragma unroll
        for (int first = 0; first < kBlockN; first += kRowsAtOnce) {
          const int row = first + own, from_lane = place * kBlockN + row;
          const int own_key = __shfl_sync(~0u, key, from_lane);
          const bool exists = is_key(own_key);
          const int row_from = exists ? own_key : 0;
          const Element* const k_from = k_ptr + part.b * stride_k_b + row_from * stride_k_s + part.hk * stride_k_h;
          const Element* const v_from = v_ptr + part.b * stride_v_b + row_from * stride_v_s + part.hk * stride_v_h;
          copy_row(k_to, k_from, row, exists, Number<128>(), Number<kKBytes / kBlockN / sizeof(Element)>());
          copy_row(v_to, v_from, row, exists, Number<128>(), Number<kVBytes / kBlockN / sizeof(Element)>());
        }
        arrive_when_copied(ring.full());
        ++place;
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
    const int rows = min(work.rows_end - work.row_start, item_rows);  // rows of the item that exist
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
        const uint32_t* const from = reinterpret_cast<const uint32_t*>((q_ptr + work.b * stride_q_b + q * stride_q_s + h * stride_q_h)) + lane % 4;
#pragma unroll
        for (int column = 0; column < 128; column += 8) q_values[column / 4 + row] = from[column / 2];
      }
    }
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
      // The keys of a lane's elements. An entry that names no key becomes seqlen_k, after the last key, which is masked.
      int keys[kBlockN / 4];
      bool listed = true;
#pragma unroll
      for (int i = 0; i < kBlockN / 4; i += 2) {
        const int column = 4 * i + 2 * (lane % 4), entry = tile * kBlockN + column;
        const int2 two = shared_at<int2>(kEntries + 4 * (kBlockN * ring.stage + column));
        const auto key_of = [&](int key, int entry) {
          return entry < work.entries && static_cast<uint32_t>(key) < static_cast<uint32_t>(work.seqlen_k) ? key : work.seqlen_k;
        };
        keys[i] = key_of(two.x, entry);
        keys[i + 1] = key_of(two.y, entry + 1);
        listed = listed && max(keys[i], keys[i + 1]) < work.seqlen_k;
      }
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
      OutElement* const to = (out_ptr + work.b * stride_out_b + q * stride_out_s + h * stride_out_h);
      const uint2 four = {
          pack<OutElement>(sum.acc.x * normalize, sum.acc.y * normalize), pack<OutElement>(sum.acc.z * normalize, sum.acc.w * normalize)};
      *reinterpret_cast<uint2*>(to + column) = four;
      if (write_lse && column == 0) lse_ptr[(work.b * static_cast<long long>(heads) + h) * seqlen_q + q] = log_sum_exp(sum.row_max, sum.sum);
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
