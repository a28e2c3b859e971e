// The online softmax of attention's query rows (Milakov and Gimelshein, arXiv:1805.02867).
#pragma once

#include <algorithm>

#include "attention_dots.h"
#include "attention_tiles.h"

namespace pagewire {

// The keys of a step that a row sees.
struct Visible {
  int64_t begin, end;
};

// What the codes of a step's keys and values are times.
struct StepScales {
  float keys[KEYS], values[KEYS];
};

// exp(x) of simd.h, bit for bit, where x <= 0 or is NaN.
inline vf exp_of_negative(vf x) {
  vf rounded = x * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: an integer in the low bits
  vf n = rounded - 12582912.0f;
  vi exponent = (bits_as<vi>(rounded) + 127) << 23;
  return x < splat(-87.33f) ? vf{} : exp_mantissa(x, n) * bits_as<vf>(exponent);
}

// What some rows have so far: the running maximum, the sum of exp, the weighted values.
struct Rows {
  int64_t dim;  // floats of a row of q and acc, a multiple of 2 W
  float soft_cap;  // 0: none
  float scale;     // of short rows, whose scores come unscaled
  float *q, *scores, *acc, *peak, *total;
  int64_t* positions;  // absolute, of their tokens; joint items do without
  bf16 *short_q, *weights;  // [dim] and [KEYS] a row, where dot products read them

  // c tanh(score / c)
  vf cap(vf score) const { return soft_cap * tanh(score * (1.0f / soft_cap)); }

  // Turns the scores of `height` rows into weights, and rescales what the rows have so far.
  // visible: of each row. scales: null where the cache has none. All rows take a pass before the
  // next one, so that none waits for its own sum. Not inlined: every row is computed by the same
  // instructions.
  __attribute__((noinline)) void soften(int64_t row, int64_t height, const Visible* visible,
                                        int64_t count, const StepScales* scales) const {
    int64_t vectors = (count + W - 1) / W;
    vf shifts[tiles::HEIGHT], sums[tiles::HEIGHT];
    for (int64_t m = 0; m < height; m++) {
      float* of_row = scores + (row + m) * KEYS;
      if (scales != nullptr) multiply_by(scales->keys, of_row, vectors);
      if (soft_cap > 0)
        for (int64_t i = 0; i < vectors; i++) store(of_row + i * W, cap(load(of_row + i * W)));
      vf best = splat(-INF);
      for (int64_t i = 0; i < vectors; i++) {
        vf score = load(of_row + i * W);
        if (i * W < visible[m].begin || (i + 1) * W > visible[m].end) {
          score = hide(score, visible[m], i * W);
          store(of_row + i * W, score);
        }
        best = max(best, score);
      }
      float before = peak[row + m], now = std::max(before, max_lane(best));
      // A row that has seen no key yet keeps weights of zero: -inf - (-inf) would be NaN.
      shifts[m] = splat(now == -INF ? 0.0f : now);
      if (now != before) rescale(row + m, exp(splat(before - now))[0], now);
    }
    for (int64_t m = 0; m < height; m++) {
      float* of_row = scores + (row + m) * KEYS;
      sums[m] = vf{};
      for (int64_t i = 0; i < vectors; i++) {
        vf weight = exp_of_negative(load(of_row + i * W) - shifts[m]);
        store(of_row + i * W, weight);
        sums[m] += weight;
      }
    }
    for (int64_t m = 0; m < height; m++) {
      total[row + m] += sum(sums[m]);
      if (scales != nullptr) multiply_by(scales->values, scores + (row + m) * KEYS, vectors);
    }
  }

  static void multiply_by(const float* factors, float* row, int64_t vectors) {
    for (int64_t i = 0; i < vectors; i++)
      store(row + i * W, load(row + i * W) * load(factors + i * W));
  }

  // Scores of the keys from `first` on, of which those that are not visible become -inf.
  static vf hide(vf scores, Visible visible, int64_t first) {
    vi lanes;
    for (int i = 0; i < W; i++) lanes[i] = i;
    vi begin = vi{} + int32_t(visible.begin - first), end = vi{} + int32_t(visible.end - first);
    return (lanes >= begin) & (lanes < end) ? scores : splat(-INF);
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

// What a row has of some keys: the running maximum, the sum of exp, the weighted values [dim].
struct Partial {
  static int64_t floats(int64_t dim) { return dim + 2; }

  static void clear(float* of, int64_t dim) {
    of[0] = -INF;
    std::fill_n(of + 1, dim + 1, 0.0f);
  }

  // Adds what later keys have given. Not inlined, for the same reason as Rows::soften.
  __attribute__((noinline)) static void join(float* into, const float* later, int64_t dim) {
    if (later[1] == 0.0f) return;  // has seen nothing
    float peak = std::max(into[0], later[0]);
    float kept = exp(splat(into[0] - peak))[0], added = exp(splat(later[0] - peak))[0];
    into[0] = peak;
    into[1] = into[1] * kept + later[1] * added;
    for (int64_t d = 2; d < dim + 2; d += W)
      store(into + d, load(into + d) * kept + load(later + d) * added);
  }
};

// Calls f with std::integral_constant<int, count>, count in [1, M].
template <int M, class F>
void with_rows(int64_t count, const F& f) {
  if constexpr (M > 1)
    if (count < M) return with_rows<M - 1>(count, f);
  f(std::integral_constant<int, M>{});
}

}  // namespace pagewire
