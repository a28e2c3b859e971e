// The online softmax of attention's query rows (Milakov and Gimelshein, arXiv:1805.02867).
#pragma once

#include <algorithm>

#include "attention_dots.h"

namespace pagewire {

constexpr int64_t KEYS = 64;  // a step

// The keys of a step that a row sees.
struct Visible {
  int64_t begin, end;
};

// What the codes of a step's keys and values are times.
struct StepScales {
  float keys[KEYS], values[KEYS];
};

inline void multiply_by(const float* factors, float* row, int64_t width) {
  for (int64_t j = 0; j < width; j += W) store(row + j, load(row + j) * load(factors + j));
}

// What some rows have so far: the running maximum, the sum of exp, the weighted values.
struct Rows {
  int64_t dim;  // floats of a row of q and acc, a multiple of 2 W
  float soft_cap;  // 0: none
  float scale;     // of short rows, whose scores come unscaled
  float *q, *scores, *acc, *peak, *total;
  bf16 *short_q, *weights;  // [dim] and [KEYS] a row, where dot products read them

  // c tanh(score / c)
  vf cap(vf score) const { return soft_cap * tanh(score * (1.0f / soft_cap)); }

  // Turns the scores of one row into weights, and rescales what the row has so far. scales: null
  // where the cache has none.
  void soften(int64_t row, Visible visible, int64_t count, const StepScales* scales) const {
    float* of_row = scores + row * KEYS;
    int64_t width = (count + W - 1) / W * W;
    if (scales != nullptr) multiply_by(scales->keys, of_row, width);
    if (soft_cap > 0)
      for (int64_t j = 0; j < width; j += W) store(of_row + j, cap(load(of_row + j)));
    std::fill(of_row, of_row + visible.begin, -INF);
    for (int64_t j = visible.end; j < width; j++) of_row[j] = -INF;
    vf best = splat(-INF);
    for (int64_t j = 0; j < width; j += W) best = max(best, load(of_row + j));
    float now = std::max(peak[row], max_lane(best));
    // A row that has seen no key yet keeps weights of zero: -inf - (-inf) would be NaN.
    vf shift = splat(now == -INF ? 0.0f : now), sums = {};
    for (int64_t j = 0; j < width; j += W) {
      vf weight = exp(load(of_row + j) - shift);
      store(of_row + j, weight);
      sums += weight;
    }
    if (now != peak[row]) rescale(row, exp(splat(peak[row] - now))[0], now);
    total[row] += sum(sums);
    if (scales != nullptr) multiply_by(scales->values, of_row, width);
  }

#if defined(__AVX512BF16__)
  // As soften, from scores that are not scaled yet to weights in bfloat16.
  void soften_short(int64_t row, Visible visible, int64_t count, const StepScales* scales) const {
    vf scaled[KEYS / W], best = splat(-INF);
    int64_t vectors = (count + W - 1) / W;
    for (int64_t i = 0; i < vectors; i++) {
      scaled[i] = load(scores + row * KEYS + i * W) * scale;
      if (scales != nullptr) scaled[i] *= load(scales->keys + i * W);
      if (soft_cap > 0) scaled[i] = cap(scaled[i]);
      uint32_t seen = first_lanes(visible.end - i * W) & ~first_lanes(visible.begin - i * W);
      if (seen != 0xffff)
        scaled[i] = bits_as<vf>(_mm512_mask_blend_ps(
            __mmask16(seen), bits_as<__m512>(splat(-INF)), bits_as<__m512>(scaled[i])));
      best = max(best, scaled[i]);
    }
    float before = peak[row], now = std::max(before, max_lane(best));
    vf shift = splat(now == -INF ? 0.0f : now), sums = {};
    for (int64_t i = 0; i < vectors; i++) {
      vf weight = dots::exp_of_negative(scaled[i] - shift);
      sums += weight;
      if (scales != nullptr) weight *= load(scales->values + i * W);
      __m256bh rounded = _mm512_cvtneps_pbh(bits_as<__m512>(weight));
      std::memcpy(weights + row * KEYS + i * W, &rounded, sizeof rounded);
    }
    if (now != before) rescale(row, dots::exp_of_negative(splat(before - now))[0], now);
    total[row] += sum(sums);
  }

  static uint32_t first_lanes(int64_t n) {
    return n <= 0 ? 0 : n >= W ? 0xffff : (1u << n) - 1;
  }
#endif

  void rescale(int64_t row, float factor, float now) const {
    total[row] *= factor;
    float* of_row = acc + row * dim;
    for (int64_t d = 0; d < dim; d += W) store(of_row + d, load(of_row + d) * factor);
    peak[row] = now;
  }
};

}  // namespace pagewire
