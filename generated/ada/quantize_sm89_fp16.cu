// quantize_sm89_fp16
//
// Queries, keys and values become 8 bits and scales; rows of Q and K are rotated and transformed.
// Rendered by `attngen build specs/ada.yaml`, schedule quantize.
//
// A unit of work is some rows, tokens of one head of Q, K or V. A block goes from unit to unit: it reads each once, and
// the next one while it works. A thread holds eight vectors of a row in registers, or four of each of two rows, rotates
// and transforms them with the lanes that have the others, and rounds them by the scale that the block finds. A scale of
// a whole head or tensor takes two launches: without `rounds` maxima go to global memory, with it rows are rounded, the
// last ones first, which are still in L2.
// Widths of rows and what a scale is of are the call's, so that one kernel serves all head dims.
#include "divisor.cuh"
#include "scales.cuh"

using Element = fp16;

constexpr int kThreads = 512;  // of a block, at most
constexpr int kMaxVectors = 32;              // of a row
constexpr int kMaxRows = 512;                // of a unit
constexpr int kHalf = kSlots / 2;            // slots of a thread that are of one row for sure

// An address that was kept in shared memory: the compiler does not know where it leads.
template <typename Value>
__device__ __forceinline__ Value* in_global(Value* address) {
  __builtin_assume(__isGlobal(address));
  return address;
}

// Q, K or V: its rows and results, and how units and threads share it.
struct Part {
  const Element* from;
  unsigned char* to;
  float* scales;
  long long from_b, from_s, from_h, to_b, to_s, to_h;  // strides, in elements
  Divisor heads, tiles, lanes;                         // of a batch entry; of a sequence; of a row
  int begin;                                           // its first unit
  int seqlen, number, rows, far_row, vectors, lane_bits, granularity;  // `number` among the three
  bool whole;  // threads have no vectors beyond a row
};

extern "C" __global__ void __launch_bounds__(kThreads, 1) quantize_sm89_fp16(
    const fp16* q_ptr, const fp16* k_ptr, const fp16* v_ptr, unsigned char* q_out_ptr, unsigned char* k_out_ptr,
    unsigned char* v_out_ptr, float* q_descale_ptr, float* k_descale_ptr, float* v_descale_ptr,
    const float* signs_ptr, const fp16* k_mean_ptr, uint32_t* maxima_ptr, const void* rotary_cos_ptr,
    const void* rotary_sin_ptr, const int* rotary_offsets_ptr,
    long long stride_q_b, long long stride_q_s, long long stride_q_h,
    long long stride_k_b, long long stride_k_s, long long stride_k_h,
    long long stride_v_b, long long stride_v_s, long long stride_v_h,
    long long stride_q_out_b, long long stride_q_out_s, long long stride_q_out_h,
    long long stride_k_out_b, long long stride_k_out_s, long long stride_k_out_h,
    long long stride_v_out_b, long long stride_v_out_s, long long stride_v_out_h,
    long long stride_rotary_cos,
    long long stride_rotary_sin,
    long long sign_bits_0, long long sign_bits_1, long long sign_bits_2, long long sign_bits_3, int batch,
    int seqlen_q, int seqlen_k, int units, int units_q, int units_k, int rows_qk, int rows_v, int far_row_qk,
    int far_row_v, int vectors_qk, int vectors_v, int slot_bits, int lane_bits_qk, int lane_bits_v, int scales_qk,
    int scales_v, int rounds, int hadamard, int positions, int rotary_half, int rotary_form, int rotary_step,
    int interleaved, int whole_vectors, int e5m2_out, int heads, int kv_heads, int group, int tiles_q, int tiles_k,
    int tiles_v, int lanes_qk, int lanes_v, int heads_reciprocal, int kv_heads_reciprocal, int group_reciprocal,
    int tiles_q_reciprocal, int tiles_k_reciprocal, int tiles_v_reciprocal, int lanes_qk_reciprocal,
    int lanes_v_reciprocal, float norm
) {
  __shared__ Part parts[3];
  __shared__ Words vector_signs[kMaxVectors];  // what each vector changes its signs by
  __shared__ Words factors[32];                // of each lane, for transforms by products
  __shared__ uint32_t largest[3][kMaxRows];    // of each row, or in the first place of all; of three units in turn

  if (threadIdx.x == 0) {
    const Divisor of_heads(heads, heads_reciprocal), of_kv_heads(kv_heads, kv_heads_reciprocal);
    const Divisor of_qk(lanes_qk, lanes_qk_reciprocal), of_v(lanes_v, lanes_v_reciprocal);
    parts[0] = {q_ptr, q_out_ptr, q_descale_ptr, stride_q_b, stride_q_s, stride_q_h,
                stride_q_out_b, stride_q_out_s, stride_q_out_h, of_heads, Divisor(tiles_q, tiles_q_reciprocal), of_qk,
                0, seqlen_q, 0, rows_qk, far_row_qk, vectors_qk, lane_bits_qk, scales_qk, vectors_qk % (far_row_qk ? kHalf : kSlots) == 0};
    parts[1] = {k_ptr, k_out_ptr, k_descale_ptr, stride_k_b, stride_k_s, stride_k_h,
                stride_k_out_b, stride_k_out_s, stride_k_out_h, of_kv_heads, Divisor(tiles_k, tiles_k_reciprocal), of_qk,
                units_q, seqlen_k, 1, rows_qk, far_row_qk, vectors_qk, lane_bits_qk, scales_qk, vectors_qk % (far_row_qk ? kHalf : kSlots) == 0};
    parts[2] = {v_ptr, v_out_ptr, v_descale_ptr, stride_v_b, stride_v_s, stride_v_h,
                stride_v_out_b, stride_v_out_s, stride_v_out_h, of_kv_heads, Divisor(tiles_v, tiles_v_reciprocal), of_v,
                units_q + units_k, seqlen_k, 2, rows_v, far_row_v, vectors_v, lane_bits_v, scales_v, vectors_v % (far_row_v ? kHalf : kSlots) == 0};
  }
  if (threadIdx.x < 32) factors[threadIdx.x] = hadamard_factor<Element>(threadIdx.x);
  for (int i = threadIdx.x; i < 3 * kMaxRows; i += blockDim.x) largest[i / kMaxRows][i % kMaxRows] = 0;
  for (int vector = threadIdx.x; vector < kMaxVectors; vector += blockDim.x) {
    uint32_t flips = 0;
    if (signs_ptr == nullptr) {
      const int word = vector / kNumbers;
      const long long bits = word == 0 ? sign_bits_0 : word == 1 ? sign_bits_1 : word == 2 ? sign_bits_2 : sign_bits_3;
      flips = bits >> vector % kNumbers * kNumbers & 0xff;
    } else if (vector < vectors_qk) {
      for (int i = 0; i < kNumbers; ++i) flips |= static_cast<uint32_t>(signs_ptr[kNumbers * vector + i] < 0.0f) << i;
    }
    for (int i = 0; i < kNumbers / 2; ++i) vector_signs[vector].pairs[i] = signs_of_pair(flips, i);
  }
  __syncthreads();  // parts, signs and maxima are there

  // A unit: a tile of one head. Neighbouring units have neighbouring heads.
  struct Unit {
    int part, b, h, tile;
  };
  const auto unit_at = [&](int place) {
    const int index = rounds ? units - 1 - place : place;
    const int which = (index >= units_q) + (index >= units_q + units_k);
    const Part& part = parts[which];
    const int unit = index - part.begin, tile_of_all = part.heads.quotient(unit), b = part.tiles.quotient(tile_of_all);
    return Unit{which, b, unit - tile_of_all * part.heads.value, tile_of_all - b * part.tiles.value};
  };
  // A thread's share of the units of a part: its row, and its first vector there. A thread without a row of its own
  // does what another one does, but for writing it.
  struct Share {
    int row, first;
    bool own;
  };
  const auto share_of = [&](const Part& part) {
    const int row = part.lanes.quotient(threadIdx.x), lane = threadIdx.x - row * part.lanes.value;
    const int in_transform = lane & (1 << part.lane_bits) - 1, last = (part.far_row ? part.far_row : part.rows) - 1;
    const int first = (lane - in_transform) * (part.far_row ? kHalf : kSlots) + 2 * in_transform;
    return Share{min(row, last), first, static_cast<int>(threadIdx.x) < part.lanes.value * (last + 1)};
  };
  // Slots come in pairs of neighbouring vectors. Those of the second half are of the same row, or of one `far_row` later.
  const auto vector_of = [&](const Part& part, const Share& share, int pair) {
    return share.first + (pair % 2 << part.lane_bits + 1) + (pair < 2 || part.far_row ? 0 : 4 << part.lane_bits);
  };
  const auto row_of = [&](const Part& part, const Share& share, int pair) {
    return share.row + (pair < 2 ? 0 : part.far_row);
  };
  const auto has_row = [&](const Part& part, const Share& share, int tile, int pair) {
    return share.own && tile * part.rows + row_of(part, share, pair) < part.seqlen;
  };
  // The token of a row; that of another one where there is none, which changes no maximum.
  const auto token_of = [&](const Part& part, const Share& share, int tile, int pair) {
    return min(tile * part.rows + row_of(part, share, pair), part.seqlen - 1);
  };

  // Whether all threads that have a row have all of their numbers.
  const auto is_whole = [&](const Part& part, int tile) {
    return part.whole && (tile + 1) * part.rows <= part.seqlen;
  };

  Words words[kSlots];
  const auto load = [&](const Unit& unit) {
    const Part& part = parts[unit.part];
    const Share share = share_of(part);
    const Element* const from = in_global(part.from) + unit.b * part.from_b + unit.h * part.from_h;
    if (is_whole(part, unit.tile)) {
      const Element* const first =
          from + token_of(part, share, unit.tile, 0) * part.from_s + kNumbers * share.first;
      const long long far = part.far_row ? part.far_row * part.from_s : 4 * kNumbers << part.lane_bits;
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) {
        const int apart = slot / 2 % 2 * 2 * kNumbers << part.lane_bits;
        words[slot] = Words::load(first + (slot < kHalf ? 0 : far) + apart + slot % 2 * kNumbers);
      }
    } else {
#pragma unroll
      for (int pair = 0; pair < kSlots / 2; ++pair) {
        const int vector = vector_of(part, share, pair);
        const Element* const at = from + token_of(part, share, unit.tile, pair) * part.from_s + kNumbers * vector;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          words[2 * pair + i] = {};
          if (vector + i < part.vectors) words[2 * pair + i] = Words::load(at + i * kNumbers);
        }
      }
    }
  };

  // A block has one unit of each round of all blocks, so that what they read together lies together.
  int place = blockIdx.x;
  load(unit_at(place));
  for (int turn = 0; place < units; turn = turn == 2 ? 0 : turn + 1) {
    const Unit unit = unit_at(place);
    const Part& part = parts[unit.part];
    const Share share = share_of(part);
    const bool of_v = part.number == 2, transforms = hadamard && !of_v, rotates = rotary_half > 0 && !of_v;

    if (part.number == 1 && k_mean_ptr != nullptr) {  // keys less their mean
      const Element* const mean = k_mean_ptr + (unit.b * static_cast<long long>(kv_heads) + unit.h) * kNumbers * part.vectors;
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) {
        const int vector = vector_of(part, share, slot / 2) + slot % 2;
        if (vector < part.vectors) subtract<Element>(words[slot], Words::load(mean + kNumbers * vector));
      }
    }

    // The numbers of the thread, rotated and transformed.
    float x[kSlots][kNumbers];
    if (transforms && !rotates) {
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) flip(words[slot], vector_signs[vector_of(part, share, slot / 2) + slot % 2]);
    }
    const bool by_products = transforms && !rotates && lane_bits_qk == 2 && slot_bits >= 2;
    if (by_products) {  // rows of 128 and of 256
      if (slot_bits == 2) {
        hadamard_products<Element, 2>(x, words, factors[threadIdx.x % 32]);
      } else {
        hadamard_products<Element, 3>(x, words, factors[threadIdx.x % 32]);
      }
    } else {
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) to_floats<Element>(x[slot], words[slot]);
    }
    if (rotates) {
      const int offset = rotary_offsets_ptr == nullptr ? 0 : rotary_offsets_ptr[unit.b];
      const auto angle_row = [&](int slot) {
        return static_cast<int>(max(0ll, min(token_of(part, share, unit.tile, slot / 2) + static_cast<long long>(offset), positions - 1ll)));
      };
      const auto angle_of = [&](int slot) {
        const int element = kNumbers * (vector_of(part, share, slot / 2) + slot % 2);
        return Angle{angle_row(slot), element < 2 * rotary_half ? interleaved ? element / 2 : element : -1};
      };
      if (rotary_step == 4) {
        rotate_slots<4>(x, angle_of, rotary_cos_ptr, stride_rotary_cos, rotary_sin_ptr, stride_rotary_sin, rotary_form);
      } else if (rotary_step == 2) {
        rotate_slots<2>(x, angle_of, rotary_cos_ptr, stride_rotary_cos, rotary_sin_ptr, stride_rotary_sin, rotary_form);
      } else if (rotary_step == 0) {
        rotate_slots<0>(x, angle_of, rotary_cos_ptr, stride_rotary_cos, rotary_sin_ptr, stride_rotary_sin, rotary_form);
      } else {
        // Seldom: partners are in other threads, or within vectors. The slots take turns at being the first.
#pragma unroll 1
        for (int slot = 0; slot < kSlots; ++slot) {
          const int vector = vector_of(part, share, slot / 2) + slot % 2;
          if (vector < part.vectors && kNumbers * vector < 2 * rotary_half) {
            const long long row = angle_row(slot);
            const Element* const from = in_global(part.from) + unit.b * part.from_b + unit.h * part.from_h +
                                        token_of(part, share, unit.tile, slot / 2) * part.from_s;
            rotate_vector<Element>(x[0], from, kNumbers * vector, rotary_half, rotary_cos_ptr, row * stride_rotary_cos,
                                   rotary_sin_ptr, row * stride_rotary_sin, rotary_form, interleaved, whole_vectors);
          }
          next_slot_first(x);
        }
      }
      if (transforms) {
#pragma unroll
        for (int slot = 0; slot < kSlots; ++slot) flip(x[slot], vector_signs[vector_of(part, share, slot / 2) + slot % 2]);
      }
    }

    if (transforms && !by_products) hadamard_transform(x, slot_bits, lane_bits_qk);

    // The largest magnitude of what a scale is of: here, or what the launch before has found.
    const bool of_tokens = part.granularity == kToken, finds = !rounds || part.granularity == kBlock || of_tokens;
    const auto kv_head_of = [&] {
      return unit.b * kv_heads + (part.number == 0 ? Divisor(group, group_reciprocal).quotient(unit.h) : unit.h);
    };
    const auto of_all = [&] {  // the maximum in global memory
      return maxima_ptr + (part.granularity == kTensor ? part.number : part.number * batch * kv_heads + kv_head_of());
    };
    uint32_t of_warp = 0;
    if (finds) {
      float magnitudes[2];  // of both halves
      find_largest(x, magnitudes);
      const uint32_t of_both = __float_as_uint(fmaxf(magnitudes[0], magnitudes[1]));
      if (!of_tokens) {
        of_warp = __reduce_max_sync(~0u, of_both);
        if (rounds && threadIdx.x % 32 == 0) raise(&largest[turn][0], of_warp);
      } else if (part.far_row) {
        raise(&largest[turn][share.row], __float_as_uint(magnitudes[0]));
        raise(&largest[turn][share.row + part.far_row], __float_as_uint(magnitudes[1]));
      } else {
        raise(&largest[turn][share.row], of_both);
      }
    }

    // The next unit arrives while this one is rounded.
    place += gridDim.x;
    load(unit_at(min(place, units - 1)));
    if (!rounds) {  // few units raise a maximum: the others read it alone, since atomics of one place queue
      if (threadIdx.x % 32 == 0 && of_warp > *static_cast<volatile uint32_t*>(of_all())) raise(of_all(), of_warp);
      continue;
    }
    if (finds) __syncthreads();

    const float own_norm = transforms ? norm : 1.0f, limit = e5m2_out ? kLargest<e5m2> : kLargest<e4m3>;
    const long long head = unit.b * static_cast<long long>(part.heads.value) + unit.h;
    const int last_turn = turn == 0 ? 2 : turn - 1;  // of the unit before, whose maxima all have read
    float factor;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half == 0 || of_tokens) {
        const int row = of_tokens ? row_of(part, share, 2 * half) : 0;
        const float scale = scale_of(__uint_as_float(finds ? largest[turn][row] : *of_all()) * own_norm, limit);
        factor = __fdiv_rn(1.0f, scale) * own_norm;
        if (of_tokens ? share.first == 0 : threadIdx.x == 0) {
          largest[last_turn][row] = 0;
          if (of_tokens) {
            const int token = unit.tile * part.rows + row;
            if (share.own && token < part.seqlen) in_global(part.scales)[head * part.seqlen + token] = scale;
          } else if (part.granularity == kBlock) {
            in_global(part.scales)[head * part.tiles.value + unit.tile] = scale;
          } else if (part.granularity == kTensor) {
            if (unit.tile == 0 && head == 0) in_global(part.scales)[0] = scale;
          } else if (unit.tile == 0 && (part.number > 0 || Divisor(group, group_reciprocal).remainder(unit.h) == 0)) {
            in_global(part.scales)[kv_head_of()] = scale;
          }
        }
      }
      const auto store = [&]<typename Rounded>() {
        unsigned char* const to = part.to + unit.b * part.to_b + unit.h * part.to_h +
                                  token_of(part, share, unit.tile, 2 * half) * part.to_s;
#pragma unroll
        for (int pair = 2 * half; pair < 2 * half + 2; ++pair) {
          const uint4 rounded = in_8_bits<Rounded>(x[2 * pair], x[2 * pair + 1], factor);
          const int vector = vector_of(part, share, pair);
          unsigned char* const at = to + kNumbers * vector;
          if (is_whole(part, unit.tile)) {
            if (share.own) *reinterpret_cast<uint4*>(at) = rounded;
          } else if (has_row(part, share, unit.tile, pair)) {
            if (vector < part.vectors) *reinterpret_cast<uint2*>(at) = {rounded.x, rounded.y};
            if (vector + 1 < part.vectors) *reinterpret_cast<uint2*>(at + kNumbers) = {rounded.z, rounded.w};
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
}
