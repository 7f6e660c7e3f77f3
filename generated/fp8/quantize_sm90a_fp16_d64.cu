// quantize_sm90a_fp16_d64
//
// Queries, keys and values become 8 bits and scales; rows of Q and K are transformed, or rotated, too.
// Rendered from templates/cuda/quantize/tiles.cu.j2 by `attngen build specs/fp8.yaml`.
//
// A tile is 64 tokens of 2 heads. Each group of four warps works on a tile, while TMA loads its next ones. Rows that
// are transformed, but not rotated, are multiplied: A is the tile, B a Hadamard matrix with the random signs in its rows.
// There is a kernel for each kind of call, so that none has registers or branches of another:
//   quantize_sm90a_fp16_d64: scales of blocks, of one tile or of two.
//   quantize_sm90a_fp16_d64_kept: scales of heads, and of tokens of Q and K.
//   quantize_sm90a_fp16_d64_rotated: rotated rows, with scales of blocks and of tokens.
//   quantize_sm90a_fp16_d64_rotated_heads: rotated rows, with scales of heads.
#include "pdl.cuh"
#include "divisor.cuh"
#include "pieces.cuh"
#include "ring.cuh"
#include "scales.cuh"
#include "tma.cuh"
#include "told.cuh"
#include "wgmma.cuh"

using Element = fp16;

constexpr int kGroups = 4;  // of four warps
constexpr int kThreads = 128 * kGroups;
constexpr int kStages = 3;         // tiles of a group in shared memory
constexpr int kRotatedStages = 2;  // where angles lie beside them
constexpr int kRows = 64;          // of a tile
constexpr int kHeadDim = 64;
constexpr int kHeads = 2 * 64 / kHeadDim;  // of a tile

// In bytes.
constexpr uint32_t kBox = kRows * 128;  // 64 columns
constexpr uint32_t kTile = 2 * kBox;
constexpr uint32_t kFactorBox = kHeadDim * 128;  // 64 rows of the Hadamard matrix
constexpr uint32_t kAngles = 144, kTable = kRows * kAngles;  // rows of angles lie in different banks

// Where things begin in shared memory, beside tiles.
constexpr uint32_t kFactors = kGroups * kStages * kTile;
constexpr uint32_t kShared = 204800;
constexpr uint32_t kTables = kGroups * kRotatedStages * kTile;  // cosines and sines, twice
constexpr uint32_t kRotatedShared = 167936;

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
  settle(products);
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

// What threads tell each other.
struct Shared {
  uint64_t full[kGroups * kStages];  // barriers: a tile is there
  Part parts[3];
  uint32_t flips[kHeadDim / 32];  // bits of the numbers of a row that change their signs
  uint32_t largest[2][kGroups][4][kHeads];  // of each warp, of two tiles in turn
};
static_assert(kShared + sizeof(Shared) <= 205824);

extern "C" __global__ void __launch_bounds__(kThreads, 1) quantize_sm90a_fp16_d64(
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
      uint32_t found = 0;
      const int first = of_block & -sharers;
      for (int i = 0; i < 4 * sharers; ++i) found = max(found, shared.largest[pair][first + i / 4][i % 4][head]);
      const float scale = scale_of(__uint_as_float(found) * own_norm, limit);
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
  return i < count ? told(maxima + i) : 1;
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
    uint32_t found = 0;
    for (int first = threadIdx.x % 128; first < count; first += 128 * kAtOnce) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        while (asked[head][i] == 0) asked[head][i] = word_of(of_head, first + 128 * i, count);
        found = max(found, asked[head][i] - 1);
        asked[head][i] = word_of(of_head, first + 128 * (kAtOnce + i), count);
      }
    }
    found = __reduce_max_sync(~0u, found);
    if (threadIdx.x % 32 == 0) largest[threadIdx.x % 128 / 32][head] = found;
  }
}
__device__ __forceinline__ uint32_t largest_of_group(const uint32_t (&largest)[4][kHeads], int head) {
  return max(max(largest[0][head], largest[1][head]), max(largest[2][head], largest[3][head]));
}

// What threads tell each other.
struct KeptShared {
  uint64_t full[kGroups * kStages];  // barriers: a tile is there
  int4 tasks[kGroups][kStages];      // which: part, batch entry, head, place in its sequence
  KeptPart parts[3];
  uint32_t flips[kHeadDim / 32];            // bits of the numbers of a row that change their signs
  uint32_t largest[2][kGroups][4][kHeads];  // of each warp, of two uses in turn
};
static_assert(kShared + sizeof(KeptShared) <= 206848);

extern "C" __global__ void __launch_bounds__(kThreads, 1) quantize_sm90a_fp16_d64_kept(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map,
    unsigned char* q_out_ptr, unsigned char* k_out_ptr, unsigned char* v_out_ptr, float* q_descale_ptr,
    float* k_descale_ptr, float* v_descale_ptr, const float* signs_ptr, uint32_t* maxima_ptr,
    long long stride_q_out_b, long long stride_q_out_s, long long stride_q_out_h,
    long long stride_k_out_b, long long stride_k_out_s, long long stride_k_out_h,
    long long stride_v_out_b, long long stride_v_out_s, long long stride_v_out_h,
    long long sign_bits_0, long long sign_bits_1, int heads, int kv_heads, int seqlen_q, int seqlen_k, int units,
    int units_q, int units_k, int e5m2_out, int hadamard, int lag, int units_of_tokens, int words_q, int words_k,
    int words_v, int tiles_q, int tiles_k, int group, int group_kv, int set_q, int set_k, int set_v, int sets_q,
    int sets_k, int sets_v, int pairs_q, int pairs_k, int pairs_v, int group_reciprocal, int group_kv_reciprocal,
    int set_q_reciprocal, int set_k_reciprocal, int set_v_reciprocal, int sets_q_reciprocal, int sets_k_reciprocal,
    int sets_v_reciprocal, int pairs_q_reciprocal, int pairs_k_reciprocal, int pairs_v_reciprocal, float norm
) {
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
        tell(maxima_ptr + part.words + (b * part.heads + first_head + thread) * part.tiles + task.w,
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
    float x[kSlots][kNumbers];
    if (multiplies) {
      multiply_tile(x, base + tile, base + kFactors);
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
    named_sync(Named::kTile, of_block, 128);  // all have read the tile, and told what they found
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

// Rotated rows are transformed in registers: two lanes have a row, each every other pair of its vectors.

// Where a vector of a thread is in its box, and a piece in its row.
__device__ __forceinline__ int vector_of_row(int slot) {
  return (slot & 1) + 2 * (threadIdx.x % 2) + (slot & 2) * 2;
}
__device__ __forceinline__ int column_of_row(int piece) {
  return 16 * (threadIdx.x % 2) + piece % 2 * 32 + (kHeads == 1 ? piece / 2 * 64 : 0);
}

__device__ __forceinline__ void read_rows(float (&x)[kSlots][kNumbers], const char* tile) {
  const int row = threadIdx.x % 128 / 2;
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
    to_floats<Element>(x[slot], Words::load(tile + slot / 4 * kBox + row * 128 + (vector_of_row(slot) ^ row % 8) * 16));
  }
}

// Rotates them by the angles of two tables. A number's partner is in the other box, or in the same.
__device__ __forceinline__ void rotate_rows(float (&x)[kSlots][kNumbers], const char* tables, int form) {
  const char* const cosines = tables + threadIdx.x % 128 / 2 * kAngles;
  constexpr int kPartner = kHeads == 1 ? 4 : 2;
#pragma unroll
  for (int slot = 0; slot < kPartner; ++slot) {
#pragma unroll
    for (int i = 0; i < kNumbers; i += 4) {
      float cos[4], sin[4];
      four_table_numbers(cos, cosines, kNumbers * vector_of_row(slot) + i, form);
      four_table_numbers(sin, cosines + kTable, kNumbers * vector_of_row(slot) + i, form);
#pragma unroll
      for (int own = slot; own < kSlots; own += 2 * kPartner) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float first = x[own][i + j], second = x[own + kPartner][i + j];
          x[own][i + j] = rotated(first, second, cos[j], sin[j], true);
          x[own + kPartner][i + j] = rotated(second, first, cos[j], sin[j], false);
        }
      }
    }
  }
}

__device__ __forceinline__ void transform_rows(float (&x)[kSlots][kNumbers], const Words* vector_signs) {
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
    flip(x[slot], vector_signs[vector_of_row(slot) + (kHeads == 1 ? slot / 4 * 8 : 0)]);
  }
  hadamard_transform<kHeads == 1 ? 3 : 2, 1>(x);
}

// Rotated rows of Q and K with scales of blocks or of tokens; V of blocks comes with them. Angles lie in shared memory for
// all heads of a token.

// What threads tell each other.
struct RotatedShared {
  uint64_t full[kGroups * kRotatedStages];  // barriers: a tile is there
  uint64_t angles[4];                       // two tables are there, and have been read
  Part parts[3];
  Words vector_signs[kHeadDim / kNumbers];
  uint32_t flips[kHeadDim / 32];            // bits of the numbers of a row that change their signs
  uint32_t largest[2][kGroups][4][kHeads];  // of each warp, of two tiles in turn
};
static_assert(kRotatedShared + sizeof(RotatedShared) <= 168960);

extern "C" __global__ void __launch_bounds__(kThreads, 1) quantize_sm90a_fp16_d64_rotated(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map,
    unsigned char* q_out_ptr, unsigned char* k_out_ptr, unsigned char* v_out_ptr, float* q_descale_ptr,
    float* k_descale_ptr, float* v_descale_ptr, const float* signs_ptr, const void* rotary_cos_ptr,
    const void* rotary_sin_ptr, const int* rotary_offsets_ptr,
    long long stride_q_out_b, long long stride_q_out_s, long long stride_q_out_h,
    long long stride_k_out_b, long long stride_k_out_s, long long stride_k_out_h,
    long long stride_v_out_b, long long stride_v_out_s, long long stride_v_out_h,
    long long cos_row_bytes, long long sin_row_bytes, long long sign_bits_0, long long sign_bits_1, int heads,
    int kv_heads, int seqlen_q, int seqlen_k, int units, int units_q, int units_k, int e5m2_out, int sharers,
    int of_tokens, int hadamard, int bands, int bands_q, int bands_k, int positions, int rotary_form,
    int angle_bytes, int heads_q, int heads_k, int tiles_q, int tiles_k, int turns_q, int turns_k,
    int heads_q_reciprocal, int heads_k_reciprocal, int tiles_q_reciprocal, int tiles_k_reciprocal,
    int turns_q_reciprocal, int turns_k_reciprocal, float norm
) {
  launch_dependents();
  char* const memory = shared_memory;
  RotatedShared& shared = *reinterpret_cast<RotatedShared*>(memory + kRotatedShared);
  const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(memory));
  const int of_block = threadIdx.x / 128;  // the group
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = threadIdx.x % 32;
  const uint32_t full = base + kRotatedShared + 8 * kRotatedStages * of_block;
  const uint32_t angles_full = base + kRotatedShared + 8 * kRotatedStages * kGroups, angles_empty = angles_full + 16;

  if (threadIdx.x == 0) {
    shared.parts[0] = {q_out_ptr, q_descale_ptr, stride_q_out_b, stride_q_out_s, stride_q_out_h};
    shared.parts[1] = {k_out_ptr, k_descale_ptr, stride_k_out_b, stride_k_out_s, stride_k_out_h};
    shared.parts[2] = {v_out_ptr, v_descale_ptr, stride_v_out_b, stride_v_out_s, stride_v_out_h};
    init_barriers(base + kRotatedShared, kGroups * kRotatedStages + 2, 1);
    init_barriers(angles_empty, 2, kGroups / sharers);
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

  // A block has a band, all heads of some tokens, which share angles, then another one. Each group has some turns at a
  // band, and one thread of it has its next tiles brought.
  const int blocks = gridDim.x, own = blockIdx.x;
  const auto own_of = [&](int bands) { return max(bands - own + blocks - 1, 0) / blocks; };
  const int own_bands_q = own_of(bands_q), own_bands = own_of(bands);
  const Divisor turns_of_q(turns_q, turns_q_reciprocal), turns_of_k(turns_k, turns_k_reciprocal);
  const int all_turns = own_bands_q * turns_q + (own_bands - own_bands_q) * turns_k;
  struct Turn {
    int own_band, index;  // bands of this block, and the tile among all
    bool first, last;     // of a band
  };
  const auto turn_at = [&](int turn) {
    const int later = turn - own_bands_q * turns_q;  // of those of K and V
    const Divisor& turns = later < 0 ? turns_of_q : turns_of_k;
    const int from = later < 0 ? turn : later, in_parts = turns.quotient(from), of_band = from - in_parts * turns.value;
    const int own_band = (later < 0 ? 0 : own_bands_q) + in_parts, band = own + own_band * blocks;
    const int begin = later < 0 ? band * turns_q : bands_q * turns_q + (band - bands_q) * turns_k;
    return Turn{own_band, (begin + of_band) * kGroups + of_block, of_band == 0, of_band == turns.value - 1};
  };
  const uint32_t ring = base + of_block * kRotatedStages * kTile;
  if (thread == 0) {
    for (int turn = 0; turn < min(kRotatedStages, all_turns); ++turn) {
      bring(turn_at(turn).index, ring + turn * kTile, full + 8 * turn);
    }
  }
  if (threadIdx.x < kHeadDim / kNumbers) {
    const uint32_t bits = shared.flips[threadIdx.x / 4] >> threadIdx.x % 4 * kNumbers;
    for (int i = 0; i < kNumbers / 2; ++i) shared.vector_signs[threadIdx.x].pairs[i] = signs_of_pair(bits, i);
  }
  __syncthreads();

  // One warp brings the angles of a band once those of an earlier one have been read: one table, or two of 64 tokens
  // each where two groups share a scale.
  const int bands_ahead = sharers == 1;
  const auto bring_angles = [&](int own_band) {
    const int band = own + own_band * blocks;
    if (band >= bands_q + bands_k) return;
    const bool of_q = band < bands_q;
    const int row_of_band = of_q ? band : band - bands_q, tiles = of_q ? tiles_q : tiles_k, b = row_of_band / tiles;
    const int offset = rotary_offsets_ptr == nullptr ? 0 : rotary_offsets_ptr[b];
    for (int half = 0; half < sharers; ++half) {
      const int table = own_band * sharers + half, slot = table & 1;
      const uint32_t to = base + kTables + slot * 2 * kTable;
      wait(angles_empty + 8 * slot, (table >> 1 & 1) ^ 1);
      if (lane == 0) arrive_expecting(angles_full + 8 * slot, 2 * kRows * angle_bytes);
      __syncwarp();
      for (int row = lane; row < kRows; row += 32) {
        const long long token = ((row_of_band - b * tiles) * sharers + half) * kRows + row;
        const long long position = max(0ll, min(token + offset, positions - 1ll));
        load_bytes(to + row * kAngles, static_cast<const char*>(rotary_cos_ptr) + position * cos_row_bytes,
                   angles_full + 8 * slot, angle_bytes);
        load_bytes(to + kTable + row * kAngles, static_cast<const char*>(rotary_sin_ptr) + position * sin_row_bytes,
                   angles_full + 8 * slot, angle_bytes);
      }
    }
  };
  const bool brings_angles = threadIdx.x / 32 == 4 * kGroups - 1;
  if (brings_angles && bands_ahead) bring_angles(0);

  for (int turn = 0; turn < all_turns; ++turn) {
    const Turn here = turn_at(turn);
    const Task task = task_at(here.index);
    const bool turns = task.part < 2, transforms = hadamard && turns;
    const int stage = turn % kRotatedStages, table = here.own_band * sharers + (of_block & sharers - 1), slot = table & 1;
    if (brings_angles && here.first) bring_angles(here.own_band + bands_ahead);
    wait(full + 8 * stage, turn / kRotatedStages & 1);
    const int row = thread / 2;  // two lanes have a row
    const char* const tile = memory + (of_block * kRotatedStages + stage) * kTile;
    float x[kSlots][kNumbers];
    read_rows(x, tile);
    if (turns) {
      wait(angles_full + 8 * slot, table >> 1 & 1);
      rotate_rows(x, memory + kTables + slot * 2 * kTable, rotary_form);
      if (hadamard) transform_rows(x, shared.vector_signs);
    }

    const int heads_here = task.part == 0 ? heads : kv_heads, seqlen = task.part == 0 ? seqlen_q : seqlen_k;
    const Part& part = shared.parts[task.part];
    const float own_norm = transforms ? norm : 1.0f, limit = e5m2_out ? kLargest<e5m2> : kLargest<e4m3>;
    const auto tile_was_read = [&] {
      if (thread != 0) return;
      if (turn + kRotatedStages < all_turns) {
        bring(turn_at(turn + kRotatedStages).index, ring + stage * kTile, full + 8 * stage);
      }
      if (turns && here.last) arrive(angles_empty + 8 * slot);
    };
    float factors[kHeads];
    if (of_tokens) {
      float magnitudes[kPieces];
      find_largest_of_pieces(x, magnitudes);
      const float low = fmaxf(magnitudes[0], magnitudes[1]), high = fmaxf(magnitudes[2], magnitudes[3]);
      float largest;  // of the row, or of that of one head
      if (kHeads == 1) {
        largest = fmaxf(low, high);
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
      } else {
        largest = exchanged_maximum<1>(low, high);
      }
      const float scale = scale_of(largest * own_norm, limit), factor = __fdiv_rn(1.0f, scale) * own_norm;
#pragma unroll
      for (int head = 0; head < kHeads; ++head) {
        factors[head] = kHeads == 1 ? factor : __shfl_sync(~0u, factor, (lane & ~1) + head);
      }
      const int head = task.head + lane % kHeads, token = task.tile * kRows + row;
      if (lane % 2 < kHeads && head < heads_here && token < seqlen) {
        part.scales[(task.b * static_cast<long long>(heads_here) + head) * seqlen + token] = scale;
      }
      named_sync(Named::kTile, of_block, 128);
      tile_was_read();
    } else {
      uint32_t of_warp[kHeads];
      find_largest_of_warp(x, of_warp);
#pragma unroll
      for (int head = 0; head < kHeads; ++head) {
        if (lane == 0) shared.largest[turn & 1][of_block][warp][head] = of_warp[head];
      }
      named_sync(Named::kTile, of_block >> sharers - 1, 128 * sharers);
      tile_was_read();
      const int blocks = task.part == 0 ? tiles_q : tiles_k;
#pragma unroll
      for (int head = 0; head < kHeads; ++head) {
        uint32_t found = 0;
        const int first = of_block & -sharers;
        for (int i = 0; i < 4 * sharers; ++i) found = max(found, shared.largest[turn & 1][first + i / 4][i % 4][head]);
        const float scale = scale_of(__uint_as_float(found) * own_norm, limit);
        factors[head] = __fdiv_rn(1.0f, scale) * own_norm;
        if (thread == 0 && (task.tile & sharers - 1) == 0 && task.head + head < heads_here) {
          const long long of_head = task.b * static_cast<long long>(heads_here) + task.head + head;
          part.scales[of_head * blocks + (task.tile >> sharers - 1)] = scale;
        }
      }
    }
    const auto store = [&]<typename Rounded>() {
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        const int of_tile = kHeads == 1 ? 0 : piece / 2, head = task.head + of_tile, token = task.tile * kRows + row;
        unsigned char* const of_row = part.to + task.b * part.to_b + head * part.to_h + token * part.to_s;
        const uint4 rounded = in_8_bits<Rounded>(x[2 * piece], x[2 * piece + 1], factors[of_tile]);
        if (head < heads_here && token < seqlen) __stcs(reinterpret_cast<uint4*>(of_row + column_of_row(piece)), rounded);
      }
    };
    if (e5m2_out) {
      store.template operator()<e5m2>();
    } else {
      store.template operator()<e4m3>();
    }
  }
}

// Rotated rows of Q and K with scales of heads.
//
// A block has bands: the same tokens of some neighbouring heads, one tile for each group, which share angles. Sets of bands
// follow one another, as those of tiles do above, and a band is found `lag` turns before it is rounded. Tiles and angles
// are loaded for both, the second time out of L2.

// What threads tell each other.
struct RotatedHeadsShared {
  uint64_t full[kGroups * kRotatedStages];  // barriers: a tile is there
  uint64_t angles[4];                       // two tables are there, and have been read
  int4 tasks[kGroups][kRotatedStages];      // which: part, batch entry, head, place in its sequence
  KeptPart parts[2];                        // in bands, not tiles
  Words vector_signs[kHeadDim / kNumbers];
  uint32_t flips[kHeadDim / 32];            // bits of the numbers of a row that change their signs
  uint32_t largest[2][kGroups][4][kHeads];  // of each warp, of two uses in turn
};
static_assert(kRotatedShared + sizeof(RotatedHeadsShared) <= 168960);

extern "C" __global__ void __launch_bounds__(kThreads, 1) quantize_sm90a_fp16_d64_rotated_heads(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map,
    unsigned char* q_out_ptr, unsigned char* k_out_ptr, unsigned char* v_out_ptr, float* q_descale_ptr,
    float* k_descale_ptr, float* v_descale_ptr, const float* signs_ptr, uint32_t* maxima_ptr,
    const void* rotary_cos_ptr, const void* rotary_sin_ptr, const int* rotary_offsets_ptr,
    long long stride_q_out_b, long long stride_q_out_s, long long stride_q_out_h,
    long long stride_k_out_b, long long stride_k_out_s, long long stride_k_out_h,
    long long stride_v_out_b, long long stride_v_out_s, long long stride_v_out_h,
    long long cos_row_bytes, long long sin_row_bytes, long long sign_bits_0, long long sign_bits_1, int heads,
    int kv_heads, int seqlen_q, int seqlen_k, int units, int units_q, int units_k, int e5m2_out, int hadamard,
    int lag, int bands, int bands_q, int words_q, int words_k, int tiles_q, int tiles_k, int positions,
    int rotary_form, int angle_bytes, int group, int group_kv, int set_q, int set_k, int sets_q, int sets_k,
    int across_q, int across_k, int group_reciprocal, int group_kv_reciprocal, int set_q_reciprocal,
    int set_k_reciprocal, int sets_q_reciprocal, int sets_k_reciprocal, int across_q_reciprocal,
    int across_k_reciprocal, float norm
) {
  char* const memory = shared_memory;
  RotatedHeadsShared& shared = *reinterpret_cast<RotatedHeadsShared*>(memory + kRotatedShared);
  const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(memory));
  const int of_block = __shfl_sync(~0u, threadIdx.x / 128, 0);  // the group, which the compiler knows to be that of a warp
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = threadIdx.x % 32;
  const uint32_t full = base + kRotatedShared + 8 * kRotatedStages * of_block;
  const uint32_t angles_full = base + kRotatedShared + 8 * kRotatedStages * kGroups, angles_empty = angles_full + 16;

  if (threadIdx.x == 0) {
    shared.parts[0] = {q_out_ptr, q_descale_ptr, stride_q_out_b, stride_q_out_s, stride_q_out_h,
                       Divisor(set_q, set_q_reciprocal), Divisor(sets_q, sets_q_reciprocal),
                       Divisor(across_q, across_q_reciprocal), Divisor(group, group_reciprocal),
                       0, words_q, heads, seqlen_q, tiles_q};
    shared.parts[1] = {k_out_ptr, k_descale_ptr, stride_k_out_b, stride_k_out_s, stride_k_out_h,
                       Divisor(set_k, set_k_reciprocal), Divisor(sets_k, sets_k_reciprocal),
                       Divisor(across_k, across_k_reciprocal), Divisor(group_kv, group_kv_reciprocal),
                       bands_q, words_k, kv_heads, seqlen_k, tiles_k};
    init_barriers(base + kRotatedShared, kGroups * kRotatedStages + 2, 1);
    init_barriers(angles_empty, 2, kGroups);
    fence_barrier_init();
  }
  if (threadIdx.x < kHeadDim / 32) {
    shared.flips[threadIdx.x] = signs_of_word(threadIdx.x, signs_ptr, sign_bits_0, sign_bits_1);
  }
  __syncthreads();  // parts, barriers and signs are there

  // Steps: the first `lead` bands are found, then one is found and one is rounded in turn, then the last ones are rounded.
  const int own = max(bands - static_cast<int>(blockIdx.x) + static_cast<int>(gridDim.x) - 1, 0) / gridDim.x;
  const int lead = min(lag, own);
  const auto has_to_find = [&](int step) {
    const int later = step - lead;
    return later < 0 || (later < 2 * (own - lead) && (later & 1) == 0);
  };
  const auto task_at = [&](int step) {
    const int later = step - lead;
    const int turn = later < 0 ? step : later >= 2 * (own - lead) ? step - own : (later >> 1) + (later & 1 ? 0 : lead);
    const int band = blockIdx.x + turn * gridDim.x, which = band >= bands_q;
    const KeptPart& part = shared.parts[which];
    const int set = part.set.quotient(band - part.begin), of_set = band - part.begin - set * part.set.value;
    const int b = part.sets.quotient(set), tile = part.pairs.quotient(of_set);
    const int across = (set - b * part.sets.value) * part.pairs.value + of_set - tile * part.pairs.value;
    return int4{which, b, (across * kGroups + of_block) * kHeads, tile};
  };
  const auto bring = [&](int step) {
    if (step >= 2 * own) return;
    const int4 task = task_at(step);
    const int stage = step % kRotatedStages;
    shared.tasks[of_block][stage] = task;
    load_tile(base + (of_block * kRotatedStages + stage) * kTile, task.x == 0 ? q_map : k_map, full + 8 * stage, task.z,
              task.w * kRows, task.y);
  };
  if (thread == 0) {
    for (int stage = 0; stage < kRotatedStages; ++stage) bring(stage);
  }
  if (threadIdx.x < kHeadDim / kNumbers) {
    const uint32_t bits = shared.flips[threadIdx.x / 4] >> threadIdx.x % 4 * kNumbers;
    for (int i = 0; i < kNumbers / 2; ++i) shared.vector_signs[threadIdx.x].pairs[i] = signs_of_pair(bits, i);
  }
  __syncthreads();

  // One warp brings the angles of a step once those of the last but one have been read.
  const auto bring_angles = [&](int step) {
    if (step >= 2 * own) return;
    const int4 task = task_at(step);
    const int slot = step & 1, offset = rotary_offsets_ptr == nullptr ? 0 : rotary_offsets_ptr[task.y];
    const uint32_t to = base + kTables + slot * 2 * kTable;
    wait(angles_empty + 8 * slot, (step >> 1 & 1) ^ 1);
    if (lane == 0) arrive_expecting(angles_full + 8 * slot, 2 * kRows * angle_bytes);
    __syncwarp();
    for (int row = lane; row < kRows; row += 32) {
      const long long token = task.w * kRows + row;
      const long long position = max(0ll, min(token + offset, positions - 1ll));
      load_bytes(to + row * kAngles, static_cast<const char*>(rotary_cos_ptr) + position * cos_row_bytes,
                 angles_full + 8 * slot, angle_bytes);
      load_bytes(to + kTable + row * kAngles, static_cast<const char*>(rotary_sin_ptr) + position * sin_row_bytes,
                 angles_full + 8 * slot, angle_bytes);
    }
  };
  const bool brings_angles = threadIdx.x / 32 == 4 * kGroups - 1;
  if (brings_angles) bring_angles(0);

  const float own_norm = hadamard ? norm : 1.0f, limit = e5m2_out ? kLargest<e5m2> : kLargest<e4m3>;
  float factors[kHeads];  // of the heads of the last tile
  int known_words = -1;   // where their maxima begin, added up: no other heads of a tile have this sum
  int uses = 0;
  for (int step = 0; step < 2 * own; ++step) {
    const int stage = step % kRotatedStages, slot = step & 1;
    const bool finds = has_to_find(step);
    if (brings_angles) bring_angles(step + 1);
    wait(full + 8 * stage, step / kRotatedStages & 1);
    const int4 task = shared.tasks[of_block][stage];
    const int b = task.y, first_head = task.z;
    const KeptPart& part = shared.parts[task.x];
    const int words_of_tile = part.words_of_head(b, first_head) + part.words_of_head(b, first_head + kHeads - 1);
    const bool waits = !finds && words_of_tile != known_words;
    uint32_t(&largest)[4][kHeads] = shared.largest[uses & 1][of_block];
    if (waits) {  // seldom, so that it may take its time, and not while registers are full
      const int count = part.group.value * part.tiles;
      Asked asked;
      ask(asked, maxima_ptr, part, b, first_head, count);
      wait_for_maxima(largest, asked, maxima_ptr, part, b, first_head, count);
    }
    float x[kSlots][kNumbers];
    read_rows(x, memory + (of_block * kRotatedStages + stage) * kTile);
    wait(angles_full + 8 * slot, step >> 1 & 1);
    rotate_rows(x, memory + kTables + slot * 2 * kTable, rotary_form);
    if (hadamard) transform_rows(x, shared.vector_signs);

    if (finds) {
      uint32_t of_warp[kHeads];
      find_largest_of_warp(x, of_warp);
#pragma unroll
      for (int head = 0; head < kHeads; ++head) {
        if (lane == 0) largest[warp][head] = of_warp[head];
      }
    }
    named_sync(Named::kTile, of_block, 128);
    if (finds || waits) ++uses;
    if (thread == 0) {
      bring(step + kRotatedStages);
      arrive(angles_empty + 8 * slot);
    }
    if (finds) {
      if (thread < kHeads && first_head + thread < part.heads) {
        tell(maxima_ptr + part.words + (b * part.heads + first_head + thread) * part.tiles + task.w,
             largest_of_group(largest, thread));
      }
      continue;
    }
    if (waits) {
      known_words = words_of_tile;
#pragma unroll
      for (int head = 0; head < kHeads; ++head) {
        const float scale = scale_of(__uint_as_float(largest_of_group(largest, head)) * own_norm, limit);
        factors[head] = __fdiv_rn(1.0f, scale) * own_norm;
        // The first tile of a head that a group rounds: some group writes each scale, maybe several the same.
        const int of_all = part.scale_of_head(first_head + head);
        if (thread == 0) part.scales[b * kv_heads + of_all] = scale;
      }
    }
    const auto store = [&]<typename Rounded>() {
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        const int of_tile = kHeads == 1 ? 0 : piece / 2, head = first_head + of_tile, token = task.w * kRows + thread / 2;
        unsigned char* const of_row = part.to + b * part.to_b + head * part.to_h + token * part.to_s;
        const uint4 rounded = in_8_bits<Rounded>(x[2 * piece], x[2 * piece + 1], factors[of_tile]);
        if (head < part.heads && token < part.seqlen) {
          __stcs(reinterpret_cast<uint4*>(of_row + column_of_row(piece)), rounded);
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
