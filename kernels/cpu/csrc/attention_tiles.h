// Products of float32 tiles, blocked by registers.
#pragma once

#include "simd.h"

namespace pagewire {

// c[MR][2W] (+)= a[MR][depth] b[depth][2W]
template <int MR>
static void product(const float* a, int64_t a_row, const float* b, int64_t b_row, float* c,
                    int64_t c_row, int64_t depth, bool add) {
  vf acc[MR][2] = {};
  if (add) {
    PAGEWIRE_UNROLL
    for (int m = 0; m < MR; m++) {
      acc[m][0] = load(c + m * c_row);
      acc[m][1] = load(c + m * c_row + W);
    }
  }
  for (int64_t i = 0; i < depth; i++) {
    vf b0 = load(b + i * b_row), b1 = load(b + i * b_row + W);
    PAGEWIRE_UNROLL
    for (int m = 0; m < MR; m++) {
      acc[m][0] += b0 * a[m * a_row + i];
      acc[m][1] += b1 * a[m * a_row + i];
    }
  }
  PAGEWIRE_UNROLL
  for (int m = 0; m < MR; m++) {
    store(c + m * c_row, acc[m][0]);
    store(c + m * c_row + W, acc[m][1]);
  }
}

// c[rows][width] (+)= a[rows][depth] b[depth][width], width a multiple of 2W
static inline void multiply(const float* a, int64_t a_row, const float* b, int64_t b_row,
                            float* c, int64_t c_row, int64_t rows, int64_t width, int64_t depth,
                            bool add) {
  for (int64_t x = 0; x < width; x += 2 * W) {
    int64_t m = 0;
    for (; m + 6 <= rows; m += 6)
      product<6>(a + m * a_row, a_row, b + x, b_row, c + m * c_row + x, c_row, depth, add);
    for (; m + 2 <= rows; m += 2)
      product<2>(a + m * a_row, a_row, b + x, b_row, c + m * c_row + x, c_row, depth, add);
    for (; m < rows; m++)
      product<1>(a + m * a_row, a_row, b + x, b_row, c + m * c_row + x, c_row, depth, add);
  }
}

}  // namespace pagewire
