// Attention's products for few query rows, straight from the cache, in float32.
#pragma once

#include <algorithm>

#include "attention_rows.h"

namespace pagewire {
namespace few_rows {

// scores[row][j] = q[row] . keys[j] for MR rows and U keys
template <int MR, int U, class T>
void dot(const float* q, int64_t dim, const T* const* keys, int64_t head_dim, float* scores) {
  vf acc[U][MR] = {};
  int64_t d = 0;
  for (; d + W <= head_dim; d += W) {
    vf key[U];
    PAGEWIRE_UNROLL
    for (int j = 0; j < U; j++) key[j] = load(keys[j] + d);
    PAGEWIRE_UNROLL
    for (int m = 0; m < MR; m++) {
      vf query = load(q + m * dim + d);
      PAGEWIRE_UNROLL
      for (int j = 0; j < U; j++) acc[j][m] += key[j] * query;
    }
  }
  if (d < head_dim) {
    PAGEWIRE_UNROLL
    for (int j = 0; j < U; j++) {
      vf key = load_first(keys[j] + d, head_dim - d);
      PAGEWIRE_UNROLL
      for (int m = 0; m < MR; m++) acc[j][m] += key * load(q + m * dim + d);
    }
  }
  PAGEWIRE_UNROLL
  for (int m = 0; m < MR; m++)
    PAGEWIRE_UNROLL
    for (int j = 0; j < U; j++) scores[m * KEYS + j] = sum(acc[j][m]);
}

// acc[row] += sum over j of weights[row][j] * values[j], for MR rows
template <int MR, class T>
void accumulate(const float* weights, const T* const* values, int64_t count, int64_t head_dim,
                float* acc, int64_t dim) {
  int64_t d = 0;
  for (; d + 2 * W <= head_dim; d += 2 * W) {
    vf c[MR][2];
    PAGEWIRE_UNROLL
    for (int m = 0; m < MR; m++) {
      c[m][0] = load(acc + m * dim + d);
      c[m][1] = load(acc + m * dim + d + W);
    }
    for (int64_t j = 0; j < count; j++) {
      vf v0 = load(values[j] + d), v1 = load(values[j] + d + W);
      PAGEWIRE_UNROLL
      for (int m = 0; m < MR; m++) {
        float weight = weights[m * KEYS + j];
        c[m][0] += v0 * weight;
        c[m][1] += v1 * weight;
      }
    }
    PAGEWIRE_UNROLL
    for (int m = 0; m < MR; m++) {
      store(acc + m * dim + d, c[m][0]);
      store(acc + m * dim + d + W, c[m][1]);
    }
  }
  for (; d < head_dim; d += W) {
    int64_t width = std::min<int64_t>(W, head_dim - d);
    vf c[MR];
    PAGEWIRE_UNROLL
    for (int m = 0; m < MR; m++) c[m] = load(acc + m * dim + d);
    for (int64_t j = 0; j < count; j++) {
      vf v = width == W ? load(values[j] + d) : load_first(values[j] + d, width);
      PAGEWIRE_UNROLL
      for (int m = 0; m < MR; m++) c[m] += v * weights[m * KEYS + j];
    }
    PAGEWIRE_UNROLL
    for (int m = 0; m < MR; m++) store(acc + m * dim + d, c[m]);
  }
}

}  // namespace few_rows
}  // namespace pagewire
