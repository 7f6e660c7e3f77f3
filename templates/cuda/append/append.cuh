// Sequence of a new token, and the places of its key and value in a cache.
#pragma once

#include "types.cuh"

// A new token: number `index` of the new ones of sequence `b`, or of none.
struct Token {
  int b, index;
  bool belongs;
};

// Of tokens packed one after the other: the sequence whose rows the token is one of. Those after the last sequence belong
// to none, and count as rows of the first one.
__device__ __forceinline__ Token packed_token(int token, const int* cu_seqlens, int batch) {
  int low = 0, high = batch;  // the first sequence that ends after the token
  while (low < high) {
    const int middle = (low + high) / 2;
    if (cu_seqlens[middle + 1] > token) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  const bool belongs = low < batch;
  const int b = belongs ? low : 0;
  return {b, token - cu_seqlens[b], belongs};
}

// A row of a cache: of a page, or of the entry of a sequence. `page` is -1 where there is no place.
struct Place {
  int page, row;
};

__device__ __forceinline__ Place place_of_slot(long long slot, int pages, int page_size) {
  if (slot < 0 || slot >= static_cast<long long>(pages) * page_size) return {-1, 0};
  return {static_cast<int>(slot / page_size), static_cast<int>(slot % page_size)};
}

__device__ __forceinline__ Place place_in_pages(long long position, const int* listed, int max_pages, int pages, int page_size) {
  if (position < 0 || position >= static_cast<long long>(max_pages) * page_size) return {-1, 0};
  const int place = static_cast<int>(position), page = listed[place / page_size];
  return {page < pages ? page : -1, place % page_size};
}

__device__ __forceinline__ Place place_in_entry(long long position, int entry, int entries, int rows) {
  const bool known = position >= 0 && position < rows && entry < entries;
  return {known ? entry : -1, static_cast<int>(position)};
}
