// Rows that go into a cache of 8 bits.
#pragma once

#include "rotary.cuh"

// The numbers of a vector over their scale, rounded to nearest even; none goes beyond the largest finite number.
template <typename Rounded, typename Element>
__device__ __forceinline__ void store_rounded(Rounded* to, const Vector<Element>& vector, float scale) {
  static_assert(Vector<Element>::kElements == 8);
  float x[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = __fdiv_rn(to_float(vector.elements[i]), scale);
  *reinterpret_cast<uint2*>(to) = {pack<Rounded>(x[0], x[1], x[2], x[3]), pack<Rounded>(x[4], x[5], x[6], x[7])};
}
