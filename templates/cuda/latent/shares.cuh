// Blocks that share a work item merge its partial results: each one some of the rows, or, of few rows, some of the columns.
#pragma once

#include "barrier.cuh"
#include "split.cuh"
#include "tma.cuh"
#include "types.cuh"
#include "work_list.cuh"

// Partial results of a block's rows in memory: chunks of 16 bytes, row after row, then for each row its weights and, behind these, row max
// and row sum. A unit is the least that blocks share. In float32 a row has one weight.
template <int kWidth>
struct FloatRows {
  static constexpr int kChunks = kWidth / 4, kChunksOfUnit = 1, kColumns = 4;
  static constexpr bool kKept = false;  // few rows: to tell which ones stay takes longer than to write them

  static __device__ __forceinline__ int weight_of(int chunk) { return 0; }
  static __device__ __forceinline__ void weigh(float* weights, float weight) { weights[0] = weight; }
  static __device__ __forceinline__ void add(float (&sum)[kColumns], const uint4& chunk, float weight) {
    const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] = fmaf(__uint_as_float(words[i]), weight, sum[i]);
  }
};

// In 16 bits each lane of a quad has a weight for its columns of each half of the row, at first a power of two by which they are below
// 2^15, so that fp16 keeps 11 bits of the largest one. Of 32 columns those of a lane lie side by side.
template <int kWidth>
struct ShortRows {
  static constexpr int kChunks = kWidth / 8, kChunksOfUnit = 4, kColumns = 8;
  static constexpr bool kKept = true;

  static __device__ __forceinline__ int weight_of(int chunk) { return chunk / (kChunks / 2) * 4 + chunk % 4; }
  static __device__ __forceinline__ void weigh(float* weights, float weight) {
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      float4& four = *reinterpret_cast<float4*>(weights + i);
      four = {four.x * weight, four.y * weight, four.z * weight, four.w * weight};
    }
  }
  static __device__ __forceinline__ void add(float (&sum)[kColumns], const uint4& chunk, float weight) {
    const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 two = unpack<fp16>(words[i]);
      sum[2 * i] = fmaf(two.x, weight, sum[2 * i]);
      sum[2 * i + 1] = fmaf(two.y, weight, sum[2 * i + 1]);
    }
  }

  // Half of the columns of two rows, `row` and 8 rows on, as the four lanes of an MMA have them. `place_of` says where the chunks of a row
  // lie, and `words_of` where its weights do.
  template <typename PlaceOf, typename WordsOf>
  static __device__ __forceinline__ void store_half(
      const PlaceOf& place_of, const WordsOf& words_of, int row, int rows, int half, int lane, const float (&acc)[kWidth / 4],
      const float (&row_max)[2], const float (&sum)[2]);
};

constexpr int kWordBytes = 64, kRowMaxAt = 32;  // of the words of a row, and of its row max among them

template <int kWidth>
template <typename PlaceOf, typename WordsOf>
__device__ __forceinline__ void ShortRows<kWidth>::store_half(
    const PlaceOf& place_of, const WordsOf& words_of, int row, int rows, int half, int lane, const float (&acc)[kWidth / 4],
    const float (&row_max)[2], const float (&sum)[2]) {
#pragma unroll
  for (int upper = 0; upper < 2; ++upper) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < kWidth / 16; ++i) {
      largest = fmaxf(largest, fmaxf(fabsf(acc[4 * i + 2 * upper]), fabsf(acc[4 * i + 2 * upper + 1])));
    }
    const int exponent = max(static_cast<int>(__float_as_uint(largest) >> 23), 15);
    const float shrink = __uint_as_float(127 + 14 + 127 - exponent << 23);
    if (row + 8 * upper < rows) {
      char* const at = place_of(row + 8 * upper) + half * kWidth + 16 * (lane % 4);
#pragma unroll
      for (int i = 0; i < kWidth / 16; i += 4) {
        uint32_t pairs[4];
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
          const int of = 4 * (i + pair) + 2 * upper;
          pairs[pair] = pack<fp16>(acc[of] * shrink, acc[of + 1] * shrink);
        }
        *reinterpret_cast<uint4*>(at + 16 * i) = {pairs[0], pairs[1], pairs[2], pairs[3]};
      }
      char* const words = words_of(row + 8 * upper);
      *reinterpret_cast<float*>(words + 4 * (4 * half + lane % 4)) = __uint_as_float(exponent - 14 << 23);
      if (lane % 4 == half) *reinterpret_cast<float2*>(words + kRowMaxAt) = {row_max[upper], sum[upper]};
    }
  }
}

// Orders ordinary writes of all memory before reads and writes by the copy engine.
__device__ __forceinline__ void fence_all_proxies() { asm volatile("fence.proxy.async;" ::: "memory"); }

// How blocks share the rows of an item that they merge: whole rows if there are enough.
template <typename Rows>
struct Shares {
  int unit;  // chunks
  EvenRanges units;

  __device__ __forceinline__ Shares(int rows, int parts)
      : unit(rows >= parts ? Rows::kChunks : Rows::kChunksOfUnit),
        units(rows >= parts ? rows : rows * (Rows::kChunks / Rows::kChunksOfUnit), parts) {}
  __device__ __forceinline__ int first(int own) const { return unit * units.first(own); }
  __device__ __forceinline__ bool whole_rows() const { return unit == Rows::kChunks; }
};

// A share: chunks of all rows, one after the other, and the rows that they are of.
template <typename Rows>
struct Share {
  int first, chunks, first_row, rows;

  __device__ __forceinline__ Share(const Shares<Rows>& shares, int own) : first(shares.first(own)), chunks(shares.first(own + 1) - first) {
    first_row = first / Rows::kChunks;
    rows = chunks == 0 ? 0 : (first + chunks + Rows::kChunks - 1) / Rows::kChunks - first_row;
  }

  // Copies it from all parts but one to shared memory, chunks of one part after those of another, and so the words of rows: a warp,
  // each lane those of some parts.
  template <typename PartOf>
  __device__ __forceinline__ void copy(uint32_t to, uint32_t words_to, uint32_t copied, int words_at, int parts, int but, int lane, const PartOf& part_of) const {
    fence_all_proxies();
    if (lane == 0) arrive_expecting(copied, 16 * chunks * (parts - (but >= 0)) + kWordBytes * rows * parts);
    __syncwarp();
#pragma unroll 1
    for (int part = lane; chunks > 0 && part < parts; part += 32) {
      if (part != but) load_bytes(to + 16 * chunks * part, part_of(part) + 16 * first, copied, 16 * chunks);
      load_bytes(words_to + kWordBytes * rows * part, part_of(part) + words_at + kWordBytes * first_row, copied, kWordBytes * rows);
    }
  }
};

// Multiplies the weights of the parts of a row by what their row maxima ask for, and by the reciprocal of the row's sum, which `finish` sees
// before. Neighbouring lanes of a warp have a row, `lanes` of them, a power of two; all lanes of the warp call this, some with no parts.
template <typename Rows, typename WordsOf, typename Finish>
__device__ __forceinline__ void weigh_row(int parts, int lane, int lanes, const WordsOf& words_of, const Finish& finish) {
  PartialRow<8> all = {{}, kUnseen, 0.0f};
#pragma unroll 1
  for (int part = lane; part < parts; part += lanes) {
    const float2 of_part = *reinterpret_cast<const float2*>(words_of(part) + kRowMaxAt / 4);
    all.add({{}, of_part.x, of_part.y});
  }
#pragma unroll 1
  for (int distance = lanes / 2; distance > 0; distance /= 2) {
    all.add({{}, __shfl_xor_sync(~0u, all.row_max, distance), __shfl_xor_sync(~0u, all.sum, distance)});
  }
  finish(all);
  const float normalize = all.sum == 0.0f ? 0.0f : __fdividef(1.0f, all.sum);  // an exact one is a call, and ptxas takes few of these
#pragma unroll 1
  for (int part = lane; part < parts; part += lanes) {
    float* const words = words_of(part);
    Rows::weigh(words, exp2_approx(words[kRowMaxAt / 4] - all.row_max) * normalize);
  }
}

// Rows of partial results that a block does not write, since it merges them itself. They lie among the other parts of the same
// rows, which are `merged`.
template <typename Rows>
struct KeptRows {
  int first = 0, end = 0;
  uint32_t start = 0;  // where row 0 would be

  __device__ __forceinline__ KeptRows() {}
  __device__ __forceinline__ KeptRows(const Shares<Rows>& shares, int own, uint32_t merged) {
    if (!shares.whole_rows()) return;
    first = shares.units.first(own);
    end = shares.units.first(own + 1);
    start = merged + 16 * Rows::kChunks * (own * (end - first) - first);
  }
  __device__ __forceinline__ bool has(int row) const { return row >= first && row < end; }
  __device__ __forceinline__ uint32_t place_of(int row) const { return start + row * 16 * Rows::kChunks; }
};

// Counts a block that has left, and returns how many had left before. What it has written is released by a fence, if others need it.
__device__ __forceinline__ uint32_t count_left(uint32_t* counter, uint32_t times) {
  uint32_t before;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(times) : "memory");
  return before;
}
