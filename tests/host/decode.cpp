// A split-KV kernel on the host: cases of the command line, each against float64. Macros say which kernel it is.
#include <functional>

#include "kernel.inc"
#include "launch.h"

// MERGE is a launch that adds up partial results; with MERGES_IN_PLACE blocks do so themselves. In both cases one or two
// blocks have the rows of a unit, or four.
#if defined(MERGE) || MERGES_IN_PLACE
#define PAIRS 1
constexpr int kMostBlocks = MERGES_IN_PLACE && !LATENT_ROWS ? 4 : 2;
#else
#define PAIRS 0
constexpr int kMostBlocks = kCluster;
#endif

template <typename Number>
static Number element(float x) {
  if constexpr (sizeof(Number) == 1) return {static_cast<unsigned char>(pack<Number>(x, 0.0f, 0.0f, 0.0f))};
  else return {static_cast<uint16_t>(pack<Number>(x, 0.0f))};
}
#if LATENT_ROWS
#include "latent_rows.h"
using Key = CacheElement;
constexpr int kRowOfKey = kRowOfCache;
#else
using Key = Element;
constexpr int kRowOfKey = HEAD_DIM;
#endif
#if SCALED
using Query = QElement;
static const Element kNan = {0x7f};
#else
using Query = Element;
static const Element kNan = {0x7fff};
#endif

// One causal call: lengths, query and KV heads, queries, blocks, tiles of a split (0: equal shares), rows of a page; and
// blocks of a cluster, or of the rows of a unit.
static void run(const std::vector<int>& lengths, int heads, int kv_heads, int rows, int grid, int split_tiles, int page_size, int cluster) {
  const int batch = lengths.size(), longest = std::max(*std::max_element(lengths.begin(), lengths.end()), 1);
  const int group = heads / kv_heads, width = HEAD_DIM, width_v = HEAD_DIM_V;
  std::vector<Query> q(batch * rows * heads * width);
  std::vector<OutElement> out(batch * rows * heads * width_v, element<OutElement>(7.0f));
  std::vector<float> lse(batch * rows * heads, 7.0f);
  for (Query& x : q) x = element<Query>(random_number());

  // Rows of no sequence are NaN, and no entry of the table beyond a length is a page.
  const int pages_of_row = PAGED ? (longest + page_size - 1) / page_size : 1, pages = batch * pages_of_row + 2;
  std::vector<int> table(batch * (pages_of_row + 1), -7), order(pages);
  for (int i = 0; i < pages; ++i) order[i] = pages - 1 - i;
  std::rotate(order.begin(), order.begin() + 1, order.end());
  int used = 0;
  for (int b = 0; PAGED && b < batch; ++b) {
    for (int i = 0; i * page_size < lengths[b]; ++i) table[b * (pages_of_row + 1) + i] = order[used++];
  }
  const auto place_of = [&](int b, int key, int h) -> size_t {
    const size_t row = PAGED ? static_cast<size_t>(table[b * (pages_of_row + 1) + key / page_size]) * page_size + key % page_size
                             : static_cast<size_t>(b) * longest + key;
    return (row * kv_heads + h) * kRowOfKey;
  };
  const size_t elements = static_cast<size_t>(PAGED ? pages * page_size : batch * longest) * kv_heads * kRowOfKey;
#if LATENT_ROWS
  std::vector<Key> k(elements, 0x7f);  // NaN in each format
  const auto number_at = [&](const std::vector<Key>& of, size_t place, int column) { return number_of(of.data() + place, column); };
  const std::vector<Key>& v = k;
  for (int b = 0; b < batch; ++b) {
    for (int i = 0; i < lengths[b] * kv_heads; ++i) store_row(k.data() + place_of(b, i / kv_heads, i % kv_heads), true);
  }
#else
  std::vector<Key> k(elements, kNan), v(elements, kNan);
  const auto number_at = [&](const std::vector<Key>& of, size_t place, int column) { return to_float(of[place + column]); };
  for (int b = 0; b < batch; ++b) {
    for (int i = 0; i < lengths[b] * kv_heads * width; ++i) {
      const size_t place = place_of(b, i / width / kv_heads, i / width % kv_heads) + i % width;
      k[place] = element<Element>(random_number());
      v[place] = VALUES_OF_KEYS ? k[place] : element<Element>(random_number());
    }
  }
#endif

  // Scales of heads, and of the KV heads of pages.
  std::vector<float> q_scales, k_scales, v_scales;
  for (std::vector<float>* scales : {&q_scales, &k_scales, &v_scales}) {
    for (int i = 0; i < std::max(batch, pages) * (TOKEN_SCALES ? page_size : 1) * kv_heads; ++i) scales->push_back(SCALED && (SCALED > 1 || scales != &q_scales) ? 1.0f + random_number() / 8.0f : 1.0f);
  }
  const auto scale_of_key = [&](const std::vector<float>& scales, int b, int key, int h) -> double {
    const int page = PAGE_SCALES || TOKEN_SCALES ? table[b * (pages_of_row + 1) + key / page_size] : b;
    return scales[(TOKEN_SCALES ? page * page_size + key % page_size : page) * kv_heads + h];
  };
#define OF_SCALES(name) name##_scales.data()
#if TOKEN_SCALES
#define STRIDES_OF_SCALES page_size * kv_heads, 1, kv_heads,
#else
#define STRIDES_OF_SCALES kv_heads, 1,
#endif
#if SCALED == 2
#define SCALES OF_SCALES(q), OF_SCALES(k), OF_SCALES(v), kv_heads, 1, STRIDES_OF_SCALES STRIDES_OF_SCALES
#elif SCALED
#define SCALES OF_SCALES(k), OF_SCALES(v), STRIDES_OF_SCALES STRIDES_OF_SCALES
#else
#define SCALES
#endif
  const long long step = static_cast<long long>(kv_heads) * kRowOfKey;
#if LATENT_ROWS
#define MAPS k.data()
#else
  const auto map_of = [&](const std::vector<Element>& of, int keys) -> TensorMap {
    const void* base = of.data();
    if (PAGED) {
      return {base, sizeof(Element), 4, kBoxBytes, {width, page_size, kv_heads, pages}, {1, step, width, page_size * step},
              {kBoxColumns, std::__gcd(page_size, keys), 1, 1}};
    }
    return {base, sizeof(Element), 4, kBoxBytes, {width, kv_heads, longest, batch}, {1, width, step, longest * step}, {kBoxColumns, 1, keys, 1}};
  };
#if VALUES_OF_KEYS
#if PAGED && HEAD_DIM > HEAD_DIM_V
#define MAPS k_map, k.data()
#else
#define MAPS k_map
#endif
#else
#define MAPS k_map, v_map
  const TensorMap v_map = map_of(v, V_KEYS);
#endif
  const TensorMap k_map = map_of(k, kBlockN);
#endif
#if PAIRS
  const int row_bits = cluster / 2;  // 1, 2 or 4 blocks
#else
  int row_bits = 0;
  while ((1 << row_bits) < ROW_WARPS && (kRows << row_bits) < rows * group) ++row_bits;
#endif
  const int row_units = (rows * group + (kRows << row_bits) - 1) / (kRows << row_bits), units = batch * kv_heads * row_units;
  const int tiles = (longest + kBlockN - 1) / kBlockN, max_splits = split_tiles ? (tiles + split_tiles - 1) / split_tiles : 1;
  const size_t slots = static_cast<size_t>(split_tiles ? units * max_splits : 2 * grid) << row_bits;
  std::vector<float> partials(slots * kRows * Partial::kFloats, NAN);
  std::vector<int> begun(2 * grid, -7);
  std::vector<uint32_t> counters((split_tiles ? units << PAIRS * row_bits : MERGES_IN_PLACE ? 2 * units << row_bits : grid), 0);
  const float scale = 1.0f / std::sqrt(static_cast<float>(width));

#ifdef MERGE
#define WRITTEN partials.data(), begun.data(), counters.data()
#else
#define WRITTEN partials.data(), counters.data()
#endif
#if PAIRS
#define MOST_QUERIES
#else
#define MOST_QUERIES rows, 0,  // and beside no other launch
#endif
#if VALUES_OF_KEYS && HEAD_DIM > HEAD_DIM_V
#define K_STRIDES page_size * step, step, kRowOfKey,
#else
#define K_STRIDES
#endif
#if PAGED
#define ARGUMENTS \
        q.data(), MAPS, out.data(), lse.data(), SCALES WRITTEN, nullptr, table.data(), lengths.data(), heads * \
        width, width, K_STRIDES heads * width_v, width_v, batch, heads, kv_heads, group, row_bits, row_units, \
        split_tiles, max_splits, reciprocal(batch), reciprocal(group), reciprocal(row_units), reciprocal(split_tiles), rows, \
        pages_of_row * page_size, batch * rows, 0, MOST_QUERIES pages_of_row + 1, page_size, pages, std::__gcd(page_size, \
        kBlockN), reciprocal(page_size), scale, 1, 0
#else
#define ARGUMENTS \
        q.data(), MAPS, out.data(), lse.data(), SCALES WRITTEN, lengths.data(), rows * heads * width, heads * \
        width, width, rows * heads * width_v, heads * width_v, width_v, batch, heads, kv_heads, group, row_bits, \
        row_units, split_tiles, max_splits, reciprocal(batch), reciprocal(group), reciprocal(row_units), \
        reciprocal(split_tiles), rows, longest, batch * rows, batch * longest, scale, 1, 1
#endif
  kernel = [&] { KERNEL(ARGUMENTS); };
  const auto launch_all = [&](int at_once) {
    launch(grid, MERGES_IN_PLACE ? 1 : cluster, kThreads, at_once);
#ifdef MERGE
    if (split_tiles > 0) return;
    const auto forward = kernel;
    kernel = [&] { MERGE(ARGUMENTS); };
    launch(grid / cluster * (kRows << row_bits) / kMergedRows, 1, kMergedRows * kRowThreads);
    kernel = forward;
#endif
  };
  launch_all(1);
  const std::vector<OutElement> first = out;
  std::fill(out.begin(), out.end(), element<OutElement>(7.0f));
  std::fill(lse.begin(), lse.end(), 7.0f);
  std::fill(partials.begin(), partials.end(), NAN);
  launch_all(MERGES_IN_PLACE ? grid : 1);
  if (std::memcmp(first.data(), out.data(), 2 * out.size())) fail("another result the second time");
  for (uint32_t counter : counters) {
    if (counter) fail("a counter that is not 0 again", counter);
  }

  double worst = 0.0;
  for (int i = 0; i < batch * rows * heads; ++i) {
    const int b = i / heads / rows, row = i / heads % rows, h = i % heads, hk = h / group;
    std::vector<double> p(std::max(lengths[b] - rows + row + 1, 0));
    double maximum = -INFINITY, sum = 0.0;
    for (size_t key = 0; key < p.size(); ++key) {
      for (int c = 0; c < width; ++c) p[key] += static_cast<double>(to_float(q[i * width + c])) * number_at(k, place_of(b, key, hk), c);
      p[key] *= q_scales[b * kv_heads + hk] * scale_of_key(k_scales, b, key, hk);
      maximum = std::max(maximum, p[key] *= scale);
    }
    for (double& x : p) sum += x = std::exp(x - maximum);
    const double wanted = p.empty() ? -INFINITY : maximum + std::log(sum);
    const double actual = lse[PAGED ? h * batch * rows + b * rows + row : (b * heads + h) * rows + row];
    if (!(actual == wanted || std::abs(actual - wanted) < (LATENT_ROWS ? 6e-3 : 1e-3))) fail("a log-sum-exp", i);
    for (int c = 0; c < width_v; ++c) {
      double o = 0.0;
      for (size_t key = 0; key < p.size(); ++key) o += p[key] / sum * scale_of_key(v_scales, b, key, hk) * number_at(v, place_of(b, key, hk), c);
      const double error = std::abs(o - to_float(out[i * width_v + c]));
      worst = std::max(worst, error == error ? error : 99.0);
    }
  }
  if (worst > 0.02) fail("an output, off by a thousandth times", static_cast<long long>(1000 * worst));
}

int main(int count, char** arguments) {
  for (int i = 1; i < count; ++i) {
    std::vector<int> numbers;
    for (char* word = std::strtok(arguments[i], ","); word; word = std::strtok(nullptr, ",")) numbers.push_back(std::atoi(word));
#if PAIRS
    const bool single = numbers[2] * numbers[0] / numbers[1] <= kRows;  // one block has all rows of a unit
#else
    const bool single = numbers[4] > 0;  // splits that the call asks for are of single blocks
#endif
    for (int cluster = 1; cluster <= kMostBlocks; cluster *= PAIRS ? 2 : std::max(kMostBlocks, 2)) {
      if (cluster > 1 && single) continue;
      run({numbers.begin() + 6, numbers.end()}, numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], numbers[5], cluster);
    }
  }
}
