// A backward by clusters on the host: cases of the command line, each against float64. Macros say which kernel it is.
#include <utility>

#include "threads.h"

inline uint32_t atomicInc(uint32_t* place, uint32_t last) { return std::exchange(*place, *place < last ? *place + 1 : 0); }

#include "kernel.inc"
#include "launch.h"

static Element element(float x) { return {static_cast<uint16_t>(pack<Element>(x, 0.0f))}; }

// One causal call of dense tensors: batch, queries, keys, query and KV heads.
static void run(int batch, int rows, int keys, int heads, int kv_heads) {
  const int group = heads / kv_heads, width = HEAD_DIM;
  const size_t of_q = static_cast<size_t>(batch) * rows * heads * width, of_k = static_cast<size_t>(batch) * keys * kv_heads * width;
  std::vector<Element> q(of_q), k(of_k), v(of_k), out(of_q), dout(of_q);
  std::vector<Element> dq(of_q, element(7.0f)), dk(of_k, element(7.0f)), dv(of_k, element(7.0f));
  for (std::vector<Element>* tensor : {&q, &k, &v, &dout}) {
    for (Element& x : *tensor) x = element(random_number());
  }
  const float scale = 1.0f / std::sqrt(static_cast<float>(width));
  std::vector<float> lse(batch * heads * rows), lse_log2(lse.size(), NAN), delta(lse.size(), NAN);
  std::vector<double> wanted_dq(of_q), wanted_dk(of_k), wanted_dv(of_k);
  for (int i = 0; i < batch * heads * rows; ++i) {
    const int b = i / rows / heads, h = i / rows % heads, row = i % rows, seen = std::max(keys - rows + row + 1, 0);
    const size_t query = (static_cast<size_t>(b * rows + row) * heads + h) * width;
    const auto key = [&](int j) { return (static_cast<size_t>(b * keys + j) * kv_heads + h / group) * width; };
    const auto product = [&](const std::vector<Element>& x, size_t at_x, const std::vector<Element>& y, size_t at_y) {
      double sum = 0.0;
      for (int c = 0; c < width; ++c) sum += static_cast<double>(to_float(x[at_x + c])) * to_float(y[at_y + c]);
      return sum;
    };
    std::vector<double> p(seen), o(width);
    double sum = 0.0;
    for (int j = 0; j < seen; ++j) sum += p[j] = std::exp(scale * product(q, query, k, key(j)));
    for (int j = 0; j < seen; ++j) {
      p[j] /= sum;
      for (int c = 0; c < width; ++c) o[c] += p[j] * to_float(v[key(j) + c]);
    }
    lse[i] = seen ? std::log(sum) : -INFINITY;
    for (int c = 0; c < width; ++c) out[query + c] = element(o[c]);
    const double of_row = product(out, query, dout, query);
    for (int j = 0; j < seen; ++j) {
      const double ds = scale * p[j] * (product(dout, query, v, key(j)) - of_row);
      for (int c = 0; c < width; ++c) {
        wanted_dv[key(j) + c] += p[j] * to_float(dout[query + c]);
        wanted_dk[key(j) + c] += ds * to_float(q[query + c]);
        wanted_dq[query + c] += ds * to_float(k[key(j) + c]);
      }
    }
  }

  const int q_tiles = (rows + kBlockM - 1) / kBlockM, kv_tiles = (keys + kBlockN - 1) / kBlockN;
  const int row_tiles = (rows + PREPROCESS_ROWS - 1) / PREPROCESS_ROWS;
  const long long step_q = heads * width, step_k = kv_heads * width;
  std::vector<float> sums(static_cast<size_t>(batch) * heads * q_tiles * kSumsOfTile, NAN);
  kernel = [&] {
    PREPROCESS(
        out.data(), dout.data(), lse.data(), nullptr, lse_log2.data(), delta.data(), sums.data(), rows * step_q, step_q,
        width, rows * step_q, step_q, width, heads, rows, row_tiles, sums.size() / 4, 0);
  };
  launch(batch * heads * row_tiles, 1, PREPROCESS_THREADS);
  const TensorMap q_map = {q.data(), sizeof(Element), 4, kBoxBytes, {width, heads, rows, batch}, {1, width, step_q, rows * step_q}, {kBoxColumns, 1, kBlockM, 1}};
  // Keys through a window: what lies after the last row is 0.
  const TensorMap k_map = {k.data() - kKeys * step_k, sizeof(Element), 5, kBoxBytes, {width, kv_heads, kKeys, 1 << 30, batch}, {1, width, step_k, step_k, keys * step_k}, {kBoxColumns, 1, kKeys, 1, 1}};
  TensorMap dout_map = q_map, v_map = k_map;
  dout_map.base = dout.data();
  v_map.base = v.data() - kKeys * step_k;
  constexpr int kSection = 1;
  kernel = [&] {
    DQKV(
        q_map, k_map, v_map, dout_map, sums.data(), dk.data(), dv.data(), lse_log2.data(), delta.data(), nullptr,
        keys * step_k, step_k, width, keys * step_k, step_k, width, batch, heads, kv_heads, group, kSection, kv_tiles, rows,
        keys, batch * rows, batch * keys, q_tiles, scale, 0);
  };
  launch(CLUSTER * batch * kv_heads * kv_tiles, CLUSTER, kThreads);
  kernel = [&] {
    POSTPROCESS(
        sums.data(), dq.data(), rows * step_q, step_q, width, batch, heads, kv_heads, group, kSection, q_tiles, rows, keys,
        batch * rows, batch * keys, scale);
  };
  launch(batch * heads * q_tiles, 1, 128 * CLUSTER);

  const auto compare = [&](const char* what, const std::vector<Element>& actual, const std::vector<double>& wanted) {
    double largest = 0.0;
    for (double x : wanted) largest = std::max(largest, std::abs(x));
    for (size_t i = 0; i < wanted.size(); ++i) {
      if (!(std::abs(to_float(actual[i]) - wanted[i]) < 0.02 * largest)) fail(what, i);
    }
  };
  compare("dQ", dq, wanted_dq);
  compare("dK", dk, wanted_dk);
  compare("dV", dv, wanted_dv);
}

int main(int count, char** arguments) {
  for (int i = 1; i < count; ++i) {
    std::vector<int> numbers;
    for (char* word = std::strtok(arguments[i], ","); word; word = std::strtok(nullptr, ",")) numbers.push_back(std::atoi(word));
    run(numbers[0], numbers[1], numbers[2], numbers[3], numbers[4]);
  }
}
