// Matrix products over all panels of a weight, with what is done to the sums on the way out.
#pragma once

#include <algorithm>

#include "parallel.h"
#include "tiles.h"
#include "weight.h"

namespace pagewire {

// Rows in the form that a weight's panels read.
struct PreparedRows {
  const void* data;
  int64_t row_bytes, count;
};

// Rows of w.in numbers, prepared in memory of the calling thread that lives until its next call.
// row(r) is where row r lies, or, on the thread that asks, has just been made.
template <class Row>
PreparedRows prepare_rows(const PackedWeight& w, int64_t rows, int threads, const Row& row) {
  int64_t row_bytes = prepared_row_bytes(w);
  char* to = scratch<PreparedRows, char>(size_t(rows * row_bytes));
  for_rows(rows, w.in, threads, [&](int64_t r) { prepare_row(w, row(r), to + r * row_bytes); });
  return {to, row_bytes, rows};
}

// x [rows, w.in], prepared; x itself where that will do.
template <class T>
PreparedRows prepare(const PackedWeight& w, int dtype, const T* x, int64_t x_row, int64_t rows,
                     int threads) {
  if (reads_directly(w, dtype)) return {x, x_row * int64_t(sizeof(T)), rows};
  return prepare_rows(w, rows, threads, [&](int64_t r) { return x + r * x_row; });
}

// Rows whose sums of a panel are looked at together: they stay in the first-level cache. A multiple
// of what a product takes at once.
constexpr int64_t ROW_BLOCK = HAS_TILES ? 64 : 48;

// Calls body(panel, first row, rows) for every panel and block of rows. Threads are handed both, as
// the last panel of a prompt would keep one thread for a while when the others have nothing left.
template <class Body>
void for_panels(int64_t panels, int64_t rows, int64_t in, int threads, const Body& body) {
  if (rows * in * panels * PANEL < 65536) threads = 1;  // less than it takes to hand it out
  int64_t blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
  parallel_ranges(panels * blocks, threads, [&](int64_t begin, int64_t end) {
    [[maybe_unused]] TileScope scope;
    for (int64_t i = begin; i < end; i++) {
      int64_t row = i % blocks * ROW_BLOCK;
      body(i / blocks, row, std::min(ROW_BLOCK, rows - row));
    }
  });
}

// Calls put(row, first column, columns, sums) with the sums, plus bias, of every row and panel.
template <class Put>
void product(const PackedWeight& w, const PreparedRows& x, int threads, const Put& put) {
  for_panels(num_panels(w), x.count, w.in, threads, [&](int64_t panel, int64_t row, int64_t rows) {
    alignas(64) float sums[ROW_BLOCK * PANEL];
    const char* from = static_cast<const char*>(x.data) + row * x.row_bytes;
    multiply_panel(w, panel, from, x.row_bytes, rows, sums);
    int64_t column = panel * PANEL, columns = std::min(PANEL, w.out - column);
    for (int64_t r = 0; r < rows; r++) {
      float* of_row = sums + r * PANEL;
      if (w.bias != nullptr)
        for (int64_t i = 0; i < columns; i++) of_row[i] += w.bias[column + i];
      put(row + r, column, columns, of_row);
    }
  });
}

// A row's columns are nearly always a whole panel, which needs no loop.
template <class T>
inline void store_columns(T* to, const float* from, int64_t columns) {
  if (columns == PANEL) {
    store(to, load(from));
    store(to + W, load(from + W));
    return;
  }
  int64_t i = 0;
  for (; i + W <= columns; i += W) store(to + i, load(from + i));
  for (; i < columns; i++) from_float(from[i], to + i);
}

// to += from
template <class T>
inline void add_columns(T* to, const float* from, int64_t columns) {
  if (columns == PANEL) {
    store(to, load(to) + load(from));
    store(to + W, load(to + W) + load(from + W));
    return;
  }
  int64_t i = 0;
  for (; i + W <= columns; i += W) store(to + i, load(to + i) + load(from + i));
  for (; i < columns; i++) from_float(to_float(to[i]) + from[i], to + i);
}

}  // namespace pagewire
