// Probabilities in 8 bits in the order of the keys, where V has these in their order, too.
//
// A lane's elements of S, the two columns 2 t and 2 t + 1 of a block of 8 keys and of the next, lie in a register; the A
// operand wants the keys 4 t to 4 t + 3 of the 16 there. So the four lanes of a row exchange: two registers take two
// shuffles, since in each of them half of the lanes send what they have of the first block, and half what of the second.
#pragma once

#include "types.cuh"

template <int kCount>
__device__ __forceinline__ void in_order_of_keys(uint32_t (&p)[kCount]) {
  static_assert(kCount % 2 == 0);
  const int t = threadIdx.x % 4, even = (threadIdx.x % 32 & ~3) + 2 * (t & 1);  // the lanes that have this one's keys: even, even + 1
  const bool odd = t & 1, second = t & 2;
  const uint32_t low = 0x5410, high = 0x7632;  // of two words the lower halves, and the upper ones
  const int from_first = second ? even + 1 : even, from_next = second ? even : even + 1;
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    const uint32_t first = __shfl_sync(~0u, __byte_perm(p[i], p[i + 1], odd ? high : low), from_first);
    const uint32_t next = __shfl_sync(~0u, __byte_perm(p[i], p[i + 1], odd ? low : high), from_next);
    p[i] = __byte_perm(first, next, second ? 0x1054 : 0x5410);
    p[i + 1] = __byte_perm(first, next, second ? 0x3276 : 0x7632);
  }
}
