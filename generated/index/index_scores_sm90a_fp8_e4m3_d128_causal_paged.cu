// index_scores_sm90a_fp8_e4m3_d128_causal_paged
//
// Index scores of keys, variant causal: sums over heads of w relu(q k), in float32.
// Rendered by `attngen build specs/index.yaml`, schedule index_scores.
//
// A block has some queries and a chunk of the keys of a sequence. Keys are the rows of its products, and the columns are the
// heads of a query, then those of the next one:
//
//   S (64 keys x queries * heads) = K Q^T      score(query, key) = scale(key) * sum over heads of w(query, head) * relu(S)
//
// So a thread has a quarter of the heads of its keys in registers, as it has their weights, and four lanes add up. Pairs that
// the mask hides score -inf. With many queries two warpgroups share each tile of keys, and one multiplies while the other
// adds; with few queries a block is one warpgroup, and a multiprocessor runs several.
#include "divisor.cuh"
#include "expression.cuh"
#include "index.cuh"
#include "packed_tiles.cuh"
#include "pdl.cuh"
#include "ring.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

using Element = e4m3;  // of Q and K

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
  static constexpr uint32_t kSharedBytes = kKeysFreed + 8 * kStages - kShared;
  using Keys = Ring<kKeysFilled, kKeysFreed, kStages>;
};

template <typename Tile>
__device__ __forceinline__ void score_keys(
    const TensorMap& q_map, const TensorMap& k_map,
    const float* weights_ptr, const float* k_scale_ptr, float* out_ptr, const int* cu_seqlens_q_ptr,
    const int* page_table_ptr, const int* seqused_k_ptr,
    long long stride_weights_b, long long stride_weights_s, long long stride_weights_h,
    long long stride_k_scale_page, long long stride_k_scale_s,
    long long stride_out_b, long long stride_out_s,
    long long page_table_stride,
    int heads, int max_seqlen_q, int max_seqlen_k, int total_q, int total_k, int least_tiles, int chunks,
    int query_tiles, int page_size, int num_pages, int box_rows, int page_size_reciprocal, int batch,
    int hides_rest
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

  // Queries of a sequence are rows of q from cu_seqlens_q[b] on, or without it those of batch b. Blocks that run at the same
  // time have the same chunk of the keys of their sequences.
  const bool packed = cu_seqlens_q_ptr != nullptr;
  const int place = blockIdx.x % (query_tiles * chunks), chunk_number = place / query_tiles;
  int b = blockIdx.x / (query_tiles * chunks), q_tile = place - chunk_number * query_tiles;
  if (packed) b = sequence_of_tile<kQueries * kGroups>(cu_seqlens_q_ptr, batch, q_tile);
  // The shuffle puts b into a uniform register: consumers of 32 heads have no other left.
  b = __shfl_sync(~0u, b, 0);
  const int q_begin = packed ? cu_seqlens_q_ptr[b] : b * max_seqlen_q;
  const int seqlen_q = packed ? cu_seqlens_q_ptr[b + 1] - q_begin : max_seqlen_q;
  if (packed) q_tile -= first_tile_of<kQueries * kGroups>(q_begin, b);
  const int q_start = q_tile * kQueries * kGroups;
  if (q_start >= seqlen_q) return;
  const int outer = packed ? 0 : b, first_row = packed ? q_begin : 0;  // of the queries in their tensor

  // Chunks are parts of what a sequence has, since the host does not know its length; what the table has room for behind it
  // is cut in as many.
  const int seqlen_k = max(0, min(seqused_k_ptr[b], max_seqlen_k));
  const int tiles = (seqlen_k + kBlockN - 1) / kBlockN, chunk = max((tiles + chunks - 1) / chunks, least_tiles) * kBlockN;
  const int chunk_begin = chunk_number * chunk, chunk_end = min(chunk_begin + chunk, min(tiles * kBlockN, max_seqlen_k));
  const Divisor by_page(page_size, page_size_reciprocal);
  // The page of a key; the number of pages, which no page has, where there is none.
  const auto page_of = [&](int key) {
    if (key >= seqlen_k) return num_pages;
    const int page = page_table_ptr[b * page_table_stride + by_page.quotient(key)];
    return static_cast<uint32_t>(page) < num_pages ? page : num_pages;
  };
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
                 first_row + q_start + of * kQueries, outer);
      }
    }
    // A lane copies the rows of a page, or of two, whose numbers it has looked up a tile ahead.
    int pages[2];
    const auto look_up = [&](int tile) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = (lane + 32 * i) * box_rows;
        pages[i] = row < kBlockN ? page_of(tile * kBlockN + row) : num_pages;
      }
    };
    look_up(first_tile);
    Keys keys;
    for (int tile = first_tile; tile < end_tile; ++tile) {
      keys.acquire();
      if (lane == 0) keys.arrive_expecting(Tile::kKBytes);
      const uint32_t to = Tile::kK + keys.stage * Tile::kKBytes;
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = (lane + 32 * i) * box_rows;
        if (row >= kBlockN) break;
        const int of_page = by_page.remainder(tile * kBlockN + row);
#pragma unroll
        for (int box = 0; box < kBoxes; ++box) {
          load_box(to + (box * kBlockN + row) * kBoxBytes, k_map, keys.full(), box * kBoxColumns, of_page, pages[i]);
        }
      }
      __syncwarp();
      look_up(tile + 1);
      keys.advance();
    }
    return;
  }

  if constexpr (kGroups > 1) grow_registers<kConsumerRegisters>();
  const int own_start = q_start + group * kQueries;
  float* const out = out_ptr + outer * stride_out_b + first_row * stride_out_s;
  weights_ptr += outer * stride_weights_b + first_row * stride_weights_s;
  // Keys that no query of the block sees.
  const auto hide = [&](int begin, int end) {
    for (int query = own_start; query < min(own_start + kQueries, seqlen_q); ++query) {
      for (int key = begin + threadIdx.x % 128; key < end; key += 128) out[query * stride_out_s + key] = minus_infinity();
    }
  };
  hide(chunk_begin, min(first_tile * kBlockN, chunk_end));
  hide(end_tile * kBlockN, chunk_end);
  if (hides_rest) {
    const int rest = tiles * kBlockN, share = (max_seqlen_k - rest + chunks - 1) / chunks;
    hide(rest + chunk_number * share, min(rest + (chunk_number + 1) * share, max_seqlen_k));
  }
  if (first_tile == end_tile) return;

  // Whether a query sees a key. Both lie inside the sequence.
  const auto sees = [&](int q_row, int kv) -> bool {
    const int q_pos = q_row + (seqlen_k - seqlen_q);
    return q_pos >= kv;
  };

  float weights[kColumns / 4];  // of the columns of a thread
#pragma unroll
  for (int i = 0; i < kColumns / 4; ++i) {
    const int column = 8 * (i / 2) + 2 * (lane % 4) + i % 2, query = own_start + column / kHeads, head = column % kHeads;
    const float* const weight = weights_ptr + query * stride_weights_s + head * stride_weights_h;
    weights[i] = query < seqlen_q && head < heads ? *weight : 0.0f;
  }
  wait(Tile::kQBarrier, 0);

  const RowMatrix q(Tile::kQ + group * Tile::kQBytes);
  const int row = 16 * (warp % 4) + lane / 4;  // the first of a thread's two keys of a tile; the other is 8 later
  // The scales of a thread's keys of a tile.
  const auto scales_of = [&](int tile) {
    float2 scale = {1.0f, 1.0f};
    if (k_scale_ptr == nullptr) return scale;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int key = min(tile * kBlockN + row + 8 * i, seqlen_k - 1);
      const int page = page_of(key);
      if (page == num_pages) continue;
      (i == 0 ? scale.x : scale.y) = k_scale_ptr[page * stride_k_scale_page + by_page.remainder(key) * stride_k_scale_s];
    }
    return scale;
  };
  Keys keys;
  float2 next_scale = scales_of(first_tile);
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
    const float2 scale = next_scale;
    next_scale = scales_of(tile + 1);  // which arrive while the tensor cores work
    wait_products<0>();
    fence_registers(s);
    if (lane == 0) keys.release();
    keys.advance();

    float sums[2 * kQueries] = {};  // of the thread's heads: for each query, both keys
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      float& sum = sums[8 * (i / 4) / kHeads * 2 + i / 2 % 2];
      sum = fmaf(weights[i / 4 * 2 + i % 2], relu(s[i]), sum);
    }
    sum_of_quad(sums);
    constexpr int kOwn = own_of_quad<2 * kQueries>();
    const int first = first_of_quad<2 * kQueries>();
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int query = own_start + (first + i) / 2, second = (first + i) % 2, key = tile * kBlockN + row + 8 * second;
      if (query >= seqlen_q || key >= chunk_end) continue;
      const bool visible = key < seqlen_k && sees(query, min(key, seqlen_k - 1));
      out[query * stride_out_s + key] = visible ? sums[i] * (second ? scale.y : scale.x) : minus_infinity();
    }
  }
}
// Many queries, at most 32 heads.
extern "C" __global__ void __launch_bounds__(384, 1) index_scores_sm90a_fp8_e4m3_d128_causal_paged_heads_32(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const float* weights_ptr, const float* k_scale_ptr, float* out_ptr, const int* cu_seqlens_q_ptr,
    const int* page_table_ptr, const int* seqused_k_ptr,
    long long stride_weights_b, long long stride_weights_s, long long stride_weights_h,
    long long stride_k_scale_page, long long stride_k_scale_s,
    long long stride_out_b, long long stride_out_s,
    long long page_table_stride,
    int heads, int max_seqlen_q, int max_seqlen_k, int total_q, int total_k, int least_tiles, int chunks,
    int query_tiles, int page_size, int num_pages, int box_rows, int page_size_reciprocal, int batch,
    int hides_rest
) {
  using Own = Tile<32, 8, 2, 8>;
  static_assert(Own::kThreads == 384 && Own::kSharedBytes == 131208);
  score_keys<Own>(
      q_map, k_map,
      weights_ptr, k_scale_ptr, out_ptr, cu_seqlens_q_ptr,
      page_table_ptr, seqused_k_ptr,
      stride_weights_b, stride_weights_s, stride_weights_h,
      stride_k_scale_page, stride_k_scale_s,
      stride_out_b, stride_out_s,
      page_table_stride,
      heads, max_seqlen_q, max_seqlen_k, total_q, total_k, least_tiles, chunks,
      query_tiles, page_size, num_pages, box_rows, page_size_reciprocal, batch,
      hides_rest
  );
}
// Few queries, at most 32 heads.
extern "C" __global__ void __launch_bounds__(160, 4) index_scores_sm90a_fp8_e4m3_d128_causal_paged_heads_32_few(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const float* weights_ptr, const float* k_scale_ptr, float* out_ptr, const int* cu_seqlens_q_ptr,
    const int* page_table_ptr, const int* seqused_k_ptr,
    long long stride_weights_b, long long stride_weights_s, long long stride_weights_h,
    long long stride_k_scale_page, long long stride_k_scale_s,
    long long stride_out_b, long long stride_out_s,
    long long page_table_stride,
    int heads, int max_seqlen_q, int max_seqlen_k, int total_q, int total_k, int least_tiles, int chunks,
    int query_tiles, int page_size, int num_pages, int box_rows, int page_size_reciprocal, int batch,
    int hides_rest
) {
  using Own = Tile<32, 2, 1, 4>;
  static_assert(Own::kThreads == 160 && Own::kSharedBytes == 41032);
  score_keys<Own>(
      q_map, k_map,
      weights_ptr, k_scale_ptr, out_ptr, cu_seqlens_q_ptr,
      page_table_ptr, seqused_k_ptr,
      stride_weights_b, stride_weights_s, stride_weights_h,
      stride_k_scale_page, stride_k_scale_s,
      stride_out_b, stride_out_s,
      page_table_stride,
      heads, max_seqlen_q, max_seqlen_k, total_q, total_k, least_tiles, chunks,
      query_tiles, page_size, num_pages, box_rows, page_size_reciprocal, batch,
      hides_rest
  );
}
// Many queries, at most 64 heads.
extern "C" __global__ void __launch_bounds__(384, 1) index_scores_sm90a_fp8_e4m3_d128_causal_paged_heads_64(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const float* weights_ptr, const float* k_scale_ptr, float* out_ptr, const int* cu_seqlens_q_ptr,
    const int* page_table_ptr, const int* seqused_k_ptr,
    long long stride_weights_b, long long stride_weights_s, long long stride_weights_h,
    long long stride_k_scale_page, long long stride_k_scale_s,
    long long stride_out_b, long long stride_out_s,
    long long page_table_stride,
    int heads, int max_seqlen_q, int max_seqlen_k, int total_q, int total_k, int least_tiles, int chunks,
    int query_tiles, int page_size, int num_pages, int box_rows, int page_size_reciprocal, int batch,
    int hides_rest
) {
  using Own = Tile<64, 4, 2, 8>;
  static_assert(Own::kThreads == 384 && Own::kSharedBytes == 131208);
  score_keys<Own>(
      q_map, k_map,
      weights_ptr, k_scale_ptr, out_ptr, cu_seqlens_q_ptr,
      page_table_ptr, seqused_k_ptr,
      stride_weights_b, stride_weights_s, stride_weights_h,
      stride_k_scale_page, stride_k_scale_s,
      stride_out_b, stride_out_s,
      page_table_stride,
      heads, max_seqlen_q, max_seqlen_k, total_q, total_k, least_tiles, chunks,
      query_tiles, page_size, num_pages, box_rows, page_size_reciprocal, batch,
      hides_rest
  );
}
// Few queries, at most 64 heads.
extern "C" __global__ void __launch_bounds__(160, 4) index_scores_sm90a_fp8_e4m3_d128_causal_paged_heads_64_few(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const float* weights_ptr, const float* k_scale_ptr, float* out_ptr, const int* cu_seqlens_q_ptr,
    const int* page_table_ptr, const int* seqused_k_ptr,
    long long stride_weights_b, long long stride_weights_s, long long stride_weights_h,
    long long stride_k_scale_page, long long stride_k_scale_s,
    long long stride_out_b, long long stride_out_s,
    long long page_table_stride,
    int heads, int max_seqlen_q, int max_seqlen_k, int total_q, int total_k, int least_tiles, int chunks,
    int query_tiles, int page_size, int num_pages, int box_rows, int page_size_reciprocal, int batch,
    int hides_rest
) {
  using Own = Tile<64, 1, 1, 4>;
  static_assert(Own::kThreads == 160 && Own::kSharedBytes == 41032);
  score_keys<Own>(
      q_map, k_map,
      weights_ptr, k_scale_ptr, out_ptr, cu_seqlens_q_ptr,
      page_table_ptr, seqused_k_ptr,
      stride_weights_b, stride_weights_s, stride_weights_h,
      stride_k_scale_page, stride_k_scale_s,
      stride_out_b, stride_out_s,
      page_table_stride,
      heads, max_seqlen_q, max_seqlen_k, total_q, total_k, least_tiles, chunks,
      query_tiles, page_size, num_pages, box_rows, page_size_reciprocal, batch,
      hides_rest
  );
}
// Many queries, at most 128 heads.
extern "C" __global__ void __launch_bounds__(384, 1) index_scores_sm90a_fp8_e4m3_d128_causal_paged_heads_128(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const float* weights_ptr, const float* k_scale_ptr, float* out_ptr, const int* cu_seqlens_q_ptr,
    const int* page_table_ptr, const int* seqused_k_ptr,
    long long stride_weights_b, long long stride_weights_s, long long stride_weights_h,
    long long stride_k_scale_page, long long stride_k_scale_s,
    long long stride_out_b, long long stride_out_s,
    long long page_table_stride,
    int heads, int max_seqlen_q, int max_seqlen_k, int total_q, int total_k, int least_tiles, int chunks,
    int query_tiles, int page_size, int num_pages, int box_rows, int page_size_reciprocal, int batch,
    int hides_rest
) {
  using Own = Tile<128, 2, 2, 8>;
  static_assert(Own::kThreads == 384 && Own::kSharedBytes == 131208);
  score_keys<Own>(
      q_map, k_map,
      weights_ptr, k_scale_ptr, out_ptr, cu_seqlens_q_ptr,
      page_table_ptr, seqused_k_ptr,
      stride_weights_b, stride_weights_s, stride_weights_h,
      stride_k_scale_page, stride_k_scale_s,
      stride_out_b, stride_out_s,
      page_table_stride,
      heads, max_seqlen_q, max_seqlen_k, total_q, total_k, least_tiles, chunks,
      query_tiles, page_size, num_pages, box_rows, page_size_reciprocal, batch,
      hides_rest
  );
}
// Few queries, at most 128 heads.
extern "C" __global__ void __launch_bounds__(160, 3) index_scores_sm90a_fp8_e4m3_d128_causal_paged_heads_128_few(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const float* weights_ptr, const float* k_scale_ptr, float* out_ptr, const int* cu_seqlens_q_ptr,
    const int* page_table_ptr, const int* seqused_k_ptr,
    long long stride_weights_b, long long stride_weights_s, long long stride_weights_h,
    long long stride_k_scale_page, long long stride_k_scale_s,
    long long stride_out_b, long long stride_out_s,
    long long page_table_stride,
    int heads, int max_seqlen_q, int max_seqlen_k, int total_q, int total_k, int least_tiles, int chunks,
    int query_tiles, int page_size, int num_pages, int box_rows, int page_size_reciprocal, int batch,
    int hides_rest
) {
  using Own = Tile<128, 1, 1, 4>;
  static_assert(Own::kThreads == 160 && Own::kSharedBytes == 49224);
  score_keys<Own>(
      q_map, k_map,
      weights_ptr, k_scale_ptr, out_ptr, cu_seqlens_q_ptr,
      page_table_ptr, seqused_k_ptr,
      stride_weights_b, stride_weights_s, stride_weights_h,
      stride_k_scale_page, stride_k_scale_s,
      stride_out_b, stride_out_s,
      page_table_stride,
      heads, max_seqlen_q, max_seqlen_k, total_q, total_k, least_tiles, chunks,
      query_tiles, page_size, num_pages, box_rows, page_size_reciprocal, batch,
      hides_rest
  );
}
