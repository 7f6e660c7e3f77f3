// quantize_sm90a_fp16
//
// Queries, keys and values become 8 bits and scales; rows of Q and K are rotated and transformed.
// Rendered from templates/cuda/quantize/kernel.cu.j2 by `attngen build specs/serving.yaml`.
//
// A block has some rows, tokens of one head of Q, K or V, and reads them once: a thread holds up to four vectors of a row
// in registers, rotates and transforms them with the lanes that have the others, and rounds them by the scale that the
// block finds. A scale of a whole head or tensor takes two launches: without `rounds` maxima go to global memory, with it
// rows are rounded, the last ones first, which are still in L2.
// Widths of rows and what a scale is of are the call's, so that one kernel serves all head dims.
#include "pdl.cuh"
#include "divisor.cuh"
#include "scales.cuh"

using Element = fp16;

constexpr int kThreads = 1024;  // of a block, at most
constexpr int kMaxVectors = 32;              // of a row

extern "C" __global__ void __launch_bounds__(kThreads) quantize_sm90a_fp16(
    const fp16* q_ptr, const fp16* k_ptr, const fp16* v_ptr, unsigned char* q_out_ptr, unsigned char* k_out_ptr,
    unsigned char* v_out_ptr, float* q_descale_ptr, float* k_descale_ptr, float* v_descale_ptr,
    const float* signs_ptr, uint32_t* maxima_ptr, const void* rotary_cos_ptr, const void* rotary_sin_ptr,
    const int* rotary_offsets_ptr,
    long long stride_q_b, long long stride_q_s, long long stride_q_h,
    long long stride_k_b, long long stride_k_s, long long stride_k_h,
    long long stride_v_b, long long stride_v_s, long long stride_v_h,
    long long stride_q_out_b, long long stride_q_out_s, long long stride_q_out_h,
    long long stride_k_out_b, long long stride_k_out_s, long long stride_k_out_h,
    long long stride_v_out_b, long long stride_v_out_s, long long stride_v_out_h,
    long long stride_rotary_cos,
    long long stride_rotary_sin,
    long long sign_bits_0, long long sign_bits_1, long long sign_bits_2, long long sign_bits_3, int batch,
    int seqlen_q, int seqlen_k, int blocks_q, int blocks_k, int rows_qk, int rows_v, int vectors_qk, int vectors_v,
    int slot_bits_qk, int slot_bits_v, int lane_bits_qk, int lane_bits_v, int scales_qk, int scales_v, int rounds,
    int hadamard, int positions, int rotary_half, int rotary_form, int interleaved, int whole_vectors,
    int e5m2_out, int heads, int kv_heads, int group, int tiles_q, int tiles_k, int tiles_v, int lanes_qk,
    int lanes_v, int heads_reciprocal, int kv_heads_reciprocal, int group_reciprocal, int tiles_q_reciprocal,
    int tiles_k_reciprocal, int tiles_v_reciprocal, int lanes_qk_reciprocal, int lanes_v_reciprocal, float norm
) {
  launch_dependents();
  __shared__ uint32_t largest[kThreads];           // of each row, or in the first place of all
  __shared__ unsigned char vector_flips[kMaxVectors];  // signs that change, a bit for each number

  // Which rows they are: some of one head, of Q, K or V. Neighbouring blocks have neighbouring heads.
  int unit = rounds ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const bool of_q = unit < blocks_q, of_v = unit >= blocks_q + blocks_k;
  unit -= of_q ? 0 : of_v ? blocks_q + blocks_k : blocks_q;
  const Divisor own_heads(of_q ? heads : kv_heads, of_q ? heads_reciprocal : kv_heads_reciprocal);
  const Divisor tiles(of_q ? tiles_q : of_v ? tiles_v : tiles_k,
                      of_q ? tiles_q_reciprocal : of_v ? tiles_v_reciprocal : tiles_k_reciprocal);
  const int seqlen = of_q ? seqlen_q : seqlen_k, rows = of_v ? rows_v : rows_qk;
  const int tile_of_all = own_heads.quotient(unit), h = own_heads.remainder(unit);
  const int b = tiles.quotient(tile_of_all), tile = tiles.remainder(tile_of_all);
  const int granularity = of_v ? scales_v : scales_qk;

  // What of a row a thread has: two vectors from `first` on, and `apart` from these two more, but for those beyond a row.
  const int vectors = of_v ? vectors_v : vectors_qk;
  const Divisor lanes(of_v ? lanes_v : lanes_qk, of_v ? lanes_v_reciprocal : lanes_qk_reciprocal);
  const int slot_bits = of_v ? slot_bits_v : slot_bits_qk, lane_bits = of_v ? lane_bits_v : lane_bits_qk;
  const int row = lanes.quotient(threadIdx.x), lane = lanes.remainder(threadIdx.x), token = tile * rows + row;
  const int first = (lane >> lane_bits << lane_bits + 2) + ((lane & (1 << lane_bits) - 1) << 1), apart = 2 << lane_bits;
  const bool active = row < rows && token < seqlen;
  const auto vector_of = [&](int slot) { return first + slot % 2 + slot / 2 * apart; };

  const Element* const from = of_q   ? q_ptr + b * stride_q_b + h * stride_q_h + token * stride_q_s
                              : of_v ? v_ptr + b * stride_v_b + h * stride_v_h + token * stride_v_s
                                     : k_ptr + b * stride_k_b + h * stride_k_h + token * stride_k_s;
  const bool transforms = hadamard && !of_v;

  wait_dependencies();  // nothing in global memory is read or written before
  largest[threadIdx.x] = 0;
  if (threadIdx.x < kMaxVectors) {
    const int vector = threadIdx.x;
    uint32_t flips = 0;
    if (transforms && signs_ptr == nullptr) {
      const int word = vector / kNumbers;
      const long long bits = word == 0 ? sign_bits_0 : word == 1 ? sign_bits_1 : word == 2 ? sign_bits_2 : sign_bits_3;
      flips = bits >> vector % kNumbers * kNumbers & 0xff;
    } else if (transforms && vector < vectors) {
      for (int i = 0; i < kNumbers; ++i) flips |= static_cast<uint32_t>(signs_ptr[kNumbers * vector + i] < 0.0f) << i;
    }
    vector_flips[vector] = flips;
  }

  Words words[kSlots] = {};
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
    if (active && vector_of(slot) < vectors) words[slot] = Words::load(from + kNumbers * vector_of(slot));
  }
  __syncthreads();  // signs and maxima are there

  // The numbers of the thread, rotated and transformed; 0 where there is none.
  float x[kSlots][kNumbers];
  const int rotary_dim = of_v || !active ? 0 : 2 * rotary_half;
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
    const int vector = vector_of(slot);
    const uint32_t flips = vector < vectors ? vector_flips[vector] : 0;
    if (vector < vectors && kNumbers * vector < rotary_dim) {
      const long long position = token + (rotary_offsets_ptr == nullptr ? 0ll : rotary_offsets_ptr[b]);
      const long long angle = max(0ll, min(position, positions - 1ll));
      to_floats<Element>(x[slot], words[slot], 0);
      rotate_vector<Element>(x[slot], from, kNumbers * vector, rotary_half, rotary_cos_ptr, angle * stride_rotary_cos,
                             rotary_sin_ptr, angle * stride_rotary_sin, rotary_form, interleaved, whole_vectors);
      flip(x[slot], flips);
    } else {
      to_floats<Element>(x[slot], words[slot], flips);
    }
  }
  if (transforms) hadamard_transform(x, slot_bits, lane_bits);

  // The largest magnitude of what a scale is of: here, or what the launch before has found.
  const bool finds = !rounds || granularity == kBlock || granularity == kToken;
  const int place = granularity == kToken ? row : 0;
  if (finds) {
    const uint32_t magnitude = __float_as_uint(largest_of(x));
    if (granularity == kToken) {
      if (active) raise(&largest[place], magnitude);
    } else {
      const uint32_t of_warp = __reduce_max_sync(~0u, magnitude);
      if (threadIdx.x % 32 == 0) raise(&largest[0], of_warp);
    }
    __syncthreads();
  }
  const Divisor heads_of_group(group, group_reciprocal);
  const int which = of_q ? 0 : of_v ? 2 : 1, kv_head = b * kv_heads + (of_q ? heads_of_group.quotient(h) : h);
  uint32_t* const of_all = maxima_ptr + (granularity == kTensor ? which : which * batch * kv_heads + kv_head);
  if (!rounds) {
    if (threadIdx.x == 0) raise(of_all, largest[0]);
    return;
  }

  const float own_norm = transforms ? norm : 1.0f, limit = e5m2_out ? kLargest<e5m2> : kLargest<e4m3>;
  const float scale = scale_of(__uint_as_float(finds ? largest[place] : *of_all) * own_norm, limit);
  const float factor = __fdiv_rn(1.0f, scale) * own_norm;
  if (active) {
    unsigned char* const to = of_q   ? q_out_ptr + b * stride_q_out_b + h * stride_q_out_h + token * stride_q_out_s
                              : of_v ? v_out_ptr + b * stride_v_out_b + h * stride_v_out_h + token * stride_v_out_s
                                     : k_out_ptr + b * stride_k_out_b + h * stride_k_out_h + token * stride_k_out_s;
    if (e5m2_out) {
      store_rounded<e5m2>(to, x, factor, vectors, first, apart, slot_bits == 0);
    } else {
      store_rounded<e4m3>(to, x, factor, vectors, first, apart, slot_bits == 0);
    }
  }

  float* const scales = of_q ? q_descale_ptr : of_v ? v_descale_ptr : k_descale_ptr;
  const long long head = b * static_cast<long long>(own_heads.value) + h;
  if (granularity == kToken) {
    if (active && lane == 0) scales[head * seqlen + token] = scale;
  } else if (threadIdx.x == 0) {
    if (granularity == kBlock) {
      scales[head * tiles.value + tile] = scale;
    } else if (granularity == kTensor) {
      if (tile == 0 && head == 0) scales[0] = scale;
    } else if (tile == 0 && (!of_q || heads_of_group.remainder(h) == 0)) {
      scales[kv_head] = scale;
    }
  }
}
