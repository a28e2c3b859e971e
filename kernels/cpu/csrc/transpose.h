// Squares of elements of 32 bits, transposed in registers: rows[i][j] becomes rows[j][i].
#pragma once

#include "simd.h"

namespace pagewire {

#if defined(__AVX512F__)

PAGEWIRE_INLINE void transpose(__m512i (&rows)[16]) {
  __m512i t[16];
  PAGEWIRE_UNROLL
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  PAGEWIRE_UNROLL
  for (int i = 0; i < 16; i += 4) {
    rows[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    rows[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    rows[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    rows[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  PAGEWIRE_UNROLL
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0xdd);
  }
  PAGEWIRE_UNROLL
  for (int i = 0; i < 4; i++) {
    rows[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    rows[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    rows[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    rows[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

// columns[i][j] = rows[j][i] of W rows of W elements, read from any memory that load() reads.
template <class C>
inline void load_columns(const C* const* rows, int64_t at, vf (&columns)[16]) {
  __m512i loaded[16];
  PAGEWIRE_UNROLL
  for (int i = 0; i < 16; i++) loaded[i] = bits_as<__m512i>(load(rows[i] + at));
  transpose(loaded);
  PAGEWIRE_UNROLL
  for (int i = 0; i < 16; i++) columns[i] = bits_as<vf>(loaded[i]);
}

#elif defined(__AVX2__)

// Four elements of one row and four of another in one vector, so that its halves need not cross
// afterwards. What is narrower than a float is joined before it is widened.
template <class C>
inline vf load_halves(const C* low, const C* high) {
  if constexpr (sizeof(C) == 4) {
    __m256 first = _mm256_castps128_ps256(_mm_loadu_ps(low));
    return bits_as<vf>(_mm256_insertf128_ps(first, _mm_loadu_ps(high), 1));
  } else if constexpr (sizeof(C) == 2) {
    __m128i first = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(low));
    __m128i second = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(high));
    __m128i both = _mm_unpacklo_epi64(first, second);
    return load(reinterpret_cast<const C*>(&both));
  } else {
    uint32_t halves[2];
    std::memcpy(halves, low, sizeof *halves);
    std::memcpy(halves + 1, high, sizeof *halves);
    uint64_t both = halves[0] | uint64_t(halves[1]) << 32;
    return load(reinterpret_cast<const C*>(&both));
  }
}

template <class C>
inline void load_columns(const C* const* rows, int64_t at, vf (&columns)[8]) {
  __m256 t[8];
  PAGEWIRE_UNROLL
  for (int i = 0; i < 4; i++) {
    t[i] = bits_as<__m256>(load_halves(rows[i] + at, rows[i + 4] + at));
    t[i + 4] = bits_as<__m256>(load_halves(rows[i] + at + 4, rows[i + 4] + at + 4));
  }
  PAGEWIRE_UNROLL
  for (int i = 0; i < 8; i += 4) {
    __m256 a = _mm256_unpacklo_ps(t[i], t[i + 1]), b = _mm256_unpackhi_ps(t[i], t[i + 1]);
    __m256 c = _mm256_unpacklo_ps(t[i + 2], t[i + 3]), d = _mm256_unpackhi_ps(t[i + 2], t[i + 3]);
    columns[i] = bits_as<vf>(_mm256_shuffle_ps(a, c, 0x44));
    columns[i + 1] = bits_as<vf>(_mm256_shuffle_ps(a, c, 0xee));
    columns[i + 2] = bits_as<vf>(_mm256_shuffle_ps(b, d, 0x44));
    columns[i + 3] = bits_as<vf>(_mm256_shuffle_ps(b, d, 0xee));
  }
}

#else

#if defined(__clang__) || __GNUC__ >= 12
#define PAGEWIRE_PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PAGEWIRE_PICK(a, b, ...) __builtin_shuffle(a, b, vi{__VA_ARGS__})
#endif

template <class C>
inline void load_columns(const C* const* rows, int64_t at, vf (&columns)[4]) {
  vf r[4];
  PAGEWIRE_UNROLL
  for (int i = 0; i < 4; i++) r[i] = load(rows[i] + at);
  vf low0 = PAGEWIRE_PICK(r[0], r[1], 0, 4, 1, 5), high0 = PAGEWIRE_PICK(r[0], r[1], 2, 6, 3, 7);
  vf low1 = PAGEWIRE_PICK(r[2], r[3], 0, 4, 1, 5), high1 = PAGEWIRE_PICK(r[2], r[3], 2, 6, 3, 7);
  columns[0] = PAGEWIRE_PICK(low0, low1, 0, 1, 4, 5);
  columns[1] = PAGEWIRE_PICK(low0, low1, 2, 3, 6, 7);
  columns[2] = PAGEWIRE_PICK(high0, high1, 0, 1, 4, 5);
  columns[3] = PAGEWIRE_PICK(high0, high1, 2, 3, 6, 7);
}

#undef PAGEWIRE_PICK

#endif

}  // namespace pagewire
