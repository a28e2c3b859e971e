// Products with panels of bfloat16 by tile registers.
//
// A panel's pair of features is a row of two tiles of 16 outputs; rows of x are rows of a tile as
// they lie in memory. An instruction sums up to 32 features, and a sum runs over these parts in
// order whatever the number of rows: a chain is a thirty-second as long as one over all features,
// so that it needs no sums of chunks.
#pragma once

#include <algorithm>

#include "tiles.h"
#include "weight.h"

#if defined(PAGEWIRE_TILES)

namespace pagewire {
namespace weight_tiles {

constexpr int64_t FEATURES = 32;       // of a tile of x
constexpr int64_t CHUNK = 256;         // features whose weights stay in the first-level cache
constexpr int64_t AHEAD = 4096;        // bytes between a weight and what is fetched meanwhile
constexpr int64_t PASS_ROWS = 2 * TILE_ROWS;
constexpr int64_t STRIDE = 4 * PANEL;  // bytes between pairs of a panel, and between rows of sums
static_assert(PANEL == 2 * TILE_BYTES / 4);

// Registers: sums [2 of rows][2 of outputs], rows of x [2], weights [2].
inline TileShapes shapes(int64_t rows, int64_t pairs) {
  TileShapes shapes;
  for (int i = 0; i < 2; i++) {
    int64_t of_tile = std::min(rows - i * TILE_ROWS, TILE_ROWS);
    if (of_tile <= 0) break;
    for (int j = 0; j < 2; j++) shapes.set_product(2 * i + j, 4 + i, 6 + j, of_tile, 16, pairs);
  }
  return shapes;
}

// Up to two tiles of rows by the panel. FIRST: of the rows, for which the weights come from memory.
template <int ROW_TILES, bool FIRST>
void multiply(const char* x, int64_t row_bytes, const char* weights, int64_t steps, bool add,
              float* sums) {
  using namespace tile_registers;
  const char* x1 = x + TILE_ROWS * row_bytes;
  float* sums1 = sums + TILE_ROWS * PANEL;
  if (add) {
    load<0>(sums, STRIDE);
    load<1>(sums + PANEL / 2, STRIDE);
    if constexpr (ROW_TILES == 2) {
      load<2>(sums1, STRIDE);
      load<3>(sums1 + PANEL / 2, STRIDE);
    }
  } else {
    zero<0>();
    zero<1>();
    if constexpr (ROW_TILES == 2) {
      zero<2>();
      zero<3>();
    }
  }
  for (; steps > 0; steps--) {
    if constexpr (FIRST)
      for (int64_t line = 0; line < FEATURES / 2 * STRIDE; line += 64)
        __builtin_prefetch(weights + AHEAD + line);
    load<6>(weights, STRIDE);
    load<4>(x, row_bytes);
    add_bfloat16_product<0, 4, 6>();
    load<7>(weights + TILE_BYTES, STRIDE);
    add_bfloat16_product<1, 4, 7>();
    if constexpr (ROW_TILES == 2) {
      load<5>(x1, row_bytes);
      add_bfloat16_product<2, 5, 6>();
      add_bfloat16_product<3, 5, 7>();
      x1 += 2 * FEATURES;
    }
    x += 2 * FEATURES;
    weights += FEATURES / 2 * STRIDE;
  }
  store<0>(sums, STRIDE);
  store<1>(sums + PANEL / 2, STRIDE);
  if constexpr (ROW_TILES == 2) {
    store<2>(sums1, STRIDE);
    store<3>(sums1 + PANEL / 2, STRIDE);
  }
}

// All rows, over `steps` tiles of `pairs` pairs of features.
inline void multiply_rows(const char* x, int64_t row_bytes, int64_t rows, const char* weights,
                          int64_t pairs, int64_t steps, bool add, float* sums) {
  for (int64_t r = 0; r < rows; r += PASS_ROWS) {
    int64_t count = std::min(rows - r, PASS_ROWS);
    TileScope::use(shapes(count, pairs));
    auto pass = count > TILE_ROWS ? (r == 0 ? multiply<2, true> : multiply<2, false>)
                                  : (r == 0 ? multiply<1, true> : multiply<1, false>);
    pass(x + r * row_bytes, row_bytes, weights, steps, add, sums + r * PANEL);
  }
}

// As multiply_panel(), of PACKED_BFLOAT16.
inline void multiply_panel(const PackedWeight& w, int64_t panel, const void* x, int64_t row_bytes,
                           int64_t rows, float* sums) {
  int64_t pairs = (w.in + 1) / 2, whole = w.in / FEATURES * FEATURES;
  const char* from = static_cast<const char*>(x);
  const char* weights = static_cast<const char*>(w.data) + panel * pairs * STRIDE;
  int64_t i = 0;
  do {
    int64_t steps = std::min(CHUNK, whole - i) / FEATURES;
    multiply_rows(from + 2 * i, row_bytes, rows, weights + i / 2 * STRIDE, FEATURES / 2, steps,
                  i > 0, sums);
    i += CHUNK;
  } while (i < whole);
  if (int64_t rest = pairs - whole / 2; rest > 0)
    multiply_rows(from + 2 * whole, row_bytes, rows, weights + whole / 2 * STRIDE, rest, 1, true,
                  sums);
}

}  // namespace weight_tiles
}  // namespace pagewire

#endif
