// quantize_sm90a_bf16_d128
//
// Queries, keys and values become 8 bits and scales of blocks; rows of Q and K are transformed.
// Rendered from templates/cuda/quantize/tiles.cu.j2 by `attngen build specs/serving.yaml`.
//
// A tile is 64 tokens of one head, and has a scale for each, or shares it with the tile of the next tokens.
// Each group of four warps works on a tile, while TMA loads its next ones. Rows that are transformed are
// multiplied: A is the tile, B a Hadamard matrix with the random signs in its rows.
// Rotated rows are transformed in registers, two lanes a row; their angles lie in shared memory for all heads of a token.
#include "pdl.cuh"
#include "divisor.cuh"
#include "pieces.cuh"
#include "ring.cuh"
#include "scales.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

using Element = bf16;

constexpr int kGroups = 4;  // of four warps
constexpr int kThreads = 128 * kGroups;
constexpr int kStages = 3;  // tiles of a group in shared memory
constexpr int kRotatedStages = 2;  // where angles lie beside them
constexpr int kRows = 64;  // of a tile
constexpr int kHeadDim = 128;
constexpr int kHeads = 2 * 64 / kHeadDim;  // of a tile

// In bytes.
constexpr uint32_t kBox = kRows * 128;  // 64 columns
constexpr uint32_t kTile = 2 * kBox;
constexpr uint32_t kFactorBox = kHeadDim * 128;  // 64 rows of the Hadamard matrix
constexpr uint32_t kAngles = 272, kTable = kRows * kAngles;  // rows of angles lie in different banks
// Where things begin in shared memory, beside tiles.
constexpr uint32_t kFactors = kGroups * kStages * kTile;
constexpr uint32_t kTables = kGroups * kRotatedStages * kTile;  // cosines and sines, twice
constexpr uint32_t kShared = 229376;

// Q, K or V: its results.
struct Part {
  unsigned char* to;
  float* scales;
  long long to_b, to_s, to_h;  // strides, in elements
};

// Named barriers of the hardware; 0 is __syncthreads.
enum class Named {
  kTile = 1,  // of the groups that share the tokens of a scale
};

// What threads tell each other.
struct Shared {
  uint64_t full[kGroups * kStages];  // barriers: a tile is there
  uint64_t angles[4];  // two tables are there, and have been read
  Part parts[3];
  uint32_t flips[kHeadDim / 32];  // bits of the numbers of a row that change their signs
  Words vector_signs[kHeadDim / kNumbers];
  uint32_t largest[2][kGroups][4][kHeads];  // of each warp, of two tiles in turn
};
static_assert(kShared + sizeof(Shared) <= 230400);

extern __shared__ char shared_memory[];

extern "C" __global__ void __launch_bounds__(kThreads, 1) quantize_sm90a_bf16_d128(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map,
    unsigned char* q_out_ptr, unsigned char* k_out_ptr, unsigned char* v_out_ptr, float* q_descale_ptr,
    float* k_descale_ptr, float* v_descale_ptr, const float* signs_ptr, const void* rotary_cos_ptr,
    const void* rotary_sin_ptr, const int* rotary_offsets_ptr,
    long long stride_q_out_b, long long stride_q_out_s, long long stride_q_out_h,
    long long stride_k_out_b, long long stride_k_out_s, long long stride_k_out_h,
    long long stride_v_out_b, long long stride_v_out_s, long long stride_v_out_h,
    long long cos_row_bytes, long long sin_row_bytes, long long sign_bits_0, long long sign_bits_1, int heads,
    int kv_heads, int seqlen_q, int seqlen_k, int units, int units_q, int units_k, int sharers, int e5m2_out,
    int rotates, int hadamard, int bands_q, int bands_k, int positions, int rotary_form, int angle_bytes,
    int heads_q, int heads_k, int tiles_q, int tiles_k, int turns_q, int turns_k, int heads_q_reciprocal,
    int heads_k_reciprocal, int tiles_q_reciprocal, int tiles_k_reciprocal, int turns_q_reciprocal,
    int turns_k_reciprocal, float norm
) {
  launch_dependents();
  char* const memory = shared_memory;
  Shared& shared = *reinterpret_cast<Shared*>(memory + kShared);
  const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(memory));
  const int of_block = threadIdx.x / 128;  // the group
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = threadIdx.x % 32;
  const uint32_t full = base + kShared + 8 * kStages * of_block;
  const uint32_t angles_full = base + kShared + 8 * kStages * kGroups, angles_empty = angles_full + 16;
  if (threadIdx.x == 0) {
    shared.parts[0] = {q_out_ptr, q_descale_ptr, stride_q_out_b, stride_q_out_s, stride_q_out_h};
    shared.parts[1] = {k_out_ptr, k_descale_ptr, stride_k_out_b, stride_k_out_s, stride_k_out_h};
    shared.parts[2] = {v_out_ptr, v_descale_ptr, stride_v_out_b, stride_v_out_s, stride_v_out_h};
    init_barriers(base + kShared, kGroups * kStages + 2, 1);
    init_barriers(angles_empty, 2, kGroups / sharers);
    fence_barrier_init();
  }
  wait_dependencies();  // nothing in global memory is read or written before
  if (threadIdx.x < kHeadDim / 32) {
    const long long bits = threadIdx.x < 2 ? sign_bits_0 : sign_bits_1;
    uint32_t word = bits >> threadIdx.x % 2 * 32;
    if (signs_ptr != nullptr) {
      word = 0;
      for (int i = 0; i < 32; ++i) word |= static_cast<uint32_t>(signs_ptr[32 * threadIdx.x + i] < 0.0f) << i;
    }
    shared.flips[threadIdx.x] = word;
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
    arrive_expecting(barrier, kTile);
#pragma unroll
    for (int box = 0; box < kTile / kBox; ++box) {
      load_box(to + box * kBox, map, barrier, kHeads == 1 ? 64 * box : 0, task.head + (kHeads == 1 ? 0 : box),
               task.tile * kRows, task.b);
    }
  };

  // A group's numbers become 8 bits: four pieces of 16 in each thread, of rows and columns of the tile as `row_of` and
  // `column_of` say. `ready` is called when all have read the tile. `pair`: which of `largest` is free.
  const auto finish = [&](const float (&x)[kSlots][kNumbers], const Task& task, bool transforms, int pair,
                          const auto& row_of, const auto& column_of, const auto& ready) {
    float magnitudes[kPieces];
    find_largest_of_pieces(x, magnitudes);
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
      float of_head = fmaxf(magnitudes[2 * head], magnitudes[2 * head + 1]);
      if (kHeads == 1) of_head = fmaxf(of_head, fmaxf(magnitudes[2], magnitudes[3]));
      const uint32_t of_warp = __reduce_max_sync(~0u, __float_as_uint(of_head));
      if (lane == 0) shared.largest[pair][of_block][warp][head] = of_warp;
    }
    named_sync(Named::kTile, of_block >> sharers - 1, 128 * sharers);
    ready();

    const Part& part = shared.parts[task.part];
    const int heads_here = task.part == 0 ? heads : kv_heads, seqlen = task.part == 0 ? seqlen_q : seqlen_k;
    const int blocks = task.part == 0 ? tiles_q : tiles_k;
    const float own_norm = transforms ? norm : 1.0f, limit = e5m2_out ? kLargest<e5m2> : kLargest<e4m3>;
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
        const int of_tile = kHeads == 1 ? 0 : piece / 2, head = task.head + of_tile, token = task.tile * kRows + row_of(piece);
        unsigned char* const of_row = part.to + task.b * part.to_b + head * part.to_h + token * part.to_s;
        const uint4 rounded = in_8_bits<Rounded>(x[2 * piece], x[2 * piece + 1], factors[of_tile]);
        if (head < heads_here && token < seqlen) __stcs(reinterpret_cast<uint4*>(of_row + column_of(piece)), rounded);
      }
    };
    if (e5m2_out) {
      store.template operator()<e5m2>();
    } else {
      store.template operator()<e4m3>();
    }
  };
  if (rotates) {
    // A block has a band, all heads of some tokens, which share angles, then another one. Each group has some turns at a
    // band, and one thread of it has its next tiles brought.
    const int blocks = gridDim.x, own = blockIdx.x;
    const auto own_of = [&](int bands) { return max(bands - own + blocks - 1, 0) / blocks; };
    const int own_bands_q = own_of(bands_q), own_bands = own_of(bands_q + 2 * bands_k);
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
      const bool turns = task.part < 2;
      const int stage = turn % kRotatedStages, table = here.own_band * sharers + (of_block & sharers - 1), slot = table & 1;
      if (brings_angles && here.first) bring_angles(here.own_band + bands_ahead);
      wait(full + 8 * stage, turn / kRotatedStages & 1);
      const int row = thread / 2;  // two lanes have a row, each every other pair of vectors
      const char* const tile = memory + (of_block * kRotatedStages + stage) * kTile;
      const auto vector_of = [&](int slot) { return (slot & 1) + 2 * (lane % 2) + (slot & 2) * 2; };  // in its box
      float x[kSlots][kNumbers];
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) {
        to_floats<Element>(x[slot], Words::load(tile + slot / 4 * kBox + row * 128 + (vector_of(slot) ^ row % 8) * 16));
      }
      if (turns) {
        wait(angles_full + 8 * slot, table >> 1 & 1);
        const char* const cosines = memory + kTables + slot * 2 * kTable + row * kAngles;
#pragma unroll
        for (int slot = 0; slot < kSlots / 2; ++slot) {  // a number's partner is in the other box
#pragma unroll
          for (int i = 0; i < kNumbers; i += 4) {
            float cos[4], sin[4];
            four_table_numbers(cos, cosines, kNumbers * vector_of(slot) + i, rotary_form);
            four_table_numbers(sin, cosines + kTable, kNumbers * vector_of(slot) + i, rotary_form);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              const float first = x[slot][i + j], second = x[slot + kSlots / 2][i + j];
              x[slot][i + j] = rotated(first, second, cos[j], sin[j], true);
              x[slot + kSlots / 2][i + j] = rotated(second, first, cos[j], sin[j], false);
            }
          }
        }
        if (hadamard) {
#pragma unroll
          for (int slot = 0; slot < kSlots; ++slot) flip(x[slot], shared.vector_signs[vector_of(slot) + slot / 4 * 8]);
          hadamard_transform<3, 1>(x);
        }
      }
      finish(x, task, hadamard && turns, turn & 1, [&](int) { return row; },
             [&](int piece) { return 16 * (lane % 2) + piece % 2 * 32 + piece / 2 * 64; },
             [&] {
               if (thread != 0) return;
               if (turn + kRotatedStages < all_turns) {
                 bring(turn_at(turn + kRotatedStages).index, ring + stage * kTile, full + 8 * stage);
               }
               if (turns && here.last) arrive(angles_empty + 8 * slot);
             });
    }
    return;
  }
  // All groups of all blocks have neighbouring tiles at a time, so that what is read together lies together.
  const int first = blockIdx.x * kGroups + of_block, all = gridDim.x * kGroups;
  const uint32_t ring = base + of_block * kStages * kTile;
  if (thread == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      if (first + stage * all < units) bring(first + stage * all, ring + stage * kTile, full + 8 * stage);
    }
  }
  // B of the products, K-major and swizzled: row k, column n. Columns come in such an order that a thread gets 16 that lie
  // side by side.
  for (int i = threadIdx.x; i < kHeadDim * kHeadDim / 2; i += kThreads) {
    const int k = i % (kHeadDim / 2) * 2, n = i / (kHeadDim / 2);
    const int column = n / 64 * 64 + n % 8 / 2 * 16 + n / 8 % 8 * 2 + n % 2;
    const uint32_t both = shared.flips[k / 32] >> k % 32 ^ (__popc(k & column) & 1) ^ (__popc(k + 1 & column) & 1) << 1;
    const uint32_t at = kFactors + k / 64 * kFactorBox + n * 128 + (k % 64 / 8 ^ n % 8) * 16 + k % 8 * 2;
    *reinterpret_cast<uint32_t*>(memory + at) = pack<Element>(1.0f, 1.0f) ^ signs_of_pair(both, 0);
  }
  fence_async_proxy();
  __syncthreads();

  for (int index = first, turn = 0; index < units; index += all, ++turn) {
    const Task task = task_at(index);
    const bool multiplies = task.part < 2;
    const int stage = turn % kStages, row = 16 * warp + lane / 4;
    const uint32_t tile = (of_block * kStages + stage) * kTile;
    wait(full + 8 * stage, turn / kStages & 1);
    float x[kSlots][kNumbers];  // pieces are of two rows, 8 apart, and of both halves of the columns
    if (multiplies) {
      float products[kSlots * kNumbers];
      const Matrix<16, 1024, 1> a(base + tile), factors(base + kFactors);
      fence_products();
#pragma unroll
      for (int head = 0; head < kHeads; ++head) {
        auto& d = *reinterpret_cast<float(*)[kHeadDim / 2]>(&products[head * kHeadDim / 2]);
#pragma unroll
        for (int i = 0; i < kHeadDim / 16; ++i) {
          const uint32_t box = head + i / 4, at = i % 4 * 32;
          Product<Element, kHeadDim>::template ss<0>(
              d, a.at(box * kBox + at), factors.at(i / 4 * kFactorBox + at), i > 0);
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
    } else {
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) {
        const int vector = 2 * (lane % 4) + slot % 2;
        const char* const box = memory + tile + slot / 4 * kBox + slot / 2 % 2 * 8 * 128;
        to_floats<Element>(x[slot], Words::load(box + row * 128 + (vector ^ row % 8) * 16));
      }
    }
    finish(x, task, multiplies, turn & 1, [&](int piece) { return row + piece % 2 * 8; },
           [&](int piece) { return 16 * (lane % 4) + (kHeads == 1 ? piece / 2 * 64 : 0); },
           [&] {
             if (thread == 0 && index + kStages * all < units) {
               bring(index + kStages * all, ring + stage * kTile, full + 8 * stage);
             }
           });
  }
}
