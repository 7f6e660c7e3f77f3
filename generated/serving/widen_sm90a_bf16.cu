// widen_sm90a_bf16
//
// Used keys and values of a cache in 8 bits in bf16, times their scales.
// Rendered by `attngen build specs/serving.yaml`, schedule widen.
//
// A block has the keys or the values of 32 tokens of a sequence, of all heads; a thread eight numbers of a row at a time.
// The output is (batch, seqlen_k, kv_heads, head_dim); rows beyond the used ones stay as they are.
#include "divisor.cuh"
#include "pdl.cuh"
#include "e4m3.cuh"

using Element = bf16;

constexpr int kThreads = 256;
constexpr int kTokens = 32;
constexpr int kNumbers = 8;  // that a thread reads at once
constexpr int kTogether = 4;  // reads that are on their way at once

extern "C" __global__ void __launch_bounds__(kThreads) widen_sm90a_bf16(
    const unsigned char* k_cache_ptr, const unsigned char* v_cache_ptr, bf16* k_ptr, bf16* v_ptr,
    const float* k_descale_ptr, const float* v_descale_ptr, const int* seqused_k_ptr, const int* page_table_ptr,
    long long stride_k_cache_page, long long stride_k_cache_s, long long stride_k_cache_h,
    long long stride_v_cache_page, long long stride_v_cache_s, long long stride_v_cache_h,
    long long stride_k_descale_b, long long stride_k_descale_h, long long stride_k_descale_s,
    long long stride_v_descale_b, long long stride_v_descale_h, long long stride_v_descale_s,
    long long page_table_stride,
    int batch, int seqlen_k, int head_dim_qk, int head_dim_v, int tiles, int scales_of_pages, int kv_heads,
    int vectors_k, int vectors_v, int page_size, int kv_heads_reciprocal, int vectors_k_reciprocal,
    int vectors_v_reciprocal, int page_size_reciprocal
) {
  launch_dependents();
  const Divisor of_heads(kv_heads, kv_heads_reciprocal), of_pages(page_size, page_size_reciprocal);
  const int unit = blockIdx.x / tiles, first = (blockIdx.x - unit * tiles) * kTokens;
  const bool of_v = unit >= batch;
  const int b = of_v ? unit - batch : unit, head_dim = of_v ? head_dim_v : head_dim_qk;
  const Divisor of_row = of_v ? Divisor(vectors_v, vectors_v_reciprocal) : Divisor(vectors_k, vectors_k_reciprocal);
  const unsigned char* const cache = of_v ? v_cache_ptr : k_cache_ptr;
  const long long stride_page = of_v ? stride_v_cache_page : stride_k_cache_page;
  const long long stride_s = of_v ? stride_v_cache_s : stride_k_cache_s, stride_h = of_v ? stride_v_cache_h : stride_k_cache_h;
  const float* const scales = of_v ? v_descale_ptr : k_descale_ptr;
  const long long scale_b = of_v ? stride_v_descale_b : stride_k_descale_b, scale_h = of_v ? stride_v_descale_h : stride_k_descale_h;
  const long long scale_s = of_v ? stride_v_descale_s : stride_k_descale_s;  // 0 unless rows of pages have scales
  Element* const out = of_v ? v_ptr : k_ptr;

  wait_dependencies();  // nothing in global memory is read or written before
  const int used = seqused_k_ptr == nullptr ? seqlen_k : min(seqused_k_ptr[b], seqlen_k);
  const int tokens = min(kTokens, used - first), count = tokens * kv_heads * of_row.value;
  for (int i = threadIdx.x; i < count; i += kTogether * kThreads) {
    uint2 eight[kTogether];
    float scale[kTogether];
    long long to[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      const int place = min(i + j * kThreads, count - 1);  // beyond the end, the last one again
      const int row = of_row.quotient(place), element = kNumbers * (place - row * of_row.value);
      const int token = of_heads.quotient(row), h = row - token * kv_heads, position = first + token;
      const int listed = of_pages.quotient(position);
      const long long page = page_table_ptr == nullptr ? b : page_table_ptr[b * page_table_stride + listed];
      const int at = page_table_ptr == nullptr ? position : position - listed * page_size;
      eight[j] = *reinterpret_cast<const uint2*>(cache + page * stride_page + at * stride_s + h * stride_h + element);
      scale[j] = scales[(scales_of_pages ? page : b) * scale_b + h * scale_h + at * scale_s];
      to[j] = ((static_cast<long long>(b) * seqlen_k + position) * kv_heads + h) * head_dim + element;
    }
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      const uint2 low = widened(eight[j].x), high = widened(eight[j].y);
      *reinterpret_cast<uint4*>(out + to[j]) = {scaled<Element>(low.x, scale[j]), scaled<Element>(low.y, scale[j]),
                                                scaled<Element>(high.x, scale[j]), scaled<Element>(high.y, scale[j])};
    }
  }
}
