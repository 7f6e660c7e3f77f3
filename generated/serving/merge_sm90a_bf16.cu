// merge_sm90a_bf16
//
// Results of one query over two sets of keys become the result over both, by their log-sum-exps.
// Rendered by `attngen build specs/serving.yaml`, schedule merge.
//
// A thread has 16 bytes of a row of the output, and finds the weights of the row's parts by itself: blocks and warps need
// not begin where rows do, and any width of rows fills them.
#include "divisor.cuh"
#include "pdl.cuh"
#include "types.cuh"

using Element = bf16;

constexpr int kThreads = 256;

extern "C" __global__ void __launch_bounds__(kThreads) merge_sm90a_bf16(
    const bf16* out_0_ptr, const bf16* out_1_ptr, bf16* out_ptr, const float* lse_0_ptr, const float* lse_1_ptr,
    float* lse_ptr,
    int stride_out_0_outer, int stride_out_0_middle, int stride_out_0_inner,
    int stride_out_1_outer, int stride_out_1_middle, int stride_out_1_inner,
    int stride_lse_0_outer, int stride_lse_0_middle, int stride_lse_0_inner,
    int stride_lse_1_outer, int stride_lse_1_middle, int stride_lse_1_inner,
    int stride_lse_outer, int stride_lse_middle, int stride_lse_inner,
    int count, int vectors, int inner, int middle, int vectors_reciprocal, int inner_reciprocal,
    int middle_reciprocal
) {
  launch_dependents();
  const Divisor of_row(vectors, vectors_reciprocal), of_inner(inner, inner_reciprocal), of_middle(middle, middle_reciprocal);
  const int own = blockIdx.x * kThreads + threadIdx.x, row = of_row.quotient(own), vector = own - row * vectors;
  const int line = of_inner.quotient(row), x = row - line * inner, z = of_middle.quotient(line), y = line - z * middle;
  // No number is negative, and a product without signs is one instruction.
  const auto product = [](uint32_t steps, uint32_t stride) { return static_cast<uint64_t>(steps) * stride; };
  const auto at = [=](int outer_stride, int middle_stride, int inner_stride) {
    return product(z, outer_stride) + product(y, middle_stride) + product(x, inner_stride);
  };
  const Element* const row_0 = out_0_ptr + at(stride_out_0_outer, stride_out_0_middle, stride_out_0_inner);
  const Element* const row_1 = out_1_ptr + at(stride_out_1_outer, stride_out_1_middle, stride_out_1_inner);
  const float* const log_0 = lse_0_ptr + at(stride_lse_0_outer, stride_lse_0_middle, stride_lse_0_inner);
  const float* const log_1 = lse_1_ptr + at(stride_lse_1_outer, stride_lse_1_middle, stride_lse_1_inner);

  wait_dependencies();  // nothing in global memory is read or written before
  if (own >= count) return;
  uint4 part_0 = reinterpret_cast<const uint4*>(row_0)[vector], part_1 = reinterpret_cast<const uint4*>(row_1)[vector];
  const float lse_0 = *log_0, lse_1 = *log_1;

  constexpr float kNothing = __builtin_bit_cast(float, 0xff800000u);  // -inf
  const bool seen_0 = lse_0 != kNothing, seen_1 = lse_1 != kNothing;
  const float most = lse_0 > lse_1 ? lse_0 : lse_1;
  const float weight_0 = expf(lse_0 - most), weight_1 = expf(lse_1 - most), sum = weight_0 + weight_1;
  const float normalize = __fdividef(1.0f, sum);
  const float share_0 = seen_0 ? weight_0 * normalize : 0.0f, share_1 = seen_1 ? weight_1 * normalize : 0.0f;
  if (!seen_0) part_0 = {0, 0, 0, 0};  // it may hold anything, NaN, too
  if (!seen_1) part_1 = {0, 0, 0, 0};
  const auto pair = [=](uint32_t of_0, uint32_t of_1) {
    const float2 a = unpack<Element>(of_0), b = unpack<Element>(of_1);
    return pack<Element>(share_0 * a.x + share_1 * b.x, share_0 * a.y + share_1 * b.y);
  };
  reinterpret_cast<uint4*>(out_ptr)[own] = {pair(part_0.x, part_1.x), pair(part_0.y, part_1.y),
                                            pair(part_0.z, part_1.z), pair(part_0.w, part_1.w)};
  if (vector == 0) {
    lse_ptr[at(stride_lse_outer, stride_lse_middle, stride_lse_inner)] = seen_0 || seen_1 ? most + logf(sum) : kNothing;
  }
}
