// Weights of matrix products, packed once for this library's instruction set.
//
// A product y = x weight^T is computed a panel of PANEL output features at a time. A panel's
// weights lie in memory in the order in which they are used, and every output sums its input
// features in that one order, whatever the number of rows: a row's result does not depend on
// the rows beside it. A format is a layout of panels, and the form in which it wants x.
#pragma once

#include <type_traits>

#include "api.h"

namespace pagewire {

constexpr int64_t PANEL = 2 * W;

// The formats of elements of a Dtype have its code.
enum Format { PACKED_FLOAT32 = 0, PACKED_BFLOAT16 = 1, PACKED_FLOAT16 = 2, PACKED_QUANTIZED = 16 };

}  // namespace pagewire

// As kernels/cpu/library.py fills it.
struct PackedWeight {
  int64_t format, in, out;
  const void* data;
  const float* bias;  // [out], or null
};

namespace pagewire {

inline int64_t num_panels(const PackedWeight& w) { return (w.out + PANEL - 1) / PANEL; }

// Whether a panel reads rows of this dtype as they are, so that prepare_row() is not needed.
bool reads_directly(const PackedWeight& w, int dtype);

int64_t prepared_row_bytes(const PackedWeight& w);

// One row of x in the form that panels read.
template <class T>
void prepare_row(const PackedWeight& w, const T* x, void* to);

// sums [rows][PANEL] = the panel's part of the product of `rows` prepared (or direct) rows that
// lie row_bytes apart. Columns past w.out hold anything.
void multiply_panel(const PackedWeight& w, int64_t panel, const void* x, int64_t row_bytes,
                    int64_t rows, float* sums);

}  // namespace pagewire
