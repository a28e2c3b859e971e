// What KV caches hold: numbers of the tensors' own type, 16-bit floats beside float32, or codes of
// 8 bits: e4m3 floats (Micikevicius et al., arXiv:2209.05433) or int8, times scales.
#pragma once

#include <algorithm>
#include <cmath>

#include "api.h"

// What kernels/cpu/library.py calls CacheCodes: nothing but format is read where there are no codes.
struct CacheCodes {
  int64_t format;  // enum CacheFormat
  // Of e4m3 [kv_heads], read. Of int8 [blocks, kv_heads, slots], slots dense: written with the
  // codes.
  float *k_scale, *v_scale;
  int64_t k_block, k_head, v_block, v_head;  // strides of int8's scales
};

namespace pagewire {

// FLOAT_CACHE is of the tensors' own type, the other two floats lie beside float32.
enum CacheFormat : int64_t {
  FLOAT_CACHE = 0,
  E4M3_CACHE = 1,
  INT8_CACHE = 2,
  BFLOAT16_CACHE = 3,
  FLOAT16_CACHE = 4
};

struct e4m3 {
  uint8_t bits;
};
struct int8 {
  int8_t code;
};

template <class C>
constexpr bool IS_CODE = std::is_same_v<C, e4m3> || std::is_same_v<C, int8>;

typedef uint8_t vb __attribute__((vector_size(W)));
typedef int8_t vsb __attribute__((vector_size(W)));

// Calls call(C{}) with the element type of a cache beside tensors of T.
template <class T, class F>
auto with_cache(int64_t format, T plain, const F& call) {
  if constexpr (std::is_same_v<T, float>) {
    if (format == BFLOAT16_CACHE) return call(bf16{});
    if (format == FLOAT16_CACHE) return call(f16{});
  }
  switch (format) {
    case E4M3_CACHE:
      return call(e4m3{});
    case INT8_CACHE:
      return call(int8{});
    default:
      return call(plain);
  }
}

// Codes as floats, exactly, without their scale.

inline vf load(const e4m3* p) {
#if defined(__AVX2__)
  // A half has the same layout with a bias of 15 instead of 7: it is 2^-8 of the value.
  const int16_t KEPT = int16_t(0xbf80);
#if defined(__AVX512F__)
  __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  __m256i half = _mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7);
  half = _mm256_and_si256(half, _mm256_set1_epi16(KEPT));
  __mmask16 nan = _mm_testn_epi8_mask(_mm_xor_si128(codes, _mm_set1_epi8(0x7f)), _mm_set1_epi8(0x7f));
  half = _mm256_mask_mov_epi16(half, nan, _mm256_set1_epi16(0x7e00));
  return bits_as<vf>(_mm512_maskz_cvtph_ps(0xffff, half)) * 256.0f;
#else
  __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  __m128i half = _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(KEPT));
  __m128i magnitude = _mm_and_si128(wide, _mm_set1_epi16(0x7f));
  __m128i nan = _mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x7f));
  half = _mm_or_si128(half, _mm_and_si128(nan, _mm_set1_epi16(0x7e00)));
  return bits_as<vf>(_mm256_cvtph_ps(half)) * 256.0f;
#endif
#else
  vb codes;
  std::memcpy(&codes, p, sizeof codes);
  vu code = __builtin_convertvector(codes, vu), magnitude = code & 0x7f;
  vu normal = (magnitude << 20) + (120u << 23);
  vf tiny = __builtin_convertvector(bits_as<vi>(magnitude), vf) * 0.001953125f;  // steps of 2^-9
  vf value = magnitude < 8 ? tiny : bits_as<vf>(normal);
  value = magnitude == 0x7f ? bits_as<vf>(vu{} + 0x7fc00000u) : value;
  return bits_as<vf>(bits_as<vu>(value) | ((code & 0x80) << 24));
#endif
}

inline vf load(const int8* p) {
#if defined(__AVX512F__)
  __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return bits_as<vf>(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes)));
#elif defined(__AVX2__)
  __m128i codes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return bits_as<vf>(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes)));
#else
  vsb codes;
  std::memcpy(&codes, p, sizeof codes);
  return __builtin_convertvector(__builtin_convertvector(codes, vi), vf);
#endif
}

// The nearest codes, ties to even; beyond +-448 the greatest; NaN stays NaN.
inline vb encode_e4m3(vf x) {
  vu bits = bits_as<vu>(x), magnitude = bits & 0x7fffffffu;
  vu most = vu{} + 0x43e00000u;  // 448
  vu bounded = magnitude > most ? most : magnitude;
  // Half of what is cut off, less what makes a tie go to the even code; a carry out of the
  // mantissa is the next exponent, which is right.
  vu normal = ((bounded + 0x7ffffu + ((bounded >> 20) & 1)) >> 20) - (120u << 3);
  // Steps of 2^-9 below 2^-6: floats from 2^14 on have them.
  vu subnormal = bits_as<vu>(bits_as<vf>(bounded) + 16384.0f) - 0x46800000u;
  vu code = bounded < 0x3c800000u ? subnormal : normal;
  code = magnitude > 0x7f800000u ? vu{} + 0x7fu : code;
  return __builtin_convertvector(code | ((bits >> 24) & 0x80), vb);
}

// x within +-127, or NaN, which becomes 0.
inline vsb encode_int8(vf x) {
  vf bounded = x > 127.0f ? splat(127.0f) : x < -127.0f ? splat(-127.0f) : x == x ? x : vf{};
  vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  return __builtin_convertvector(bits_as<vi>(bounded + magic), vsb);
}

// The first n <= W of a vector of codes.
template <class Codes>
inline void store_codes(void* to, Codes codes, int64_t n) {
  std::memcpy(to, &codes, size_t(n));
}

// A head's row x as codes of x / scale.
template <class T>
void encode_row(const T* x, float scale, int64_t dim, e4m3* to) {
  for (int64_t i = 0; i < dim; i += W) {
    int64_t n = std::min<int64_t>(W, dim - i);
    store_codes(to + i, encode_e4m3(load_some(x + i, n) / splat(scale)), n);
  }
}

// A head's row x as codes of x / scale, with the scale max |x| / 127, which is returned. Unless
// all of x is finite, neither is the scale.
template <class T>
float encode_row(const T* x, int64_t dim, int8* to) {
  vu most = {};  // magnitudes are ordered as their bits, NaN last
  for (int64_t i = 0; i < dim; i += W) {
    vu magnitude = bits_as<vu>(load_some(x + i, std::min<int64_t>(W, dim - i))) & 0x7fffffffu;
    most = magnitude > most ? magnitude : most;
  }
  uint32_t greatest = 0;
  for (int i = 0; i < W; i++) greatest = std::max(greatest, uint32_t(most[i]));
  float scale = bits_as<float>(greatest) / 127.0f;
  for (int64_t i = 0; i < dim; i += W) {
    int64_t n = std::min<int64_t>(W, dim - i);
    store_codes(to + i, encode_int8(load_some(x + i, n) / splat(scale)), n);
  }
  return scale;
}

}  // namespace pagewire
