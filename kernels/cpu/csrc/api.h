// What kernels/cpu/library.py calls. Strides count elements, the last dimension is dense,
// dtype is one of the codes below. Functions that return int64_t give -1, or the index of
// the first input that points outside its tensor, in which case nothing was written.
#pragma once

#include <cstdint>

#include "simd.h"

#define PAGEWIRE_API extern "C" __attribute__((visibility("default")))

namespace pagewire {

enum Dtype { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

template <class F>
auto with_dtype(int dtype, const F& call) {
  switch (dtype) {
    case BFLOAT16:
      return call(bf16{});
    case FLOAT16:
      return call(f16{});
    default:
      return call(float{});
  }
}

}  // namespace pagewire
