// Token sampling: greedy, or Philox4x32-10 (Salmon et al., SC 2011) inverted through the
// cumulative distribution, with top-k, top-p and min-p. kernels/reference/sample.py defines it.
//
// No filter sorts the vocabulary: each finds its cut by radix descent over the bits of the
// logits, which are mapped to integers of the same order.

#include <algorithm>
#include <cmath>

#include "api.h"
#include "parallel.h"

struct SamplingColumns {
  const float* temperature;
  const int32_t* top_k;
  const float *top_p, *min_p;
  const int64_t *seed, *position;
  const int32_t* sample_index;
};

namespace pagewire {
namespace {

double uniform(uint64_t seed, uint64_t position, uint32_t sample_index) {
  uint32_t c0 = uint32_t(position), c1 = sample_index, c2 = 0, c3 = 0;
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  for (int round = 0; round < 10; round++) {
    uint64_t product0 = uint64_t(c0) * 0xD2511F53u, product1 = uint64_t(c2) * 0xCD9E8D57u;
    c0 = uint32_t(product1 >> 32) ^ c1 ^ k0;
    c1 = uint32_t(product1);
    c2 = uint32_t(product0 >> 32) ^ c3 ^ k1;
    c3 = uint32_t(product0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return double((uint64_t(c0) << 21) | (c1 >> 11)) * 0x1p-53;
}

// Integers in the order of the floats; -0 counts as 0.
uint32_t ordered(float x) {
  uint32_t bits = bits_as<uint32_t>(x == 0 ? 0.0f : x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The bits that one level of a radix descent looks at.
struct Digit {
  int shift;
  uint32_t size;
  uint32_t of(uint32_t key) const { return (key >> shift) & (size - 1); }
};
constexpr Digit DIGITS[] = {{20, 4096}, {8, 4096}, {0, 256}};

struct Candidate {
  uint32_t key;
  int32_t id;
};

// One row of logits while it is being cut down. weights[i] is exp((logit - max) / temperature),
// and 0 once i is filtered out.
struct Row {
  float *logits, *weights;
  int64_t vocab;

  std::vector<Candidate>& candidates() const {
    thread_local std::vector<Candidate> list;
    list.clear();
    for (int64_t i = 0; i < vocab; i++)
      if (logits[i] != -INF) list.push_back({ordered(logits[i]), int32_t(i)});
    return list;
  }

  static void keep_digit(std::vector<Candidate>& list, Digit digit, uint32_t value) {
    list.erase(std::remove_if(list.begin(), list.end(),
                              [&](const Candidate& c) { return digit.of(c.key) != value; }),
               list.end());
  }

  // Keeps the k greatest, and those equal to the least of them.
  void top_k(int64_t k) {
    std::vector<Candidate>& list = candidates();
    if (k >= int64_t(list.size())) return;
    for (Digit digit : DIGITS) {
      int64_t counts[4096] = {};
      for (const Candidate& c : list) counts[digit.of(c.key)]++;
      uint32_t value = digit.size - 1;
      for (; counts[value] < k; value--) k -= counts[value];
      keep_digit(list, digit, value);
    }
    float threshold = logits[list.front().id];
    for (int64_t i = 0; i < vocab; i++)
      if (logits[i] < threshold) logits[i] = -INF;
  }

  // Drops the least likely while their sum is at most (1 - p) of the total. Ties go lowest id
  // first; the last of the greatest always stays.
  void top_p(float p) {
    std::vector<Candidate>& list = candidates();
    double total = 0, dropped = 0;
    for (const Candidate& c : list) total += double(weights[c.id]);
    double limit = (1.0 - double(p)) * total;
    for (Digit digit : DIGITS) {
      double masses[4096] = {};
      uint32_t last = 0;
      for (const Candidate& c : list) {
        masses[digit.of(c.key)] += double(weights[c.id]);
        last = std::max(last, digit.of(c.key));
      }
      uint32_t value = 0;
      for (; value < last && dropped + masses[value] <= limit; value++) dropped += masses[value];
      keep_digit(list, digit, value);
    }
    float threshold = logits[list.front().id];
    size_t tied = 0;
    for (; tied + 1 < list.size() && dropped + double(weights[list[tied].id]) <= limit; tied++) {
      dropped += double(weights[list[tied].id]);
      logits[list[tied].id] = -INF;
    }
    for (int64_t i = 0; i < vocab; i++)
      if (logits[i] < threshold) logits[i] = -INF;
  }
};

// logits, with NaN as -inf, into row.logits; returns the greatest.
template <class T>
float widen(const T* logits, Row& row) {
  vf best = splat(-INF);
  int64_t i = 0;
  for (; i + W <= row.vocab; i += W) {
    vf x = load(logits + i);
    x = x == x ? x : splat(-INF);
    best = max(best, x);
    store(row.logits + i, x);
  }
  float peak = max_lane(best);
  for (; i < row.vocab; i++) {
    float x = to_float(logits[i]);
    row.logits[i] = x == x ? x : -INF;
    peak = std::max(peak, row.logits[i]);
  }
  return peak;
}

// The lowest id of the greatest logit; NaN counts as -inf.
template <class T>
int64_t greatest(const T* logits, int64_t vocab) {
  constexpr int64_t STRIDE = 4 * W;
  vf best[4] = {splat(-INF), splat(-INF), splat(-INF), splat(-INF)};
  int64_t i = 0;
  // NaN is not greater than anything.
  for (; i + STRIDE <= vocab; i += STRIDE)
    for (int j = 0; j < 4; j++) best[j] = max(load(logits + i + j * W), best[j]);
  float peak = max_lane(max(max(best[0], best[1]), max(best[2], best[3])));
  for (; i < vocab; i++) peak = to_float(logits[i]) > peak ? to_float(logits[i]) : peak;
  if (peak == -INF) return 0;  // as all the rest
  for (i = 0; i + W <= vocab; i += W) {
    vi equal = load(logits + i) == peak;
    int32_t any = 0;
    for (int j = 0; j < W; j++) any |= equal[j];
    if (any) break;
  }
  for (; i < vocab; i++)
    if (to_float(logits[i]) == peak) break;
  return i;
}

// The last step of exp(scores): weights of removed logits (-inf) come out 0.
void weigh(const Row& row, float peak, float temperature) {
  // A subnormal temperature has no finite inverse; the largest float stands in for it, and
  // everything below the peak still vanishes.
  float inverse = float(std::min(1.0 / double(temperature), double(std::numeric_limits<float>::max())));
  for (int64_t i = 0; i < row.vocab; i += W) {
    bool whole = i + W <= row.vocab;
    vf x = whole ? load(row.logits + i) : load_first(row.logits + i, row.vocab - i);
    vf weight = exp((x - peak) * inverse);
    if (whole)
      store(row.weights + i, weight);
    else
      store_first(row.weights + i, weight, row.vocab - i);
  }
}

int64_t first_equal(const float* values, int64_t n, float wanted) {
  return std::find(values, values + n, wanted) - values;
}

// The first id whose cumulative weight exceeds u times the total.
int64_t invert(const Row& row, double u) {
  constexpr int64_t BLOCK = 16 * W;
  struct BlockSums;
  int64_t blocks = (row.vocab + BLOCK - 1) / BLOCK;
  double* sums = scratch<BlockSums, double>(size_t(blocks));
  double total = 0;
  for (int64_t b = 0; b < blocks; b++) {
    int64_t i = b * BLOCK, end = std::min(row.vocab, i + BLOCK);
    vd wide = {};
    for (; i + W <= end; i += W) wide += __builtin_convertvector(load(row.weights + i), vd);
    sums[b] = sum(wide);
    for (; i < end; i++) sums[b] += double(row.weights[i]);
    total += sums[b];
  }
  double target = u * total, cumulative = 0;
  int64_t last_kept = 0;
  for (int64_t b = 0; b < blocks; b++) {
    int64_t end = std::min(row.vocab, (b + 1) * BLOCK);
    if (cumulative + sums[b] <= target && b + 1 < blocks) {
      cumulative += sums[b];
      continue;
    }
    for (int64_t i = b * BLOCK; i < end; i++) {
      cumulative += double(row.weights[i]);
      if (cumulative > target) return i;
    }
  }
  // u * total rounded up to the total.
  for (int64_t i = 0; i < row.vocab; i++)
    if (row.weights[i] > 0) last_kept = i;
  return last_kept;
}

template <class T>
int64_t sample_row(const T* logits, int64_t vocab, const SamplingColumns& c, int64_t r) {
  if (!(c.temperature[r] > 0)) return greatest(logits, vocab);
  struct Logits;
  struct Weights;
  Row row{scratch<Logits, float>(size_t(vocab)), nullptr, vocab};
  float peak = widen(logits, row);
  float temperature = c.temperature[r];
  if (!std::isfinite(peak)) return first_equal(row.logits, vocab, peak);
  row.weights = scratch<Weights, float>(size_t(vocab));
  if (c.top_k[r] > 0 && c.top_k[r] < vocab) row.top_k(c.top_k[r]);
  weigh(row, peak, temperature);
  if (c.top_p[r] < 1) {
    row.top_p(c.top_p[r]);
    weigh(row, peak, temperature);
  }
  if (c.min_p[r] > 0)
    for (int64_t i = 0; i < vocab; i++)
      if (row.weights[i] < c.min_p[r]) row.weights[i] = 0;
  return invert(row, uniform(uint64_t(c.seed[r]), uint64_t(c.position[r]), uint32_t(c.sample_index[r])));
}

}  // namespace
}  // namespace pagewire

using namespace pagewire;

PAGEWIRE_API void pagewire_sample(int dtype, const void* logits, int64_t stride, int64_t rows,
                                  int64_t vocab, const SamplingColumns* columns, int64_t* ids,
                                  int threads) {
  with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    parallel_for(rows, threads, [&](int64_t r) {
      ids[r] = sample_row(static_cast<const T*>(logits) + r * stride, vocab, *columns, r);
    });
  });
}
