// bwd_sm90a_indexed_bf16_d576x512_listed_m64n64s1w12
//
// Attention backward, variant listed: mask `True`.
// Rendered by `attngen build tests/render/others.yaml`, schedule indexed_backward.
//
// P = exp2(logit - LSE) and dP = dO V^T are recomputed, tile by tile; dS = P (dP - D) times the scale, dQ = dS K, and, since V is the
// first 512 columns of K, dK = dS^T Q + P^T dO is the gradient of both. Three kernels run one after the other: preprocess (D and LSE
// of each query row, zeros for the dK accumulator), dqkv (all products), postprocess (rounds dK).
#include "copy.cuh"
#include "barrier.cuh"
#include "gather.cuh"
#include "gradient.cuh"
#include "ldmatrix.cuh"
#include "quad.cuh"
#include "softmax.cuh"
#include "sums.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

using Element = bf16;  // of Q, K, dO, P and dS
using GradElement = bf16;  // of dQ and dK

constexpr int kRows = 64;    // heads of a block
constexpr int kKeys = 64;    // of a step
constexpr int kHeadDimQk = 576;
constexpr int kHeadDimV = 512;  // the first columns of K
constexpr int kWarpgroups = 3;
constexpr int kThreads = 384;
constexpr int kMmaK = Product<Element, kKeys>::kK;  // K of one wgmma: the elements that it sums over
constexpr int kChunk = 16 / sizeof(Element);

// Columns come in boxes of 128 bytes.
constexpr int kBoxBytes = 128, kBoxColumns = kBoxBytes / sizeof(Element);
constexpr int kBoxes = kHeadDimQk / kBoxColumns, kValueBoxes = kHeadDimV / kBoxColumns;
constexpr int kOwnBoxes = (kBoxes + kWarpgroups - 1) / kWarpgroups;  // of a warpgroup
constexpr uint32_t kBox = kKeys * kBoxBytes;                         // bytes of a box of a tile
static_assert(kRows == kKeys);                                       // so that boxes of Q, dO, P and dS have as many bytes

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

// Named barriers: of all warpgroups, and that P is there.
struct Named {
  static constexpr int kAll = 1, kOfP = 2;
};

// Shared memory. Addresses are constants, so that they cost no instruction; the kernel checks where it begins.
constexpr uint32_t kShared = 1024;
constexpr uint32_t kQ = kShared + 0;  // 73728 B: Q
constexpr uint32_t kDout = kShared + 73728;  // 65536 B: dO
constexpr uint32_t kK = kShared + 139264;  // 73728 B: K of a tile
constexpr uint32_t kP = kShared + 212992;  // 8192 B: P of a tile, rows of heads
constexpr uint32_t kDs = kShared + 221184;  // 8192 B: dS of a tile, rows of heads
constexpr uint32_t kEntries = kShared + 229376;  // 512 B: keys of tiles, -1 for none
// Layouts of wgmma's operands: rows of columns, or, transposed, columns of rows.
using RowMatrix = Matrix<16, 8 * kBoxBytes, 1>;
using ColumnMatrix = Matrix<kBox, 8 * kBoxBytes, 1>;

extern __shared__ char shared_memory[];

template <typename Value>
__device__ __forceinline__ Value& shared_at(uint32_t address) {
  return *reinterpret_cast<Value*>(shared_memory + (address - kShared));
}

// D = rowsum(dO * O) - dLSE of each query row, its log-sum-exp in units of log2, and zeros for the accumulator of dK. A warp has a row.
extern "C" __global__ void __launch_bounds__(128) bwd_sm90a_indexed_bf16_d576x512_listed_m64n64s1w12_preprocess(
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

// A block has 64 heads of a query, and goes through the query's list, 64 keys at a time. A warpgroup computes
// S = Q K^T and P, another one dP = dO V^T and dS. Then each of three has a third of the columns of dQ, in registers, and of dK of the
// tile, which it adds to the dK accumulator. Rows of the next tile are gathered once dQ has read those of this one.
extern "C" __global__ void __launch_bounds__(kThreads, 1) bwd_sm90a_indexed_bf16_d576x512_listed_m64n64s1w12_dqkv(
    const bf16* q_ptr, const bf16* k_ptr, const bf16* dout_ptr, bf16* dq_ptr, float* dkv_sum_ptr,
    const float* lse_log2_ptr, const float* delta_ptr, const int* seqused_k_ptr, const int* indices_ptr,
    long long stride_q_b, long long stride_q_s, long long stride_q_h,
    long long stride_k_b, long long stride_k_s, long long stride_k_h,
    long long stride_dout_b, long long stride_dout_s, long long stride_dout_h,
    long long stride_dq_b, long long stride_dq_s, long long stride_dq_h,
    long long stride_indices_0, long long stride_indices_1,
    int extent_indices_0, int extent_indices_1, int extent_indices_2,
    int batch, int heads, int kv_heads, int group, int key_rows, int seqlen_q, int max_seqlen_k, int total_q,
    int total_k,
    float softmax_scale,
    int has_seqused_k
) {
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // uniform across the warp, and the compiler knows
  const int lane = threadIdx.x % 32, warpgroup = warp / 4;
  const uint32_t here = static_cast<uint32_t>(__cvta_generic_to_shared(shared_memory)) - kShared;
  if (here != 0) __trap();

  // Blocks in order: groups of heads of a query, then queries of a sequence, then sequences, then KV heads.
  const int units = (group + kRows - 1) / kRows;
  const int hk = blockIdx.x / units / seqlen_q / batch, b = blockIdx.x / units / seqlen_q % batch;
  const int q = blockIdx.x / units % seqlen_q, first_head = blockIdx.x % units * kRows;
  const int seqlen_k = has_seqused_k ? seqused_k_ptr[b] : max_seqlen_k;
  const int entries = extent_indices_2;
  const int* const list = indices_ptr + b * stride_indices_0 + q * stride_indices_1;
  const int tiles = (entries + 63) / 64;

  // The two rows of a lane: heads of the query.
  const int own_row = 16 * (warp % 4) + lane / 4;  // the other one is 8 rows below
  int query[2], head[2];
  float lse[2], delta[2];
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const int of_group = first_head + own_row + 8 * row;
    const int h = hk * group + min(of_group, group - 1);
    query[row] = q;
    head[row] = h;
    const long long entry = (b * static_cast<long long>(heads) + h) * seqlen_q + q;
    lse[row] = of_group < group ? lse_log2_ptr[entry] : -kMasked;  // +inf makes each probability 0
    delta[row] = of_group < group ? delta_ptr[entry] : 0.0f;
  }
  const float scale_log2e = softmax_scale * kLog2e;

  // Eight threads copy a row of a box, 16 bytes each. All threads copy.
  constexpr int kRowThreads = kBoxBytes / 16, kRowsAtOnce = kThreads / kRowThreads;
  const int chunk = threadIdx.x % kRowThreads, first = threadIdx.x / kRowThreads;
  // Copies boxes of rows, whose addresses `row_of` gives, null for zeros.
  const auto load_boxes = [&](auto boxes, uint32_t to, const auto& row_of) {
#pragma unroll 3
    for (int i = 0; i < (boxes.kCount * kRows + kRowsAtOnce - 1) / kRowsAtOnce; ++i) {
      const int number = first + i * kRowsAtOnce, box = number / kRows, row = number % kRows;
      if (boxes.kCount * kRows % kRowsAtOnce != 0 && number >= boxes.kCount * kRows) break;
      const Element* const from = row_of(row);
      copy_async(to + box * kBox + row * kBoxBytes + 16 * swizzled<kBoxBytes>(row, chunk),
                 from ? from + box * kBoxColumns + kChunk * chunk : q_ptr, from != nullptr);
    }
  };
  // The key of an entry; -1: none.
  const auto key_of = [&](int entry) {
    if (entry >= entries) return -1;
    const int key = __ldg(list + entry);
    return static_cast<uint32_t>(key) < static_cast<uint32_t>(seqlen_k) ? key : -1;
  };
  // The keys of a tile go to shared memory a tile ahead: threads read there which rows they copy, and add to.
  const auto load_keys = [&](int tile) {
    if (threadIdx.x < kKeys) shared_at<int>(kEntries + 4 * (tile % 2 * kKeys + threadIdx.x)) = key_of(tile * kKeys + threadIdx.x);
  };
  const auto load_tile = [&](int tile) {
    load_boxes(Boxes<kBoxes>(), kK, [&](int row) -> const Element* {
      const int key = shared_at<int>(kEntries + 4 * (tile % 2 * kKeys + row));
      return key < 0 ? nullptr : k_ptr + b * stride_k_b + hk * stride_k_h + key * stride_k_s;
    });
  };

  load_keys(0);
  load_boxes(Boxes<kBoxes>(), kQ, [&](int row) -> const Element* {
    const int h = hk * group + first_head + row;
    return first_head + row < group ? q_ptr + b * stride_q_b + h * stride_q_h + q * stride_q_s : nullptr;
  });
  load_boxes(Boxes<kValueBoxes>(), kDout, [&](int row) -> const Element* {
    const int h = hk * group + first_head + row;
    return first_head + row < group ? dout_ptr + b * stride_dout_b + h * stride_dout_h + q * stride_dout_s : nullptr;
  });
  __syncthreads();
  if (tiles > 0) load_tile(0);

  const auto multiply = [&](auto own) {
    constexpr int kGroup = own.kNumber;  // a constant, so that descriptors of products are constants, too
    float dq[kOwnBoxes * kBoxColumns / 2] = {};
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      if (tile + 1 < tiles) load_keys(tile + 1);
      wait_all_copies();
      fence_async_proxy();
      named_sync(Named::kAll, kThreads);  // rows of K are there, and the tile before has been multiplied

      // The place of a lane in P and dS, from a column on.
      const auto place_of = [&](int column) {
        const int row = 16 * (warp % 4) + lane % 16, chunk = column / 8 + lane / 16;
        return row * kBoxBytes + 16 * swizzled<kBoxBytes>(row, chunk);
      };
      if constexpr (kGroup == 0) {  // P
        constexpr int kBlockN = kKeys;
        float s[kBlockN / 2];
        fence_registers(s);
        fence_products();
        // S = Q K^T
#pragma unroll
        for (int box = 0; box < kBoxes; ++box) {
          const RowMatrix q(kQ + box * kBox), k(kK + box * kBox);
#pragma unroll
          for (int column = 0; column < kBoxColumns; column += kMmaK) {
            Product<Element, kBlockN>::template ss<0>(s, q.at(column * sizeof(Element)), k.at(column * sizeof(Element)), box + column > 0);
          }
        }
        commit_products();
        // The keys of a lane's elements. An entry that names no key becomes seqlen_k, after the last key, which is masked.
        int keys[kBlockN / 4];
        bool listed = true;
#pragma unroll
        for (int i = 0; i < kBlockN / 4; i += 2) {
          const int2 two = shared_at<int2>(kEntries + 4 * (tile % 2 * kKeys + 4 * i + 2 * (lane % 4)));
          listed = listed && min(two.x, two.y) >= 0;
          keys[i] = two.x < 0 ? seqlen_k : two.x;
          keys[i + 1] = two.y < 0 ? seqlen_k : two.y;
        }
        wait_products<0>();
        fence_registers(s);
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
#pragma unroll
        for (int column = 0; column < kBlockN; column += 16) {
          uint32_t p[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const int i = column / 2 + 2 * j;
            const auto of = [&](int i) { return exp2_approx(fmaf(s[i], scale_log2e, -lse[row_of(i)])); };
            p[j] = pack<Element>(of(i), of(i + 1));
          }
          store_blocks(kP + place_of(column), p[0], p[1], p[2], p[3]);
        }
        fence_async_proxy();
        named_arrive(Named::kOfP, 256);
      } else if constexpr (kGroup == 1) {  // dS = P (dP - D)
        float dp[kKeys / 2];
        fence_registers(dp);
        fence_products();
        // dP = dO V^T
#pragma unroll
        for (int box = 0; box < kValueBoxes; ++box) {
          const RowMatrix dout(kDout + box * kBox), v(kK + box * kBox);
#pragma unroll
          for (int column = 0; column < kBoxColumns; column += kMmaK) {
            Product<Element, kKeys>::template ss<0>(dp, dout.at(column * sizeof(Element)), v.at(column * sizeof(Element)), box + column > 0);
          }
        }
        commit_products();
        wait_products<0>();
        fence_registers(dp);
#pragma unroll
        for (int i = 0; i < kKeys / 2; ++i) dp[i] = (dp[i] - delta[row_of(i)]) * softmax_scale;
        named_sync(Named::kOfP, 256);  // P is there
#pragma unroll
        for (int column = 0; column < kKeys; column += 16) {
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
      }
      named_sync(Named::kAll, kThreads);  // P and dS are there

      constexpr int kFirstBox = kOwnBoxes * kGroup;
      // dQ += dS K
      {
        const RowMatrix ds(kDs);
        const ColumnMatrix k(kK + kFirstBox * kBox);
        fence_registers(dq);
        fence_products();
#pragma unroll
        for (int key = 0; key < kKeys; key += kMmaK) {
          Product<Element, kOwnBoxes * kBoxColumns>::ss<1>(dq, ds.at(key * sizeof(Element)), k.at(key * kBoxBytes), 1);
        }
        commit_products();
      }
      // dK = dS^T Q + P^T dO, a box of columns at a time
      float dk[kBoxColumns / 2];
      const auto issue_dk = [&](int box) {
        const ColumnMatrix ds(kDs), p(kP), q(kQ + box * kBox), dout(kDout + box * kBox);
        fence_registers(dk);
        fence_products();
#pragma unroll
        for (int row = 0; row < kRows; row += kMmaK) {
          Product<Element, kBoxColumns>::ss<1, 1>(dk, ds.at(row * kBoxBytes), q.at(row * kBoxBytes), row > 0);
        }
        if (box < kValueBoxes) {
#pragma unroll
          for (int row = 0; row < kRows; row += kMmaK) {
            Product<Element, kBoxColumns>::ss<1, 1>(dk, p.at(row * kBoxBytes), dout.at(row * kBoxBytes), 1);
          }
        }
        commit_products();
      };
      issue_dk(kFirstBox);
      // Destinations of the two rows of a lane: read before a thread may write the keys of the tile after the next one.
      float* rows[2];
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const int key = shared_at<int>(kEntries + 4 * (tile % 2 * kKeys + own_row + 8 * row));
        rows[row] = key < 0 ? nullptr : dkv_sum_ptr + (static_cast<long long>(b) * max_seqlen_k + key) * kv_heads * kHeadDimQk + hk * kHeadDimQk;
      }
      wait_products<1>();
      fence_registers(dq);
      named_sync(Named::kAll, kThreads);  // K has been read
      if (tile + 1 < tiles) load_tile(tile + 1);
#pragma unroll
      for (int i = 0; i < kOwnBoxes && kFirstBox + i < kBoxes; ++i) {
        if (i > 0) issue_dk(kFirstBox + i);
        wait_products<0>();
        fence_registers(dk);
        add_rows(rows, (kFirstBox + i) * kBoxColumns, dk, lane);
      }
    }

    // dQ: each lane of a quad writes 16 bytes of a row, 64 in all.
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int h = head[row];
      GradElement* const to = dq_ptr + b * stride_dq_b + h * stride_dq_h + q * stride_dq_s + kOwnBoxes * kBoxColumns * kGroup + 8 * (lane % 4);
#pragma unroll
      for (int column = 0; column < kOwnBoxes * kBoxColumns; column += 32) {
        uint32_t two_columns[4];
#pragma unroll
        for (int block = 0; block < 4; ++block) {
          const int i = column / 2 + 4 * block + 2 * row;
          two_columns[block] = pack<GradElement>(dq[i], dq[i + 1]);
        }
        gather_block(two_columns);
        if (first_head + own_row + 8 * row < group && kOwnBoxes * kBoxColumns * kGroup + column < kHeadDimQk) {
          *reinterpret_cast<uint4*>(to + column) = {two_columns[0], two_columns[1], two_columns[2], two_columns[3]};
        }
      }
    }
  };
  if (warpgroup == 0) {
    multiply(Warpgroup<0>());
  } else if (warpgroup == 1) {
    multiply(Warpgroup<1>());
  } else {
    multiply(Warpgroup<2>());
  }
}

// Rounds dK. A thread has 8 columns of a row.
extern "C" __global__ void __launch_bounds__(256) bwd_sm90a_indexed_bf16_d576x512_listed_m64n64s1w12_postprocess(
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
