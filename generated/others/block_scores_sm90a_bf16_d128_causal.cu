// block_scores_sm90a_bf16_d128_causal
//
// Scores of blocks of keys, variant causal: maxima over blocks of keys of q k, in float32.
// Rendered by `attngen build tests/render/others.yaml`, schedule block_scores.
//
// A block has some queries and a chunk of the keys of a sequence, which are whole blocks of keys. Keys are the rows of its
// products, and the columns are the heads of a query, then those of the next one:
//
//   S (64 keys x queries * heads) = K Q^T      score(query, head, block) = max over the keys of a block of S
//
// A thread has two rows of a quarter of the columns, and keeps the largest of each column over the tiles of a block of keys.
// Then lanes with the same columns compare theirs, and the four warps by shared memory. Pairs that the mask hides count as
// -inf. With many queries two warpgroups share each tile of keys, and one multiplies while the other compares; with few
// queries a block is one warpgroup, and a multiprocessor runs several.
#include "divisor.cuh"
#include "expression.cuh"
#include "index.cuh"
#include "maxima.cuh"
#include "pdl.cuh"
#include "ring.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

using Element = bf16;  // of Q and K

constexpr int kBlockN = 64;  // keys of a tile
constexpr int kRowBytes = 128 * sizeof(Element);
constexpr int kBoxBytes = 128, kBoxes = kRowBytes / kBoxBytes;  // rows come in boxes of columns
constexpr int kBoxColumns = kBoxBytes / sizeof(Element);
constexpr int kMmaBytes = 32;  // of a row, that one wgmma sums over
constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;

// Shared memory. Addresses are constants, so that they cost no instruction; the kernel checks where it begins.
constexpr uint32_t kShared = 1024;

extern __shared__ char shared_memory[];

// Q and K are K-major.
using RowMatrix = Matrix<16, 8 * kBoxBytes, 1>;

template <int kTileHeads, int kTileQueries, int kTileGroups, int kTileStages>
struct Tile {
  static constexpr int kHeads = kTileHeads, kQueries = kTileQueries;  // of a product
  static constexpr int kGroups = kTileGroups;  // warpgroups that multiply, each with queries of its own
  static constexpr int kStages = kTileStages;
  static constexpr int kColumns = kHeads * kQueries;
  static constexpr int kThreads = 128 * kGroups + (kGroups > 1 ? 128 : 32);
  static constexpr uint32_t kQBytes = kColumns * kRowBytes, kKBytes = kBlockN * kRowBytes;
  static constexpr uint32_t kQ = kShared, kK = kQ + kGroups * kQBytes;
  static constexpr uint32_t kQBarrier = kK + kStages * kKBytes;
  static constexpr uint32_t kKeysFilled = kQBarrier + 8, kKeysFreed = kKeysFilled + 8 * kStages;
  static constexpr uint32_t kMaxima = kKeysFreed + 8 * kStages;  // of each warp's rows, twice, since two blocks may be on their way
  static constexpr uint32_t kSharedBytes = kMaxima + kGroups * 2 * 4 * kColumns * sizeof(float) - kShared;
  using Keys = Ring<kKeysFilled, kKeysFreed, kStages>;
};

template <typename Tile>
__device__ __forceinline__ void score_keys(
    const TensorMap& q_map, const TensorMap& k_map,
    float* out_ptr, const int* seqused_k_ptr,
    long long stride_out_b, long long stride_out_s, long long stride_out_h,
    int heads, int seqlen_q, int max_seqlen_k, int total_q, int total_k, int chunk, int chunks, int query_tiles,
    int block_tiles
) {
  using Keys = typename Tile::Keys;
  constexpr int kHeads = Tile::kHeads, kQueries = Tile::kQueries, kGroups = Tile::kGroups, kColumns = Tile::kColumns;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, group = warp / 4;
  launch_dependents();
  if (threadIdx.x == 0) {
    if (static_cast<uint32_t>(__cvta_generic_to_shared(shared_memory)) != kShared) __trap();
    init_barrier(Tile::kQBarrier, 1);
    for (int stage = 0; stage < Tile::kStages; ++stage) {
      init_barrier(Keys::full_of(stage), 1);
      init_barrier(Keys::empty_of(stage), 4 * kGroups);
    }
    fence_barrier_init();
    prefetch_map(q_map);
    prefetch_map(k_map);
  }
  __syncthreads();
  wait_dependencies();  // nothing in global memory is read or written before

  // Blocks that run at the same time have the same chunk of keys.
  const int b = blockIdx.x / (query_tiles * chunks), place = blockIdx.x - b * query_tiles * chunks;
  const int chunk_number = place / query_tiles, q_start = (place - chunk_number * query_tiles) * kQueries * kGroups;
  const int chunk_begin = chunk_number * chunk, chunk_end = min(chunk_begin + chunk, max_seqlen_k);
  const int seqlen_k = seqused_k_ptr == nullptr ? max_seqlen_k : max(0, min(seqused_k_ptr[b], max_seqlen_k));
  // Tiles of the chunk between the first and the last key that any of the queries sees.
  const int2 hull = [&] {
    const int q_hi = min(q_start + kQueries * kGroups, seqlen_q) - 1;
    const int q_pos_hi = q_hi + (seqlen_k - seqlen_q);
    const int visible_hi = max(min(q_pos_hi + 1, seqlen_k) + kBlockN - 1, 0) / kBlockN;
    const int visible_lo = 0;
    return int2{visible_lo, visible_hi};
  }();
  const int first_tile = min(max(hull.x, chunk_begin / kBlockN), (chunk_end + kBlockN - 1) / kBlockN);
  const int end_tile = max(min(hull.y, (min(chunk_end, seqlen_k) + kBlockN - 1) / kBlockN), first_tile);

  if (group == kGroups) {
    if constexpr (kGroups > 1) shrink_registers<kProducerRegisters>();
    if (warp > 4 * kGroups || first_tile == end_tile) return;
    if (lane == 0) {
      arrive_expecting(Tile::kQBarrier, kGroups * Tile::kQBytes);
#pragma unroll
      for (int i = 0; i < kGroups * kBoxes; ++i) {
        const int of = i / kBoxes, box = i % kBoxes;
        load_box(Tile::kQ + of * Tile::kQBytes + box * kColumns * kBoxBytes, q_map, Tile::kQBarrier, box * kBoxColumns, 0,
                 q_start + of * kQueries, b);
      }
    }
    Keys keys;
    for (int tile = first_tile; tile < end_tile; ++tile) {
      keys.acquire();
      if (lane == 0) keys.arrive_expecting(Tile::kKBytes);
      const uint32_t to = Tile::kK + keys.stage * Tile::kKBytes;
      if (lane == 0) {
#pragma unroll
        for (int box = 0; box < kBoxes; ++box) {
          load_box(to + box * kBlockN * kBoxBytes, k_map, keys.full(), box * kBoxColumns, tile * kBlockN, b);
        }
      }
      keys.advance();
    }
    return;
  }

  if constexpr (kGroups > 1) grow_registers<kConsumerRegisters>();
  const int own_start = q_start + group * kQueries;
  float* const out = out_ptr + b * stride_out_b;
  // Blocks of keys that no query of the block sees.
  const auto hide = [&](int begin, int end) {
    for (int query = own_start; query < min(own_start + kQueries, seqlen_q); ++query) {
      for (int head = 0; head < heads; ++head) {
        float* const row = out + query * stride_out_s + head * stride_out_h;
        for (int i = begin + threadIdx.x % 128; i < end; i += 128) row[i] = minus_infinity();
      }
    }
  };
  const int block_keys = block_tiles * kBlockN;
  const int first_block = chunk_begin / block_keys, end_block = (chunk_end + block_keys - 1) / block_keys;
  hide(first_block, first_tile == end_tile ? end_block : first_tile / block_tiles);
  if (first_tile < end_tile) hide((end_tile + block_tiles - 1) / block_tiles, end_block);
  if (first_tile == end_tile) return;

  // Whether a query sees a key. Both lie inside the sequence.
  const auto sees = [&](int q_row, int kv) -> bool {
    const int q_pos = q_row + (seqlen_k - seqlen_q);
    return q_pos >= kv;
  };

  // Whether all queries of the block see all keys of a tile, so that nothing is asked of the mask.
  const auto is_whole = [&](int candidate) -> bool {
    const int q_hi = min(q_start + kQueries * kGroups, seqlen_q) - 1;
    const int q_pos_lo = q_start + (seqlen_k - seqlen_q);
    const int kv_lo = candidate * kBlockN, kv_hi = kv_lo + (kBlockN - 1);
    return (q_pos_lo >= kv_hi) && (candidate + 1) * kBlockN <= seqlen_k;
  };

  wait(Tile::kQBarrier, 0);
  const RowMatrix q(Tile::kQ + group * Tile::kQBytes);
  const int row = 16 * (warp % 4) + lane / 4;  // the first of a thread's two keys of a tile; the other is 8 later
  float maxima[kColumns / 4];  // of the columns of a thread, over its keys of a block
#pragma unroll
  for (int i = 0; i < kColumns / 4; ++i) maxima[i] = minus_infinity();
  float* const shared_maxima = reinterpret_cast<float*>(shared_memory + (Tile::kMaxima - kShared)) + group * 8 * kColumns;
  int block = first_tile / block_tiles, left = (block + 1) * block_tiles - first_tile;
  Keys keys;
  for (int tile = first_tile; tile < end_tile; ++tile) {
    keys.wait();
    const RowMatrix k(Tile::kK + keys.stage * Tile::kKBytes);
    float s[kColumns / 2];
    fence_products();
#pragma unroll
    for (int i = 0; i < kRowBytes / kMmaBytes; ++i) {  // S = K Q^T
      const int box = i * kMmaBytes / kBoxBytes, at = i * kMmaBytes % kBoxBytes;
      Product<Element, kColumns>::template ss<0>(
          s, k.at(box * kBlockN * kBoxBytes + at), q.at(box * kColumns * kBoxBytes + at), i > 0);
    }
    commit_products();
    const bool whole = is_whole(tile);
    wait_products<0>();
    fence_registers(s);
    if (lane == 0) keys.release();
    keys.advance();

    if (whole) {
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) {
        float& most = maxima[i / 4 * 2 + i % 2];
        most = fmaxf(most, s[i]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kColumns / 2; i += 2) {
        const int key = tile * kBlockN + row + 8 * (i / 2 % 2), column = 8 * (i / 4) + 2 * (lane % 4);
        bool visible = false;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int query = min(own_start + (column + j) / kHeads, seqlen_q - 1);
          if (kHeads == 1 || j == 0) visible = key < seqlen_k && sees(query, min(key, seqlen_k - 1));
          float& most = maxima[i / 4 * 2 + j];
          most = visible ? fmaxf(most, s[i + j]) : most;
        }
      }
    }
    if (--left > 0 && tile + 1 < end_tile) continue;

    max_of_rows(maxima);
    float* const of_warps = shared_maxima + block % 2 * 4 * kColumns;
    const int first = first_of_rows<kColumns / 4>();
#pragma unroll
    for (int i = 0; i < kColumns / 32; ++i) {
      const int j = first + i;
      of_warps[warp % 4 * kColumns + 8 * (j / 2) + 2 * (lane % 4) + j % 2] = maxima[i];
    }
    named_sync(Named::kMaxima, group, 128);
    for (int column = threadIdx.x % 128; column < kColumns; column += 128) {
      const int query = own_start + column / kHeads, head = column % kHeads;
      if (query >= seqlen_q || head >= heads) continue;
      const float* const of = of_warps + column;
      out[query * stride_out_s + head * stride_out_h + block] =
          fmaxf(fmaxf(of[0], of[kColumns]), fmaxf(of[2 * kColumns], of[3 * kColumns]));
    }
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i) maxima[i] = minus_infinity();
    block += 1, left = block_tiles;
  }
}
// Many queries, at most 2 heads.
extern "C" __global__ void __launch_bounds__(384, 1) block_scores_sm90a_bf16_d128_causal_heads_2(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    float* out_ptr, const int* seqused_k_ptr,
    long long stride_out_b, long long stride_out_s, long long stride_out_h,
    int heads, int seqlen_q, int max_seqlen_k, int total_q, int total_k, int chunk, int chunks, int query_tiles,
    int block_tiles
) {
  using Own = Tile<2, 128, 2, 5>;
  static_assert(Own::kThreads == 384 && Own::kSharedBytes == 229464);
  score_keys<Own>(
      q_map, k_map,
      out_ptr, seqused_k_ptr,
      stride_out_b, stride_out_s, stride_out_h,
      heads, seqlen_q, max_seqlen_k, total_q, total_k, chunk, chunks, query_tiles,
      block_tiles
  );
}
// Few queries, at most 2 heads.
extern "C" __global__ void __launch_bounds__(160, 3) block_scores_sm90a_bf16_d128_causal_heads_2_few(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    float* out_ptr, const int* seqused_k_ptr,
    long long stride_out_b, long long stride_out_s, long long stride_out_h,
    int heads, int seqlen_q, int max_seqlen_k, int total_q, int total_k, int chunk, int chunks, int query_tiles,
    int block_tiles
) {
  using Own = Tile<2, 16, 1, 4>;
  static_assert(Own::kThreads == 160 && Own::kSharedBytes == 74824);
  score_keys<Own>(
      q_map, k_map,
      out_ptr, seqused_k_ptr,
      stride_out_b, stride_out_s, stride_out_h,
      heads, seqlen_q, max_seqlen_k, total_q, total_k, chunk, chunks, query_tiles,
      block_tiles
  );
}
// Many queries, at most 4 heads.
extern "C" __global__ void __launch_bounds__(384, 1) block_scores_sm90a_bf16_d128_causal_heads_4(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    float* out_ptr, const int* seqused_k_ptr,
    long long stride_out_b, long long stride_out_s, long long stride_out_h,
    int heads, int seqlen_q, int max_seqlen_k, int total_q, int total_k, int chunk, int chunks, int query_tiles,
    int block_tiles
) {
  using Own = Tile<4, 64, 2, 5>;
  static_assert(Own::kThreads == 384 && Own::kSharedBytes == 229464);
  score_keys<Own>(
      q_map, k_map,
      out_ptr, seqused_k_ptr,
      stride_out_b, stride_out_s, stride_out_h,
      heads, seqlen_q, max_seqlen_k, total_q, total_k, chunk, chunks, query_tiles,
      block_tiles
  );
}
// Few queries, at most 4 heads.
extern "C" __global__ void __launch_bounds__(160, 3) block_scores_sm90a_bf16_d128_causal_heads_4_few(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    float* out_ptr, const int* seqused_k_ptr,
    long long stride_out_b, long long stride_out_s, long long stride_out_h,
    int heads, int seqlen_q, int max_seqlen_k, int total_q, int total_k, int chunk, int chunks, int query_tiles,
    int block_tiles
) {
  using Own = Tile<4, 8, 1, 4>;
  static_assert(Own::kThreads == 160 && Own::kSharedBytes == 74824);
  score_keys<Own>(
      q_map, k_map,
      out_ptr, seqused_k_ptr,
      stride_out_b, stride_out_s, stride_out_h,
      heads, seqlen_q, max_seqlen_k, total_q, total_k, chunk, chunks, query_tiles,
      block_tiles
  );
}
// Many queries, at most 8 heads.
extern "C" __global__ void __launch_bounds__(384, 1) block_scores_sm90a_bf16_d128_causal_heads_8(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    float* out_ptr, const int* seqused_k_ptr,
    long long stride_out_b, long long stride_out_s, long long stride_out_h,
    int heads, int seqlen_q, int max_seqlen_k, int total_q, int total_k, int chunk, int chunks, int query_tiles,
    int block_tiles
) {
  using Own = Tile<8, 32, 2, 5>;
  static_assert(Own::kThreads == 384 && Own::kSharedBytes == 229464);
  score_keys<Own>(
      q_map, k_map,
      out_ptr, seqused_k_ptr,
      stride_out_b, stride_out_s, stride_out_h,
      heads, seqlen_q, max_seqlen_k, total_q, total_k, chunk, chunks, query_tiles,
      block_tiles
  );
}
// Few queries, at most 8 heads.
extern "C" __global__ void __launch_bounds__(160, 3) block_scores_sm90a_bf16_d128_causal_heads_8_few(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    float* out_ptr, const int* seqused_k_ptr,
    long long stride_out_b, long long stride_out_s, long long stride_out_h,
    int heads, int seqlen_q, int max_seqlen_k, int total_q, int total_k, int chunk, int chunks, int query_tiles,
    int block_tiles
) {
  using Own = Tile<8, 4, 1, 4>;
  static_assert(Own::kThreads == 160 && Own::kSharedBytes == 74824);
  score_keys<Own>(
      q_map, k_map,
      out_ptr, seqused_k_ptr,
      stride_out_b, stride_out_s, stride_out_h,
      heads, seqlen_q, max_seqlen_k, total_q, total_k, chunk, chunks, query_tiles,
      block_tiles
  );
}
