// Keys in pages of a cache: a row of the page table says for each sequence where its keys are.
#pragma once

#include "types.cuh"

// Rows of one page, as many as one copy brings.
struct PageBox {
  int page;  // the number of pages, which no page has, where there is nothing to copy
  int row;   // of the page, the first one
};

// The pages of one sequence.
struct Pages {
  const int* table;  // page numbers, in the order of its keys
  int page_size, num_pages, seqlen_k;
  uint32_t inverse;  // of the page size: floor((2^32 - 1) / page_size)

  // Finds the box that begins at a key. Entries of the table after the last key are not read.
  __device__ __forceinline__ PageBox at(int key) const {
    PageBox box = {num_pages, 0};
    if (key < seqlen_k) {
      int entry = __umulhi(key, inverse);  // key / page_size, or one less
      box.row = key - entry * page_size;
      if (box.row >= page_size) {
        ++entry;
        box.row -= page_size;
      }
      const int page = table[entry];
      if (static_cast<uint32_t>(page) < num_pages) box.page = page;
    }
    return box;
  }
};
