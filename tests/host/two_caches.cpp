// A kernel of latent attention with keys of two caches in 584 bytes a token on the host: cases of the command line, each against float64.
#include <functional>

#include "kernel.inc"
#include "launch.h"

using Number = OutElement;  // of Q, too
static Number element(float x) { return {static_cast<uint16_t>(pack<Number>(x, 0.0f))}; }

// Pages of rows of 576 bytes, after which lie eight bytes of scales of each.
struct Cache {
  int slots, rows, pages;
  long long page_bytes;
  std::vector<unsigned char> bytes;

  Cache(int slots, int rows) : slots(slots), rows(rows), pages((slots + rows - 1) / rows), page_bytes((rows * 584 + 575) / 576 * 576) {
    bytes.resize((pages + 1) * page_bytes, 0x7f);  // NaN
    for (int slot = 0; slot < pages * rows; ++slot) {
      unsigned char* const row = row_of(slot);
      for (int i = 0; i < 448; ++i) row[i] = pack<e4m3>(20.0f * random_number(), 0.0f, 0.0f, 0.0f) & 255;
      for (int i = 0; i < 64; ++i) {
        const Number number = element(random_number());
        std::memcpy(row + 448 + 2 * i, &number, 2);
      }
      for (int i = 0; i < 7; ++i) scales_of(slot)[i] = 120 + (slot + i) % 3;
    }
  }
  unsigned char* row_of(int slot) { return bytes.data() + slot / rows * page_bytes + slot % rows * 576; }
  unsigned char* scales_of(int slot) { return bytes.data() + slot / rows * page_bytes + rows * 576 + slot % rows * 8; }
  double number(int slot, int column) {
    if (column < 448) return std::ldexp(to_float(e4m3{row_of(slot)[column]}), scales_of(slot)[column / 64] - 127);
    Number number;
    std::memcpy(&number, row_of(slot) + 448 + 2 * (column - 448), 2);
    return to_float(number);
  }
};

static std::vector<int> list(int queries, int topk, int slots) {
  std::vector<int> entries(queries * topk);
  for (int& entry : entries) entry = static_cast<int>(std::abs(random_number()) * 1000003) % slots;
  const int wrong[] = {-1, slots, INT32_MIN, INT32_MAX};
  for (size_t i = 0; i < entries.size(); i += 7) entries[i] = wrong[i / 7 % 4];
  for (int i = 0; i < std::min(64, topk); ++i) entries[i] = -1;  // a tile without keys
  return entries;
}

static void run(int heads, int queries, int grid, int slots, int extra_slots, int topk, int extra_topk, int factor, std::vector<int> given) {
  constexpr int kWidth = 512;
  std::vector<int> counts(queries, topk), extra_counts(queries, extra_topk);
  for (size_t i = 0; i + 1 < given.size() && i / 2 < counts.size(); i += 2) counts[i / 2] = given[i], extra_counts[i / 2] = given[i + 1];
  Cache cache(slots, 7), extra(extra_slots, 16);
  std::vector<Number> q(queries * heads * kWidth), out(q.size(), element(7.0f));
  std::vector<float> lse(queries * heads, 7.0f);
  for (Number& x : q) x = element(factor * random_number());
  // The first cache's pages are those of a table, in the reverse order.
  const std::vector<int> entries = list(queries, topk, slots), extra_entries = list(queries, extra_topk, extra_slots);
  std::vector<int> table(cache.pages);
  for (int i = 0; i < cache.pages; ++i) table[i] = cache.pages - 1 - i;
  const auto slot_of = [&](int key) { return table[key / 7] * 7 + key % 7; };

  const int row_bits = heads > kRows ? 1 : 0, item_rows = kRows << row_bits, query_rows = (heads + item_rows - 1) / item_rows * item_rows;
  const int row_units = queries * query_rows / item_rows;
  const int most_splits = (topk + 63) / 64 + (extra_topk + 63) / 64;
  std::vector<float> partials((std::max(2 * grid, row_units * most_splits) << row_bits) * kRows * Partial::kFloats, NAN);
  std::vector<int> begun(2 * grid, -7);
  std::vector<uint32_t> counters(2 * row_units << row_bits, 0);
  const float scale = 1.0f / std::sqrt(static_cast<float>(kWidth));
  const int keys = slots;
#define ARGUMENTS \
        q.data(), cache.bytes.data(), out.data(), lse.data(), partials.data(), begun.data(), grid, counters.data(), nullptr, table.data(), \
        &keys, entries.data(), counts.data(), extra.bytes.data(), extra_entries.data(), extra_counts.data(), heads * kWidth, kWidth, cache.page_bytes, \
        heads * kWidth, kWidth, queries * topk, topk, 1, queries, topk, queries, 1, queries, extra.page_bytes, 584, 584, extra.pages, 16, 1, 584, \
        queries * extra_topk, extra_topk, 1, queries, extra_topk, queries, 1, queries, 1, heads, 1, heads, query_rows, row_bits, row_units, split_tiles, max_splits, reciprocal(1), \
        reciprocal(query_rows), reciprocal(row_units), reciprocal(split_tiles), queries, keys, queries, keys, 0, 7, cache.pages, 1, reciprocal(7), reciprocal(16), scale, 1, 0
  const auto check = [&](int time) {
    double worst = 0.0;
    for (int i = 0; i < queries * heads; ++i) {
      const int query = i / heads;
      std::vector<std::vector<double>> rows;
      const auto add = [&](Cache& from, const std::vector<int>& entries, int topk, int count, bool mapped) {
        for (int entry = 0; entry < std::min(count, topk); ++entry) {
          const int key = entries[query * topk + entry];
          if (key < 0 || key >= from.slots) continue;
          std::vector<double> row(kWidth);
          for (int c = 0; c < kWidth; ++c) row[c] = from.number(mapped ? slot_of(key) : key, c);
          rows.push_back(row);
        }
      };
      add(cache, entries, topk, counts[query], true);
      add(extra, extra_entries, extra_topk, extra_counts[query], false);
      std::vector<double> p;
      for (const std::vector<double>& row : rows) {
        double s = 0.0;
        for (int c = 0; c < kWidth; ++c) s += static_cast<double>(to_float(q[i * kWidth + c])) * row[c];
        p.push_back(s * scale);
      }
      const double maximum = p.empty() ? 0.0 : *std::max_element(p.begin(), p.end());
      double sum = 0.0;
      for (double& x : p) sum += x = std::exp(x - maximum);
      const double wanted = p.empty() ? -INFINITY : maximum + std::log(sum), actual = lse[i % heads * queries + query];
      if (!(actual == wanted || std::abs(actual - wanted) < 4e-3 * (1 + factor))) fail("a log-sum-exp", 100000 * time + i);
      for (int c = 0; c < kWidth; ++c) {
        double o = 0.0;
        for (size_t key = 0; key < p.size(); ++key) o += p[key] / sum * rows[key][c];
        const double error = std::abs(o - to_float(out[i * kWidth + c]));
        worst = std::max(worst, error == error ? error : 99.0);
      }
    }
    if (worst > 0.03) fail("an output, off by a thousandth times", static_cast<long long>(100000 * time + 1000 * worst));
  };
  // A launch merges; or blocks do, which wait in vain, since they run one after the other, and then run at once; or the last block of an item.
  for (int time = 0; time < 4; ++time) {
    const int split_tiles = time == 3 ? 2 : 0, max_splits = time == 0 ? 1 : time == 3 ? most_splits : 0;
    std::fill(out.begin(), out.end(), element(7.0f));
    std::fill(partials.begin(), partials.end(), NAN);
    kernel = [&] { KERNEL(ARGUMENTS); };
    launch(grid, 1, kThreads, time == 1 ? 1 : grid);
    kernel = [&] { MERGE(ARGUMENTS); };
    if (time == 0) launch(3, 1, kMergedRows * kRowThreads);
    check(time);
  }
}

int main(int count, char** arguments) {
  for (int i = 1; i < count; ++i) {
    std::vector<int> n;
    for (char* word = std::strtok(arguments[i], ","); word; word = std::strtok(nullptr, ",")) n.push_back(std::atoi(word));
    run(n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], {n.begin() + 8, n.end()});
  }
}
