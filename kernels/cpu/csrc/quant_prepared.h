// Rows of x as products with weights of quant.h read them: signed bytes under a float scale for
// each 32 features.
#pragma once

#include "quant.h"

namespace pagewire {
namespace quant {

constexpr int32_t LEAST_OFFSET = 8;  // of the formats that have one; the others' are multiples
constexpr int64_t AHEAD = 4096;      // bytes between a code and what is fetched meanwhile

// 32 features of a prepared row.
struct PreparedBlock {
  int8_t codes[BLOCK];
  float scale;
  float scaled_sum;  // scale * sum of the codes
  // -LEAST_OFFSET * sum of the codes, of the first half and of all.
  int32_t start_half, start;

  // What a sum of products with unsigned codes begins with, for half HALF of F's halves.
  template <class F>
  int32_t start_of(int half) const {
    static_assert(F::OFFSET % LEAST_OFFSET == 0);
    int32_t least = F::HALVES == 1 ? start : half == 0 ? start_half : start - start_half;
    return least * (F::OFFSET / LEAST_OFFSET);
  }
};

}  // namespace quant
}  // namespace pagewire
