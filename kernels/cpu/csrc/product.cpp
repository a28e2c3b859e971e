// y = x weight^T + bias.

#include "product.h"

using namespace pagewire;

PAGEWIRE_API void pagewire_linear(int dtype, const void* x, int64_t x_row,
                                  const PackedWeight* weight, void* out, int64_t tokens,
                                  int threads) {
  with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    const PackedWeight& w = *weight;
    PreparedRows rows = prepare(w, dtype, static_cast<const T*>(x), x_row, tokens, threads);
    product(w, rows, threads, [&](int64_t row, int64_t column, int64_t columns, const float* sums) {
      store_columns(static_cast<T*>(out) + row * w.out + column, sums, columns);
    });
  });
}
