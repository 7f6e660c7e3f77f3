// quantize_sm90a_bf16_d128
//
// Queries, keys and values become 8 bits and scales; rows of Q and K are rotated and transformed.
// Rendered from templates/cuda/quantize/tiles.cu.j2 by `attngen build specs/fp8.yaml`.
//
// A tile is 64 tokens of one head. Each group of four warps works on one, while the copy engine brings
// the next. Rows that are transformed without rotation are multiplied: A is the tile, B a Hadamard matrix with the random
// signs in its rows. Rotated rows are transformed in registers, two lanes a row, and their angles lie in shared memory for
// all heads of a token.
// A scale of a head takes a tile twice: to find the largest magnitude, and, `lag` tiles later, to round it, when it is
// still in L2. Where a scale is of a tensor, and where rows of a head are rotated, these are two launches.
#include "pdl.cuh"
#include "counts.cuh"
#include "divisor.cuh"
#include "pieces.cuh"
#include "ring.cuh"
#include "scales.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

using Element = bf16;

constexpr int kGroups = 4;  // of four warps
constexpr int kThreads = 128 * kGroups;
constexpr int kStages = 2;  // tiles of a group in shared memory
constexpr int kRows = 64;  // of a tile
constexpr int kHeadDim = 128;
constexpr int kHeads = 2 * 64 / kHeadDim;  // of a tile

// In bytes. Tables of cosines and of sines have 16 bytes more for each row than angles take, so that rows lie in other banks.
constexpr uint32_t kBox = kRows * 128;  // 64 columns
constexpr uint32_t kTile = 2 * kBox;
constexpr uint32_t kFactorBox = kHeadDim * 128;  // 64 rows of the Hadamard matrix
constexpr uint32_t kAngles = 272, kTable = kRows * kAngles;

// Where things begin in shared memory. Products need factors, rotation two tables of cosines and two of sines.
constexpr uint32_t kRing = 0, kFactors = kGroups * kStages * kTile, kTables = kFactors;
constexpr uint32_t kShared = kFactors + 69632;

enum Phase { kFinds = 0, kRounds = 1, kBoth = 2 };

// Q, K or V: results, and in which order its tiles are worked on. Some heads, side by side, form a section.
struct Part {
  unsigned char* to;
  float* scales;
  long long to_b, to_s, to_h;           // strides, in elements
  Divisor section_heads, section, sections;  // tiles of a section side by side, and in all; sections of a batch entry
  int begin, first_section, first_band;  // its first tile; of sections and of bands
  int heads, seqlen, granularity;
};

// What is in a stage: a tile by its place among all, -1 after the last one. `again`: its largest magnitude is known.
// `last`: of a band, for this group; the angles of the band are in that table.
struct Place {
  int position;
  bool again, last;
  int table;
};

// What threads tell each other.
struct Shared {
  uint64_t barriers[kGroups * kStages + 4];  // tiles that are there; angles that are there, and that have been read
  Part parts[3];
  Words vector_signs[kHeadDim / kNumbers];
  uint32_t flips[kHeadDim / 32];           // bits of the numbers of a row that change their signs
  uint32_t largest[2][kGroups][4][kHeads];  // of each warp, of two tiles in turn
  Place places[kGroups][kStages];
};
static_assert(kShared + sizeof(Shared) <= 202752);

extern __shared__ char shared_memory[];

extern "C" __global__ void __launch_bounds__(kThreads, 1) quantize_sm90a_bf16_d128(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map,
    unsigned char* q_out_ptr, unsigned char* k_out_ptr, unsigned char* v_out_ptr, float* q_descale_ptr,
    float* k_descale_ptr, float* v_descale_ptr, const float* signs_ptr, uint32_t* maxima_ptr,
    const void* rotary_cos_ptr, const void* rotary_sin_ptr, const int* rotary_offsets_ptr,
    long long stride_q_out_b, long long stride_q_out_s, long long stride_q_out_h,
    long long stride_k_out_b, long long stride_k_out_s, long long stride_k_out_h,
    long long stride_v_out_b, long long stride_v_out_s, long long stride_v_out_h,
    long long cos_row_bytes, long long sin_row_bytes, long long sign_bits_0, long long sign_bits_1, int batch,
    int heads, int kv_heads, int seqlen_q, int seqlen_k, int units, int units_q, int units_k, int bands_q,
    int bands_k, int sharers, int scales_qk, int scales_v, int phase, int lag, int counters, int tickets,
    int backwards, int hadamard, int rotates, int positions, int rotary_form, int angle_bytes, int e5m2_out,
    int group, int section_heads_q, int section_heads_k, int section_q, int section_k, int sections_q,
    int sections_k, int group_reciprocal, int section_heads_q_reciprocal, int section_heads_k_reciprocal,
    int section_q_reciprocal, int section_k_reciprocal, int sections_q_reciprocal, int sections_k_reciprocal,
    float norm
) {
  launch_dependents();
  char* const memory = shared_memory;
  auto& [barriers, parts, vector_signs, flips, largest, places] = *reinterpret_cast<Shared*>(memory + kShared);
  const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(memory));
  const int group_of_warps = threadIdx.x / 128, thread = threadIdx.x % 128, warp = thread / 32;
  const uint32_t first_barrier = base + kShared;
  const uint32_t full = first_barrier + 8 * kStages * group_of_warps;
  const uint32_t angles_full = first_barrier + 8 * kStages * kGroups, angles_empty = angles_full + 16;

  if (threadIdx.x == 0) {
    const Divisor heads_of_q(section_heads_q, section_heads_q_reciprocal), section_of_q(section_q, section_q_reciprocal);
    const Divisor heads_of_k(section_heads_k, section_heads_k_reciprocal), section_of_k(section_k, section_k_reciprocal);
    const Divisor all_of_q(sections_q, sections_q_reciprocal), all_of_k(sections_k, sections_k_reciprocal);
    parts[0] = {q_out_ptr, q_descale_ptr, stride_q_out_b, stride_q_out_s, stride_q_out_h, heads_of_q, section_of_q,
                all_of_q, 0, 0, 0, heads, seqlen_q, scales_qk};
    parts[1] = {k_out_ptr, k_descale_ptr, stride_k_out_b, stride_k_out_s, stride_k_out_h, heads_of_k, section_of_k,
                all_of_k, units_q, batch * sections_q, bands_q, kv_heads, seqlen_k, scales_qk};
    parts[2] = {v_out_ptr, v_descale_ptr, stride_v_out_b, stride_v_out_s, stride_v_out_h, heads_of_k, section_of_k,
                all_of_k, units_q + units_k, batch * (sections_q + sections_k), bands_q + bands_k, kv_heads, seqlen_k,
                scales_v};
    init_barriers(first_barrier, kGroups * kStages + 2, 1);
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
    flips[threadIdx.x] = word;
  }
  __syncthreads();  // parts, barriers and signs are there
  if (hadamard && !rotates) {
    // B of the products, K-major and swizzled: row k, column n. Columns come in such an order that a thread gets 16 that lie
    // side by side.
    for (int i = threadIdx.x; i < kHeadDim * kHeadDim / 2; i += kThreads) {
      const int k = i % (kHeadDim / 2) * 2, n = i / (kHeadDim / 2);
      const int column = n / 64 * 64 + n % 8 / 2 * 16 + n / 8 % 8 * 2 + n % 2;
      const uint32_t both = flips[k / 32] >> k % 32 ^ (__popc(k & column) & 1) ^ (__popc(k + 1 & column) & 1) << 1;
      const uint32_t at = kFactors + k / 64 * kFactorBox + n * 128 + (k % 64 / 8 ^ n % 8) * 16 + k % 8 * 2;
      *reinterpret_cast<uint32_t*>(memory + at) = pack<Element>(1.0f, 1.0f) ^ signs_of_pair(both, 0);
    }
    fence_async_proxy();
  } else if (threadIdx.x < kHeadDim / kNumbers) {
    const uint32_t own = flips[threadIdx.x / 4] >> threadIdx.x % 4 * kNumbers;
    for (int i = 0; i < kNumbers / 2; ++i) vector_signs[threadIdx.x].pairs[i] = signs_of_pair(own, i);
  }
  __syncthreads();

  // A tile.
  struct Task {
    int part, b, head, tile, section;
  };
  const auto part_at = [&](int position) { return (position >= units_q) + (position >= units_q + units_k); };
  const auto task_at = [&](int position) {
    Task task;
    task.part = part_at(position);
    const Part& part = parts[task.part];
    const int unit = position - part.begin, below = unit >> sharers - 1;
    const int section = part.section.quotient(below), in_section = below - section * part.section.value;
    const int row = part.section_heads.quotient(in_section);
    task.b = part.sections.quotient(section);
    const int first_head = (section - task.b * part.sections.value) * part.section_heads.value;
    task.head = (first_head + in_section - row * part.section_heads.value) * kHeads;
    task.tile = row * sharers + (unit & sharers - 1);
    task.section = part.first_section + section;
    return task;
  };

  // One thread of a group has tiles brought, in the order in which the group works on them, and says which they are.
  // All groups of all blocks have neighbours at a time, so that what is read together lies together. Where rows are
  // rotated, a block has a band, all heads of some tokens, which share angles. Where tiles are taken twice, groups take
  // tickets: who waits for the maximum of a section waits for earlier tickets alone, and blocks that run have those.
  const int own = blockIdx.x * kGroups + group_of_warps, all = gridDim.x * kGroups;
  const auto part_of_band = [&](int band) { return (band >= bands_q) + (band >= bands_q + bands_k); };
  const auto take_ticket = [&](int turn) {
    return phase == kBoth ? static_cast<int>(atomicAdd(maxima_ptr + tickets, 1u)) : turn * all + own;
  };
  const int first_band = (phase == kFinds && scales_qk == kToken ? bands_q + bands_k : 0) + blockIdx.x;
  int turn = 0, band = first_band, bands = 0, ticket = 0;
  const auto bring = [&](int stage) {
    Place place{-1, false, false, 0};
    if (rotates) {
      if (band < bands_q + 2 * bands_k) {
        const Part& part = parts[part_of_band(band)];
        const int width = part.section_heads.value * sharers, of_band = turn * kGroups + group_of_warps;
        place = {part.begin + (band - part.first_band) * width + of_band, phase == kRounds, of_band + kGroups >= width,
                 bands * sharers + (group_of_warps & sharers - 1)};
        ++turn;
        if (place.last) turn = 0, band += gridDim.x, ++bands;
      }
    } else {
      while (place.position < 0) {
        const int own_turn = ticket / all;
        if (phase == kBoth) {
          const bool again = own_turn % 2;
          const int position = ticket - (own_turn + 1) / 2 * all - (again ? lag : 0);
          if (again && position >= units) break;
          if (position >= 0 && position < units && !(again && parts[part_at(position)].granularity == kToken)) {
            place = {position, again, false, 0};
          }
        } else {
          if (ticket >= units) break;
          place = {backwards ? units - 1 - ticket : ticket, phase == kRounds, false, 0};
        }
        ticket = take_ticket(++turn);
      }
    }
    places[group_of_warps][stage] = place;
    if (place.position < 0) {
      arrive(full + 8 * stage);
      return;
    }
    const Task task = task_at(place.position);
    const TensorMap& map = task.part == 0 ? q_map : task.part == 1 ? k_map : v_map;
    const uint32_t to = base + kRing + (group_of_warps * kStages + stage) * kTile;
    arrive_expecting(full + 8 * stage, kTile);
#pragma unroll
    for (int box = 0; box < kTile / kBox; ++box) {
      load_box(to + box * kBox, map, full + 8 * stage, kHeads == 1 ? 64 * box : 0, task.head + (kHeads == 1 ? 0 : box),
               task.tile * kRows, task.b);
    }
  };
  if (thread == 0) {
    if (!rotates) ticket = take_ticket(0);
    for (int stage = 0; stage < kStages; ++stage) bring(stage);
  }

  // One warp brings the angles of a band once those of an earlier one have been read: one table, or two of 64 tokens each
  // where two groups share a scale.
  const int bands_ahead = sharers == 1;
  const auto bring_angles = [&](int own_band) {
    const int of_all = first_band + own_band * gridDim.x;
    if (of_all >= bands_q + bands_k) return;
    const Part& part = parts[part_of_band(of_all)];
    const int row_of_band = of_all - part.first_band, tiles = part.section.value / part.section_heads.value;
    const int b = row_of_band / tiles, lane = threadIdx.x % 32;
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
  const bool brings_angles = rotates && threadIdx.x / 32 == 4 * kGroups - 1;
  if (brings_angles && bands_ahead) bring_angles(0);

  int pair = 0;                    // of `largest`
  int known = -1, known_band = -1;  // the last section whose maxima were there, and the last band that was begun
  for (int taken = 0;; ++taken) {
    const int stage = taken % kStages;
    wait(full + 8 * stage, taken / kStages & 1);
    const Place place = places[group_of_warps][stage];
    if (place.position < 0) break;
    const Task task = task_at(place.position);
    const Part& part = parts[task.part];
    const bool of_q_or_k = task.part < 2, transforms = hadamard && of_q_or_k, turns = rotates && of_q_or_k;
    const bool multiplies = transforms && !turns;
    const int slot_of_angles = place.table & 1;
    if (brings_angles && place.table >> sharers - 1 != known_band) {
      known_band = place.table >> sharers - 1;
      bring_angles(known_band + bands_ahead);
    }
    const bool of_tokens = part.granularity == kToken, finds = !place.again || part.granularity == kBlock || of_tokens;
    const bool rounds = place.again || (phase == kBoth && of_tokens);

    // The numbers of the thread: four pieces of 16, in two vectors each. After products these are of two rows, 8 apart,
    // and of each half of the columns; else of one row, which two lanes share.
    const uint32_t tile = kRing + (group_of_warps * kStages + stage) * kTile;
    const int lane = threadIdx.x % 32, row = multiplies ? 16 * warp + lane / 4 : thread / 2;
    const auto row_of = [&](int piece) { return multiplies ? row + 8 * (piece % 2) : row; };
    const auto column_of = [&](int piece) {
      const int in_box = multiplies ? 16 * (lane % 4) : 16 * (lane % 2) + piece % 2 * 32;
      return in_box + (kHeads == 1 ? piece / 2 * 64 : 0);
    };
    float x[kSlots][kNumbers];
    if (multiplies) {
      float products[32 * kTile / kBox];
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
      for (int i = 0; i < 32 * kTile / kBox; ++i) {
        const int piece = i / 32 * 2 + i / 2 % 2, place = i % 32 / 4 * 2 + i % 2;
        x[2 * piece + place / kNumbers][place % kNumbers] = products[i];
      }
    } else {
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) {
        const int vector = (slot & 1) + 2 * (lane % 2) + (slot & 2) * 2;
        to_floats<Element>(x[slot], Words::load(memory + tile + slot / 4 * kBox + row * 128 + (vector ^ row % 8) * 16));
      }
    }
    if (turns) {
      wait(angles_full + 8 * slot_of_angles, place.table >> 1 & 1);
      const char* const cosines = memory + kTables + slot_of_angles * 2 * kTable + row * kAngles;
      constexpr int kStep = kHeads == 1 ? 4 : 2;  // a number and its partner are that many slots apart
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) {
        if (slot & kStep) continue;
        const int vector = (slot & 1) + 2 * (lane % 2) + (kHeads == 1 ? (slot & 2) * 2 : 0);
#pragma unroll
        for (int i = 0; i < kNumbers; i += 4) {
          float cos[4], sin[4];
          four_table_numbers(cos, cosines, kNumbers * vector + i, rotary_form);
          four_table_numbers(sin, cosines + kTable, kNumbers * vector + i, rotary_form);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float first = x[slot][i + j], second = x[slot + kStep][i + j];
            x[slot][i + j] = rotated(first, second, cos[j], sin[j], true);
            x[slot + kStep][i + j] = rotated(second, first, cos[j], sin[j], false);
          }
        }
      }
      if (transforms) {
#pragma unroll
        for (int slot = 0; slot < kSlots; ++slot) {
          const int vector = (slot & 1) + 2 * (lane % 2) + (slot & 2) * 2 + (kHeads == 1 ? slot / 4 * 8 : 0);
          flip(x[slot], vector_signs[vector]);
        }
        hadamard_transform<kHeads == 1 ? 3 : 2, 1>(x);
      }
    }

    // The largest magnitudes: of each piece, of rows or of heads.
    float magnitudes[kPieces];
    if (finds) {
      find_largest_of_pieces(x, magnitudes);
      if (of_tokens) {
        const auto join = [&](int one, int other) {
          magnitudes[one] = magnitudes[other] = fmaxf(magnitudes[one], magnitudes[other]);
        };
        if (!multiplies) {  // all pieces of a head are of one row
          join(0, 1);
          join(2, 3);
        }
        if (kHeads == 1) {
          join(0, 2);
          join(1, 3);
        }
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
          magnitudes[piece] = fmaxf(magnitudes[piece], __shfl_xor_sync(~0u, magnitudes[piece], 1));
          if (multiplies) magnitudes[piece] = fmaxf(magnitudes[piece], __shfl_xor_sync(~0u, magnitudes[piece], 2));
        }
      } else {
#pragma unroll
        for (int head = 0; head < kHeads; ++head) {
          float of_head = fmaxf(magnitudes[2 * head], magnitudes[2 * head + 1]);
          if (kHeads == 1) of_head = fmaxf(of_head, fmaxf(magnitudes[2], magnitudes[3]));
          const uint32_t of_warp = __reduce_max_sync(~0u, __float_as_uint(of_head));
          if (lane == 0) largest[pair][group_of_warps][warp][head] = of_warp;
        }
      }
    } else if (phase == kBoth && thread == 0 && known != task.section) {
      await_count(maxima_ptr + counters + task.section, part.section.value);
      known = task.section;
    }

    // All have read the tile, and told what they found.
    named_sync(1 + (group_of_warps >> sharers - 1), 128 * sharers);
    if (thread == 0) {
      bring(stage);
      if (turns && place.last) arrive(angles_empty + 8 * slot_of_angles);
    }
    const Divisor of_group(group, group_reciprocal);
    const auto kv_head_of = [&](int head) {
      return task.b * kv_heads + (task.part == 0 ? of_group.quotient(head) : head);
    };
    const auto maximum_of = [&](int head) {  // in global memory
      return maxima_ptr + (part.granularity == kTensor ? task.part : task.part * batch * kv_heads + kv_head_of(head));
    };
    uint32_t found[kHeads];
    if (!of_tokens) {
#pragma unroll
      for (int head = 0; head < kHeads; ++head) {
        if (finds) {
          found[head] = 0;
          const int first = group_of_warps & -sharers;
          for (int i = 0; i < 4 * sharers; ++i) {
            found[head] = max(found[head], largest[pair][first + i / 4][i % 4][head]);
          }
        } else {
          found[head] = *static_cast<volatile uint32_t*>(maximum_of(min(task.head + head, part.heads - 1)));
        }
      }
      pair ^= finds;
    }
    if (!rounds) {
      if (thread == 0) {
#pragma unroll
        for (int head = 0; head < kHeads; ++head) {
          if (task.head + head < part.heads) raise(maximum_of(task.head + head), found[head]);
        }
        if (phase == kBoth) count_one(maxima_ptr + counters + task.section);
      }
      continue;
    }

    const float own_norm = transforms ? norm : 1.0f, limit = e5m2_out ? kLargest<e5m2> : kLargest<e4m3>;
    const int first_token = task.tile * kRows;
    float factors[kPieces];
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const int head = kHeads == 1 ? 0 : piece / 2;
      if (!of_tokens && piece % (kPieces / kHeads) != 0) {
        factors[piece] = factors[piece - 1];  // the scale is the same
        continue;
      }
      const float magnitude = of_tokens ? magnitudes[piece] : __uint_as_float(found[head]);
      const float scale = scale_of(magnitude * own_norm, limit);
      factors[piece] = __fdiv_rn(1.0f, scale) * own_norm;
      if (task.head + head >= part.heads) continue;
      const long long of_head = task.b * static_cast<long long>(part.heads) + task.head + head;
      if (of_tokens) {
        const int token = first_token + row_of(piece);
        if (column_of(piece) == 0 && token < part.seqlen) part.scales[of_head * part.seqlen + token] = scale;
      } else if (thread == 0) {
        if (part.granularity == kBlock) {
          const int blocks = part.section.value / part.section_heads.value;
          if ((task.tile & sharers - 1) == 0) part.scales[of_head * blocks + task.tile / sharers] = scale;
        } else if (part.granularity == kTensor) {
          if (task.tile == 0 && of_head == 0) part.scales[0] = scale;
        } else if (task.tile == 0 && (task.part > 0 || of_group.remainder(task.head + head) == 0)) {
          part.scales[kv_head_of(task.head + head)] = scale;
        }
      }
    }
    const auto store = [&]<typename Rounded>() {
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        const int head = task.head + (kHeads == 1 ? 0 : piece / 2), token = first_token + row_of(piece);
        unsigned char* const of_row = part.to + task.b * part.to_b + head * part.to_h + token * part.to_s;
        const uint4 rounded = in_8_bits<Rounded>(x[2 * piece], x[2 * piece + 1], factors[piece]);
        if (head < part.heads && token < part.seqlen) *reinterpret_cast<uint4*>(of_row + column_of(piece)) = rounded;
      }
    };
    if (e5m2_out) {
      store.template operator()<e5m2>();
    } else {
      store.template operator()<e4m3>();
    }
  }
}
