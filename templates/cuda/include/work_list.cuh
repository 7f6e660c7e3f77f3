// A list of work: items with tiles of keys, which workers cut among themselves. A worker is a block, or the blocks that
// have the rows of an item. Each worker computes its own range of the list, from the lengths on the device.
#pragma once

#include "divisor.cuh"

// The place of an item.
struct Place {
  int hk, b, row_block;
};

// The next chunk of the list, and how many are left in this worker's range.
struct Walk {
  Place place;
  int chunk, left;
};

// A part of an item: its tiles [first, end). It begins with chunk number `chunk` of the item's `chunks`.
template <typename Work>
struct PartOf : Work {
  int chunk, chunks;
  int list_begin;  // index of the item's first chunk in the list
  int first, end;
};

// The item that a worker begins and others finish, and how many have a part of it; none: -1.
struct Begun {
  int item, parts;
};

// An item of which others have parts, too: how many, the first of these workers, and which of them this one is.
struct Unfinished {
  int item, parts, first_worker, own;
};

// Where a worker leaves partial results: it has two slots, for an item that another worker begins, and for one that it
// begins.
__device__ __forceinline__ int slot_of_worker(int first_worker, int number) { return 2 * (first_worker + number) + (number == 0); }

// Chunks of an item: single tiles, or splits of `split_tiles` tiles if the call fixes their size. With kListsEmpty an item
// that sees no key has one chunk, which writes its result; one of -1 tiles does not exist.
template <bool kListsEmpty>
struct Chunks {
  int split_tiles;
  Divisor by_split;

  __device__ __forceinline__ Chunks(int split_tiles, int reciprocal) : split_tiles(split_tiles), by_split(split_tiles, reciprocal) {}
  __device__ __forceinline__ bool are_splits() const { return split_tiles > 0; }
  __device__ __forceinline__ int operator()(int tiles) const {
    if (tiles <= 0) return kListsEmpty ? tiles + 1 : 0;
    return are_splits() ? by_split.quotient(tiles + split_tiles - 1) : tiles;
  }
  __device__ __forceinline__ static bool lists(int tiles) { return tiles >= (kListsEmpty ? 0 : 1); }
};

// Totals of a list: chunks, the items that they belong to, and the tiles of the longest item.
struct Count {
  int chunks, items, longest;

  __device__ __forceinline__ Count& operator+=(const Count& other) {
    chunks += other.chunks;
    items += other.items;
    longest = max(longest, other.longest);
    return *this;
  }
};

// A list cut into one range for each worker; lengths differ by one at most.
struct EvenRanges {
  int count, quotient, remainder;

  EvenRanges() = default;
  __device__ __forceinline__ EvenRanges(int chunks, int workers)
      : count(workers), quotient(chunks / max(workers, 1)), remainder(chunks % max(workers, 1)) {}
  __device__ __forceinline__ int first(int worker) const { return worker * quotient + min(worker, remainder); }
  __device__ __forceinline__ int worker_of(int chunk) const {
    if (quotient == 1 && remainder == 0) return chunk;
    const int longer = remainder * (quotient + 1);  // chunks in ranges that have one more
    return chunk < longer ? chunk / (quotient + 1) : remainder + (chunk - longer) / quotient;
  }
};

// Division of numbers that are not negative; `quick_ranges.cuh` has another, for small ones.
struct Exact {
  static __device__ __forceinline__ int quotient(int number, int divisor) {
    return static_cast<uint32_t>(number) / static_cast<uint32_t>(divisor);
  }
  static __device__ __forceinline__ EvenRanges ranges(int chunks, int workers) { return EvenRanges(chunks, workers); }
};

// How a list is cut: into `splits` equal parts of each item, one for each of `workers`, or, if that is 0, into equal
// ranges. `runtime/geometry/work_list.py` is the same on the host, with the same Limits.
struct Cut {
  int workers, splits;
};

template <typename Limits, typename Division>
struct CutBy {
  // Workers that have enough to do.
  static __device__ __forceinline__ int workers(int tiles, int items, int most) { return min(max(tiles / Limits::kLeastTiles, items), most); }

  // With enough workers for all items, each item is cut evenly among its own workers, unless some of these would have much
  // more to do than others.
  static __device__ __forceinline__ int splits(const Count& all, int workers, int cut_tiles = Limits::kCutTiles) {
    if (all.items == 0 || all.items > workers) return 0;
    const int cuts = Division::quotient(workers, all.items), share = Division::quotient(all.chunks, workers);
    return all.longest <= cuts * (share + max(cut_tiles, share <= Limits::kWholeTiles ? share / Limits::kOneOf : 0)) ? cuts : 0;
  }

  // Equal items: if few workers stay idle, each takes the same number of whole items, and no partial results are merged.
  static __device__ __forceinline__ int takers(const Count& all, int workers) {
    if (all.items > workers && Division::quotient(all.chunks, workers) <= Limits::kWholeTiles && all.chunks == all.items * all.longest) {
      const int items_each = Division::quotient(all.items + workers - 1, workers), takers = Division::quotient(all.items, items_each);
      if (takers * items_each == all.items && Limits::kOneOf * takers >= (Limits::kOneOf - 1) * workers) return takers;
    }
    return workers;
  }

  // Of up to `most` workers. `split_tiles`: tiles of a chunk if the call fixes that, else 0.
  static __device__ __forceinline__ Cut of(const Count& all, int split_tiles, int most) {
    if (split_tiles > 0) return {workers(all.chunks * split_tiles, all.items, most), 0};
    const int useful = workers(all.chunks, all.items, most), cuts = splits(all, useful);
    if (cuts > 0) return {all.items * cuts, cuts};
    return {takers(all, useful), 0};
  }

  static __device__ __forceinline__ EvenRanges ranges(const Count& all, const Cut& cut) {
    return Division::ranges(cut.splits > 0 ? cut.workers : all.chunks, cut.workers);
  }
};

constexpr int kItemsOfWarp = 128;  // which a warp counts by itself

// The items that a thread counts, `each` of them at most, of those from `begin` on. With kByWarp each warp counts a few items by itself, so that
// no warp waits for another; of more, each thread of the block counts some.
template <int kThreads, bool kByWarp>
struct OwnItems {
  bool by_warp;
  int first, end, each;

  __device__ __forceinline__ OwnItems(int begin, int end_of_all, int lane) {
    const int items = end_of_all - begin;
    by_warp = kByWarp && items <= kItemsOfWarp;
    each = by_warp ? (items + 31) / 32 : (items + kThreads - 1) / kThreads;
    first = min(begin + (by_warp ? lane : static_cast<int>(threadIdx.x)) * each, end_of_all);
    end = min(first + each, end_of_all);
  }
};

// What some items add up to, the first of them at `place`.
template <typename Items, typename ChunksOf, typename WorkOf, typename Advance>
__device__ __forceinline__ Count count_items(
    const Items& items, Place place, const ChunksOf& chunks_of, const WorkOf& work_of, const Advance& advance) {
  Count own = {};
#pragma unroll 1
  for (int item = items.first; item < items.end; ++item) {
    const int tiles = work_of(place).tiles;
    own += Count{chunks_of(tiles), chunks_of.lists(tiles), tiles};
    advance(place);
  }
  return own;
}

// The sum of what the lanes before this one have.
__device__ __forceinline__ Count count_before(const Count& own, int lane) {
  Count sum = own;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const Count other = {
        __shfl_up_sync(~0u, sum.chunks, distance), __shfl_up_sync(~0u, sum.items, distance),
        __shfl_up_sync(~0u, sum.longest, distance)};
    if (lane >= distance) sum += other;
  }
  return {sum.chunks - own.chunks, sum.items - own.items, sum.longest};
}

// The totals of a warp.
__device__ __forceinline__ Count count_of_warp(const Count& own) {
  return {__reduce_add_sync(~0u, own.chunks), __reduce_add_sync(~0u, own.items), __reduce_max_sync(~0u, own.longest)};
}

// The totals of a block of kWarps warps, and of the threads before this one. `of_warp` has a Count for each warp in shared
// memory, of which a thread reads kAtOnce at once.
template <int kWarps, int kAtOnce, typename OfWarp>
__device__ __forceinline__ Count count_of_block(const Count& own, int warp, int lane, const OfWarp& of_warp, Count& before) {
  before = count_before(own, lane);
  if (lane == 31) of_warp(warp) = Count(before) += own;
  __syncthreads();
  Count all = {};
#pragma unroll kAtOnce
  for (int other = 0; other < kWarps; ++other) {
    const Count count = of_warp(other);
    if (other < warp) before += count;
    all += count;
  }
  return all;
}

// Whether a range of the list begins among some items, the first of them at `place`, and where; `before` counts the items
// before them.
template <typename Items, typename ChunksOf, typename WorkOf, typename Advance>
__device__ __forceinline__ bool find_begin(
    Walk& begin, int range_begin, int range_end, const Items& items, Place place, const Count& before, int splits,
    const ChunksOf& chunks_of, const WorkOf& work_of, const Advance& advance) {
  int listed = splits > 0 ? before.items * splits : before.chunks;
  bool begins = false;
#pragma unroll 1
  for (int item = items.first; item < items.end && listed <= range_begin; ++item) {
    const int tiles = work_of(place).tiles;
    const int chunks = splits > 0 ? (chunks_of.lists(tiles) ? splits : 0) : chunks_of(tiles);
    if (range_begin < listed + chunks) {
      begin = {place, range_begin - listed, range_end - range_begin};
      begins = true;
    }
    listed += chunks;
    advance(place);
  }
  return begins;
}

// What another lane has of a struct of words.
template <typename Words>
__device__ __forceinline__ Words of_lane(const Words& own, int lane) {
  constexpr int kWords = sizeof(Words) / 4;
  int words[kWords];
  memcpy(words, &own, sizeof(Words));
#pragma unroll
  for (int i = 0; i < kWords; ++i) words[i] = __shfl_sync(~0u, words[i], lane);
  Words result;
  memcpy(&result, words, sizeof(Words));
  return result;
}

// What one of the lanes has found, or one of the block's threads.
__device__ __forceinline__ Walk begin_of_warp(const Walk& own, bool begins) { return of_lane(own, __ffs(__ballot_sync(~0u, begins)) - 1); }
__device__ __forceinline__ Walk begin_of_block(const Walk& own, bool begins, Walk& shared) {
  if (begins) shared = own;
  __syncthreads();
  return shared;
}

// Up to 32 items, one for each lane, that enough workers cut evenly; `splits` is 0 else.
template <typename Cutting>
struct FewItems {
  int tiles, count, splits;
  uint32_t existing;

  __device__ __forceinline__ FewItems(int tiles, int most_workers)
      : tiles(tiles), existing(__ballot_sync(~0u, tiles >= 0)) {
    count = __popc(existing);
    const int chunks = __reduce_add_sync(~0u, tiles <= 0 ? tiles + 1 : tiles), longest = __reduce_max_sync(~0u, tiles);
    splits = Cutting::splits({chunks, count, longest}, Cutting::workers(chunks, count, most_workers));
  }
  // The lane with item `number` of those that exist.
  __device__ __forceinline__ int lane_of(int number, int lane) const {
    return __ffs(__ballot_sync(~0u, tiles >= 0 && __popc(existing & (1u << lane) - 1) == number)) - 1;
  }
};

// Makes part number `number` of `splits` equal ones of the item; false if it is short and has fewer.
template <typename Division, typename Part>
__device__ __forceinline__ bool cut_part(Part& part, int number, int splits) {
  const EvenRanges tiles = Division::ranges(part.tiles, splits);
  part.chunk = number;
  part.chunks = max(min(part.tiles, splits), 1);
  part.first = tiles.first(number);
  part.end = tiles.first(number + 1);
  return number < part.chunks;
}

// Takes the next part of a worker's range, which ends at `range_end`; false if nothing is left.
template <typename Division, typename Part, bool kListsEmpty, typename WorkOf, typename Advance>
__device__ __forceinline__ bool take_part(
    Walk& walk, Part& part, int splits, int range_end, int kv_heads, const Chunks<kListsEmpty>& chunks_of,
    const WorkOf& work_of, const Advance& advance) {
  using Work = decltype(work_of(walk.place));
  if (walk.left == 0) return false;
  while ((static_cast<Work&>(part) = work_of(walk.place)).tiles < (kListsEmpty || splits > 0 ? 0 : 1)) {
    advance(walk.place);
    if (walk.place.hk == kv_heads) return false;
  }
  part.list_begin = range_end - walk.left - walk.chunk;
  if (splits > 0) {  // the range is one part
    walk.left = 0;
    return cut_part<Division>(part, walk.chunk, splits);
  }
  part.chunk = walk.chunk;
  part.chunks = chunks_of(part.tiles);
  const int taken = chunks_of.are_splits() ? 1 : min(part.chunks - walk.chunk, walk.left);
  const int chunk_tiles = chunks_of.are_splits() ? chunks_of.split_tiles : 1;
  part.first = walk.chunk * chunk_tiles;
  part.end = min((walk.chunk + taken) * chunk_tiles, part.tiles);
  walk.left -= taken;
  walk.chunk += taken;
  if (walk.chunk == part.chunks) {
    walk.chunk = 0;
    advance(walk.place);
  }
  return true;
}
