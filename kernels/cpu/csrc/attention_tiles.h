// Attention's products in float32, for few query rows and for many.
//
// Keys are transposed into a tile, so that a score is a lane, and sums one product after the other
// whatever the number of rows: a row's result does not depend on the rows beside it. Values are
// read where they lie by few rows, and widened first for many.
#pragma once

#include <algorithm>

#include "attention.h"
#include "attention_fetch.h"
#include "transpose.h"

namespace pagewire {
namespace tiles {

constexpr int64_t PANEL = 2 * W;          // keys side by side
constexpr int HEIGHT = W == 16 ? 12 : 6;  // query rows of a block of registers, at most
// Its vectors side by side: more with few rows, so that enough sums are under way.
template <int M>
constexpr int WIDTH = M <= HEIGHT / 2 ? 4 : 2;

// keys[KEYS] to [panel][dim][PANEL], of the first count keys, a multiple of W.
template <class C>
void pack_keys(const C* const* keys, int64_t count, int64_t head_dim, int64_t dim,
               Fetcher<C>& fetch, float* tile) {
  for (int64_t j = 0; j < count; j += W) {
    float* panel = tile + j / PANEL * dim * PANEL + j % PANEL;
    for (int64_t d = 0; d < head_dim; d += W) {
      vf columns[W];
      if (head_dim - d >= W) {
        load_columns(keys + j, d, columns);
      } else {
        C padded[W][W] = {};
        const C* rows[W];
        for (int i = 0; i < W; i++) {
          std::memcpy(padded[i], keys[j + i] + d, size_t(head_dim - d) * sizeof(C));
          rows[i] = padded[i];
        }
        load_columns(rows, 0, columns);
      }
      PAGEWIRE_UNROLL
      for (int i = 0; i < W; i++) {
        if (i % 2 == 0) fetch();
        store(panel + (d + i) * PANEL, columns[i]);
      }
    }
  }
}

// Head rows in float32, [count][dim] with zeros behind head_dim.
template <class C>
void widen(const C* const* rows, int64_t begin, int64_t end, int64_t head_dim, int64_t dim,
           Fetcher<C>& fetch, float* to) {
  for (int64_t j = begin; j < end; j++)
    for (int64_t d = 0; d < dim; d += W) {
      fetch();
      store(to + j * dim + d, load_some(rows[j] + d, head_dim - d));
    }
}

// scores[M][N W] of M queries and the keys of N vectors of the tile.
template <int M, int N>
void multiply_panels(const float* q, int64_t dim, const float* tile, int64_t head_dim,
                     float* scores) {
  vf sums[M][N] = {};
  for (int64_t d = 0; d < head_dim; d++) {
    vf keys[N];
    PAGEWIRE_UNROLL
    for (int i = 0; i < N; i++)
      keys[i] = load(tile + i / 2 * dim * PANEL + d * PANEL + i % 2 * W);
    PAGEWIRE_UNROLL
    for (int m = 0; m < M; m++) {
      float query = q[m * dim + d];
      PAGEWIRE_UNROLL
      for (int i = 0; i < N; i++) sums[m][i] += keys[i] * query;
    }
  }
  PAGEWIRE_UNROLL
  for (int m = 0; m < M; m++)
    PAGEWIRE_UNROLL
    for (int i = 0; i < N; i++) store(scores + m * KEYS + i * W, sums[m][i]);
}

// Of the first count keys at least.
template <int M>
void multiply_keys(const float* q, int64_t dim, const float* tile, int64_t count, int64_t head_dim,
                   float* scores) {
  constexpr int N = WIDTH<M>;
  for (int64_t j = 0; j < count; j += N * W)
    multiply_panels<M, N>(q, dim, tile + j * dim, head_dim, scores + j);
}

// acc[m][..] += weights[m][j] * load_value(j, i) over keys [begin, end), for M rows and N vectors i.
// A step has a sum of its own: one chain over all keys would round more.
template <int M, int N, class LoadValue>
void add_panels(const float* weights, int64_t begin, int64_t end, float* acc, int64_t dim,
                const LoadValue& load_value) {
  vf sums[M][N] = {};
  for (int64_t j = begin; j < end; j++) {
    vf values[N];
    PAGEWIRE_UNROLL
    for (int i = 0; i < N; i++) values[i] = load_value(j, i);
    PAGEWIRE_UNROLL
    for (int m = 0; m < M; m++) {
      float weight = weights[m * KEYS + j];
      PAGEWIRE_UNROLL
      for (int i = 0; i < N; i++) sums[m][i] += values[i] * weight;
    }
  }
  PAGEWIRE_UNROLL
  for (int m = 0; m < M; m++)
    PAGEWIRE_UNROLL
    for (int i = 0; i < N; i++) {
      float* to = acc + m * dim + i * W;
      store(to, load(to) + sums[m][i]);
    }
}

// Calls add(d, std::integral_constant<int, N>) for the N vectors from d on, of all of head_dim.
template <int M, class Add>
void for_panels(int64_t head_dim, const Add& add) {
  int64_t d = 0;
  if constexpr (WIDTH<M> == 4)
    for (; d + 2 * W < head_dim; d += 4 * W) add(d, std::integral_constant<int, 4>{});
  for (; d < head_dim; d += 2 * W) add(d, std::integral_constant<int, 2>{});
}

// acc is [M][dim], dim a multiple of 2 W.
template <int M, class C>
void add_values(const float* weights, const C* const* values, Fetcher<C>& fetch, int64_t begin,
                int64_t end, int64_t head_dim, float* acc, int64_t dim) {
  for_panels<M>(head_dim, [&](int64_t d, auto vectors) {
    constexpr int N = decltype(vectors)::value;
    int64_t left = head_dim - d;
    if (left >= N * W)
      add_panels<M, N>(weights, begin, end, acc + d, dim, [&](int64_t j, int i) {
        if (i % 2 == 0) fetch();
        return load(values[j] + d + i * W);
      });
    else
      add_panels<M, N>(weights, begin, end, acc + d, dim, [&](int64_t j, int i) {
        if (i % 2 == 0) fetch();
        return load_some(values[j] + d + i * W, left - i * W);
      });
  });
}

// As add_values, of a tile that widen() has made.
template <int M>
void add_tile(const float* weights, const float* tile, int64_t begin, int64_t end,
              int64_t head_dim, float* acc, int64_t dim) {
  for_panels<M>(head_dim, [&](int64_t d, auto vectors) {
    add_panels<M, decltype(vectors)::value>(
        weights, begin, end, acc + d, dim,
        [&](int64_t j, int i) { return load(tile + j * dim + d + i * W); });
  });
}

}  // namespace tiles
}  // namespace pagewire
