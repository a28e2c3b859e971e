// Loops over a pool of threads that wait for work by spinning briefly, then by sleeping.
//
// A loop is handed out in ranges that shrink towards its end, to whoever asks: a thread that
// is late, or has lost its core to another process, holds up nobody unless it is in the middle
// of a range. There is no barrier to arrive at. The caller takes part, and goes on when the
// last range is done.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pagewire {

constexpr int64_t MOST_ITEMS = (1 << 24) - 1;

// Calls body(data, begin, end) for ranges that cover [0, n), 0 < n <= MOST_ITEMS, on at most
// `threads` threads. Inside of a loop, or beside one of another thread, it runs on the caller alone.
void run_loop(int64_t n, int threads, void (*body)(void*, int64_t, int64_t), void* data);

// Calls body(begin, end) for ranges that cover [0, n), in no order.
template <class Body>
void parallel_ranges(int64_t n, int threads, const Body& body) {
  if (n <= 0) return;
  if (threads <= 1 || n == 1 || n > MOST_ITEMS) return body(int64_t(0), n);
  auto call = [](void* data, int64_t begin, int64_t end) {
    (*static_cast<const Body*>(data))(begin, end);
  };
  run_loop(n, threads, call, const_cast<Body*>(&body));
}

// Calls body(i) once for each i in [0, n), in no order.
template <class Body>
void parallel_for(int64_t n, int threads, const Body& body) {
  parallel_ranges(n, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) body(i);
  });
}

// Elements of rows that are worth a range of their own, which costs some atomic operations.
constexpr int64_t RANGE_ELEMENTS = 2048;

// Calls body(row) once for each row in [0, rows), in no order; a row takes the time of row_elements
// that are read, computed a little with and written.
template <class Body>
void for_rows(int64_t rows, int64_t row_elements, int threads, const Body& body) {
  int64_t per_item = 1 + (RANGE_ELEMENTS - 1) / (row_elements + 1);
  parallel_ranges((rows + per_item - 1) / per_item, threads, [&](int64_t begin, int64_t end) {
    int64_t last = end * per_item < rows ? end * per_item : rows;
    for (int64_t row = begin * per_item; row < last; row++) body(row);
  });
}

// Memory of the calling thread that lives until its next call, for one purpose each.
template <class Tag, class T>
T* scratch(size_t n) {
  // Room for aligned rows: vectors of W floats that cross cache lines cost twice.
  thread_local std::vector<T> memory;
  constexpr size_t LINE = 64 / sizeof(T);
  if (memory.size() < n + LINE) memory.resize(n + LINE);
  uintptr_t address = reinterpret_cast<uintptr_t>(memory.data());
  return reinterpret_cast<T*>((address + 63) / 64 * 64);
}

}  // namespace pagewire
