// bwd_sm90a_mla_bf16_d576x512_causal_m64n64s1w12
//
// Attention backward, variant causal: mask `q_pos >= kv`.
// Rendered by `attngen build tests/render/others.yaml`, schedule mla_backward.
//
// P = exp2(logit - LSE) and dP = dO V^T are recomputed, tile by tile; dS = P (dP - D) times the scale, dQ = dS K, and, since V is the
// first 512 columns of K, dK = dS^T Q + P^T dO is the gradient of both.
//
// A block has no room for dQ and dK at once, and adding dK of each tile to global memory would take longer than all products. So query
// rows are taken in chunks. Of each chunk, `dq` computes P, dS and dQ, and writes P and dS to memory; then `dkv` multiplies these, each
// block over many rows. Before the first chunk comes `preprocess` (D and LSE of each query row, zeros for the dK accumulator), after
// the last one `postprocess` (rounds dK).
#include "copy.cuh"
#include "expression.cuh"
#include "gather.cuh"
#include "gradient.cuh"
#include "ldmatrix.cuh"
#include "quad.cuh"
#include "ring.cuh"
#include "softmax.cuh"
#include "sums.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

using Element = bf16;  // of Q, K, dO, P and dS
using GradElement = bf16;  // of dQ and dK

constexpr int kRows = 64;    // query rows of a tile
constexpr int kBlockN = 64;  // keys of a tile
constexpr int kHeadDimQk = 576;
constexpr int kHeadDimV = 512;  // the first columns of K
constexpr int kConsumers = 2;  // warpgroups that multiply
constexpr int kThreads = 384, kDkvThreads = 384;
constexpr int kMmaK = Product<Element, kBlockN>::kK;  // K of one wgmma: the elements that it sums over
constexpr int kChunk = 16 / sizeof(Element);

// Columns come in boxes of 128 bytes.
constexpr int kBoxBytes = 128, kBoxColumns = kBoxBytes / sizeof(Element);
constexpr int kBoxes = kHeadDimQk / kBoxColumns, kValueBoxes = kHeadDimV / kBoxColumns;
constexpr uint32_t kBox = kBlockN * kBoxBytes;  // bytes of a box of a tile
static_assert(kRows == kBlockN);  // so that boxes of Q, dO, P and dS have as many bytes

// Boxes of K in quarters, the last of which has those that K has beyond V, too. A warpgroup of dq has two quarters of the columns of dQ,
// and multiplies one after the other, so that K of the next tile replaces one meanwhile. Quarters come in the order in which they
// become free: the first one of each warpgroup, then the second one.
constexpr int kQuarter = kValueBoxes / 4, kQuarters = 4;
constexpr int quarter_of(int place) { return place % 2 * 2 + place / 2; }
constexpr int boxes_of(int quarter, int boxes) { return quarter == kQuarters - 1 ? boxes - 3 * kQuarter : kQuarter; }

// Rows of queries are counted by parts: so many tiles of a KV head of a sequence.
constexpr int kPartTiles = 44, kPartRows = kPartTiles * kRows;

// Workspace of a chunk of query rows, as it lies in shared memory, by halves of the rows of a tile: P and dS of each tile of
// keys, side by side; boxes of Q, then of dO; and the tiles of keys that a tile of rows sees.
constexpr int kHalfRows = 32;
constexpr uint32_t kHalfBox = kHalfRows * kBoxBytes;
struct Spans {
  int visible_lo, visible_hi;
  int full_lo, full_hi;  // whose keys all rows see
};
static_assert(sizeof(Spans) <= 4 * 16);

// A block of dkv.
constexpr int kKeyTiles = 4, kTilesOfGroup = kKeyTiles / kConsumers;  // of keys: of a block, and of a warpgroup
constexpr int kDkvBoxes = 3;  // of columns
constexpr int kDkvParts = (kBoxes + kDkvBoxes - 1) / kDkvBoxes;  // blocks for all columns
constexpr uint32_t kPairBytes = 2 * kKeyTiles * kHalfBox, kColumnBytes = 2 * kDkvBoxes * kHalfBox;  // of a stage

// A number of boxes of columns, as a type that a generic lambda can use as a constant.
template <int kNumber>
struct Boxes {
  static constexpr int kCount = kNumber;
};

// The same for the number of a warpgroup.
template <int kOwn>
struct Warpgroup {
  static constexpr int kNumber = kOwn;
};

// Shared memory. Addresses are constants, so that they cost no instruction; kernels check where it begins.
constexpr uint32_t kShared = 1024;
// Of dq:
constexpr uint32_t kQ = kShared + 0;  // 73728 B: Q
constexpr uint32_t kDout = kShared + 73728;  // 65536 B: dO
constexpr uint32_t kK = kShared + 139264;  // 73728 B: K of a tile
constexpr uint32_t kP = kShared + 212992;  // 8192 B: P of a tile
constexpr uint32_t kDs = kShared + 221184;  // 8192 B: dS of a tile
constexpr uint32_t kKFull = kShared + 229376;  // 72 B: barriers
constexpr uint32_t kKEmpty = kShared + 229448;  // 72 B: barriers

// Rings: who fills the stages -> who empties them.
using KRing = Ring<kKFull, kKEmpty, 9>;  // the loaders -> both consumers

// Named barriers of the hardware; 0 is __syncthreads.
enum class Named {
  kOrder = 1,  // 1 of them: half of S is multiplied, so that it is ahead of dP
  kPublished = 2,  // 1 of them: P is in shared memory
  kComplete = 3,  // 1 of them: dS is in shared memory
  kGiven = 4,  // 1 of them: P and dS are in shared memory, for the warp that writes them
  kWritten = 5,  // 2 of them: P, or dS, has been read from there
};

// Of dkv:
constexpr uint32_t kPairs = kShared + 0;  // 131072 B: P and dS of half of the rows of tiles, a pair for each tile of keys
constexpr uint32_t kColumns = kShared + 131072;  // 98304 B: Q and dO of these rows, some columns
constexpr uint32_t kRowsFull = kShared + 229376;  // 32 B: barriers
constexpr uint32_t kRowsEmpty = kShared + 229408;  // 32 B: barriers
constexpr uint32_t kSeen = kShared + 229440;  // 176 B: tiles of keys that each tile of rows sees, a bit for each

// Rings: who fills the stages -> who empties them.
using RowsRing = Ring<kRowsFull, kRowsEmpty, 4>;  // the loader -> the consumers

// Layouts of wgmma's operands: rows of columns, or, transposed, columns of rows.
using RowMatrix = Matrix<16, 8 * kBoxBytes, 1>;
using ColumnMatrix = Matrix<kBox, 8 * kBoxBytes, 1>;
using HalfColumnMatrix = Matrix<kHalfBox, 8 * kBoxBytes, 1>;

extern __shared__ char shared_memory[];

template <typename Value>
__device__ __forceinline__ Value& shared_at(uint32_t address) {
  return *reinterpret_cast<Value*>(shared_memory + (address - kShared));
}

// D = rowsum(dO * O) - dLSE of each query row, its log-sum-exp in units of log2, and zeros for the accumulator of dK. A warp has a row.
extern "C" __global__ void __launch_bounds__(128) bwd_sm90a_mla_bf16_d576x512_causal_m64n64s1w12_preprocess(
    const bf16* out_ptr, const bf16* dout_ptr, const float* lse_ptr, const float* dlse_ptr, float* lse_log2_ptr,
    float* delta_ptr, float* dkv_sum_ptr,
    long long stride_out_b, long long stride_out_s, long long stride_out_h,
    long long stride_dout_b, long long stride_dout_s, long long stride_dout_h,
    int heads, int rows, int row_tiles, long long sum_chunks,
    int has_dlse
) {
  const int lane = threadIdx.x % 32;
  const int h = blockIdx.x % heads, row_tile = blockIdx.x / heads % row_tiles, b = blockIdx.x / heads / row_tiles;
  // A block clears its share of the accumulator while its rows arrive.
  const long long share = (sum_chunks + gridDim.x - 1) / gridDim.x, share_end = min(share * (blockIdx.x + 1), sum_chunks);
  for (long long i = share * blockIdx.x + threadIdx.x; i < share_end; i += 128) {
    reinterpret_cast<float4*>(dkv_sum_ptr)[i] = {};
  }
#pragma unroll
  for (int i = threadIdx.x / 32; i < 16; i += 4) {
    const int row = row_tile * 16 + i;
    if (row >= rows) break;
    float delta = 0.0f;
#pragma unroll
    for (int column = kChunk * lane; column < kHeadDimV; column += 32 * kChunk) {
      const int4 out = *reinterpret_cast<const int4*>(out_ptr + b * stride_out_b + h * stride_out_h + row * stride_out_s + column);
      const int4 dout = *reinterpret_cast<const int4*>(dout_ptr + b * stride_dout_b + h * stride_dout_h + row * stride_dout_s + column);
      delta += dot<Element>(out.x, dout.x) + dot<Element>(out.y, dout.y) + dot<Element>(out.z, dout.z) + dot<Element>(out.w, dout.w);
    }
#pragma unroll
    for (int other = 1; other < 32; other *= 2) delta += __shfl_xor_sync(~0u, delta, other);
    if (lane == 0) {
      const long long entry = (b * static_cast<long long>(heads) + h) * rows + row;
      const float lse = lse_ptr[entry];
      const bool dead = lse == kMasked;  // a row that sees no key: +inf makes each of its probabilities 0
      lse_log2_ptr[entry] = dead ? -kMasked : lse * kLog2e;
      delta_ptr[entry] = dead ? 0.0f : delta - (has_dlse ? dlse_ptr[entry] : 0.0f);
    }
  }
}

// A block has 64 rows: heads of queries, those of one query side by side. It goes through the tiles of keys that they see, with a
// warpgroup for each of these:
//
//   0:  S = Q K^T, P           half of dQ += dS K
//   1:  dP = dO V^T, dS        the rest of dQ
//   2:  loads K of the next tile, box by box; writes P and dS to memory
extern "C" __global__ void __launch_bounds__(kThreads, 1) bwd_sm90a_mla_bf16_d576x512_causal_m64n64s1w12_dq(
    const bf16* q_ptr, const bf16* k_ptr, const bf16* dout_ptr, bf16* dq_ptr, float* products_ptr, float* rows_ptr,
    int* ranges_ptr, const float* lse_log2_ptr, const float* delta_ptr, const int* seqused_k_ptr,
    long long stride_q_b, long long stride_q_s, long long stride_q_h,
    long long stride_k_b, long long stride_k_s, long long stride_k_h,
    long long stride_dout_b, long long stride_dout_s, long long stride_dout_h,
    long long stride_dq_b, long long stride_dq_s, long long stride_dq_h,
    int batch, int heads, int kv_heads, int group, int first_part, int chunk_key_tiles, int seqlen_q,
    int max_seqlen_k, int total_q, int total_k,
    float softmax_scale,
    int has_seqused_k
) {
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // uniform across the warp, and the compiler knows
  const int lane = threadIdx.x % 32, warpgroup = warp / 4;
  const uint32_t here = static_cast<uint32_t>(__cvta_generic_to_shared(shared_memory)) - kShared;
  if (here != 0) __trap();

  // The rows of the block: those from `row_start` on of all heads of a KV head.
  const int part = first_part + blockIdx.x / kPartTiles;
  const int sequence_parts = (seqlen_q * group + kPartRows - 1) / kPartRows;
  [[maybe_unused]] const int of_sequence = part % sequence_parts;  // number of the part in its sequence
  const int b = part / sequence_parts % batch, hk = part / sequence_parts / batch;
  Spans& published = reinterpret_cast<Spans*>(ranges_ptr)[blockIdx.x];
  const int seqlen_k = has_seqused_k ? seqused_k_ptr[b] : max_seqlen_k;
  const int row_start = (of_sequence * kPartTiles + blockIdx.x % kPartTiles) * kRows, row_count = min(seqlen_q * group - row_start, kRows);
  if (row_count <= 0) {
    if (threadIdx.x == 0) published = {};
    return;
  }

  // The tiles of keys that they see.
  const int q_start = row_start / group;
  const int q_hi = min((row_start + kRows - 1) / group, seqlen_q - 1);
  const int whole_tiles = seqlen_k / kBlockN;
  const int q_pos_lo = q_start + (seqlen_k - seqlen_q);
  const int q_pos_hi = q_hi + (seqlen_k - seqlen_q);
  const int visible_hi = (max(q_pos_hi + 1, 0) + kBlockN - 1) / kBlockN;
  const int full_hi = min(max(q_pos_lo + 1, 0) / kBlockN, whole_tiles);
  const Spans spans = {0, visible_hi, 0, full_hi};
  const int tiles = max(spans.visible_hi - spans.visible_lo, 0);
  const auto tile_of = [&](int number) {
    const int tile = spans.visible_lo + number;
    return tile;
  };
  if (threadIdx.x == 0) published = spans;

  // The two rows of a lane.
  const int own_row = 16 * (warp % 4) + lane / 4;  // the other one is 8 rows below
  int query[2], head[2];
  float lse[2], delta[2];
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const int of_tile = own_row + 8 * row, packed = row_start + min(of_tile, row_count - 1);
    const int q = packed / group, h = hk * group + packed % group;
    query[row] = q;
    head[row] = h;
    const long long entry = (b * static_cast<long long>(heads) + h) * seqlen_q + q;
    lse[row] = of_tile < row_count ? lse_log2_ptr[entry] : -kMasked;  // +inf makes each probability 0
    delta[row] = of_tile < row_count ? delta_ptr[entry] : 0.0f;
  }
  const float scale_log2e = softmax_scale * kLog2e;

  if (threadIdx.x == 0) {
    init_barriers(kKFull, 9, 128);  // each thread of the loaders, when its copies have landed
    init_barriers(kKEmpty, 9, 4);  // each warp of the consumer that has these columns of dQ
    fence_barrier_init();
  }
  // Q and dO: eight threads copy a row of a box, 16 bytes each. Rows that do not exist become zeros.
  const int chunk = threadIdx.x % (kBoxBytes / 16);
  const auto load_rows = [&](auto boxes, uint32_t to, const auto& row_of) {
    for (int row = threadIdx.x / (kBoxBytes / 16); row < kRows; row += kThreads / (kBoxBytes / 16)) {
      const bool exists = row < row_count;
      const int packed = row_start + min(row, row_count - 1);
      const Element* const from = row_of(packed / group, hk * group + packed % group) + kChunk * chunk;
      const uint32_t place = to + row * kBoxBytes + 16 * swizzled<kBoxBytes>(row, chunk);
#pragma unroll
      for (int box = 0; box < boxes.kCount; ++box) copy_async(place + box * kBox, from + box * kBoxColumns, exists);
    }
  };
  load_rows(Boxes<kBoxes>(), kQ, [&](int q, int h) { return q_ptr + b * stride_q_b + h * stride_q_h + q * stride_q_s; });
  load_rows(Boxes<kValueBoxes>(), kDout, [&](int q, int h) { return dout_ptr + b * stride_dout_b + h * stride_dout_h + q * stride_dout_s; });
  wait_all_copies();
  fence_async_proxy();
  __syncthreads();  // Q and dO are there, and barriers

  if (warpgroup < kConsumers) {
    const auto multiply = [&](auto own) {
      constexpr int kOwn = own.kNumber;  // a constant, so that descriptors of products are constants, too
      // Columns of dQ, by quarters.
      constexpr int kFirstQuarter = 2 * kOwn, kFirstBox = kFirstQuarter * kQuarter, kSecondBox = kFirstBox + kQuarter;
      constexpr int kFirstColumns = kQuarter * kBoxColumns, kSecondColumns = boxes_of(kFirstQuarter + 1, kBoxes) * kBoxColumns;
      float first_dq[kFirstColumns / 2] = {}, second_dq[kSecondColumns / 2] = {};
      // The place of a lane in P and dS, from a column on.
      const auto place_of = [&](int column) {
        const int row = 16 * (warp % 4) + lane % 16, chunk = column / 8 + lane / 16;
        return row * kBoxBytes + 16 * swizzled<kBoxBytes>(row, chunk);
      };
#pragma unroll 1
      for (int number = 0; number < tiles; ++number) {
        const int tile = tile_of(number);
        // Multiplies rows with those of K of the tile, box by box as these land.
        const auto multiply_rows = [&](auto boxes, uint32_t rows, float(&to)[kBlockN / 2]) {
          if constexpr (kOwn == 1) named_sync(Named::kOrder, 0, 128 * kConsumers);
          fence_registers(to);
#pragma unroll
          for (int n = 0; n < kQuarters; ++n) {
            const int quarter = quarter_of(n);
#pragma unroll
            for (int box = quarter * kQuarter; box < quarter * kQuarter + boxes_of(quarter, boxes.kCount); ++box) {
              KRing(box, number & 1).wait();
              fence_async_proxy();  // the loaders' writes are ordinary ones
              const RowMatrix a(rows + box * kBox), k(kK + box * kBox);
              fence_products();
#pragma unroll
              for (int column = 0; column < kBoxColumns; column += kMmaK) {
                Product<Element, kBlockN>::template ss<0>(to, a.at(column * sizeof(Element)), k.at(column * sizeof(Element)), box + column > 0);
              }
            }
            if (kOwn == 0 && n == kQuarters / 2 - 1) named_arrive(Named::kOrder, 0, 128 * kConsumers);
          }
          commit_products();
          wait_products<0>();
          fence_registers(to);
        };
        if constexpr (kOwn == 0) {  // P
          // S = Q K^T
          float s[kBlockN / 2];
          multiply_rows(Boxes<kBoxes>(), kQ, s);
          const int kv_first = tile * kBlockN + 2 * (lane % 4);
          if (__any_sync(~0u, !(tile >= spans.full_lo && tile < spans.full_hi))) {
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
#pragma unroll
          for (int i = 0; i < kBlockN / 2; ++i) s[i] = exp2_approx(fmaf(s[i], scale_log2e, -lse[row_of(i)]));
          if (number > 0) named_sync(Named::kWritten, 0, 128 + 32);
#pragma unroll
          for (int column = 0; column < kBlockN; column += 16) {
            uint32_t p[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) p[j] = pack<Element>(s[column / 2 + 2 * j], s[column / 2 + 2 * j + 1]);
            store_blocks(kP + place_of(column), p[0], p[1], p[2], p[3]);
          }
          fence_async_proxy();
          named_arrive(Named::kPublished, 0, 128 * kConsumers);
        } else {  // dS = P (dP - D)
          // dP = dO V^T
          float dp[kBlockN / 2];
          multiply_rows(Boxes<kValueBoxes>(), kDout, dp);
#pragma unroll
          for (int i = 0; i < kBlockN / 2; ++i) dp[i] = (dp[i] - delta[row_of(i)]) * softmax_scale;
          if (number > 0) named_sync(Named::kWritten, 1, 128 + 32);
          named_sync(Named::kPublished, 0, 128 * kConsumers);
#pragma unroll
          for (int column = 0; column < kBlockN; column += 16) {
            uint32_t p[4];
            load_blocks(p, kP + place_of(column));
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              const int i = column / 2 + 2 * j;
              const float2 both = unpack<Element>(p[j]);
              p[j] = pack<Element>(both.x * dp[i], both.y * dp[i + 1]);
            }
            store_blocks(kDs + place_of(column), p[0], p[1], p[2], p[3]);
          }
          fence_async_proxy();
          named_arrive(Named::kGiven, 0, 128 + 32);
          if constexpr (kBoxes > kValueBoxes) {
            KRing(kValueBoxes, number & 1).wait();  // columns that dP does not read
            fence_async_proxy();
          }
        }
        named_sync(Named::kComplete, 0, 128 * kConsumers);

        // dQ += dS K
        const RowMatrix ds(kDs);
        const auto issue = [&](auto& dq, uint32_t boxes) {
          constexpr int kColumns = sizeof(dq) / sizeof(float) * 2;
          const ColumnMatrix k(boxes);
          fence_registers(dq);
          fence_products();
#pragma unroll
          for (int key = 0; key < kBlockN; key += kMmaK) {
            Product<Element, kColumns>::template ss<1>(dq, ds.at(key * sizeof(Element)), k.at(key * kBoxBytes), 1);
          }
          commit_products();
        };
        const auto release_boxes = [&](int first, int count) {
          if (lane < count) arrive(KRing::empty_of(first + lane));
        };
        issue(first_dq, kK + kFirstBox * kBox);
        issue(second_dq, kK + kSecondBox * kBox);
        wait_products<1>();
        fence_registers(first_dq);
        release_boxes(kFirstBox, kQuarter);
        wait_products<0>();
        fence_registers(second_dq);
        release_boxes(kSecondBox, kSecondColumns / kBoxColumns);
      }

      // Stores columns of dQ: each lane of a quad writes 16 bytes of a row, 64 in all.
      const auto store_columns = [&](const auto& columns, int first_column) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          const int q = query[row], h = head[row];
          GradElement* const to = dq_ptr + b * stride_dq_b + h * stride_dq_h + q * stride_dq_s + first_column + 8 * (lane % 4);
#pragma unroll
          for (int column = 0; column < sizeof(columns) / sizeof(float) * 2; column += 32) {
            uint32_t two_columns[4];
#pragma unroll
            for (int block = 0; block < 4; ++block) {
              const int i = column / 2 + 4 * block + 2 * row;
              two_columns[block] = pack<GradElement>(columns[i], columns[i + 1]);
            }
            gather_block(two_columns);
            if (own_row + 8 * row < row_count) {
              *reinterpret_cast<uint4*>(to + column) = {two_columns[0], two_columns[1], two_columns[2], two_columns[3]};
            }
          }
        }
      };
      store_columns(first_dq, kFirstBox * kBoxColumns);
      store_columns(second_dq, kSecondBox * kBoxColumns);
    };
    if (warpgroup == 0) {
      grow_registers<200>();
      multiply(Warpgroup<0>());
    } else {
      grow_registers<232>();
      multiply(Warpgroup<1>());
    }
  } else {
    shrink_registers<72>();
    constexpr int kLoaderThreads = kThreads - 128 * kConsumers, kRowsAtOnce = kLoaderThreads / (kBoxBytes / 16);
    constexpr int kRowsOfThread = kBlockN / kRowsAtOnce;
    static_assert(kRowsAtOnce % 8 == 0);  // so that all rows of a thread are swizzled alike
    const int first = (threadIdx.x - 128 * kConsumers) / (kBoxBytes / 16);
    const uint32_t place = kK + first * kBoxBytes + 16 * swizzled<kBoxBytes>(first, chunk);
    const bool writes = warp == 4 * kConsumers;
    float* const own_products = products_ptr + static_cast<long long>(blockIdx.x) * chunk_key_tiles * (kBox / 2);
    // Writes P and dS of a tile to memory, which then lie behind each other, by halves of their rows.
    const auto give = [&](int tile) {
      named_sync(Named::kGiven, 0, 128 + 32);
      if (lane == 0) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float* const to = own_products + (half * chunk_key_tiles + tile) * static_cast<long long>(kBox / 4);
          store_floats(to, kP + half * kHalfBox, kHalfBox);
          store_floats(to + kHalfBox / 4, kDs + half * kHalfBox, kHalfBox);
        }
        commit_stores();
      }
      __syncwarp();
    };
    if (writes && lane == 0 && tiles > 0) {
      float* const own_rows = rows_ptr + static_cast<long long>(blockIdx.x) * (kBoxes + kValueBoxes) * (kBox / 4);
#pragma unroll 1
      for (int i = 0; i < 2 * (kBoxes + kValueBoxes); ++i) {
        const int half = i / (kBoxes + kValueBoxes), box = i % (kBoxes + kValueBoxes);
        static_assert(kDout == kQ + kBoxes * kBox);
        store_floats(own_rows + i * (kHalfBox / 4), kQ + box * kBox + half * kHalfBox, kHalfBox);
      }
      commit_stores();
    }
    __syncwarp();
    int before = 0;  // the tile before
#pragma unroll 1
    for (int number = 0; number < tiles; ++number) {
      const int tile = tile_of(number);
      if (writes && number > 0) give(before);
      const Element* rows_of_k[kRowsOfThread];
      bool exists[kRowsOfThread];
#pragma unroll
      for (int i = 0; i < kRowsOfThread; ++i) {
        const int key = tile * kBlockN + first + i * kRowsAtOnce;
        exists[i] = key < seqlen_k;
        rows_of_k[i] = kept_in_registers(k_ptr + b * stride_k_b + hk * stride_k_h + (exists[i] ? key : 0) * stride_k_s + kChunk * chunk);
      }
#pragma unroll
      for (int n = 0; n < kQuarters; ++n) {
        const int quarter = quarter_of(n);
#pragma unroll
        for (int box = quarter * kQuarter; box < quarter * kQuarter + boxes_of(quarter, kBoxes); ++box) {
          const KRing ring(box, number & 1);
          if (box == quarter * kQuarter) ring.acquire();  // the boxes of a quarter become free together
#pragma unroll
          for (int i = 0; i < kRowsOfThread; ++i) {
            copy_async(place + box * kBox + i * kRowsAtOnce * kBoxBytes, rows_of_k[i] + box * kBoxColumns, exists[i]);
          }
          arrive_when_copied(ring.full());
        }
      }
      if (writes && number > 0) {
        if (lane == 0) wait_stores_read();
        __syncwarp();
        named_arrive(Named::kWritten, 0, 128 + 32);
        named_arrive(Named::kWritten, 1, 128 + 32);
      }
      before = tile;
    }
    if (writes && tiles > 0) {
      give(before);
      if (lane == 0) wait_stores_written();
    }
  }
}

// A block has 4 tiles of keys and 3 boxes of columns of dK, and sums over the rows of a part of the chunk. Two
// warpgroups multiply, and share the tiles of keys; a warp of the third one loads.
extern "C" __global__ void __launch_bounds__(kDkvThreads, 1) bwd_sm90a_mla_bf16_d576x512_causal_m64n64s1w12_dkv(
    const float* products_ptr, const float* rows_ptr, const int* ranges_ptr, float* dkv_sum_ptr,
    const int* seqused_k_ptr,
    int batch, int heads, int kv_heads, int group, int first_part, int chunk_key_tiles, int seqlen_q,
    int max_seqlen_k, int total_q, int total_k,
    int has_seqused_k
) {
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const int lane = threadIdx.x % 32, warpgroup = warp / 4;
  const uint32_t here = static_cast<uint32_t>(__cvta_generic_to_shared(shared_memory)) - kShared;
  if (here != 0) __trap();

  // Blocks in order: columns, then tiles of keys, then parts of the chunk, so that blocks that run side by side read the same P and dS.
  const int key_blocks = chunk_key_tiles / kKeyTiles;
  const int columns = blockIdx.x % kDkvParts, first_tile = blockIdx.x / kDkvParts % key_blocks * kKeyTiles;
  const int of_chunk = blockIdx.x / kDkvParts / key_blocks, part = first_part + of_chunk;
  const int sequence_parts = (seqlen_q * group + kPartRows - 1) / kPartRows;
  [[maybe_unused]] const int of_sequence = part % sequence_parts;  // number of the part in its sequence
  const int b = part / sequence_parts % batch, hk = part / sequence_parts / batch;
  const int seqlen_k = has_seqused_k ? seqused_k_ptr[b] : max_seqlen_k;
  if (first_tile * kBlockN >= seqlen_k) return;

  // Tiles of keys that the block has to multiply, a bit for each, for each tile of rows.
  int seen = 0;
  if (threadIdx.x < kPartTiles) {
    const Spans spans = reinterpret_cast<const Spans*>(ranges_ptr)[of_chunk * kPartTiles + threadIdx.x];
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i) {
      const int tile = first_tile + i;
      seen |= (tile >= spans.visible_lo && tile < spans.visible_hi) << i;
    }
    shared_at<int>(kSeen + 4 * threadIdx.x) = seen;
  }
  if (threadIdx.x == 0) {
    init_barriers(kRowsFull, 4, 1);  // the loader, and the bytes of the copy
    init_barriers(kRowsEmpty, 4, 8);  // each warp of the consumers
    fence_barrier_init();
  }
  // Boxes that Q, or dO, does not have are zeros, which copies do not touch.
  const int q_boxes = min(kBoxes - columns * kDkvBoxes, kDkvBoxes), dout_boxes = min(kValueBoxes - columns * kDkvBoxes, kDkvBoxes);
  for (int stage = 0; stage < RowsRing::kStages; ++stage) {
    for (int box = 0; box < 2 * kDkvBoxes; ++box) {
      if (box < kDkvBoxes ? box < q_boxes : box - kDkvBoxes < dout_boxes) continue;
      for (int i = 16 * threadIdx.x; i < static_cast<int>(kHalfBox); i += 16 * kDkvThreads) {
        shared_at<int4>(kColumns + stage * kColumnBytes + box * kHalfBox + i) = {};
      }
    }
  }
  fence_async_proxy();
  if (!__syncthreads_or(seen)) return;

  RowsRing ring;
  if (warpgroup == kConsumers) {
    shrink_registers<24>();
    if (warp == 4 * kConsumers) {
      for (int i = 0; i < kPartTiles; ++i) {
        if (shared_at<int>(kSeen + 4 * i) == 0) continue;
        const long long row_tile = of_chunk * kPartTiles + i;
        for (int half = 0; half < 2; ++half) {
          const uint32_t to_columns = kColumns + ring.stage * kColumnBytes;
          ring.acquire();
          const float* const pairs = products_ptr + ((2 * row_tile + half) * chunk_key_tiles + first_tile) * (kHalfBox / 2);
          const float* const boxes = rows_ptr + (2 * row_tile + half) * (kBoxes + kValueBoxes) * (kHalfBox / 4);
          if (lane == 0) {
            const uint32_t full = ring.full();
            ring.arrive_expecting(kPairBytes + (q_boxes + dout_boxes) * kHalfBox);
            load_bytes(kPairs + ring.stage * kPairBytes, pairs, full, kPairBytes);
            load_bytes(to_columns, boxes + columns * kDkvBoxes * (kHalfBox / 4), full, q_boxes * kHalfBox);
            load_bytes(to_columns + kDkvBoxes * kHalfBox, boxes + (kBoxes + columns * kDkvBoxes) * (kHalfBox / 4), full, dout_boxes * kHalfBox);
          }
          __syncwarp();
          ring.advance();
        }
      }
    }
  } else {
    grow_registers<240>();
    float dk[kTilesOfGroup][kDkvBoxes * kBoxColumns / 2] = {};
    // Issues dK += dS^T Q + P^T dO of one tile of keys.
    const auto issue = [&](float(&to)[kDkvBoxes * kBoxColumns / 2], int tile) {
      const uint32_t pair = kPairs + ring.stage * kPairBytes + tile * 2 * kHalfBox, of_columns = kColumns + ring.stage * kColumnBytes;
      const HalfColumnMatrix p(pair), ds(pair + kHalfBox), q(of_columns), dout(of_columns + kDkvBoxes * kHalfBox);
      fence_registers(to);
      fence_products();
#pragma unroll
      for (int row = 0; row < kHalfRows; row += kMmaK) {
        Product<Element, kDkvBoxes * kBoxColumns>::ss<1, 1>(to, ds.at(row * kBoxBytes), q.at(row * kBoxBytes), 1);
        Product<Element, kDkvBoxes * kBoxColumns>::ss<1, 1>(to, p.at(row * kBoxBytes), dout.at(row * kBoxBytes), 1);
      }
      commit_products();
    };
    const int first_of_group = warpgroup * kTilesOfGroup;
    constexpr int kAll = (1 << kTilesOfGroup) - 1;
    int multiplied = 0;  // a bit for each tile of keys
#pragma unroll 1
    for (int i = 0; i < kPartTiles; ++i) {
      const int of_block = __shfl_sync(~0u, shared_at<int>(kSeen + 4 * i), 0), own = of_block >> first_of_group & kAll;
      if (of_block == 0) continue;
      multiplied |= own;
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        ring.wait();
        if (__any_sync(~0u, own == kAll)) {
#pragma unroll
          for (int j = 0; j < kTilesOfGroup; ++j) issue(dk[j], first_of_group + j);
          wait_products<0>();
#pragma unroll
          for (int j = 0; j < kTilesOfGroup; ++j) fence_registers(dk[j]);
        } else {
#pragma unroll
          for (int j = 0; j < kTilesOfGroup; ++j) {
            if (__any_sync(~0u, own >> j & 1)) {
              issue(dk[j], first_of_group + j);
              wait_products<0>();
              fence_registers(dk[j]);
            }
          }
        }
        if (lane == 0) ring.release();
        ring.advance();
      }
    }
#pragma unroll
    for (int j = 0; j < kTilesOfGroup; ++j) {
      if (!__any_sync(~0u, multiplied >> j & 1)) continue;
      const int own_row = 16 * (warp % 4) + lane / 4;
      float* rows[2];
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const int key = (first_tile + first_of_group + j) * kBlockN + own_row + 8 * row;
        rows[row] = key < seqlen_k ? dkv_sum_ptr + (static_cast<long long>(b) * max_seqlen_k + key) * kv_heads * kHeadDimQk + hk * kHeadDimQk : nullptr;
      }
#pragma unroll
      for (int box = 0; box < kDkvBoxes; ++box) {
        if (columns * kDkvBoxes + box >= kBoxes) break;
        float of_box[kBoxColumns / 2];
#pragma unroll
        for (int i = 0; i < kBoxColumns / 2; ++i) of_box[i] = dk[j][box * kBoxColumns / 2 + i];
        add_rows(rows, (columns * kDkvBoxes + box) * kBoxColumns, of_box, lane);
      }
    }
  }
}

// Rounds dK. A thread has 8 columns of a row.
extern "C" __global__ void __launch_bounds__(256) bwd_sm90a_mla_bf16_d576x512_causal_m64n64s1w12_postprocess(
    const float* dkv_sum_ptr, bf16* dk_ptr,
    long long stride_dk_b, long long stride_dk_s, long long stride_dk_h,
    int kv_heads, int key_rows, int max_seqlen_k
) {
  const long long first = blockIdx.x * 16LL;  // row of a KV head
  const auto round = [&](const float* sums, GradElement* to, int columns, long long stride_b, long long stride_s, long long stride_h) {
    const int chunks = columns / 8;
    for (int i = threadIdx.x; i < 16 * chunks; i += 256) {
      const long long number = first + i / chunks;
      if (number >= key_rows) return;
      const int column = i % chunks * 8, hk = number % kv_heads;
      const long long row = number / kv_heads;
      const float4* const from = reinterpret_cast<const float4*>(sums + number * columns + column);
      const float4 low = from[0], high = from[1];
      GradElement* const at = to + row / max_seqlen_k * stride_b + row % max_seqlen_k * stride_s + hk * stride_h + column;
      *reinterpret_cast<uint4*>(at) = {
          pack<GradElement>(low.x, low.y), pack<GradElement>(low.z, low.w), pack<GradElement>(high.x, high.y), pack<GradElement>(high.z, high.w)};
    }
  };
  round(dkv_sum_ptr, dk_ptr, kHeadDimQk, stride_dk_b, stride_dk_s, stride_dk_h);
}
