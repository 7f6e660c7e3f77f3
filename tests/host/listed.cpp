// A kernel of latent attention with keys by index on the host: cases of the command line, each against float64.
#include <functional>

#include "kernel.inc"
#include "launch.h"

using Number = OutElement;  // of Q, too
static Number element(float x) { return {static_cast<uint16_t>(pack<Number>(x, 0.0f))}; }

#if LATENT_ROWS
#include "latent_rows.h"
#else
constexpr int kRowOfCache = HEAD_DIM;
constexpr float row_factor = 1.0f;
using CacheElement = Number;
static void store_row(CacheElement* row, bool exists) {
  for (int i = 0; i < HEAD_DIM; ++i) row[i] = exists ? element(random_number()) : Number{0x7fff};
}
static float number_of(const CacheElement* row, int column) { return to_float(row[column]); }
#endif

// One call: heads, queries, blocks, keys, entries of a list, a factor of Q; then how many entries of each query count. Entries
// are numbers of BLOCK keys.
static void run(int heads, int queries, int grid, int keys, int topk, int factor, std::vector<int> counts, int cluster) {
  constexpr int kWidth = HEAD_DIM, kWidthV = HEAD_DIM_V;
  counts.resize(queries, topk);
  std::vector<Number> q(queries * heads * kWidth), out(queries * heads * kWidthV, element(7.0f));
  std::vector<CacheElement> k((keys + 1) * kRowOfCache);
  std::vector<float> lse(queries * heads, 7.0f);
  // Q makes up for the factor of rows, so that logits do not change.
  for (size_t i = 0; i < q.size(); ++i) q[i] = element(factor * random_number() / (i % kWidth < kWidthV ? row_factor : 1.0f));
  for (int i = 0; i <= keys; ++i) store_row(k.data() + i * kRowOfCache, i < keys);
  std::vector<int> entries(queries * topk);
  const int units = (keys + BLOCK - 1) / BLOCK;  // of which the last one may be incomplete
  for (int& entry : entries) entry = static_cast<int>(std::abs(random_number()) * 1000003) % units;
  const int wrong[] = {-1, units, INT32_MIN, INT32_MAX};  // the row after the last one is NaN
  for (size_t i = 0; i < entries.size(); i += 7) entries[i] = wrong[i / 7 % 4];
  for (int i = 0; i < std::min(64 / BLOCK, topk); ++i) entries[i] = -1;  // a tile without keys

  const int row_bits = cluster > 1 ? 1 : 0, item_rows = kRows << row_bits, query_rows = (heads + item_rows - 1) / item_rows * item_rows;
  const int row_units = queries * query_rows / item_rows;
  std::vector<float> partials((2 * grid << row_bits) * kRows * Partial::kFloats, NAN);
  std::vector<int> begun(2 * grid, -7);
  std::vector<uint32_t> counters(2 * row_units << row_bits, 0);
  const float scale = 1.0f / std::sqrt(static_cast<float>(kWidth));
#ifdef MERGE
#define WRITTEN partials.data(), begun.data(), counters.data()
#else
#define WRITTEN partials.data(), counters.data()
#endif
#define ARGUMENTS \
        q.data(), k.data(), out.data(), lse.data(), WRITTEN, nullptr, entries.data(), \
        counts.data(), queries * heads * kWidth, heads * kWidth, kWidth, keys * kRowOfCache, kRowOfCache, kRowOfCache, queries * heads * kWidthV, \
        heads * kWidthV, kWidthV, queries * topk, topk, 1, queries, topk, queries, 1, queries, 1, heads, 1, heads, query_rows, \
        row_bits, row_units, 0, 1, reciprocal(1), reciprocal(query_rows), reciprocal(row_units), 0, queries, keys, queries, keys, \
        scale, 1, 0
  std::vector<Number> first;
  for (int time = 0; time < 2; ++time) {
    std::fill(out.begin(), out.end(), element(7.0f));
    std::fill(partials.begin(), partials.end(), NAN);
    kernel = [&] { KERNEL(ARGUMENTS); };
#ifdef MERGE
    launch(grid, cluster, kThreads);
    kernel = [&] { MERGE(ARGUMENTS); };
    launch(grid / cluster * (kRows << row_bits) / kMergedRows, 1, kMergedRows * kRowThreads);
#else
    launch(grid, 1, kThreads, time == 0 ? 1 : grid);  // blocks run one after the other, and wait in vain; then all at once
#endif
    if (time == 0) first = out;
  }
  if (std::memcmp(first.data(), out.data(), 2 * out.size())) fail("another result the second time");

  double worst = 0.0;
  for (int i = 0; i < queries * heads; ++i) {
    std::vector<double> p;
    std::vector<int> used;
    for (int entry = 0; entry < std::min(counts[i / heads], topk); ++entry) {
      for (int in_block = 0; in_block < BLOCK; ++in_block) {
        const long long key = 1ll * entries[i / heads * topk + entry] * BLOCK + in_block;
        if (key < 0 || key >= keys) continue;
        double s = 0.0;
        for (int c = 0; c < kWidth; ++c) s += static_cast<double>(to_float(q[i * kWidth + c])) * number_of(k.data() + key * kRowOfCache, c);
        p.push_back(s * scale);
        used.push_back(key);
      }
    }
    const double maximum = p.empty() ? 0.0 : *std::max_element(p.begin(), p.end());
    double sum = 0.0;
    for (double& x : p) sum += x = std::exp(x - maximum);
    const double wanted = p.empty() ? -INFINITY : maximum + std::log(sum), actual = lse[i % heads * queries + i / heads];
    if (!(actual == wanted || std::abs(actual - wanted) < (LATENT_ROWS ? 4e-3 * (1 + factor) : 2e-3))) fail("a log-sum-exp", i);
    for (int c = 0; c < kWidthV; ++c) {
      double o = 0.0;
      for (size_t key = 0; key < p.size(); ++key) o += p[key] / sum * number_of(k.data() + used[key] * kRowOfCache, c);
      const double error = std::abs(o - to_float(out[i * kWidthV + c]));
      worst = std::max(worst, error == error ? error : 99.0);
    }
  }
  if (worst > 0.03 * row_factor) fail("an output, off by a thousandth times", static_cast<long long>(1000 * worst));
}

int main(int count, char** arguments) {
  for (int i = 1; i < count; ++i) {
    std::vector<int> numbers;
    for (char* word = std::strtok(arguments[i], ","); word; word = std::strtok(nullptr, ",")) numbers.push_back(std::atoi(word));
#if LATENT_ROWS
    row_factor = i % 3 == 0 ? 0x1p-20f : i % 3 == 1 ? 1.0f : 0x1p12f;
#endif
    run(numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], numbers[5], {numbers.begin() + 6, numbers.end()}, numbers[0] > kRows ? 2 : 1);
  }
}
