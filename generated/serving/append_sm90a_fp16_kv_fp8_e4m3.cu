// append_sm90a_fp16_kv_fp8_e4m3
//
// New keys and values go into a cache in 8 bits; keys and queries are rotated on the way.
// Rendered by `attngen build specs/serving.yaml`, schedule append.
//
// One new token has a row of each KV head for the cache of K and one for that of V, and a row of each query head that is
// rotated. A thread has 16 bytes of one row: 2^lane_bits threads have a row, and a block as many rows as fit.
// The widths of rows, how the cache lies and what is rotated are the call's, so that one kernel serves all head dims.
#include "append.cuh"
#include "pdl.cuh"
#include "rotary.cuh"
#include "row_scales.cuh"

using CacheElement = e4m3;
using Element = fp16;

constexpr int kThreads = 256;
constexpr int kThreadBits = 8;
constexpr int kElements = Vector<Element>::kElements;  // that a thread has

extern "C" __global__ void __launch_bounds__(kThreads) append_sm90a_fp16_kv_fp8_e4m3(
    const fp16* k_ptr, const fp16* v_ptr, const fp16* q_ptr, fp16* q_out_ptr, e4m3* k_cache_ptr, e4m3* v_cache_ptr,
    const int* cache_seqlens_ptr, const int* page_table_ptr, const int* batch_index_ptr, const int* cu_seqlens_ptr,
    const int* rotary_offsets_ptr, const void* slots_ptr, const void* rotary_cos_ptr, const void* rotary_sin_ptr,
    long long stride_k_b, long long stride_k_s, long long stride_k_h,
    long long stride_v_b, long long stride_v_s, long long stride_v_h,
    long long stride_q_b, long long stride_q_s, long long stride_q_h,
    long long stride_q_out_b, long long stride_q_out_s, long long stride_q_out_h,
    long long stride_k_cache_page, long long stride_k_cache_s, long long stride_k_cache_h,
    long long stride_v_cache_page, long long stride_v_cache_s, long long stride_v_cache_h,
    long long stride_slots_b, long long stride_slots_s,
    long long page_table_stride,
    long long stride_rotary_cos,
    long long stride_rotary_sin,
    float* k_descale_ptr, float* v_descale_ptr,
    long long stride_k_descale_b, long long stride_k_descale_h, long long stride_k_descale_s,
    long long stride_v_descale_b, long long stride_v_descale_h, long long stride_v_descale_s,
    int scales_of_pages, int scales_of_rows, int tokens, int batch, int seqlen_new, int heads, int kv_heads,
    int head_dim_qk, int head_dim_v, int lane_bits, int pages, int page_size, int max_pages, int positions,
    int rotary_half, int rotary_form, int interleaved, int whole_vectors, int long_slots
) {
  launch_dependents();
  const int lane = threadIdx.x & (1 << lane_bits) - 1;
  const int row = (blockIdx.x << kThreadBits - lane_bits) + (threadIdx.x >> lane_bits);
  const int rows = 2 * kv_heads + heads;  // of a token
  const int token = row / rows, own = row - token * rows;

  // The row of the token: of K, V or Q, and of which head.
  const bool of_q = own >= 2 * kv_heads, of_v = !of_q && own >= kv_heads;
  const int h = own - (of_q ? 2 * kv_heads : of_v ? kv_heads : 0);
  const int element = kElements * lane;  // the first one of the thread
  const bool active = token < tokens && element < (of_v ? head_dim_v : head_dim_qk);

  wait_dependencies();  // nothing in global memory is read or written before
  Element* to = nullptr;
  CacheElement* into_cache = nullptr;
  float* at_scale = nullptr;  // of the row there
  Vector<Element> vector;
  if (active) {
    const bool packed = cu_seqlens_ptr != nullptr;
    const Token mine = packed ? packed_token(token, cu_seqlens_ptr, batch) : Token{token / seqlen_new, token % seqlen_new, true};
    const long long b = packed ? 0 : mine.b, s = packed ? token : mine.index;  // packed rows have one stride
    const Element* const from = of_q   ? q_ptr + b * stride_q_b + s * stride_q_s + h * stride_q_h
                                : of_v ? v_ptr + b * stride_v_b + s * stride_v_s + h * stride_v_h
                                       : k_ptr + b * stride_k_b + s * stride_k_s + h * stride_k_h;
    vector = Vector<Element>::load(from + element);

    const int rotary_dim = 2 * rotary_half;
    if (!of_v && element < rotary_dim) {
      const int* const begins = rotary_offsets_ptr != nullptr ? rotary_offsets_ptr : cache_seqlens_ptr;
      const long long position = static_cast<long long>(begins[mine.b]) + mine.index;
      const long long angle = max(0ll, min(position, positions - 1ll));
      const long long cos_row = angle * stride_rotary_cos, sin_row = angle * stride_rotary_sin;
      if (whole_vectors) {
        if (interleaved) {  // pairs of neighbours
          float cos[kElements / 2], sin[kElements / 2];
          table_numbers(cos, rotary_cos_ptr, cos_row + element / 2, rotary_form);
          table_numbers(sin, rotary_sin_ptr, sin_row + element / 2, rotary_form);
#pragma unroll
          for (int i = 0; i < kElements; i += 2) {
            const float a = to_float(vector.elements[i]), b = to_float(vector.elements[i + 1]);
            vector.elements[i] = rounded_to<Element>(rotated(a, b, cos[i / 2], sin[i / 2], true));
            vector.elements[i + 1] = rounded_to<Element>(rotated(b, a, cos[i / 2], sin[i / 2], false));
          }
        } else {  // a number of the first half with one of the second
          const bool first = element < rotary_half;
          const int pair = first ? element : element - rotary_half;
          const auto partner = Vector<Element>::load(from + (first ? element + rotary_half : pair));
          float cos[kElements], sin[kElements];
          table_numbers(cos, rotary_cos_ptr, cos_row + pair, rotary_form);
          table_numbers(sin, rotary_sin_ptr, sin_row + pair, rotary_form);
#pragma unroll
          for (int i = 0; i < kElements; ++i) {
            const float x = to_float(vector.elements[i]), y = to_float(partner.elements[i]);
            vector.elements[i] = rounded_to<Element>(rotated(x, y, cos[i], sin[i], first));
          }
        }
      } else {  // the rotated numbers, or a half of them, end inside a vector, or tables begin between two words
#pragma unroll
        for (int i = 0; i < kElements; ++i) {
          const int at = element + i;
          if (at < rotary_dim) {
            const bool first = interleaved ? at % 2 == 0 : at < rotary_half;
            const int step = interleaved ? 1 : rotary_half, pair = interleaved ? at / 2 : first ? at : at - rotary_half;
            const float partner = to_float(from[first ? at + step : at - step]);
            const float cos = table_number(rotary_cos_ptr, cos_row + pair, rotary_form);
            const float sin = table_number(rotary_sin_ptr, sin_row + pair, rotary_form);
            vector.elements[i] = rounded_to<Element>(rotated(to_float(vector.elements[i]), partner, cos, sin, first));
          }
        }
      }
    }

    if (of_q) {
      to = q_out_ptr + b * stride_q_out_b + s * stride_q_out_s + h * stride_q_out_h;
    } else if (mine.belongs) {
      Place place;
      if (slots_ptr != nullptr) {
        const long long at = b * stride_slots_b + s * stride_slots_s;
        const long long slot = long_slots ? static_cast<const long long*>(slots_ptr)[at] : static_cast<const int*>(slots_ptr)[at];
        place = place_of_slot(slot, pages, page_size);
      } else {
        const long long position = static_cast<long long>(cache_seqlens_ptr[mine.b]) + mine.index;
        if (page_table_ptr != nullptr) {
          place = place_in_pages(position, page_table_ptr + mine.b * page_table_stride, max_pages, pages, page_size);
        } else {
          const int entry = batch_index_ptr != nullptr ? batch_index_ptr[mine.b] : mine.b;
          place = place_in_entry(position, entry, pages, page_size);
        }
      }
      if (place.page >= 0) {
        into_cache = of_v ? v_cache_ptr + place.page * stride_v_cache_page + place.row * stride_v_cache_s + h * stride_v_cache_h
                          : k_cache_ptr + place.page * stride_k_cache_page + place.row * stride_k_cache_s + h * stride_k_cache_h;
        const long long of = scales_of_pages ? place.page : mine.b;
        at_scale = of_v ? v_descale_ptr + of * stride_v_descale_b + h * stride_v_descale_h + place.row * stride_v_descale_s
                        : k_descale_ptr + of * stride_k_descale_b + h * stride_k_descale_h + place.row * stride_k_descale_s;
      }
    }
  }

  __syncthreads();  // Q may be rotated in place: partners are read before any of them is written
  if (to != nullptr) vector.store(to + element);
  float scale = 1.0f;
  if (scales_of_rows) {  // which are made here
    scale = scale_of_largest(largest_of_row<kThreads / 32>(active ? largest_magnitude(vector) : 0, lane_bits));
    if (into_cache != nullptr && lane == 0) *at_scale = scale;
  } else if (into_cache != nullptr) {
    scale = *at_scale;
  }
  if (into_cache != nullptr) store_rounded(into_cache + element, vector, scale);
}
