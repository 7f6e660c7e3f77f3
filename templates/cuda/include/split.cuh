// What blocks do that share the keys of a sequence: equal shares of a list, partial results, and who comes last.
#pragma once

#include "softmax.cuh"

// What a list has: pieces, the units of work that they are of, and the tiles of the longest unit.
struct Count {
  int pieces, units, longest;

  __device__ __forceinline__ Count& operator+=(const Count& other) {
    pieces += other.pieces;
    units += other.units;
    longest = max(longest, other.longest);
    return *this;
  }
};

// The sum of what the lanes before this one have.
__device__ __forceinline__ Count count_before(const Count& own, int lane) {
  Count sum = own;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const Count other = {
        __shfl_up_sync(~0u, sum.pieces, distance), __shfl_up_sync(~0u, sum.units, distance),
        __shfl_up_sync(~0u, sum.longest, distance)};
    if (lane >= distance) sum += other;
  }
  return {sum.pieces - own.pieces, sum.units - own.units, sum.longest};
}

// A list cut into one share for each worker, which differ by one piece at most.
struct Shares {
  int count, quotient, remainder;

  __device__ __forceinline__ Shares(int pieces, int workers)
      : count(workers), quotient(pieces / max(workers, 1)), remainder(pieces % max(workers, 1)) {}
  __device__ __forceinline__ int first(int worker) const { return worker * quotient + min(worker, remainder); }
  __device__ __forceinline__ int worker_of(int piece) const {
    const int longer = remainder * (quotient + 1);  // pieces of those that have one more
    return piece < longer ? piece / (quotient + 1) : remainder + (piece - longer) / quotient;
  }
};

// Counts a block in, which lets others see what it has written, and returns how many came before.
__device__ __forceinline__ uint32_t arrive_counted(uint32_t* counter) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

// What a warp has found for 16 rows from some of the keys: sums of kWidth columns, not yet divided by the sums of
// probabilities, and the references of these. A lane holds two rows, 8 apart, of which those behind the last one are
// neither stored nor merged. In memory lanes stand side by side, 16 bytes each.
template <int kWidth>
struct Partial {
  static constexpr int kVectors = 32 * (kWidth / 8 + 1);
  static constexpr int kBytes = 16 * kVectors;

  float (&acc)[kWidth / 2];
  float (&reference)[2];
  float (&row_sum)[2];

  static __device__ __forceinline__ int vector(int half, int i) { return 32 * (1 + i + half * (kWidth / 16)); }

  __device__ __forceinline__ void store(float4* to, int lane, int rows) const {
    to += lane;
    if (lane / 4 < rows) to[0] = {reference[0], row_sum[0], reference[1], row_sum[1]};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (lane / 4 + 8 * half < rows) {
#pragma unroll
        for (int i = 0; i < kWidth / 16; ++i) {
          const float* x = acc + 8 * i + 2 * half;
          to[vector(half, i)] = {x[0], x[1], x[4], x[5]};
        }
      }
    }
  }

  // Adds what was stored, in whatever memory.
  __device__ __forceinline__ void merge(const float4* from, int lane, int rows) const {
    if (lane / 4 >= rows) return;
    from += lane;
    const float4 other = from[0];
    const float other_reference[2] = {other.x, other.z}, other_sum[2] = {other.y, other.w};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (lane / 4 + 8 * half < rows) {
        const float raised = fmaxf(reference[half], other_reference[half]);
        const float alpha = exp2_approx(reference[half] - raised);
        const float other_alpha = exp2_approx(other_reference[half] - raised);
        reference[half] = raised;
        row_sum[half] = row_sum[half] * alpha + other_sum[half] * other_alpha;
#pragma unroll
        for (int i = 0; i < kWidth / 16; ++i) {
          const float4 y = from[vector(half, i)];
          float* x = acc + 8 * i + 2 * half;
          x[0] = x[0] * alpha + y.x * other_alpha;
          x[1] = x[1] * alpha + y.y * other_alpha;
          x[4] = x[4] * alpha + y.z * other_alpha;
          x[5] = x[5] * alpha + y.w * other_alpha;
        }
      }
    }
  }
};
