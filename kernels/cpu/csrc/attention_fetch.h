// Prefetching of the keys and values that attention reads next.
#pragma once

#include <cstdint>

namespace pagewire {

// Fetches the rows of the tokens that come next, all heads of one token after the other as they
// lie in memory, a line at a time: a burst would stall, and head by head would cost the double.
// Into the second level: of two steps the first one holds half, and what is on its way to it
// would occupy the buffers that the products' own misses wait for.
template <class C>
class Fetcher {
 public:
  Fetcher(const C* const* rows, int64_t count, int64_t elements)
      : row_(rows), end_(rows + count), elements_(elements) {}

  void operator()() {
    if (row_ == end_) return;
    __builtin_prefetch(*row_ + at_, 0, 2);
    at_ += 64 / int64_t(sizeof(C));
    if (at_ >= elements_) {
      at_ = 0;
      row_++;
    }
  }

 private:
  const C *const* row_;
  const C* const* end_;
  int64_t elements_, at_ = 0;
};

}  // namespace pagewire
