// Vectors of W floats through the compiler's own vector extension (GCC, clang), so that one
// source serves SSE2, AVX2, AVX-512 and NEON; and the three element types of tensors.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

// On a loop whose trip count is a constant and whose arrays are meant to live in registers.
#define PAGEWIRE_UNROLL _Pragma("GCC unroll 16")
// A part of an inner loop whose arguments are meant to live in registers.
#define PAGEWIRE_INLINE inline __attribute__((always_inline))

namespace pagewire {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#elif defined(PAGEWIRE_EMULATED_TILES)  // vectors as wide as beside real ones
constexpr int W = 16;
#else  // the build turns F16C and FMA on with AVX2
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));
typedef double vd __attribute__((vector_size(8 * W)));

constexpr float INF = std::numeric_limits<float>::infinity();

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

template <class To, class From>
inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

inline vf splat(float x) { return x - vf{}; }

// b where one is NaN.
inline vf max(vf a, vf b) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  return bits_as<vf>(_mm256_max_ps(bits_as<__m256>(a), bits_as<__m256>(b)));
#else
  return a > b ? a : b;
#endif
}

// One element of each type.

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { return bits_as<float>(uint32_t(x.bits) << 16); }
inline float to_float(f16 x) {
#if defined(__AVX2__)
  return _cvtsh_ss(x.bits);
#else
  uint32_t sign = uint32_t(x.bits & 0x8000) << 16, magnitude = x.bits & 0x7fff;
  // Rebias by a multiplication, which also normalizes subnormals.
  float value = bits_as<float>(magnitude << 13) * bits_as<float>(uint32_t(254 - 15) << 23);
  uint32_t bits = magnitude >= 0x7c00 ? 0x7f800000 | (magnitude << 13) : bits_as<uint32_t>(value);
  return bits_as<float>(bits | sign);
#endif
}

inline void from_float(float x, float* to) { *to = x; }
inline void from_float(float x, bf16* to) {
  uint32_t bits = bits_as<uint32_t>(x);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  to->bits = uint16_t(x == x ? rounded : (bits >> 16) | 0x40);
}
inline void from_float(float x, f16* to) {
#if defined(__AVX2__)
  to->bits = uint16_t(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT));
#else
  uint32_t bits = bits_as<uint32_t>(x), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
  uint32_t half;
  if (magnitude > 0x7f800000) {
    half = 0x7e00;
  } else if (magnitude >= 0x477ff000) {  // rounds past the greatest half
    half = 0x7c00;
  } else if (magnitude < 0x38800000) {  // subnormal: the adder rounds to a multiple of 2^-24
    half = bits_as<uint32_t>(bits_as<float>(magnitude) + 0.5f) - 0x3f000000;
  } else {
    half = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  }
  to->bits = uint16_t(half | sign);
#endif
}

// W elements of each type, at any alignment.

inline vf load(const float* p) {
  vf v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline vf load(const bf16* p) {
#if defined(__AVX512F__)
  // GCC 12 makes five instructions of the conversion below.
  __m256i half;
  std::memcpy(&half, p, sizeof half);
  return bits_as<vf>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
#else
  vh half;
  std::memcpy(&half, p, sizeof half);
  return bits_as<vf>(__builtin_convertvector(half, vu) << 16);
#endif
}
inline vf load(const f16* p) {
#if defined(__AVX512F__)
  __m256i half;
  std::memcpy(&half, p, sizeof half);
  return bits_as<vf>(_mm512_maskz_cvtph_ps(0xffff, half));
#elif defined(__AVX2__)
  __m128i half;
  std::memcpy(&half, p, sizeof half);
  return bits_as<vf>(_mm256_cvtph_ps(half));
#else
  vf v;
  for (int i = 0; i < W; i++) v[i] = to_float(p[i]);
  return v;
#endif
}

inline void store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }
inline void store(bf16* p, vf v) {
  vu bits = bits_as<vu>(v);
  vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  vu nan = (bits >> 16) | 0x40;
  vh half = __builtin_convertvector(v == v ? rounded : nan, vh);
  std::memcpy(p, &half, sizeof half);
}
inline void store(f16* p, vf v) {
#if defined(__AVX512F__)
  __m256i half = _mm512_maskz_cvtps_ph(0xffff, bits_as<__m512>(v), _MM_FROUND_TO_NEAREST_INT);
  std::memcpy(p, &half, sizeof half);
#elif defined(__AVX2__)
  __m128i half = _mm256_cvtps_ph(bits_as<__m256>(v), _MM_FROUND_TO_NEAREST_INT);
  std::memcpy(p, &half, sizeof half);
#else
  for (int i = 0; i < W; i++) from_float(v[i], p + i);
#endif
}

// The first n < W elements; the rest are zero, and their memory is not touched.
template <class T>
inline vf load_first(const T* p, int64_t n) {
  T padded[W] = {};
  std::memcpy(padded, p, size_t(n) * sizeof(T));
  return load(padded);
}
// The first n, be they none or all.
template <class T>
inline vf load_some(const T* p, int64_t n) {
  return n >= W ? load(p) : n > 0 ? load_first(p, n) : vf{};
}
template <class T>
inline void store_first(T* p, vf v, int64_t n) {
  T padded[W];
  store(padded, v);
  std::memcpy(p, padded, size_t(n) * sizeof(T));
}

// Halves onto halves, so every instruction set of one width adds in the same order.
inline float sum(vf v) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
  __m512 all = bits_as<__m512>(v);
  __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
#else
  __m256 eight = bits_as<__m256>(v);
#endif
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
  float lanes[W];
  std::memcpy(lanes, &v, sizeof lanes);
  for (int n = W / 2; n >= 4; n /= 2)
    for (int i = 0; i < n; i++) lanes[i] += lanes[i + n];
  return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
#endif
}
inline float max_lane(vf v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(bits_as<__m512>(v));
#elif defined(__AVX2__)
  __m256 eight = bits_as<__m256>(v);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
#endif
  float best = v[0];
  for (int i = 1; i < W; i++) best = v[i] > best ? v[i] : best;
  return best;
}
inline int32_t max_lane(vi v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32(bits_as<__m512i>(v));
#elif defined(__AVX2__)
  __m256i all = bits_as<__m256i>(v);
  __m128i four = _mm_max_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
  __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
#else
  int32_t best = v[0];
  for (int i = 1; i < W; i++) best = v[i] > best ? v[i] : best;
  return best;
#endif
}
inline double sum(vd v) {
  double total = 0;
  for (int i = 0; i < W; i++) total += v[i];
  return total;
}

// e^x / 2^n of the integer n next to x / ln(2): Cody-Waite reduction to |r| <= ln(2) / 2, then the
// minimax polynomial of Cephes' expf.
inline vf exp_mantissa(vf x, vf n) {
  vf r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  vf p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  return p * (r * r) + r + 1.0f;
}

// e^x within 2 ulp; exactly 0 below -87.3, at most e^88.37; NaN stays NaN.
inline vf exp(vf x) {
  vf below = splat(-87.33f), above = splat(88.37f);
  vf clamped = x < below ? below : x;
  clamped = clamped > above ? above : clamped;
  vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  vf n = (clamped * 1.44269504088896341f + magic) - magic;
  vi exponent = (__builtin_convertvector(n == n ? n : vf{}, vi) + 127) << 23;
  vf result = exp_mantissa(clamped, n) * bits_as<vf>(exponent);
  return x < below ? vf{} : result;
}

// Within 4 ulp; NaN stays NaN. Near zero the odd polynomial of Cephes' tanhf, else by exp.
inline vf tanh(vf x) {
  vf size = max(x, -x), square = x * x;
  vf p = splat(-5.70498872745e-3f);
  p = p * square + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  vf near = p * square * x + x;
  vf far = 1.0f - 2.0f / (exp(size + size) + 1.0f);
  return size < 0.625f ? near : x < 0.0f ? -far : x == x ? far : x;
}

}  // namespace pagewire
