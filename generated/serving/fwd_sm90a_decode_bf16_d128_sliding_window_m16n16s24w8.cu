// fwd_sm90a_decode_bf16_d128_sliding_window_m16n16s24w8
//
// Attention forward, variant sliding_window: mask `0 <= q_pos - kv and q_pos - kv < window`.
// Rendered from templates/cuda/decode/kernel.cu.j2 by `attngen build specs/serving.yaml`.
//
// Few query rows against many keys: memory binds, not the products. The rows of a KV head, those of all query heads of its
// group, are cut into blocks of 16, one for each of `row_warps` warps. These go through the same keys, 16 at a time; a
// block has several such groups of warps, which take tiles of keys in turn, each with copies of its next ones under way.
//
// The tiles that rows see, of all sequences and KV heads, are one list. Blocks take equal shares of it, or, where there
// are few units of work, clusters do, whose blocks then work together. Where a share ends inside a unit, partial results
// stay in global memory, and the block that comes last merges them, in their order.
#include "cluster.cuh"
#include "expression.cuh"
#include "mma.cuh"
#include "ring.cuh"
#include "softmax.cuh"
#include "split.cuh"
#include "tma.cuh"

using Element = bf16;  // of Q, K, V and P
using OutElement = bf16;  // of O

constexpr int kRows = 16;    // query rows of a warp
constexpr int kBlockN = 16;  // keys of a step
constexpr int kHeadDimQk = 128;
constexpr int kHeadDimV = 128;
constexpr int kWarps = 8;
constexpr int kThreads = 256;
constexpr int kCluster = 8;  // blocks that can work together
constexpr int kBoxBytes = 128;  // of a row of one copy, swizzled
constexpr int kBoxColumns = kBoxBytes / sizeof(Element);

// How work is shared out, in tiles of keys; measured.
constexpr int kTogether = 1;  // as long as there are no more units than this for each cluster, its blocks work together
constexpr int kLeastTiles = 8;  // of a block: with fewer, fewer blocks work,
constexpr int kBusyTiles = 4096;  // where one for each unit, or so many, are enough to keep memory busy:
constexpr int kBusyBlocks = 64;
constexpr int kCutTiles = 12;  // what a block may have too many if its share then has no second part

constexpr uint32_t kKBytes = kBlockN * kHeadDimQk * sizeof(Element);
constexpr uint32_t kVBytes = kBlockN * kHeadDimV * sizeof(Element);
constexpr uint32_t kStageBytes = kKBytes + kVBytes;
using PartialRows = Partial<kHeadDimV>;

// Shared memory. Addresses are constants, so that they cost no instruction; the kernel checks where it begins.
constexpr uint32_t kShared = 1024;
constexpr uint32_t kKv = kShared + 0;  // 196608 B: K and V, a tile of each per stage
constexpr uint32_t kMerge = kShared + 196608;  // 34816 B: what warps have found, on its way to others
constexpr uint32_t kKvFull = kShared + 231424;  // 192 B: barriers
constexpr uint32_t kKvEmpty = kShared + 231616;  // 192 B: barriers
constexpr uint32_t kBegin = kShared + 231808;  // 8 B: where the share begins
constexpr uint32_t kLast = kShared + 231816;  // 8 B: whether the block came last
constexpr uint32_t kCounts = kShared + 231824;  // 96 B: what the threads of each warp have counted

// Rings: who fills the stages -> who empties them.
using KvRing = Ring<kKvFull, kKvEmpty, 24>;  // the first warp of a group -> the warps of a group

// KV tiles that some row of a box of rows sees, and those that each of its rows sees whole.
struct Spans {
  int visible_lo, visible_hi;
  int full_lo, full_hi;
};

// A unit of work: rows of one KV head of a sequence, and the KV tiles that they see.
struct Work {
  int b, hk, row_start;
  int seqlen_k;
  int tiles;  // -1: the sequence has no such rows
  Spans spans;
};

// A part of a unit: its tiles [first, end), the pieces of a list from number `piece` of `pieces` on.
struct Part : Work {
  int unit, piece, pieces;
  int list_begin;  // of the unit in the list
  int first, end;
};

// The next piece, and how many are left of a share of the list.
struct Walk {
  int unit, piece, left;
};

extern __shared__ char shared_memory[];

template <typename Value>
__device__ __forceinline__ Value& shared_at(uint32_t address) {
  return *reinterpret_cast<Value*>(shared_memory + (address - kShared));
}

extern "C" __global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1) fwd_sm90a_decode_bf16_d128_sliding_window_m16n16s24w8(
    const bf16* q_ptr,
    const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
    bf16* out_ptr, float* lse_ptr, float4* partials_ptr, uint32_t* counters_ptr, const int* seqused_k_ptr,
    long long stride_q_b, long long stride_q_s, long long stride_q_h,
    long long stride_out_b, long long stride_out_s, long long stride_out_h,
    int batch, int heads, int kv_heads, int group, int row_bits, int split_tiles, int max_splits, int seqlen_q,
    int max_seqlen_k, int total_q, int total_k,
    float softmax_scale,
    int u_window,
    int write_lse, int has_seqused_k
) {
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // the same in all lanes, and the compiler knows
  const int lane = threadIdx.x % 32;
  const uint32_t here = mapped(kShared, cluster_rank()) - kShared;  // barriers and copies take addresses of the cluster

  // Warps that share keys: one for each block of rows, up to half of all.
  const int row_warps = 1 << row_bits, row_warp = warp & row_warps - 1;
  const int groups = kWarps >> row_bits, warp_group = warp >> row_bits;
  const int unit_rows = kRows << row_bits;
  const int row_tiles = (seqlen_q * group + unit_rows - 1) / unit_rows;

  if (threadIdx.x == 0) {
    if (static_cast<uint32_t>(__cvta_generic_to_shared(shared_memory)) != here + kShared) __trap();
    prefetch_map(k_map);
    prefetch_map(v_map);
    init_barriers(here + kKvFull, 24, 1);  // the first warp of the group, and the bytes of the copy
    init_barriers(here + kKvEmpty, 24, 4);  // each warp of the group, as many times as make half of the block's warps together
    fence_barrier_init();
  }

  // The rows of a unit, and which keys they see.
  const auto work_of = [&](int unit) {
    const int b = unit / row_tiles % batch, hk = unit / row_tiles / batch;
    const int row_start = unit % row_tiles * unit_rows;
    const int seqlen_k = has_seqused_k ? seqused_k_ptr[b] : max_seqlen_k;
    if (row_start >= seqlen_q * group) return Work{.tiles = -1};  // a shorter sequence than the longest
    const int q_start = row_start / group;
    const int q_hi = min((row_start + unit_rows - 1) / group, seqlen_q - 1);
    const int whole_tiles = seqlen_k / kBlockN;
    const int q_pos_lo = q_start + (seqlen_k - seqlen_q);
    const int q_pos_hi = q_hi + (seqlen_k - seqlen_q);
    const int u_window_min_1073741823 = min(u_window, 1073741823);
    const int visible_lo = max(q_pos_lo - u_window_min_1073741823 + 1, 0) / kBlockN;
    const int visible_hi = (max(q_pos_hi + 1, 0) + kBlockN - 1) / kBlockN;
    const int full_lo = (max(q_pos_hi - u_window_min_1073741823 + 1, 0) + kBlockN - 1) / kBlockN;
    const int full_hi = min(max(q_pos_lo + 1, 0) / kBlockN, whole_tiles);
    const Spans spans = {visible_lo, visible_hi, full_lo, full_hi};
    return Work{b, hk, row_start, seqlen_k, max(spans.visible_hi - spans.visible_lo, 0), spans};
  };
  // The KV tile of a number among those that rows see.
  const auto tile_of = [&](const Work& work, int number) {
    return work.spans.visible_lo + number;
  };

  // The list of pieces: tiles, or splits of so many tiles as the call asks for. Each thread counts those of some units.
  const int units = batch * kv_heads * row_tiles;
  const int units_of_thread = (units + kThreads - 1) / kThreads;
  const int unit_first = threadIdx.x * units_of_thread, unit_end = min(unit_first + units_of_thread, units);
  const auto pieces_in = [](int tiles, int piece_tiles) { return tiles < 0 ? 0 : max((tiles + piece_tiles - 1) / piece_tiles, 1); };
  const int list_tiles = split_tiles > 0 ? split_tiles : 1;
  Count own = {};
  for (int unit = unit_first; unit < unit_end; ++unit) {
    const int tiles = work_of(unit).tiles;
    own += Count{pieces_in(tiles, list_tiles), tiles >= 0, tiles};
  }
  Count before = count_before(own, lane);
  if (lane == 31) shared_at<Count>(kCounts + sizeof(Count) * warp) = Count(before) += own;
  __syncthreads();
  Count all = {};
  for (int other = 0; other < kWarps; ++other) {
    const Count of_warp = shared_at<Count>(kCounts + sizeof(Count) * other);
    if (other < warp) before += of_warp;
    all += of_warp;
  }

  // Who works: blocks, or clusters of them; and how many, so that each has enough to do.
  const bool together = split_tiles == 0 && units <= kTogether * static_cast<int>(gridDim.x / kCluster);
  const int team = together ? kCluster : 1, rank = together ? blockIdx.x % kCluster : 0;
  const int worker = blockIdx.x / team, most_workers = gridDim.x / team;
  const int least_tiles = team * (all.units * team >= kBusyBlocks ? kBusyTiles : kLeastTiles);
  const int workers = min(max(all.pieces * list_tiles / least_tiles, all.units), most_workers);
  // Where each unit can have workers of its own, cuts are at its ends, unless some would have much more to do than others.
  int splits = split_tiles > 0 || all.units == 0 ? 0 : workers / all.units;
  if (splits > 0 && pieces_in(all.longest, splits) > all.pieces / workers + kCutTiles * team) splits = 0;
  const int in_list = splits > 0 ? all.units * splits : all.pieces;
  const Shares shares(in_list, splits > 0 ? in_list : workers);
  if (worker >= shares.count) return;
  const int share_begin = shares.first(worker), share_end = shares.first(worker + 1);
  const auto tiles_of_piece = [&](const Work& work) { return splits > 0 ? pieces_in(work.tiles, splits) : list_tiles; };
  const auto pieces_listed = [&](const Work& work) {
    return splits > 0 ? (work.tiles < 0 ? 0 : splits) : pieces_in(work.tiles, list_tiles);
  };
  int listed = splits > 0 ? before.units * splits : before.pieces;
  for (int unit = unit_first; unit < unit_end && listed <= share_begin; ++unit) {
    const int pieces = pieces_listed(work_of(unit));
    if (share_begin < listed + pieces) shared_at<int2>(kBegin) = {unit, share_begin - listed};
    listed += pieces;
  }
  __syncthreads();
  const int2 begin = shared_at<int2>(kBegin);

  // Takes the next part of the share; false if nothing is left.
  const auto take = [&](Walk& walk, Part& part) {
    if (walk.left == 0) return false;
    for (part.tiles = -1; part.tiles < 0; ++walk.unit) static_cast<Work&>(part) = work_of(walk.unit);
    part.unit = --walk.unit;
    const int piece_tiles = tiles_of_piece(part);
    part.piece = walk.piece;
    part.pieces = pieces_in(part.tiles, piece_tiles);
    part.list_begin = share_end - walk.left - walk.piece;
    const int taken = split_tiles > 0 ? 1 : min(part.pieces - walk.piece, walk.left);
    part.first = walk.piece * piece_tiles;
    part.end = min((walk.piece + taken) * piece_tiles, part.tiles);
    walk.left -= taken;
    walk.piece += taken;
    if (walk.piece == part.pieces) {
      walk.piece = 0;
      ++walk.unit;
    }
    return taken > 0;  // a short unit may have no piece for its last workers
  };

  // The first warp of a group copies K and V for it, as many steps ahead as the group has stages. The tiles of a part go round
  // all groups of warps that work together.
  const int runners = groups * team, runner = rank * groups + warp_group;
  const int stages = KvRing::kStages / groups;
  Walk load_walk = {begin.x, begin.y, share_end - share_begin};
  Part load_part;
  load_part.end = 0;
  int load_number = 0;
  bool loads = row_warp == 0;
  Section<KvRing> load_ring(warp_group * stages, stages, here);
  const auto load_step = [&] {
    while (loads && load_number >= load_part.end) {  // the next part that has a tile for this group
      loads = take(load_walk, load_part);
      load_number = load_part.first + runner;
    }
    if (__any_sync(~0u, !loads)) return;
    load_ring.acquire();
    const uint32_t full = load_ring.full(), k_to = here + kKv + load_ring.stage * kStageBytes, v_to = k_to + kKBytes;
    const int key = tile_of(load_part, load_number) * kBlockN;
    if (lane == 0) load_ring.arrive_expecting(kStageBytes);
    if (lane == 0) {
#pragma unroll
      for (int column = 0; column < kHeadDimQk; column += kBoxColumns) {
        load_box_once(k_to + column * kBlockN * sizeof(Element), k_map, full, column, load_part.hk, key, load_part.b);
      }
#pragma unroll
      for (int column = 0; column < kHeadDimV; column += kBoxColumns) {
        load_box_once(v_to + column * kBlockN * sizeof(Element), v_map, full, column, load_part.hk, key, load_part.b);
      }
    }
    __syncwarp();
    load_number += runners;
    load_ring.advance();
  };
  for (int i = 0; i < stages; ++i) load_step();

  // What a warp finds for its rows: outputs, the reference of their probabilities, and the sum of these.
  float acc[kHeadDimV / 2];
  float reference[2], row_sum[2];
  int rows = 0;  // of this warp that exist
  const PartialRows found = {acc, reference, row_sum};
  const auto clear = [&] {
#pragma unroll
    for (int i = 0; i < kHeadDimV / 2; ++i) acc[i] = 0.0f;
    reference[0] = reference[1] = kUnseen;
    row_sum[0] = row_sum[1] = 0.0f;
  };

  // Adds what the groups of warps have found, two by two: afterwards the first group has all.
  const auto merge_groups = [&] {
    for (int half = groups / 2; half > 0; half /= 2) {
      float4* const place = &shared_at<float4>(kMerge + ((warp_group & half - 1) * row_warps + row_warp) * PartialRows::kBytes);
      if (warp_group >= half && warp_group < 2 * half) found.store(place, lane, rows);
      __syncthreads();
      if (warp_group < half) found.merge([&](int i) { return place[lane + i]; }, lane, rows);
      __syncthreads();
    }
  };

  // The same of the blocks of a cluster: afterwards the first group of one of them, another for each part, has all. What it
  // reads stays until it has, which the others wait for when they merge again.
  int merges = 0;
  const auto merge_blocks = [&] {
    const uint32_t place = kMerge + row_warp * PartialRows::kBytes;
    if (warp_group == 0) found.store(&shared_at<float4>(place), lane, rows);
    __syncwarp();
    arrive_cluster();
    wait_cluster();
    const bool mine = merges++ % kCluster == rank;
    if (mine) {
      clear();
      for (int other = warp_group; other < kCluster; other += groups) {
        const uint32_t from = mapped(place, other) + 16 * lane;
        found.merge([&](int i) { return load_mapped(from + 16 * i); }, lane, rows);
      }
      __syncwarp();
    }
    arrive_cluster();
    if (mine) {
      __syncthreads();
      merge_groups();
    }
    return mine;
  };

  // Where lanes find their 8 columns of a key, of which the copies have swizzled the bytes.
  const int k_row = lane / 16 * 8 + lane % 8, k_chunk = lane / 8 % 2, v_row = lane / 8 % 2 * 8 + lane % 8, v_chunk = lane / 16;
  const auto place_of = [&](int row, int column, int chunk) {
    return column / kBoxColumns * (kBlockN * kBoxBytes) + row * kBoxBytes + ((column % kBoxColumns / 8 + chunk) ^ (row % 8)) * 16;
  };

  Walk walk = {begin.x, begin.y, share_end - share_begin};
  Part part;
  Section<KvRing> kv_ring(warp_group * stages, stages, here);
  while (__any_sync(~0u, take(walk, part))) {
    const Work& work = part;
    // The two rows of a lane, and Q as the A operand.
    int query[2], head[2];
    const int row_start = work.row_start + kRows * row_warp;
    rows = min(seqlen_q * group - row_start, kRows);
    uint32_t q_values[kHeadDimQk / 4] = {};
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int packed = row_start + lane / 4 + 8 * row;
      query[row] = packed / group;
      head[row] = work.hk * group + packed % group;
      if (lane / 4 + 8 * row < rows) {
        const int q = query[row], h = head[row];
        const uint32_t* const from = reinterpret_cast<const uint32_t*>((q_ptr + work.b * stride_q_b + q * stride_q_s + h * stride_q_h)) + lane % 4;
#pragma unroll
        for (int column = 0; column < 128; column += 8) q_values[column / 4 + row] = from[column / 2];
      }
    }
    const int seqlen_k = work.seqlen_k;
    const float scale_log2e = softmax_scale * kLog2e;
    clear();

    for (int number = part.first + runner; __any_sync(~0u, number < part.end); number += runners) {
      const int tile = tile_of(work, number);
      const uint32_t k = kKv + kv_ring.stage * kStageBytes, v = k + kKBytes;
      kv_ring.wait();
      const int left = work.seqlen_k - tile * kBlockN;
      if (left < kBlockN) {  // what lies behind a sequence may be NaN, which no probability of 0 removes
#pragma unroll
        for (int column = 0; column < kHeadDimV; column += kBoxColumns) {
          for (int i = left * kBoxBytes + 16 * lane; i < kBlockN * kBoxBytes; i += 32 * 16) {
            shared_at<int4>(v + column * kBlockN * sizeof(Element) + i) = {};
          }
        }
        fence_async_proxy();
        __syncwarp();
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
      const int kv_first = tile * kBlockN + 2 * (lane % 4);
      if (__any_sync(~0u, !(tile >= work.spans.full_lo && tile < work.spans.full_hi))) {
        struct Row {
          int visible_from;
          int visible_to;
        };
        Row rows[2];
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          const int q_row = min(query[row], seqlen_q - 1);  // rows behind the end repeat the last one
          const int q_pos = q_row + (seqlen_k - seqlen_q);
          const int visible_from = max(q_pos - min(u_window, 1073741823) + 1, 0) - kv_first;
          const int visible_to = min(q_pos + 1, seqlen_k) - kv_first;
          rows[row] = {visible_from, visible_to};
        }
#pragma unroll
        for (int i = 0; i < kBlockN / 4; ++i) {
          const int key = 8 * (i / 2) + i % 2;  // from the first one of the lane
#pragma unroll
          for (int row = 0; row < 2; ++row) {
            float& x = s[4 * (i / 2) + 2 * row + i % 2];
            const auto [visible_from, visible_to] = rows[row];
            if (key < visible_from || key >= visible_to) x = kMasked;
          }
        }
      }

      // P = exp2(S * scale - reference)
      float maximum[2];
      find_maximum(s, scale_log2e, maximum);
      if (__any_sync(~0u, maximum[0] > reference[0] || maximum[1] > reference[1])) {
        float alpha[2];
        raise_reference(maximum, reference, alpha);
        rescale(acc, alpha);
        row_sum[0] *= alpha[0];
        row_sum[1] *= alpha[1];
      }
      uint32_t p[kBlockN / 4];
      exponentiate<Element>(s, scale_log2e, reference, p, row_sum);

      // O += P V
#pragma unroll
      for (int column = 0; column < kHeadDimV; column += 2 * kMmaN) {
        uint32_t values[4];
        load_blocks_transposed(values, here + v + place_of(v_row, column, v_chunk));
        multiply<Element>(acc + column / 2, p, values[0], values[1]);
        multiply<Element>(acc + column / 2 + 4, p, values[2], values[3]);
      }
      __syncwarp();
      if (lane == 0) kv_ring.release(kWarps / 2 >> row_bits);
      kv_ring.advance();
      load_step();
    }

    if (together && merges > 0) wait_cluster();
    merge_groups();
    if (together && !merge_blocks()) continue;
    if (part.end - part.first < part.tiles) {
      // Others have the rest of the keys: what is found stays in global memory, and who comes last adds all.
      const bool listed_splits = split_tiles > 0;
      const int first_worker = listed_splits ? 0 : shares.worker_of(part.list_begin);
      const int parts = listed_splits ? part.pieces : shares.worker_of(part.list_begin + part.pieces - 1) - first_worker + 1;
      // A split has a slot; a worker has two: for a unit that others begin, and for one that it begins.
      const auto slot_of = [&](int number) {
        const int slot = listed_splits ? part.unit * max_splits + number : 2 * (first_worker + number) + (number == 0);
        return partials_ptr + (slot * static_cast<long long>(row_warps) + row_warp) * PartialRows::kVectors;
      };
      uint32_t* const counter = counters_ptr + (listed_splits ? part.unit : first_worker);
      if (warp_group == 0) found.store(slot_of(listed_splits ? part.piece : worker - first_worker), lane, rows);
      __syncthreads();
      if (threadIdx.x == 0) {
        const bool last = arrive_counted(counter) == parts - 1;
        if (last) *counter = 0;  // as the next launch expects it
        shared_at<int>(kLast) = last;
      }
      __syncthreads();
      if (!shared_at<int>(kLast)) continue;
      clear();
      for (int number = warp_group; number < parts; number += groups) {
        const float4* const from = slot_of(number) + lane;
        found.merge([&](int i) { return __ldcg(from + i); }, lane, rows);
      }
      merge_groups();
    }
    if (warp_group == 0) {
      float normalize[2];
      finish_sum(row_sum, normalize);
      rescale(acc, normalize);
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        if (lane / 4 + 8 * row < rows) {
          const int q = query[row], h = head[row];
          OutElement* const to = (out_ptr + work.b * stride_out_b + q * stride_out_s + h * stride_out_h) + 2 * (lane % 4);
#pragma unroll
          for (int column = 0; column < 128; column += 8) {
            const int i = column / 2 + 2 * row;
            *reinterpret_cast<uint32_t*>(to + column) = pack<OutElement>(acc[i], acc[i + 1]);
          }
          if (write_lse && lane % 4 == 0) lse_ptr[(work.b * static_cast<long long>(heads) + h) * seqlen_q + q] = log_sum_exp(reference[row], row_sum[row]);
        }
      }
    }
  }
  if (together && merges > 0) wait_cluster();
}
