// Prefetching of the keys and values that attention reads next.
#pragma once

#include <cstdint>

#include "simd.h"

namespace pagewire {

// Fetches the rows of the tokens that come next, all heads of one token after the other as they
// lie in memory, a line at a time: a burst would stall, and head by head would cost the double.
// A loop takes a copy of it, which fits in registers, and gives it back at its end.
//
// Into the second level by default: of two steps the first one holds half, and what is on its way
// to it would occupy the buffers that the products' own misses wait for.
template <class C, int LEVEL = 2>
class Fetcher {
 public:
  Fetcher(const C* const* rows, int64_t count, int64_t elements)
      : row_(rows), end_(rows + count), elements_(elements) {}

  PAGEWIRE_INLINE void operator()() {
    if (at_ >= run_end_) {
      if (row_ == end_) return;
      // Tokens of a block lie one behind the other.
      at_ = *row_;
      run_end_ = at_ + elements_;
      while (++row_ != end_ && *row_ == run_end_) run_end_ += elements_;
    }
    __builtin_prefetch(at_, 0, 4 - LEVEL);
    at_ += 64 / int64_t(sizeof(C));
  }

 private:
  const C *at_ = nullptr, *run_end_ = nullptr;
  const C *const* row_;
  const C* const* end_;
  int64_t elements_;
};

// For what is wanted half a step later, which the first level holds. Zen 5 also brings it sooner.
template <class C>
using NearFetcher = Fetcher<C, 1>;

}  // namespace pagewire
