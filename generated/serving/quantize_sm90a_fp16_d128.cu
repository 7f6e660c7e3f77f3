// quantize_sm90a_fp16_d128
//
// Queries, keys and values become 8 bits and scales; rows of Q and K are transformed, or rotated, too.
// Rendered by `attngen build specs/serving.yaml`, schedule quantize_tiles.
//
// A tile is 64 tokens of one head. Each group of four warps works on a tile, while TMA loads its next ones. Rows that
// are transformed, but not rotated, are multiplied: A is the tile, B a Hadamard matrix with the random signs in its rows.
// There is a kernel for each kind of call, so that none has registers or branches of another:
//   quantize_sm90a_fp16_d128: scales of blocks, of one tile or of two.
//   quantize_sm90a_fp16_d128_kept: scales of heads, and of tokens of Q and K.
//   quantize_sm90a_fp16_d128_sample, quantize_sm90a_fp16_d128_sampled: scales of heads from a sample, and rounding by them.
//   quantize_sm90a_fp16_d128_rotated: rotated rows; scales of heads take two launches.
#include "pdl.cuh"
#include "divisor.cuh"
#include "ldmatrix.cuh"
#include "pieces.cuh"
#include "ring.cuh"
#include "scales.cuh"
#include "tma.cuh"
#include "publish.cuh"
#include "wgmma.cuh"

using Element = fp16;

constexpr int kGroups = 4;  // of four warps
constexpr int kWarps = 4 * kGroups, kThreads = 32 * kWarps;
constexpr int kStages = 3;         // tiles of a group in shared memory
constexpr int kRotatedStages = 2;  // where angles lie beside them
constexpr int kAngleTables = 2;
constexpr int kRows = 64;          // of a tile
constexpr int kHeadDim = 128;
constexpr int kHeads = 2 * 64 / kHeadDim;  // of a tile

// In bytes.
constexpr uint32_t kBox = kRows * 128;  // 64 columns
constexpr uint32_t kTile = 2 * kBox;
constexpr uint32_t kFactorBox = kHeadDim * 128;  // 64 rows of the Hadamard matrix
constexpr uint32_t kAngles = 272, kTable = kRows * kAngles;  // rows of angles lie in different banks

// Offsets in shared memory, beside tiles.
constexpr uint32_t kFactors = kGroups * kStages * kTile;
constexpr uint32_t kShared = 229376;
constexpr uint32_t kTables = kGroups * kRotatedStages * kTile;  // cosines and sines
constexpr uint32_t kRotatedShared = 200704;

// Named barriers of the hardware; 0 is __syncthreads.
enum class Named {
  kTile = 1,  // of a group, or of those that share the tokens of a scale
};

extern __shared__ char shared_memory[];

// The signs that 32 numbers of a row change, as bits.
__device__ __forceinline__ uint32_t signs_of_word(int word, const float* signs, long long bits_0, long long bits_1) {
  if (signs == nullptr) return (word < 2 ? bits_0 : bits_1) >> word % 2 * 32;
  uint32_t bits = 0;
  for (int i = 0; i < 32; ++i) bits |= static_cast<uint32_t>(signs[32 * word + i] < 0.0f) << i;
  return bits;
}

// A tile is brought.
__device__ __forceinline__ void load_tile(uint32_t to, const TensorMap& map, uint32_t full, int head, int token, int b) {
  arrive_expecting(full, kTile);
#pragma unroll
  for (int box = 0; box < kTile / kBox; ++box) {
    load_box(to + box * kBox, map, full, kHeads == 1 ? 64 * box : 0, head + (kHeads == 1 ? 0 : box), token, b);
  }
}

// B of the products, K-major and swizzled: row k, column n. Columns come in such an order that a thread gets 16 that lie
// side by side.
__device__ __forceinline__ void write_factors(char* to, const uint32_t* flips) {
  for (int i = threadIdx.x; i < kHeadDim * kHeadDim / 2; i += kThreads) {
    const int k = i % (kHeadDim / 2) * 2, n = i / (kHeadDim / 2);
    const int column = n / 64 * 64 + n % 8 / 2 * 16 + n / 8 % 8 * 2 + n % 2;
    const uint32_t both = flips[k / 32] >> k % 32 ^ (__popc(k & column) & 1) ^ (__popc(k + 1 & column) & 1) << 1;
    const uint32_t at = k / 64 * kFactorBox + n * 128 + (k % 64 / 8 ^ n % 8) * 16 + k % 8 * 2;
    *reinterpret_cast<uint32_t*>(to + at) = pack<Element>(1.0f, 1.0f) ^ signs_of_pair(both, 0);
  }
  fence_async_proxy();
}

// The numbers of a tile: a thread has pieces of two rows, 8 apart, and of both boxes: pieces 0 and 2 of `row_of_piece` 0.
__device__ __forceinline__ int row_of_piece(int piece) {
  return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + piece % 2 * 8;
}
__device__ __forceinline__ int column_of_piece(int piece) {
  return 16 * (threadIdx.x % 4) + (kHeads == 1 ? piece / 2 * 64 : 0);
}

// Those of a tile times the Hadamard matrix.
__device__ __forceinline__ void multiply_tile(float (&x)[kSlots][kNumbers], uint32_t tile, uint32_t matrix) {
  float products[kSlots * kNumbers];
  const Matrix<16, 1024, 1> a(tile), factors(matrix);
  fence_products();
#pragma unroll
  for (int head = 0; head < kHeads; ++head) {
    auto& d = *reinterpret_cast<float(*)[kHeadDim / 2]>(&products[head * kHeadDim / 2]);
#pragma unroll
    for (int i = 0; i < kHeadDim / 16; ++i) {
      const uint32_t box = head + i / 4, at = i % 4 * 32;
      Product<Element, kHeadDim>::template ss<0>(d, a.at(box * kBox + at), factors.at(i / 4 * kFactorBox + at), i > 0);
    }
  }
  commit_products();
  wait_products<0>();
  fence_registers(products);
#pragma unroll
  for (int i = 0; i < kSlots * kNumbers; ++i) {
    const int piece = i / 32 * 2 + i / 2 % 2, place = i % 32 / 4 * 2 + i % 2;
    x[2 * piece + place / kNumbers][place % kNumbers] = products[i];
  }
}

// Those of a tile as it is.
__device__ __forceinline__ void read_tile(float (&x)[kSlots][kNumbers], const char* tile) {
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
    const int row = row_of_piece(slot / 2), vector = 2 * (threadIdx.x % 4) + slot % 2;
    to_floats<Element>(x[slot], Words::load(tile + slot / 4 * kBox + row * 128 + (vector ^ row % 8) * 16));
  }
}

static_assert(kNumbers == 8 && kSlots >= 4);

// A tile of V in groups of 32 keys, each with a row of 32 for every column: a lane has 4 keys of a column in a word, which
// are those of its elements of an accumulator. Of a tile as it is: for each 8 of the 32 columns of a warp, the keys of both
// groups, pairs of which take the place of the first numbers.
__device__ __forceinline__ void read_columns(float (&x)[kSlots][kNumbers], uint32_t tile) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
#pragma unroll
  for (int eight = 0; eight < 4; ++eight) {
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      const int row = 32 * group + lane, vector = 4 * (warp % 2) + eight;
      uint32_t pairs[4];
      load_blocks_transposed(pairs, tile + warp / 2 * kBox + row * 128 + (vector ^ row % 8) * 16);
#pragma unroll
      for (int i = 0; i < 4; ++i) x[eight][4 * group + i] = __uint_as_float(pairs[i]);
    }
  }
}

// Rounded by the factor of the first head of the tile, or of the last one, and written; `too_large` as for rows.
template <typename Rounded>
__device__ __forceinline__ void store_columns(
    const float (&x)[kSlots][kNumbers], float first_factor, float last_factor, unsigned char* out, int b, int kv_heads, int first_head, int tile, int groups,
    uint32_t& too_large) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32, of_tile = kHeads == 1 ? 0 : warp / 2, head = first_head + of_tile;
  const int first_column = (kHeads == 1 ? 32 * warp : 32 * (warp % 2)) + lane / 4;
  const float factor = kHeads == 1 || warp < 2 ? first_factor : last_factor;
  const bool odd = lane & 1;
#pragma unroll
  for (int group = 0; group < 2; ++group) {
    const int place = 2 * tile + group;
    unsigned char* const of_group = out + ((b * kv_heads + head) * static_cast<long long>(groups) + place) * (32 * kHeadDim);
#pragma unroll
    for (int eight = 0; eight < 4; ++eight) {
      uint32_t words[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 low = unpack<Element>(__float_as_uint(x[eight][4 * group + 2 * half]));
        const float2 high = unpack<Element>(__float_as_uint(x[eight][4 * group + 2 * half + 1]));
        words[half] = pack<Rounded>(low.x * factor, low.y * factor, high.x * factor, high.y * factor);
        too_large |= (words[half] & 0x7f7f7f7f) + 0x02020202;
      }
      // Neighbouring lanes exchange words, so that each has two that lie side by side.
      const uint32_t other = __shfl_xor_sync(~0u, odd ? words[0] : words[1], 1);
      const uint2 both = odd ? uint2{other, words[1]} : uint2{words[0], other};
      const int at = (first_column + 8 * eight) * 32 + (odd ? 16 : 0) + 4 * (lane % 4 & 2);
      if (head < kv_heads && place < groups) __stcs(reinterpret_cast<uint2*>(of_group + at), both);
    }
  }
}

// The largest magnitudes of the heads of a tile, of what a warp has.
__device__ __forceinline__ void find_largest_of_warp(const float (&x)[kSlots][kNumbers], uint32_t (&largest)[kHeads]) {
  float magnitudes[kPieces];
  find_largest_of_pieces(x, magnitudes);
#pragma unroll
  for (int head = 0; head < kHeads; ++head) {
    float of_head = fmaxf(magnitudes[2 * head], magnitudes[2 * head + 1]);
    if (kHeads == 1) of_head = fmaxf(of_head, fmaxf(magnitudes[2], magnitudes[3]));
    largest[head] = __reduce_max_sync(~0u, __float_as_uint(of_head));
  }
}

// The same of a tile as it is, two numbers at once; those that are finite are looked for if some are not.
__device__ __forceinline__ void find_largest_of_tile(const char* tile, uint32_t (&largest)[kHeads]) {
  const auto words_of = [&](int slot) {
    const int row = row_of_piece(slot / 2), vector = 2 * (threadIdx.x % 4) + slot % 2;
    return Words::load(tile + slot / 4 * kBox + row * 128 + (vector ^ row % 8) * 16);
  };
  constexpr int kSlotsOfHead = kSlots / kHeads;
#pragma unroll
  for (int head = 0; head < kHeads; ++head) {
    uint32_t pairs[kNumbers / 2] = {};
#pragma unroll
    for (int slot = 0; slot < kSlotsOfHead; ++slot) {
      const Words words = words_of(head * kSlotsOfHead + slot);
#pragma unroll
      for (int i = 0; i < kNumbers / 2; ++i) pairs[i] = raised<Element>(pairs[i], words.pairs[i]);
    }
#pragma unroll
    for (int i = 1; i < kNumbers / 2; ++i) pairs[0] = raised<Element>(pairs[0], pairs[i]);
    const float2 both = unpack<Element>(pairs[0]);
    const float infinity = __uint_as_float(0x7f800000);
    float most = fmaxf(both.x, both.y);
    if (most == infinity) {
      most = 0.0f;
#pragma unroll 1
      for (int slot = 0; slot < kSlotsOfHead; ++slot) {
        float x[kNumbers];
        to_floats<Element>(x, words_of(head * kSlotsOfHead + slot));
#pragma unroll
        for (int i = 0; i < kNumbers; ++i) {
          if (fabsf(x[i]) < infinity) most = fmaxf(most, fabsf(x[i]));
        }
      }
    }
    largest[head] = __reduce_max_sync(~0u, __float_as_uint(most));
  }
}

// Scales of blocks of tokens of a head.

// Q, K or V: its results.
struct Part {
  unsigned char* to;
  float* scales;
  long long to_b, to_s, to_h;  // strides, in elements
};

// Shared memory of a block.
struct Shared {
  uint64_t full[kGroups * kStages];  // barriers: a tile is there
  Part parts[3];
  uint32_t flips[kHeadDim / 32];  // bits of the numbers of a row that change their signs
  uint32_t largest[2][kGroups][4][kHeads];  // of each warp, of two tiles in turn
};
static_assert(kShared + sizeof(Shared) <= 230400);

extern "C" __global__ void __launch_bounds__(kThreads, 1) quantize_sm90a_fp16_d128(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map,
    unsigned char* q_out_ptr, unsigned char* k_out_ptr, unsigned char* v_out_ptr, float* q_descale_ptr,
    float* k_descale_ptr, float* v_descale_ptr, const float* signs_ptr,
    long long stride_q_out_b, long long stride_q_out_s, long long stride_q_out_h,
    long long stride_k_out_b, long long stride_k_out_s, long long stride_k_out_h,
    long long stride_v_out_b, long long stride_v_out_s, long long stride_v_out_h,
    long long sign_bits_0, long long sign_bits_1, int heads, int kv_heads, int seqlen_q, int seqlen_k, int units,
    int units_q, int units_k, int e5m2_out, int sharers, int heads_q, int heads_k, int tiles_q, int tiles_k,
    int heads_q_reciprocal, int heads_k_reciprocal, int tiles_q_reciprocal, int tiles_k_reciprocal, float norm
) {
  launch_dependents();
  char* const memory = shared_memory;
  Shared& shared = *reinterpret_cast<Shared*>(memory + kShared);
  const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(memory));
  const int of_block = threadIdx.x / 128;  // the group
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = threadIdx.x % 32;
  const uint32_t full = base + kShared + 8 * kStages * of_block;

  if (threadIdx.x == 0) {
    shared.parts[0] = {q_out_ptr, q_descale_ptr, stride_q_out_b, stride_q_out_s, stride_q_out_h};
    shared.parts[1] = {k_out_ptr, k_descale_ptr, stride_k_out_b, stride_k_out_s, stride_k_out_h};
    shared.parts[2] = {v_out_ptr, v_descale_ptr, stride_v_out_b, stride_v_out_s, stride_v_out_h};
    init_barriers(base + kShared, kGroups * kStages, 1);
    fence_barrier_init();
  }
  wait_dependencies();  // nothing in global memory is read or written before
  if (threadIdx.x < kHeadDim / 32) {
    shared.flips[threadIdx.x] = signs_of_word(threadIdx.x, signs_ptr, sign_bits_0, sign_bits_1);
  }
  __syncthreads();  // parts, barriers and signs are there

  // A tile.
  struct Task {
    int part, b, head, tile;
  };
  const auto task_at = [&](int index) {
    Task task;
    task.part = (index >= units_q) + (index >= units_q + units_k);
    const bool of_q = task.part == 0;
    const Divisor of_heads = of_q ? Divisor(heads_q, heads_q_reciprocal) : Divisor(heads_k, heads_k_reciprocal);
    const Divisor of_tiles = of_q ? Divisor(tiles_q, tiles_q_reciprocal) : Divisor(tiles_k, tiles_k_reciprocal);
    const int unit = index - (of_q ? 0 : units_q) - (task.part == 2 ? units_k : 0), shared_by = unit >> sharers - 1;
    const int row = of_heads.quotient(shared_by);
    task.head = (shared_by - row * of_heads.value) * kHeads;
    task.b = of_tiles.quotient(row);
    task.tile = (row - task.b * of_tiles.value) * sharers + (unit & sharers - 1);
    return task;
  };
  const auto bring = [&](int index, uint32_t to, uint32_t barrier) {
    const Task task = task_at(index);
    const TensorMap& map = task.part == 0 ? q_map : task.part == 1 ? k_map : v_map;
    load_tile(to, map, barrier, task.head, task.tile * kRows, task.b);
  };

  // All groups of all blocks have neighbouring tiles at a time, so that what is read together lies together.
  const int first = blockIdx.x * kGroups + of_block, all = gridDim.x * kGroups;
  const uint32_t ring = base + of_block * kStages * kTile;
  if (thread == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      if (first + stage * all < units) bring(first + stage * all, ring + stage * kTile, full + 8 * stage);
    }
  }
  write_factors(memory + kFactors, shared.flips);
  __syncthreads();

  for (int index = first, turn = 0; index < units; index += all, ++turn) {
    const Task task = task_at(index);
    const bool multiplies = task.part < 2;
    const int stage = turn % kStages, pair = turn & 1;
    const uint32_t tile = (of_block * kStages + stage) * kTile;
    wait(full + 8 * stage, turn / kStages & 1);
    float x[kSlots][kNumbers];
    if (multiplies) {
      multiply_tile(x, base + tile, base + kFactors);
    } else {
      read_tile(x, memory + tile);
    }

    uint32_t largest[kHeads];
    find_largest_of_warp(x, largest);
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
      if (lane == 0) shared.largest[pair][of_block][warp][head] = largest[head];
    }
    named_sync(Named::kTile, of_block >> sharers - 1, 128 * sharers);
    if (thread == 0 && index + kStages * all < units) {
      bring(index + kStages * all, ring + stage * kTile, full + 8 * stage);
    }

    const Part& part = shared.parts[task.part];
    const int heads_here = task.part == 0 ? heads : kv_heads, seqlen = task.part == 0 ? seqlen_q : seqlen_k;
    const int blocks = task.part == 0 ? tiles_q : tiles_k;
    const float own_norm = multiplies ? norm : 1.0f, limit = e5m2_out ? kLargest<e5m2> : kLargest<e4m3>;
    float factors[kHeads];
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
      uint32_t maximum = 0;
      const int first = of_block & -sharers;
      for (int i = 0; i < 4 * sharers; ++i) maximum = max(maximum, shared.largest[pair][first + i / 4][i % 4][head]);
      const float scale = scale_of(__uint_as_float(maximum) * own_norm, limit);
      factors[head] = __fdiv_rn(1.0f, scale) * own_norm;
      if (thread == 0 && (task.tile & sharers - 1) == 0 && task.head + head < heads_here) {
        const long long of_head = task.b * static_cast<long long>(heads_here) + task.head + head;
        part.scales[of_head * blocks + (task.tile >> sharers - 1)] = scale;
      }
    }
    const auto store = [&]<typename Rounded>() {
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        const int of_tile = kHeads == 1 ? 0 : piece / 2, head = task.head + of_tile;
        const int token = task.tile * kRows + row_of_piece(piece);
        unsigned char* const of_row = part.to + task.b * part.to_b + head * part.to_h + token * part.to_s;
        const uint4 rounded = in_8_bits<Rounded>(x[2 * piece], x[2 * piece + 1], factors[of_tile]);
        if (head < heads_here && token < seqlen) __stcs(reinterpret_cast<uint4*>(of_row + column_of_piece(piece)), rounded);
      }
    };
    if (e5m2_out) {
      store.template operator()<e5m2>();
    } else {
      store.template operator()<e4m3>();
    }
  }
}

// Scales of heads, and of tokens of Q and K. Each number comes from memory once.
//
// Tiles that share scales are a set, and sets follow one another: some heads, a token of all of them after another.
// A group finds the largest magnitude of a tile `lag` turns before it rounds it; until then other groups find those of the
// rest of the set. A tile stays in shared memory for one turn; with more, it is read again, out of L2. All blocks run at
// the same time (a cooperative launch), since they wait for each other. A row of Q or K with a scale of its own waits for
// nothing.

constexpr int kAtOnce = 4 / kHeads;  // maxima of a head that a thread asks for before it waits for one

// Q, K or V: where its results go, and how its tiles are ordered.
struct KeptPart {
  unsigned char* to;
  float* scales;
  long long to_b, to_s, to_h;  // strides, in elements
  Divisor set, sets, pairs;    // tiles of a set; sets of a batch entry; tiles of a set that have the same tokens
  Divisor group;               // heads that share a scale
  int begin, words;            // its first tile, and its first maximum
  int heads, seqlen, tiles;    // of its sequences

  // The scale of a head, or of the last one, and where the maxima of its tiles begin.
  __device__ __forceinline__ int scale_of_head(int head) const { return group.quotient(min(head, heads - 1)); }
  __device__ __forceinline__ int words_of_head(int b, int head) const {
    return words + (b * heads + scale_of_head(head) * group.value) * tiles;
  }
};

// A thread asks for the first maxima of the heads of a tile, of `count` each, and later waits for all that are its.
using Asked = uint32_t[kHeads][kAtOnce];

__device__ __forceinline__ uint32_t word_of(const uint32_t* maxima, int i, int count) {
  return i < count ? published(maxima + i) : 1;
}
__device__ __forceinline__ void ask(
    Asked& asked, const uint32_t* maxima, const KeptPart& part, int b, int first_head, int count) {
#pragma unroll
  for (int head = 0; head < kHeads; ++head) {
    const uint32_t* const of_head = maxima + part.words_of_head(b, first_head + head);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) asked[head][i] = word_of(of_head, threadIdx.x % 128 + 128 * i, count);
  }
}
__device__ __forceinline__ void wait_for_maxima(
    uint32_t (&largest)[4][kHeads], Asked& asked, const uint32_t* maxima, const KeptPart& part, int b, int first_head,
    int count) {
#pragma unroll
  for (int head = 0; head < kHeads; ++head) {
    const uint32_t* const of_head = maxima + part.words_of_head(b, first_head + head);
    uint32_t maximum = 0;
    for (int first = threadIdx.x % 128; first < count; first += 128 * kAtOnce) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        while (asked[head][i] == 0) asked[head][i] = word_of(of_head, first + 128 * i, count);
        maximum = max(maximum, asked[head][i] - 1);
        asked[head][i] = word_of(of_head, first + 128 * (kAtOnce + i), count);
      }
    }
    maximum = __reduce_max_sync(~0u, maximum);
    if (threadIdx.x % 32 == 0) largest[threadIdx.x % 128 / 32][head] = maximum;
  }
}
__device__ __forceinline__ uint32_t largest_of_group(const uint32_t (&largest)[4][kHeads], int head) {
  return max(max(largest[0][head], largest[1][head]), max(largest[2][head], largest[3][head]));
}

// Keys less the mean of their head, in shared memory. Rows beyond the sequence stay 0, so that they raise no maximum.
__device__ __forceinline__ void subtract_mean(char* tile, const Element* mean, int rows, int heads) {
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
    const int row = row_of_piece(slot / 2), box = slot / 4, vector = 2 * (threadIdx.x % 4) + slot % 2;
    if (row >= rows || kHeads > 1 && box >= heads) continue;
    Words* const at = reinterpret_cast<Words*>(tile + box * kBox + row * 128 + (vector ^ row % 8) * 16);
    subtract<Element>(*at, Words::load(mean + box * 64 + kNumbers * vector));
  }
  fence_async_proxy();  // before wgmma reads them, and TMA writes the next tile
}

// Shared memory of a block.
struct KeptShared {
  uint64_t full[kGroups * kStages];  // barriers: a tile is there
  int4 tasks[kGroups][kStages];      // which: part, batch entry, head, place in its sequence
  KeptPart parts[3];
  uint32_t flips[kHeadDim / 32];            // bits of the numbers of a row that change their signs
  uint32_t largest[2][kGroups][4][kHeads];  // of each warp, of two uses in turn
};
static_assert(kShared + sizeof(KeptShared) <= 231424);

extern "C" __global__ void __launch_bounds__(kThreads, 1) quantize_sm90a_fp16_d128_kept(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map,
    unsigned char* q_out_ptr, unsigned char* k_out_ptr, unsigned char* v_out_ptr, float* q_descale_ptr,
    float* k_descale_ptr, float* v_descale_ptr, const float* signs_ptr, const fp16* k_mean_ptr,
    const uint32_t* redo_ptr, uint32_t* maxima_ptr,
    long long stride_q_out_b, long long stride_q_out_s, long long stride_q_out_h,
    long long stride_k_out_b, long long stride_k_out_s, long long stride_k_out_h,
    long long stride_v_out_b, long long stride_v_out_s, long long stride_v_out_h,
    long long sign_bits_0, long long sign_bits_1, int heads, int kv_heads, int seqlen_q, int seqlen_k, int units,
    int units_q, int units_k, int e5m2_out, int hadamard, int lag, int units_of_tokens, int words_q, int words_k,
    int words_v, int tiles_q, int tiles_k, int v_groups, int group, int group_kv, int set_q, int set_k, int set_v,
    int sets_q, int sets_k, int sets_v, int pairs_q, int pairs_k, int pairs_v, int group_reciprocal,
    int group_kv_reciprocal, int set_q_reciprocal, int set_k_reciprocal, int set_v_reciprocal,
    int sets_q_reciprocal, int sets_k_reciprocal, int sets_v_reciprocal, int pairs_q_reciprocal,
    int pairs_k_reciprocal, int pairs_v_reciprocal, float norm
) {
  launch_dependents();
  wait_dependencies();  // nothing in global memory is read or written before
  if (redo_ptr != nullptr && *redo_ptr == 0) return;  // scales from a sample were large enough
  char* const memory = shared_memory;
  KeptShared& shared = *reinterpret_cast<KeptShared*>(memory + kShared);
  const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(memory));
  const int of_block = __shfl_sync(~0u, threadIdx.x / 128, 0);  // the group, which the compiler knows to be that of a warp
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = threadIdx.x % 32;
  const uint32_t full = base + kShared + 8 * kStages * of_block;

  if (threadIdx.x == 0) {
    const Divisor of_q(group, group_reciprocal), of_kv(group_kv, group_kv_reciprocal);
    shared.parts[0] = {q_out_ptr, q_descale_ptr, stride_q_out_b, stride_q_out_s, stride_q_out_h,
                       Divisor(set_q, set_q_reciprocal), Divisor(sets_q, sets_q_reciprocal),
                       Divisor(pairs_q, pairs_q_reciprocal), of_q,
                       0, words_q, heads, seqlen_q, tiles_q};
    shared.parts[1] = {k_out_ptr, k_descale_ptr, stride_k_out_b, stride_k_out_s, stride_k_out_h,
                       Divisor(set_k, set_k_reciprocal), Divisor(sets_k, sets_k_reciprocal),
                       Divisor(pairs_k, pairs_k_reciprocal), of_kv,
                       units_q, words_k, kv_heads, seqlen_k, tiles_k};
    shared.parts[2] = {v_out_ptr, v_descale_ptr, stride_v_out_b, stride_v_out_s, stride_v_out_h,
                       Divisor(set_v, set_v_reciprocal), Divisor(sets_v, sets_v_reciprocal),
                       Divisor(pairs_v, pairs_v_reciprocal), of_kv,
                       units_q + units_k, words_v, kv_heads, seqlen_k, tiles_k};
    init_barriers(base + kShared, kGroups * kStages, 1);
    fence_barrier_init();
  }
  if (threadIdx.x < kHeadDim / 32) {
    shared.flips[threadIdx.x] = signs_of_word(threadIdx.x, signs_ptr, sign_bits_0, sign_bits_1);
  }
  __syncthreads();  // parts, barriers and signs are there

  // Steps find and round in turn. Where tiles are read again, the ring has a place for each step, else for each turn.
  const int first = blockIdx.x * kGroups + of_block, all = gridDim.x * kGroups;
  const int own = max(units - first + all - 1, 0) / all;  // tiles of this group
  const bool again = lag > 1;
  const auto turn_of = [&](int step) { return (step >> 1) - (step & 1 ? lag : 0); };
  const auto has_work = [&](int step) {
    const int turn = turn_of(step);
    return turn >= 0 && turn < own && (step & 1 || first + turn * all >= units_of_tokens);
  };
  const auto bring = [&](int place) {
    const int stage = place % kStages, turn = again ? turn_of(place) : place;
    if (again ? !has_work(place) : place >= own) return arrive(full + 8 * stage);
    const int index = first + turn * all, which = (index >= units_q) + (index >= units_q + units_k);
    const KeptPart& part = shared.parts[which];
    const int set = part.set.quotient(index - part.begin), of_set = index - part.begin - set * part.set.value;
    const int b = part.sets.quotient(set), tile = part.pairs.quotient(of_set);
    const int head = ((set - b * part.sets.value) * part.pairs.value + of_set - tile * part.pairs.value) * kHeads;
    shared.tasks[of_block][stage] = {which, b, head, tile};
    const TensorMap& map = which == 0 ? q_map : which == 1 ? k_map : v_map;
    load_tile(base + (of_block * kStages + stage) * kTile, map, full + 8 * stage, head, tile * kRows, b);
  };
  if (thread == 0) {
    for (int stage = 0; stage < kStages; ++stage) bring(stage);
  }
  write_factors(memory + kFactors, shared.flips);
  __syncthreads();

  uint32_t known[kHeads];  // the largest magnitudes of the heads of the last tile
  int known_words = -1;    // where their maxima begin, added up: no other heads of a tile have this sum
  int uses = 0;
  for (int step = 0; step < 2 * (own + lag); ++step) {
    if (!has_work(step)) {
      if (again && thread == 0) bring(step + kStages);
      continue;
    }
    const bool finds = (step & 1) == 0;
    const int turn = turn_of(step), place = again ? step : turn, stage = place % kStages;
    const uint32_t tile = (of_block * kStages + stage) * kTile;
    wait(full + 8 * stage, place / kStages & 1);
    const int4 task = shared.tasks[of_block][stage];
    const int b = task.y, first_head = task.z, first_token = task.w * kRows;
    const KeptPart& part = shared.parts[task.x];
    const bool multiplies = __all_sync(~0u, hadamard && task.x < 2), of_tokens = first + turn * all < units_of_tokens;
    uint32_t(&largest)[4][kHeads] = shared.largest[uses & 1][of_block];

    if (task.x == 1 && k_mean_ptr != nullptr && (finds || again)) {
      const Element* const mean = k_mean_ptr + (b * static_cast<long long>(kv_heads) + first_head) * kHeadDim;
      subtract_mean(memory + tile, mean, seqlen_k - first_token, kv_heads - first_head);
      named_sync(Named::kTile, of_block, 128);
    }
    if (finds) {
      uint32_t of_warp[kHeads];
      if (multiplies) {
        float x[kSlots][kNumbers];
        multiply_tile(x, base + tile, base + kFactors);
        find_largest_of_warp(x, of_warp);
      } else {
        find_largest_of_tile(memory + tile, of_warp);
      }
#pragma unroll
      for (int head = 0; head < kHeads; ++head) {
        if (lane == 0) largest[warp][head] = of_warp[head];
      }
      named_sync(Named::kTile, of_block, 128);
      ++uses;
      if (thread < kHeads && first_head + thread < part.heads) {
        publish(maxima_ptr + part.words + (b * part.heads + first_head + thread) * part.tiles + task.w,
             largest_of_group(largest, thread));
      }
      if (again && thread == 0) bring(step + kStages);
      continue;
    }

    const int words_of_tile = part.words_of_head(b, first_head) + part.words_of_head(b, first_head + kHeads - 1);
    const bool waits = !of_tokens && words_of_tile != known_words;
    // The first maxima are asked for before the products, and looked at after them.
    const int count = waits ? part.group.value * part.tiles : 0;
    Asked asked;
    ask(asked, maxima_ptr, part, b, first_head, count);
    const bool by_columns = __any_sync(~0u, task.x == 2) && v_groups > 0;
    float x[kSlots][kNumbers];
    if (multiplies) {
      multiply_tile(x, base + tile, base + kFactors);
    } else if (by_columns) {
      read_columns(x, base + tile);
    } else {
      read_tile(x, memory + tile);
    }
    if (waits) wait_for_maxima(largest, asked, maxima_ptr, part, b, first_head, count);

    const float own_norm = multiplies ? norm : 1.0f, limit = e5m2_out ? kLargest<e5m2> : kLargest<e4m3>;
    float factors[kPieces];
    if (of_tokens) {
      // Four lanes have a row, and each gets the maximum of one of their rows.
      float of_rows[kPieces];
      find_largest_of_pieces(x, of_rows);
      constexpr int kRowsOfLanes = 2 * kHeads;
      if (kHeads == 1) {
        of_rows[0] = fmaxf(of_rows[0], of_rows[2]);
        of_rows[1] = fmaxf(of_rows[1], of_rows[3]);
      }
      float of_row = exchanged_maximum<1>(of_rows[0], of_rows[1]);
      if (kHeads == 1) {
        of_row = fmaxf(of_row, __shfl_xor_sync(~0u, of_row, 2));
      } else {
        of_row = exchanged_maximum<2>(of_row, exchanged_maximum<1>(of_rows[2], of_rows[3]));
      }
      const float scale = scale_of(of_row * own_norm, limit), factor = __fdiv_rn(1.0f, scale) * own_norm;
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        factors[piece] = __shfl_sync(~0u, factor, (lane & ~3) + piece % kRowsOfLanes);
      }
      const int mine = lane % kRowsOfLanes, head = first_head + mine / 2, token = first_token + row_of_piece(mine);
      if (lane % 4 < kRowsOfLanes && head < part.heads && token < part.seqlen) {
        part.scales[(b * static_cast<long long>(part.heads) + head) * part.seqlen + token] = scale;
      }
    }
    named_sync(Named::kTile, of_block, 128);  // all have read the tile and published its maxima
    if (thread == 0) bring(place + kStages);
    if (waits) {
#pragma unroll
      for (int head = 0; head < kHeads; ++head) known[head] = largest_of_group(largest, head);
      known_words = words_of_tile;
      ++uses;
    }
    if (!of_tokens) {
#pragma unroll
      for (int head = 0; head < kHeads; ++head) {
        const float scale = scale_of(__uint_as_float(known[head]) * own_norm, limit);
        const float factor = __fdiv_rn(1.0f, scale) * own_norm;
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
          if (kHeads == 1 || piece / 2 == head) factors[piece] = factor;
        }
        const int of_all = part.scale_of_head(first_head + head);
        if (thread == 0 && task.w == 0 && first_head + head == of_all * part.group.value && first_head + head < part.heads) {
          part.scales[b * kv_heads + of_all] = scale;
        }
      }
    }
    if (by_columns) {  // in e4m3 alone
      uint32_t too_large = 0;  // numbers of exact scales never are
      store_columns<e4m3>(x, factors[0], factors[kPieces - 1], part.to, b, kv_heads, first_head, task.w, v_groups, too_large);
      continue;
    }
    const auto store = [&]<typename Rounded>() {
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        const int head = first_head + (kHeads == 1 ? 0 : piece / 2), token = first_token + row_of_piece(piece);
        unsigned char* const of_row = part.to + b * part.to_b + head * part.to_h + token * part.to_s;
        const uint4 rounded = in_8_bits<Rounded>(x[2 * piece], x[2 * piece + 1], factors[piece]);
        if (head < part.heads && token < part.seqlen) {
          __stcs(reinterpret_cast<uint4*>(of_row + column_of_piece(piece)), rounded);
        }
      }
    };
    if (e5m2_out) {
      store.template operator()<e5m2>();
    } else {
      store.template operator()<e4m3>();
    }
  }
}

// Scales of heads from some rows of each, so that all rows are read once, and by blocks that wait for nobody.
//
// Numbers of 8 bits with an exponent have the same relative precision whatever their scale, as long as none is too large
// and few are subnormal. So a scale need not come from the largest magnitude: it places the root mean square of a sample
// at 1/64 of the largest number. A number that exceeds the largest one raises a flag, and `kept` then does all again.

constexpr float kSpan = 64.0f;

// Shared memory of a block.
struct SampleShared {
  float sums[kWarps][kHeadDim];  // of each column, of the rows of a warp
  float squares[kWarps], removed[kWarps];
  float means[kHeadDim];  // with the signs of the transform
};
static_assert(sizeof(SampleShared) <= 8960);

__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

// A block has a KV head of Q, K or V. It also finds the mean of the head's keys, and transforms it.
extern "C" __global__ void __launch_bounds__(kThreads, 1) quantize_sm90a_fp16_d128_sample(
    const fp16* q_ptr, const fp16* k_ptr, const fp16* v_ptr, float* q_descale_ptr, float* k_descale_ptr,
    float* v_descale_ptr, fp16* k_mean_out_ptr, float* k_shift_ptr, uint32_t* maxima_ptr,
    long long stride_q_b, long long stride_q_s, long long stride_q_h,
    long long stride_k_b, long long stride_k_s, long long stride_k_h,
    long long stride_v_b, long long stride_v_s, long long stride_v_h,
    long long sign_bits_0, long long sign_bits_1, int kv_heads, int units, int samples_q, int samples_k,
    int step_q, int step_k, int words, int group, int kv_heads_reciprocal, int group_reciprocal
) {
  wait_dependencies();
  launch_dependents();  // `sampled` reads Q, K and V at once
  SampleShared& shared = *reinterpret_cast<SampleShared*>(shared_memory);
  for (int i = blockIdx.x * kThreads + threadIdx.x; i < words; i += gridDim.x * kThreads) maxima_ptr[i] = 0;

  const int which = (blockIdx.x >= units) + (blockIdx.x >= 2 * units), of_kv = blockIdx.x - which * units;
  const int b = Divisor(kv_heads, kv_heads_reciprocal).quotient(of_kv), head = of_kv - b * kv_heads;
  const Divisor of_group(group, group_reciprocal);
  const int of_tokens = which == 0 ? group : 1;  // rows of a token
  const int rows = (which == 0 ? samples_q : samples_k) * of_tokens;
  const long long step = which == 0 ? step_q * stride_q_s : step_k * (which == 1 ? stride_k_s : stride_v_s);
  const long long to_head = which == 0 ? stride_q_h : which == 1 ? stride_k_h : stride_v_h;
  const Element* const from = (which == 0 ? q_ptr : which == 1 ? k_ptr : v_ptr) +
                              b * (which == 0 ? stride_q_b : which == 1 ? stride_k_b : stride_v_b) + head * of_tokens * to_head;

  constexpr int kVectors = kHeadDim / kNumbers, kAtOnce = kThreads / kVectors;  // threads of a row; rows at a time
  const int vector = threadIdx.x % kVectors, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float sums[kNumbers] = {}, squares = 0.0f;
#pragma unroll 8
  for (int row = threadIdx.x / kVectors; row < rows; row += kAtOnce) {
    const int token = which == 0 ? of_group.quotient(row) : row;
    float x[kNumbers];
    to_floats<Element>(x, Words::load(from + token * step + (row - token * of_tokens) * to_head + kNumbers * vector));
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) {
      sums[i] += x[i];
      squares += x[i] * x[i];
    }
  }
#pragma unroll
  for (int i = 0; i < kNumbers; ++i) {
#pragma unroll
    for (int apart = kVectors; apart < 32; apart *= 2) sums[i] += __shfl_xor_sync(~0u, sums[i], apart);
    if (lane < kVectors) shared.sums[warp][kNumbers * lane + i] = sums[i];
  }
  squares = sum_of_warp(squares);
  if (lane == 0) shared.squares[warp] = squares;
  __syncthreads();

  // The mean is rounded as `kept` takes it. What is removed with it from the sum of squares follows from both.
  const int column = threadIdx.x % kHeadDim;
  const bool centered = which == 1 && k_mean_out_ptr != nullptr;
  float mean = 0.0f, removed = 0.0f;
  if (centered) {
    float sum = 0.0f;
    for (int i = 0; i < kWarps; ++i) sum += shared.sums[i][column];
    const uint32_t rounded = pack<Element>(sum / rows, 0.0f);
    mean = unpack<Element>(rounded).x;
    removed = mean * (2.0f * sum - rows * mean);
    if (threadIdx.x < kHeadDim) {
      reinterpret_cast<uint16_t*>(k_mean_out_ptr)[of_kv * static_cast<long long>(kHeadDim) + column] = rounded;
      shared.means[column] = signs_of_word(column / 32, nullptr, sign_bits_0, sign_bits_1) >> column % 32 & 1 ? -mean : mean;
    }
    removed = sum_of_warp(removed);
    if (lane == 0) shared.removed[warp] = removed;
  }
  __syncthreads();
  if (centered && threadIdx.x < kHeadDim) {
    float x = 0.0f;
#pragma unroll
    for (int i = 0; i < kHeadDim / 32; ++i) {
      const float own = shared.means[32 * i + lane];
      x += __popc(i & warp) & 1 ? -own : own;
    }
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
      const float other = __shfl_xor_sync(~0u, x, apart);
      x = lane & apart ? other - x : x + other;
    }
    k_shift_ptr[of_kv * static_cast<long long>(kHeadDim) + column] = x;
  }
  if (warp == kWarps - 1) {
    float total = lane < kWarps ? shared.squares[lane] : 0.0f;
    if (centered && lane < kHeadDim / 32) total -= shared.removed[lane];
    // Without a finite magnitude in the sample the scale is the least one, which all others exceed.
    float square = sum_of_warp(total) / rows / kHeadDim;
    if (!(square < 1e37f)) square = 0.0f;
    float* const scales = which == 0 ? q_descale_ptr : which == 1 ? k_descale_ptr : v_descale_ptr;
    if (lane == 0) scales[of_kv] = fmaxf(sqrtf(fmaxf(square, 0.0f)) * (kSpan / kLargest<e4m3>), 1.17549435e-38f);
  }
}

struct SampledShared {
  uint64_t full[kGroups * kStages];  // barriers: a tile is there
  uint32_t flips[kHeadDim / 32];     // bits of the numbers of a row that change their signs
};
static_assert(kShared + sizeof(SampledShared) <= 230400);

extern "C" __global__ void __launch_bounds__(kThreads, 1) quantize_sm90a_fp16_d128_sampled(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map,
    unsigned char* q_out_ptr, unsigned char* k_out_ptr, unsigned char* v_out_ptr, float* q_descale_ptr,
    float* k_descale_ptr, float* v_descale_ptr, float* k_shift_ptr, uint32_t* maxima_ptr,
    long long stride_q_out_b, long long stride_q_out_s, long long stride_q_out_h,
    long long stride_k_out_b, long long stride_k_out_s, long long stride_k_out_h,
    long long stride_v_out_b, long long stride_v_out_s, long long stride_v_out_h,
    long long sign_bits_0, long long sign_bits_1, int heads, int kv_heads, int seqlen_q, int seqlen_k, int units,
    int units_q, int units_k, int v_groups, int heads_q, int heads_k, int tiles_q, int tiles_k, int group,
    int heads_q_reciprocal, int heads_k_reciprocal, int tiles_q_reciprocal, int tiles_k_reciprocal,
    int group_reciprocal, float norm
) {
  launch_dependents();
  char* const memory = shared_memory;
  SampledShared& shared = *reinterpret_cast<SampledShared*>(memory + kShared);
  const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(memory));
  const int of_block = __shfl_sync(~0u, threadIdx.x / 128, 0);  // the group, which the compiler knows to be that of a warp
  const int thread = threadIdx.x % 128;
  const uint32_t full = base + kShared + 8 * kStages * of_block;

  if (threadIdx.x == 0) {
    init_barriers(base + kShared, kGroups * kStages, 1);
    fence_barrier_init();
  }
  if (threadIdx.x < kHeadDim / 32) {
    shared.flips[threadIdx.x] = signs_of_word(threadIdx.x, nullptr, sign_bits_0, sign_bits_1);
  }
  __syncthreads();  // barriers and signs are there

  // A tile.
  struct Task {
    int part, b, head, tile;
  };
  const auto task_at = [&](int index) {
    Task task;
    task.part = (index >= units_q) + (index >= units_q + units_k);
    const bool of_q = task.part == 0;
    const Divisor of_heads = of_q ? Divisor(heads_q, heads_q_reciprocal) : Divisor(heads_k, heads_k_reciprocal);
    const Divisor of_tiles = of_q ? Divisor(tiles_q, tiles_q_reciprocal) : Divisor(tiles_k, tiles_k_reciprocal);
    const int unit = index - (of_q ? 0 : units_q) - (task.part == 2 ? units_k : 0);
    const int row = of_heads.quotient(unit);
    task.head = (unit - row * of_heads.value) * kHeads;
    task.b = of_tiles.quotient(row);
    task.tile = row - task.b * of_tiles.value;
    return task;
  };
  const auto bring = [&](int index, uint32_t to, uint32_t barrier) {
    const Task task = task_at(index);
    const TensorMap& map = task.part == 0 ? q_map : task.part == 1 ? k_map : v_map;
    load_tile(to, map, barrier, task.head, task.tile * kRows, task.b);
  };

  // All groups of all blocks have neighbouring tiles at a time, so that what is read together lies together.
  const int first = blockIdx.x * kGroups + of_block, all = gridDim.x * kGroups;
  const uint32_t ring = base + of_block * kStages * kTile;
  if (thread == 0) {
    // Q, K and V are complete: the launch before this one starts after all that is ahead of it.
    for (int stage = 0; stage < kStages; ++stage) {
      if (first + stage * all < units) bring(first + stage * all, ring + stage * kTile, full + 8 * stage);
    }
  }
  write_factors(memory + kFactors, shared.flips);
  __syncthreads();
  wait_dependencies();  // scales and the transformed means are there
  uint32_t too_large = 0;  // bit 7 of each byte
  for (int index = first, turn = 0; index < units; index += all, ++turn) {
    const Task task = task_at(index);
    const bool multiplies = task.part < 2, by_columns = task.part == 2 && v_groups > 0;
    const int stage = turn % kStages;
    const uint32_t tile = (of_block * kStages + stage) * kTile;
    const int heads_here = task.part == 0 ? heads : kv_heads, seqlen = task.part == 0 ? seqlen_q : seqlen_k;
    const float* const scales = task.part == 0 ? q_descale_ptr : task.part == 1 ? k_descale_ptr : v_descale_ptr;
    float factors[kHeads];
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
      const int own = min(task.head + head, heads_here - 1);
      const int of_kv = task.part == 0 ? Divisor(group, group_reciprocal).quotient(own) : own;
      factors[head] = __fdiv_rn(1.0f, scales[task.b * kv_heads + of_kv]) * (multiplies ? norm : 1.0f);
    }
    wait(full + 8 * stage, turn / kStages & 1);
    float x[kSlots][kNumbers];
    if (multiplies) {
      multiply_tile(x, base + tile, base + kFactors);
    } else if (by_columns) {
      read_columns(x, base + tile);
    } else {
      read_tile(x, memory + tile);
    }
    named_sync(Named::kTile, of_block, 128);  // all have read the tile
    if (thread == 0 && index + kStages * all < units) {
      bring(index + kStages * all, ring + stage * kTile, full + 8 * stage);
    }
    if (by_columns) {
      store_columns<e4m3>(x, factors[0], factors[kHeads - 1], v_out_ptr, task.b, kv_heads, task.head, task.tile, v_groups, too_large);
      continue;
    }
    if (task.part == 1 && k_shift_ptr != nullptr) {
      const long long first_row = task.b * static_cast<long long>(kv_heads);
#pragma unroll
      for (int both = 0; both < kPieces / 2; ++both) {  // two pieces have the same columns
        const int head = min(task.head + (kHeads == 1 ? 0 : both), kv_heads - 1);
        const float* const shift = k_shift_ptr + (first_row + head) * kHeadDim + column_of_piece(2 * both);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float4 four = reinterpret_cast<const float4*>(shift)[i];
#pragma unroll
          for (int piece = 2 * both; piece < 2 * both + 2; ++piece) {
            float* const own = &x[2 * piece + i / 2][4 * (i % 2)];
            own[0] -= four.x;
            own[1] -= four.y;
            own[2] -= four.z;
            own[3] -= four.w;
          }
        }
      }
    }
    unsigned char* const out = task.part == 0 ? q_out_ptr : task.part == 1 ? k_out_ptr : v_out_ptr;
    const long long to_b = task.part == 0 ? stride_q_out_b : task.part == 1 ? stride_k_out_b : stride_v_out_b;
    const long long to_s = task.part == 0 ? stride_q_out_s : task.part == 1 ? stride_k_out_s : stride_v_out_s;
    const long long to_h = task.part == 0 ? stride_q_out_h : task.part == 1 ? stride_k_out_h : stride_v_out_h;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const int of_tile = kHeads == 1 ? 0 : piece / 2, head = task.head + of_tile;
      const int token = task.tile * kRows + row_of_piece(piece);
      const uint4 rounded = in_8_bits<e4m3>(x[2 * piece], x[2 * piece + 1], factors[of_tile]);
      if (head < heads_here && token < seqlen) {
        __stcs(reinterpret_cast<uint4*>(out + task.b * to_b + head * to_h + token * to_s + column_of_piece(piece)), rounded);
        // 0x7e is the largest magnitude, 0x7f is NaN.
        too_large |= (rounded.x & 0x7f7f7f7f) + 0x02020202 | (rounded.y & 0x7f7f7f7f) + 0x02020202 |
                     (rounded.z & 0x7f7f7f7f) + 0x02020202 | (rounded.w & 0x7f7f7f7f) + 0x02020202;
      }
    }
  }
  if (too_large & 0x80808080) maxima_ptr[0] = 1;
}

// Rotated rows are transformed in registers. Two lanes have a row of 128 numbers, each every other pair of its vectors. A
// lane has a row of 64: half of a warp those of one head, the other half those of the other one.
constexpr int kLanes = kHeadDim / 64;  // of a row

__device__ __forceinline__ int row_of_lane() {
  return kLanes == 2 ? threadIdx.x % 128 / 2 : threadIdx.x % 128 / 32 * 16 + threadIdx.x % 16;
}
__device__ __forceinline__ int head_of_lane() { return kLanes == 2 ? 0 : threadIdx.x % 32 / 16; }
__device__ __forceinline__ int vector_of_row(int slot) {
  return kLanes == 2 ? (slot & 1) + 2 * (threadIdx.x % 2) + (slot & 6) * 2 : slot;
}

// `tile`: where it begins in shared memory.
__device__ __forceinline__ void read_rows(float (&x)[kSlots][kNumbers], const char* memory, uint32_t tile) {
  const int row = row_of_lane();
  const uint32_t first = tile + head_of_lane() * kBox + row * 128 + (vector_of_row(0) ^ row % 8) * 16;
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
    const int apart = vector_of_row(slot) ^ vector_of_row(0);
    to_floats<Element>(x[slot], Words::load(memory + (first ^ apart % 8 * 16) + apart / 8 * kBox));
  }
}

// Rotates them by the angles of two tables.
__device__ __forceinline__ void rotate_rows(float (&x)[kSlots][kNumbers], const char* tables, int form) {
  const char* const cosines = tables + row_of_lane() * kAngles;
#pragma unroll
  for (int slot = 0; slot < kSlots / 2; ++slot) {
#pragma unroll
    for (int i = 0; i < kNumbers; i += 4) {
      float cos[4], sin[4];
      four_table_numbers(cos, cosines, kNumbers * vector_of_row(slot) + i, form);
      four_table_numbers(sin, cosines + kTable, kNumbers * vector_of_row(slot) + i, form);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float first = x[slot][i + j], second = x[slot + kSlots / 2][i + j];
        x[slot][i + j] = rotated(first, second, cos[j], sin[j], true);
        x[slot + kSlots / 2][i + j] = rotated(second, first, cos[j], sin[j], false);
      }
    }
  }
}

__device__ __forceinline__ void transform_rows(float (&x)[kSlots][kNumbers], const Words* vector_signs) {
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) flip(x[slot], vector_signs[vector_of_row(slot)]);
  hadamard_transform<3, kLanes - 1>(x);
}

// The largest finite magnitude that a lane has.
__device__ __forceinline__ float find_largest_of_lane(const float (&x)[kSlots][kNumbers]) {
  float largest[kPieces];
  find_largest_of_pieces(x, largest);
  return fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3]));
}

// Two lanes write 32 bytes that lie side by side. Where a lane has a row, it first exchanges pieces with its neighbour, so
// that they have pieces 0 and 1, and later 2 and 3, of the even row of both and then of the odd one.
__device__ __forceinline__ void exchange_pieces(uint4 (&pieces)[kPieces]) {
  const bool odd = threadIdx.x % 2;
  const auto exchange = [&](uint32_t& first, uint32_t& second) {
    const uint32_t other = __shfl_xor_sync(~0u, odd ? first : second, 1);
    (odd ? first : second) = other;
  };
#pragma unroll
  for (int i = 0; i < kPieces; i += 2) {
    exchange(pieces[i].x, pieces[i + 1].x);
    exchange(pieces[i].y, pieces[i + 1].y);
    exchange(pieces[i].z, pieces[i + 1].z);
    exchange(pieces[i].w, pieces[i + 1].w);
  }
}
__device__ __forceinline__ int row_to_write(int piece) {
  return kLanes == 2 ? row_of_lane() : (row_of_lane() & ~1) + piece % 2;
}
__device__ __forceinline__ int column_to_write(int piece) {
  return 16 * (threadIdx.x % 2) + 32 * (kLanes == 2 ? piece : piece / 2);
}

// Rotated rows of Q and K; V of blocks comes with them. Angles lie in shared memory for all heads of a token. A scale of a
// head takes two launches: the first finds the largest magnitudes.

// A tile of a band.
struct alignas(16) Task {
  int part, b, head, tile;
  int own_band;  // of its block
  bool last;     // of its group and band
};

// Shared memory of a block.
struct RotatedShared {
  uint64_t full[kGroups * kRotatedStages];  // barriers: a tile is there
  uint64_t angles[2 * kAngleTables];        // tables are there, and have been read
  Task tasks[kGroups][kRotatedStages];      // what the tiles are
  Part parts[3];
  Words vector_signs[kHeadDim / kNumbers];
  uint32_t flips[kHeadDim / 32];            // bits of the numbers of a row that change their signs
  uint4 largest[2][kGroups][kHeads];        // of each warp, of two tiles in turn
};
static_assert(kRotatedShared + sizeof(RotatedShared) <= 201728);

extern "C" __global__ void __launch_bounds__(kThreads, 1) quantize_sm90a_fp16_d128_rotated(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map,
    unsigned char* q_out_ptr, unsigned char* k_out_ptr, unsigned char* v_out_ptr, float* q_descale_ptr,
    float* k_descale_ptr, float* v_descale_ptr, const float* signs_ptr, uint32_t* maxima_ptr,
    const void* rotary_cos_ptr, const void* rotary_sin_ptr, const int* rotary_offsets_ptr,
    long long stride_q_out_b, long long stride_q_out_s, long long stride_q_out_h,
    long long stride_k_out_b, long long stride_k_out_s, long long stride_k_out_h,
    long long stride_v_out_b, long long stride_v_out_s, long long stride_v_out_h,
    long long cos_row_bytes, long long sin_row_bytes, long long sign_bits_0, long long sign_bits_1, int heads,
    int kv_heads, int seqlen_q, int seqlen_k, int units, int units_q, int units_k, int e5m2_out, int batch,
    int sharers, int hadamard, int scales, int rounds, int bands, int bands_q, int bands_k, int parts_q,
    int parts_k, int positions, int rotary_form, int angle_bytes, int heads_q, int heads_k, int tiles_q,
    int tiles_k, int turns_q, int turns_k, int group, int heads_q_reciprocal, int heads_k_reciprocal,
    int tiles_q_reciprocal, int tiles_k_reciprocal, int turns_q_reciprocal, int turns_k_reciprocal,
    int group_reciprocal, float norm
) {
  launch_dependents();
  char* const memory = shared_memory;
  RotatedShared& shared = *reinterpret_cast<RotatedShared*>(memory + kRotatedShared);
  const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(memory));
  const int of_block = threadIdx.x / 128;  // the group
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = threadIdx.x % 32;
  const uint32_t full = base + kRotatedShared + 8 * kRotatedStages * of_block;
  const uint32_t angles_full = base + kRotatedShared + 8 * kRotatedStages * kGroups;
  const uint32_t angles_empty = angles_full + 8 * kAngleTables;

  if (threadIdx.x == 0) {
    shared.parts[0] = {q_out_ptr, q_descale_ptr, stride_q_out_b, stride_q_out_s, stride_q_out_h};
    shared.parts[1] = {k_out_ptr, k_descale_ptr, stride_k_out_b, stride_k_out_s, stride_k_out_h};
    shared.parts[2] = {v_out_ptr, v_descale_ptr, stride_v_out_b, stride_v_out_s, stride_v_out_h};
    init_barriers(base + kRotatedShared, kGroups * kRotatedStages, 1);
    init_barriers(angles_full, kAngleTables, kWarps);
    init_barriers(angles_empty, kAngleTables, kWarps / sharers);
    fence_barrier_init();
  }
  wait_dependencies();  // nothing in global memory is read or written before
  if (threadIdx.x < kHeadDim / 32) {
    shared.flips[threadIdx.x] = signs_of_word(threadIdx.x, signs_ptr, sign_bits_0, sign_bits_1);
  }
  __syncthreads();  // parts, barriers and signs are there

  // A block has a band, all heads of some tokens or a part of them, which share angles, then another one. Each group has
  // some turns at a band, and one thread of it has its next tiles brought.
  const int blocks = gridDim.x, own = blockIdx.x;
  const auto own_of = [&](int bands) { return max(bands - own + blocks - 1, 0) / blocks; };
  const int own_bands_q = own_of(bands_q), own_bands = own_of(bands);
  const int all_turns = own_bands_q * turns_q + (own_bands - own_bands_q) * turns_k;
  const uint32_t ring = of_block * kRotatedStages * kTile;
  const auto bring = [&](int turn) {
    if (turn >= all_turns) return;
    const int later = turn - own_bands_q * turns_q;  // of those of K and V
    const bool of_q = later < 0;
    const Divisor turns = of_q ? Divisor(turns_q, turns_q_reciprocal) : Divisor(turns_k, turns_k_reciprocal);
    const Divisor of_heads = of_q ? Divisor(heads_q, heads_q_reciprocal) : Divisor(heads_k, heads_k_reciprocal);
    const Divisor of_tiles = of_q ? Divisor(tiles_q, tiles_q_reciprocal) : Divisor(tiles_k, tiles_k_reciprocal);
    const int from = of_q ? turn : later, in_parts = turns.quotient(from), of_band = from - in_parts * turns.value;
    const int own_band = (of_q ? 0 : own_bands_q) + in_parts, band = own + own_band * blocks - (of_q ? 0 : bands_q);
    const int index = (band * turns.value + of_band) * kGroups + of_block;  // of Q, or of K and V
    const bool of_v = !of_q && index >= units_k;
    const int unit = of_v ? index - units_k : index, shared_by = unit >> sharers - 1;
    const int row = of_heads.quotient(shared_by), b = of_tiles.quotient(row), stage = turn % kRotatedStages;
    const Task task = {of_q ? 0 : 1 + of_v, b, (shared_by - row * of_heads.value) * kHeads,
                       (row - b * of_tiles.value) * sharers + (unit & sharers - 1), own_band, of_band == turns.value - 1};
    shared.tasks[of_block][stage] = task;
    load_tile(base + ring + stage * kTile, of_q ? q_map : of_v ? v_map : k_map, full + 8 * stage, task.head,
              task.tile * kRows, b);
  };
  if (thread == 0) {
    for (int stage = 0; stage < kRotatedStages; ++stage) bring(stage);
  }
  if (threadIdx.x < kHeadDim / kNumbers) {
    const uint32_t bits = shared.flips[threadIdx.x / 4] >> threadIdx.x % 4 * kNumbers;
    for (int i = 0; i < kNumbers / 2; ++i) shared.vector_signs[threadIdx.x].pairs[i] = signs_of_pair(bits, i);
  }
  __syncthreads();

  // Warps bring the angles of a band once those of an earlier one have been read: one table, or two of 64 tokens each
  // where two groups share a scale. Lanes issue copies one after the other, so each warp has some rows.
  constexpr int kRowsOfWarp = kRows / kWarps;
  const int row_of_table = threadIdx.x / 32 * kRowsOfWarp + lane % kRowsOfWarp;
  const auto bring_angles = [&](int own_band) {
    const int band = own + own_band * blocks;
    if (band >= bands_q + bands_k) return;
    const bool of_q = band < bands_q;
    const int row_of_band = of_q ? band / parts_q : (band - bands_q) / parts_k;
    const int tiles = of_q ? tiles_q : tiles_k, b = row_of_band / tiles;
    const int offset = rotary_offsets_ptr == nullptr ? 0 : rotary_offsets_ptr[b];
    for (int half = 0; half < sharers; ++half) {
      const int table = own_band * sharers + half, slot = table % kAngleTables;
      const uint32_t to = base + kTables + slot * 2 * kTable;
      wait(angles_empty + 8 * slot, table / kAngleTables & 1 ^ 1);
      if (lane == 0) arrive_expecting(angles_full + 8 * slot, 2 * kRowsOfWarp * angle_bytes);
      __syncwarp();
      if (lane < 2 * kRowsOfWarp) {
        const bool of_sines = lane >= kRowsOfWarp;
        const long long token = ((row_of_band - b * tiles) * sharers + half) * kRows + row_of_table;
        const long long position = max(0ll, min(token + offset, positions - 1ll));
        const char* const from = static_cast<const char*>(of_sines ? rotary_sin_ptr : rotary_cos_ptr) +
                                 position * (of_sines ? sin_row_bytes : cos_row_bytes);
        load_bytes(to + of_sines * kTable + row_of_table * kAngles, from, angles_full + 8 * slot, angle_bytes);
      }
    }
  };
  const int bands_at_once = kAngleTables / sharers;  // whose angles are there
  for (int own_band = 0; own_band < bands_at_once; ++own_band) bring_angles(own_band);

  for (int turn = 0; turn < all_turns; ++turn) {
    const int stage = turn % kRotatedStages;
    wait(full + 8 * stage, turn / kRotatedStages & 1);
    const Task task = shared.tasks[of_block][stage];
    const bool turns = task.part < 2, transforms = hadamard && turns;
    const int heads_here = task.part == 0 ? heads : kv_heads, seqlen = task.part == 0 ? seqlen_q : seqlen_k;
    const int head = task.head + head_of_lane();
    const bool has_head = head < heads_here;
    const int of_scales = task.b * kv_heads + (task.part == 0 ? Divisor(group, group_reciprocal).quotient(head) : head);
    uint32_t* const maximum = maxima_ptr + task.part * batch * kv_heads + of_scales;
    // Read before it is needed. The maximum is final when rounding, and a lower bound while maxima are being computed.
    uint32_t known = scales == kHead && has_head ? *static_cast<volatile uint32_t*>(maximum) : 0;
    float x[kSlots][kNumbers];
    read_rows(x, memory, ring + stage * kTile);
    if (turns) {
      const int table = task.own_band * sharers + (of_block & sharers - 1), slot = table % kAngleTables;
      wait(angles_full + 8 * slot, table / kAngleTables & 1);
      rotate_rows(x, memory + kTables + slot * 2 * kTable, rotary_form);
      __syncwarp();
      if (task.last && lane == 0) arrive(angles_empty + 8 * slot);
      if (hadamard) transform_rows(x, shared.vector_signs);
    }

    const Part& part = shared.parts[task.part];
    const float own_norm = transforms ? norm : 1.0f, limit = e5m2_out ? kLargest<e5m2> : kLargest<e4m3>;
    const float largest = find_largest_of_lane(x);
    const long long of_head = task.b * static_cast<long long>(heads_here) + head;
    float scale;
    if (scales == kToken) {
      scale = scale_of((kLanes == 2 ? fmaxf(largest, __shfl_xor_sync(~0u, largest, 1)) : largest) * own_norm, limit);
      const int token = task.tile * kRows + row_of_lane();
      if ((kLanes == 1 || lane % 2 == 0) && has_head && token < seqlen) part.scales[of_head * seqlen + token] = scale;
      named_sync(Named::kTile, of_block, 128);
      if (thread == 0) bring(turn + kRotatedStages);
    } else {
      const bool first_of_head = thread % 16 == 0 && thread / 16 < kHeads;
      if (scales == kBlock || !rounds) {
#pragma unroll
        for (int one = 0; one < kHeads; ++one) {
          const uint32_t of_warp = __reduce_max_sync(~0u, head_of_lane() == one ? __float_as_uint(largest) : 0);
          if (lane == 0) reinterpret_cast<uint32_t*>(&shared.largest[turn & 1][of_block][one])[warp] = of_warp;
        }
      }
      named_sync(Named::kTile, of_block >> sharers - 1, 128 * sharers);
      if (thread == 0) bring(turn + kRotatedStages);
      if (scales == kBlock || !rounds) {
        const auto maximum_of = [&](int group) {
          const uint4 of_warps = shared.largest[turn & 1][group][head_of_lane()];
          return max(max(of_warps.x, of_warps.y), max(of_warps.z, of_warps.w));
        };
        uint32_t of_tiles = maximum_of(of_block);
        if (sharers == 2) of_tiles = max(of_tiles, maximum_of(of_block ^ 1));
        if (!rounds && first_of_head && has_head && of_tiles > known) raise(maximum, of_tiles);  // rare
        known = of_tiles;
      }
      scale = scale_of(__uint_as_float(known) * own_norm, limit);
      if (rounds && first_of_head && has_head) {
        if (scales == kBlock) {
          const int blocks = task.part == 0 ? tiles_q : tiles_k;
          if ((task.tile & sharers - 1) == 0) part.scales[of_head * blocks + (task.tile >> sharers - 1)] = scale;
        } else if (task.tile == 0) {
          part.scales[of_scales] = scale;  // the same of all heads that share it
        }
      }
    }
    if (rounds) {
      const float factor = __fdiv_rn(1.0f, scale) * own_norm;
      const auto store = [&]<typename Rounded>() {
        uint4 rounded[kPieces];
#pragma unroll
        for (int i = 0; i < kPieces; ++i) rounded[i] = in_8_bits<Rounded>(x[2 * i], x[2 * i + 1], factor);
        if (kLanes == 1) exchange_pieces(rounded);
        unsigned char* const of_head = part.to + task.b * part.to_b + head * part.to_h;
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
          const int token = task.tile * kRows + row_to_write(i);
          unsigned char* const at = of_head + token * part.to_s + column_to_write(i);
          if (has_head && token < seqlen) __stcs(reinterpret_cast<uint4*>(at), rounded[i]);
        }
      };
      if (e5m2_out) {
        store.template operator()<e5m2>();
      } else {
        store.template operator()<e4m3>();
      }
    }
    if (task.last && turns) bring_angles(task.own_band + bands_at_once);
  }
}
