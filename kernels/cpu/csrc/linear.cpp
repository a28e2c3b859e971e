// y = x weight^T + bias, where both operands keep their rows dense in memory.
//
// Every output is one dot product whose lanes run along the input features in the same order
// whatever the batch: a row's result does not depend on the rows beside it. A register tile of
// NR weight rows by MR tokens keeps the multipliers fed; weights that are not float32 are
// widened once per block of tokens. With few tokens the weights stream through once, at the
// speed of memory.

#include <algorithm>

#include "api.h"
#include "parallel.h"

namespace pagewire {
namespace {

constexpr int NR = 4;                // weight rows of a register tile
constexpr int MR = W == 16 ? 6 : 3;  // tokens of a register tile
constexpr int64_t X_BLOCK_BYTES = 192 * 1024;  // of tokens that stay in the L2 cache

// acc[n][m] += weight[n][i..] . x[m][i..], W elements of each
template <int N, int M, class T>
inline void multiply_add(const float* x, int64_t x_row, const T* weight, int64_t in, int64_t i,
                         vf (&acc)[N][M]) {
  vf xs[M];
  PAGEWIRE_UNROLL
  for (int m = 0; m < M; m++) xs[m] = load(x + m * x_row + i);
  PAGEWIRE_UNROLL
  for (int n = 0; n < N; n++) {
    vf w = load(weight + n * in + i);
    PAGEWIRE_UNROLL
    for (int m = 0; m < M; m++) acc[n][m] += w * xs[m];
  }
}

// out[m][n] for M tokens and N weight rows. Meanwhile fetches what lies `ahead` elements after
// each weight: rows are too short for the hardware to notice that they follow each other.
template <int N, int M, class T>
void dot_tile(const float* x, int64_t x_row, const T* weight, int64_t in, int64_t ahead,
              float (*out)[N]) {
  constexpr int64_t LINE = 64 / int64_t(sizeof(T));
  vf acc[N][M] = {};
  int64_t i = 0;
  for (; i + LINE <= in; i += LINE) {
    PAGEWIRE_UNROLL
    for (int n = 0; n < N; n++) __builtin_prefetch(weight + n * in + i + ahead);
    PAGEWIRE_UNROLL
    for (int64_t j = 0; j < LINE; j += W) multiply_add<N, M>(x, x_row, weight, in, i + j, acc);
  }
  for (; i + W <= in; i += W) multiply_add<N, M>(x, x_row, weight, in, i, acc);
  if (i < in) {
    for (int n = 0; n < N; n++) {
      vf w = load_first(weight + n * in + i, in - i);
      for (int m = 0; m < M; m++) acc[n][m] += w * load_first(x + m * x_row + i, in - i);
    }
  }
  PAGEWIRE_UNROLL
  for (int m = 0; m < M; m++)
    PAGEWIRE_UNROLL
    for (int n = 0; n < N; n++) out[m][n] = sum(acc[n][m]);
}

template <class T>
struct Linear {
  const float* x;
  int64_t x_row;
  const T *weight, *bias;
  T* out;
  int64_t tokens, in, features;

  template <int N, int M, class V>
  void tile(const V* rows, int64_t token, int64_t feature, bool last) const {
    float sums[M][N];
    // The last token tile of a block passes these rows just before the next rows' turn.
    dot_tile<N, M>(x + token * x_row, x_row, rows, in, last ? N * in : 0, sums);
    PAGEWIRE_UNROLL
    for (int m = 0; m < M; m++)
      PAGEWIRE_UNROLL
      for (int n = 0; n < N; n++) {
        float b = bias ? to_float(bias[feature + n]) : 0.0f;
        from_float(sums[m][n] + b, out + (token + m) * features + feature + n);
      }
  }

  template <int N, int M, class V>
  void tail(const V* rows, int64_t token, int64_t left, int64_t feature) const {
    if constexpr (M > 0) {
      if (left == M) return tile<N, M>(rows, token, feature, true);
      tail<N, M - 1>(rows, token, left, feature);
    }
  }

  template <int N, class V>
  void tokens_of(const V* rows, int64_t token, int64_t end, int64_t feature) const {
    for (; token + MR <= end; token += MR) tile<N, MR>(rows, token, feature, token + MR == end);
    tail<N, MR - 1>(rows, token, end - token, feature);
  }

  template <int N>
  void features_of(int64_t token, int64_t end, int64_t feature) const {
    const T* rows = weight + feature * in;
    if constexpr (!std::is_same_v<T, float>) {
      if (end - token > 2 * MR) {
        struct WideRows;
        float* wide = scratch<WideRows, float>(size_t(N * in));
        int64_t i = 0;
        for (; i + W <= N * in; i += W) store(wide + i, load(rows + i));
        for (; i < N * in; i++) wide[i] = to_float(rows[i]);
        return tokens_of<N>(wide, token, end, feature);
      }
    }
    tokens_of<N>(rows, token, end, feature);
  }

  void run(int64_t feature, int64_t feature_end, int64_t token_block) const {
    for (int64_t token = 0; token < tokens; token += token_block) {
      int64_t end = std::min(tokens, token + token_block), f = feature;
      // A lone token has too few sums in flight in a tile of NR rows.
      if (end - token == 1)
        for (; f + 2 * NR <= feature_end; f += 2 * NR) features_of<2 * NR>(token, end, f);
      for (; f + NR <= feature_end; f += NR) features_of<NR>(token, end, f);
      for (; f < feature_end; f++) features_of<1>(token, end, f);
    }
  }
};

}  // namespace
}  // namespace pagewire

using namespace pagewire;

// weight [features, in] and out [tokens, features] are dense; bias may be null.
PAGEWIRE_API void pagewire_linear(int dtype, const void* x, int64_t x_row, const void* weight,
                                  const void* bias, void* out, int64_t tokens, int64_t in,
                                  int64_t features, int threads) {
  with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    Linear<T> op{nullptr, x_row, static_cast<const T*>(weight), static_cast<const T*>(bias),
                 static_cast<T*>(out), tokens, in, features};
    if constexpr (std::is_same_v<T, float>) {
      op.x = static_cast<const float*>(x);
    } else {
      struct WideX;
      float* wide = scratch<WideX, float>(size_t(tokens * in));
      for (int64_t t = 0; t < tokens; t++) {
        const T* from = static_cast<const T*>(x) + t * x_row;
        int64_t i = 0;
        for (; i + W <= in; i += W) store(wide + t * in + i, load(from + i));
        for (; i < in; i++) wide[t * in + i] = to_float(from[i]);
      }
      op.x = wide;
      op.x_row = in;
    }
    if (tokens * in * features < 65536) threads = 1;  // less than it takes to wake them
    int64_t token_block =
        std::max<int64_t>(MR, X_BLOCK_BYTES / int64_t(sizeof(float)) / std::max<int64_t>(in, 1) / MR * MR);
    int64_t features_per_item = features >= 4096 ? 64 : 4 * NR;
    int64_t items = (features + features_per_item - 1) / features_per_item;
    parallel_for(items, threads, [&](int64_t item) {
      int64_t begin = item * features_per_item;
      op.run(begin, std::min(features, begin + features_per_item), token_block);
    });
  });
}
