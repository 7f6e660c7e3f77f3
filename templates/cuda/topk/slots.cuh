// Slots of a cache: places of keys in pages.
#pragma once

#include "divisor.cuh"
#include "search_by_warp.cuh"

// What is written for an index: the slot of that key of the row's sequence, or the index itself without a page table.
struct Slots {
  const int* table;  // page numbers of the sequence
  Divisor by_page;

  // The sequence of a row is the last one that begins at it or before, or the one of its place where all have as many
  // queries.
  __device__ __forceinline__ Slots(
      const int* page_table, long long stride, const int* cu_seqlens_q, int batch, int row, int queries, int page_size,
      int reciprocal)
      : table(page_table), by_page(page_size, reciprocal) {
    if (table == nullptr) return;
    const int b = cu_seqlens_q == nullptr ? row / queries : first_at_least_by_warp(cu_seqlens_q, 1, batch, row, true) - 1;
    table += max(b, 0) * stride;
  }

  __device__ __forceinline__ int operator()(int index) const {
    if (table == nullptr) return index;
    const int entry = by_page.quotient(index);
    return table[entry] * by_page.value + index - entry * by_page.value;
  }
};
