// RMSNorm, the gates of gated MLPs, and rotary embedding with the KV write.

#include "elementwise.h"

using namespace pagewire;

PAGEWIRE_API void pagewire_rms_norm(int dtype, const void* x, int64_t x_stride, const void* weight,
                                    void* out, int64_t rows, int64_t hidden, float eps,
                                    int threads) {
  with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    for_rows(rows, hidden, threads, [&](int64_t row) {
      normalize(static_cast<const T*>(x) + row * x_stride, static_cast<const T*>(weight),
                static_cast<T*>(out) + row * hidden, hidden, eps);
    });
  });
}

PAGEWIRE_API void pagewire_add_rms_norm(int dtype, const void* x, int64_t x_stride, void* residual,
                                        int64_t residual_stride, const void* weight, void* out,
                                        int64_t rows, int64_t hidden, float eps, int threads) {
  with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    for_rows(rows, hidden, threads, [&](int64_t row) {
      T* residual_row = static_cast<T*>(residual) + row * residual_stride;
      add(static_cast<const T*>(x) + row * x_stride, residual_row, hidden);
      normalize(residual_row, static_cast<const T*>(weight), static_cast<T*>(out) + row * hidden,
                hidden, eps);
    });
  });
}

PAGEWIRE_API void pagewire_activation_mul(int dtype, int64_t activation, const void* gate_up,
                                          int64_t stride, void* out, int64_t rows,
                                          int64_t intermediate, int threads) {
  with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    for_rows(rows, intermediate, threads, [&](int64_t row) {
      const T* gate = static_cast<const T*>(gate_up) + row * stride;
      activation_mul_row(activation, gate, gate + intermediate,
                         static_cast<T*>(out) + row * intermediate, intermediate);
    });
  });
}

PAGEWIRE_API int64_t pagewire_rope_and_cache(int dtype, void* q, const void* k, const void* v,
                                             const int64_t* positions, const float* cos_sin,
                                             void* k_cache, void* v_cache,
                                             const CacheCodes* codes, const int64_t* slots,
                                             const RopeSizes* sizes, const HeadNorms* norms,
                                             int threads) {
  int64_t stray = find_stray(*sizes, positions, slots);
  if (stray >= 0) return stray;
  with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    with_cache(codes->format, element, [&](auto cached) {
      using C = decltype(cached);
      rope_and_cache(*sizes, *norms, static_cast<T*>(q), static_cast<const T*>(k),
                     static_cast<const T*>(v), positions, cos_sin, static_cast<C*>(k_cache),
                     static_cast<C*>(v_cache), *codes, slots, threads);
    });
  });
  return -1;
}
