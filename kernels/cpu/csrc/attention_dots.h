// Attention's products in bfloat16 dot products (vdpbf16ps), for CPUs that have them.
//
// A dot product of keys wants pairs of elements across 16 keys in one vector: 16 rows of pairs
// are transposed in registers, into a tile. One of values wants pairs of keys across dimensions:
// two rows are interleaved. With few query rows they are used at once, with many they go to a tile.
#pragma once

#include "attention.h"
#include "attention_fetch.h"
#include "transpose.h"

#if defined(__AVX512BF16__)

namespace pagewire {
namespace dots {

constexpr int64_t LANES = 16;  // keys of a vector
constexpr int64_t DEPTH = 32;  // bfloat16 elements of a vector
constexpr int MOST_ROWS = 6;   // of the functions for few rows

inline __m512i load_row(const bf16* from, int64_t left) {
  if (left >= DEPTH) return _mm512_loadu_si512(from);
  return _mm512_maskz_loadu_epi16(__mmask32((uint64_t(1) << left) - 1), from);
}

// Codes as bfloat16, which holds them exactly.

inline __m256i load_codes(const void* from, int64_t left) {
  if (left >= DEPTH) return _mm256_loadu_si256(static_cast<const __m256i*>(from));
  return _mm256_maskz_loadu_epi8(__mmask32((uint64_t(1) << left) - 1), from);
}

inline __m512i load_row(const e4m3* from, int64_t left) {
  // Values of the subnormal codes, multiples of 2^-9.
  const __m512i tiny = _mm512_zextsi128_si512(
      _mm_set_epi16(0x3c60, 0x3c40, 0x3c20, 0x3c00, 0x3bc0, 0x3b80, 0x3b00, 0));
  __m512i codes = _mm512_cvtepu8_epi16(load_codes(from, left));
  __m512i magnitude = _mm512_and_si512(codes, _mm512_set1_epi16(0x7f));
  __m512i value =
      _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(120 << 7));
  __mmask32 is_tiny = _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(8));
  value = _mm512_mask_permutexvar_epi16(value, is_tiny, magnitude, tiny);
  __mmask32 is_nan = _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(0x7f));
  value = _mm512_mask_mov_epi16(value, is_nan, _mm512_set1_epi16(0x7fc0));
  // The sign of one, the rest of the other.
  return _mm512_ternarylogic_epi32(_mm512_slli_epi16(codes, 8), value,
                                   _mm512_set1_epi16(int16_t(0x8000)), 0xe4);
}

inline __m512i load_row(const int8* from, int64_t left) {
  __m256i codes = load_codes(from, left);
  __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(codes)));
  __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(codes, 1)));
  return bits_as<__m512i>(_mm512_cvtne2ps_pbh(high, low));
}

inline __m512 dot(__m512 sum, __m512i a, __m512i b) {
  return _mm512_dpbf16_ps(sum, bits_as<__m512bh>(a), bits_as<__m512bh>(b));
}

inline __m512i splat_pair(const bf16* from) {
  int32_t pair;
  std::memcpy(&pair, from, sizeof pair);
  return _mm512_set1_epi32(pair);
}

// Elements [d, d + DEPTH) of a row, of which `left` are there: FULL where that is all.
template <bool FULL, class C>
PAGEWIRE_INLINE __m512i load_part(const C* row, int64_t left) {
  return load_row(row, FULL ? DEPTH : left);
}

template <bool FULL, class C>
PAGEWIRE_INLINE void load_keys(const C* const* keys, int64_t d, int64_t left,
                               __m512i (&columns)[16]) {
  PAGEWIRE_UNROLL
  for (int i = 0; i < 16; i++) columns[i] = load_part<FULL>(keys[i] + d, left);
  transpose(columns);
}

// a[0] b[0], a[1] b[1], ... of two rows of values: dimensions [0, 16) and [16, 32).
struct ValuePair {
  __m512i low, high;
};
inline ValuePair interleave(__m512i a, __m512i b) {
  const __m512i by_16 = _mm512_set1_epi16(16);
  // Word 2i comes from a[i], word 2i + 1 from b[i], which is number 32 + i.
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,
                                       39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  return {_mm512_permutex2var_epi16(a, low, b),
          _mm512_permutex2var_epi16(a, _mm512_add_epi16(low, by_16), b)};
}

// exp(x) for x <= 0, by 2^n 2^r: 2e-7 of the value where it matters, 8e-6 at the far end, beyond
// which it is zero; weights are rounded to bfloat16 after it. r's polynomial interpolates 2^r at
// Chebyshev points of [-1/2, 1/2].
inline vf exp_of_negative(vf x) {
  __m512 power = bits_as<__m512>(x * 1.44269504088896341f);
  __m512 n = _mm512_roundscale_ps(power, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  vf r = bits_as<vf>(power) - bits_as<vf>(n);
  vf p = splat(1.3390863365e-03f);
  p = p * r + 9.6760319184e-03f;
  p = p * r + 5.5503571142e-02f;
  p = p * r + 2.4022107485e-01f;
  p = p * r + 6.9314718803e-01f;
  p = p * r + 1.0000000755e+00f;
  // NaN counts, and stays.
  __mmask16 counts = _mm512_cmp_ps_mask(power, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  return bits_as<vf>(_mm512_maskz_scalef_ps(counts, bits_as<__m512>(p), n));
}

// acc[m][d..] += weights[m][j] * values[j][d..] for M rows and N vectors of 32 dimensions, of which
// `left` are there: FULL where that is all.
template <int M, int N, bool FULL, class C>
void add_values_at(const bf16* weights, const C* const* values, NearFetcher<C>& fetch,
                   int64_t count, int64_t d, int64_t left, float* acc, int64_t acc_row) {
  NearFetcher<C> fetch_one = fetch;
  __m512 sums[M][2 * N];
  PAGEWIRE_UNROLL
  for (int m = 0; m < M; m++)
    PAGEWIRE_UNROLL
    for (int i = 0; i < 2 * N; i++) sums[m][i] = _mm512_loadu_ps(acc + m * acc_row + d + i * LANES);
  auto add_pair = [&](int64_t j, bool both) __attribute__((always_inline)) {
    PAGEWIRE_UNROLL
    for (int i = 0; i < N; i++) {
      int64_t at = d + i * DEPTH;
      __m512i a = load_part<FULL>(values[j] + at, left - i * DEPTH);
      __m512i b = both ? load_part<FULL>(values[j + 1] + at, left - i * DEPTH) : __m512i{};
      ValuePair pair = interleave(a, b);
      fetch_one();
      fetch_one();
      PAGEWIRE_UNROLL
      for (int m = 0; m < M; m++) {
        __m512i weight = splat_pair(weights + m * KEYS + j);
        sums[m][2 * i] = dot(sums[m][2 * i], weight, pair.low);
        sums[m][2 * i + 1] = dot(sums[m][2 * i + 1], weight, pair.high);
      }
    }
  };
  int64_t j = 0;
  for (; j + 2 <= count; j += 2) add_pair(j, true);
  // What lies behind the last value may be anything, and its weight is zero.
  if (j < count) add_pair(j, false);
  PAGEWIRE_UNROLL
  for (int m = 0; m < M; m++)
    PAGEWIRE_UNROLL
    for (int i = 0; i < 2 * N; i++) _mm512_storeu_ps(acc + m * acc_row + d + i * LANES, sums[m][i]);
  fetch = fetch_one;
}

template <int M, class C>
void add_values(const bf16* weights, const C* const* values, NearFetcher<C>& fetch,
                int64_t count, int64_t head_dim, float* acc, int64_t acc_row) {
  int64_t d = 0;
  if constexpr (M <= 4)
    for (; d + 2 * DEPTH <= head_dim; d += 2 * DEPTH)
      add_values_at<M, 2, true>(weights, values, fetch, count, d, head_dim - d, acc, acc_row);
  for (; d + DEPTH <= head_dim; d += DEPTH)
    add_values_at<M, 1, true>(weights, values, fetch, count, d, head_dim - d, acc, acc_row);
  if (d < head_dim)
    add_values_at<M, 1, false>(weights, values, fetch, count, d, head_dim - d, acc, acc_row);
}

// Tiles: panels of 32 columns, as [panel][pair][32 columns][2].

// Of 64 keys, whose pairs are those of dimensions.
template <class C>
void pack_keys(const C* const* keys, int64_t count, int64_t head_dim, int64_t dim,
               NearFetcher<C>& fetch, bf16* tile) {
  NearFetcher<C> fetch_one = fetch;
  auto pack = [&](int64_t j, int64_t d, auto full) __attribute__((always_inline)) {
    __m512i columns[16];
    load_keys<decltype(full)::value>(keys + j, d, head_dim - d, columns);
    bf16* to = tile + (j / 32) * dim * 32 + (d / 2) * 64 + (j % 32) * 2;
    PAGEWIRE_UNROLL
    for (int pair = 0; pair < 16; pair++) {
      if (pair % 2 == 0) fetch_one();
      _mm512_storeu_si512(to + pair * 64, columns[pair]);
    }
  };
  for (int64_t j = 0; j < count; j += LANES) {
    int64_t d = 0;
    for (; d + DEPTH <= head_dim; d += DEPTH) pack(j, d, std::true_type{});
    if (d < head_dim) pack(j, d, std::false_type{});
  }
  fetch = fetch_one;
}

// Of the dimensions, whose pairs are those of keys.
template <class C>
inline void pack_values(const C* const* values, int64_t count, int64_t head_dim, bf16* tile) {
  for (int64_t d = 0; d < head_dim; d += DEPTH)
    for (int64_t j = 0; j < count; j += 2) {
      __m512i a = load_row(values[j] + d, head_dim - d);
      __m512i b = j + 1 < count ? load_row(values[j + 1] + d, head_dim - d) : __m512i{};
      ValuePair pair = interleave(a, b);
      bf16* to = tile + d * KEYS + j * 32;
      _mm512_storeu_si512(to, pair.low);
      _mm512_storeu_si512(to + 32, pair.high);
    }
}

// scores[M][KEYS] of M query rows, MOST_ROWS at most, and both panels of KEYS keys: it takes
// both for enough sums to be under way. Each is the same chain as multiply_tile's.
template <int M, class C>
void multiply_keys(const bf16* q, int64_t dim, const bf16* tile, int64_t pairs,
                   NearFetcher<C>& fetch, float* scores) {
  NearFetcher<C> fetch_one = fetch;
  __m512 sums[M][4] = {};
  for (int64_t pair = 0; pair < pairs; pair++) {
    __m512i keys[4];
    PAGEWIRE_UNROLL
    for (int i = 0; i < 4; i++)
      keys[i] = _mm512_loadu_si512(tile + i / 2 * dim * 32 + pair * 64 + i % 2 * 32);
    fetch_one();
    fetch_one();
    PAGEWIRE_UNROLL
    for (int m = 0; m < M; m++) {
      __m512i both = splat_pair(q + m * dim + 2 * pair);
      PAGEWIRE_UNROLL
      for (int i = 0; i < 4; i++) sums[m][i] = dot(sums[m][i], both, keys[i]);
    }
  }
  PAGEWIRE_UNROLL
  for (int m = 0; m < M; m++)
    PAGEWIRE_UNROLL
    for (int i = 0; i < 4; i++) _mm512_storeu_ps(scores + m * KEYS + i * LANES, sums[m][i]);
  fetch = fetch_one;
}

// c[M][32] (+)= a[M][2 pairs] and one panel
template <int M>
void multiply_tile(const bf16* a, int64_t a_row, const bf16* panel, int64_t pairs, float* c,
                   int64_t c_row, bool add) {
  __m512 sums[M][2] = {};
  if (add) {
    PAGEWIRE_UNROLL
    for (int m = 0; m < M; m++) {
      sums[m][0] = _mm512_loadu_ps(c + m * c_row);
      sums[m][1] = _mm512_loadu_ps(c + m * c_row + LANES);
    }
  }
  for (int64_t pair = 0; pair < pairs; pair++) {
    __m512i low = _mm512_loadu_si512(panel + pair * 64);
    __m512i high = _mm512_loadu_si512(panel + pair * 64 + 32);
    PAGEWIRE_UNROLL
    for (int m = 0; m < M; m++) {
      __m512i both = splat_pair(a + m * a_row + 2 * pair);
      sums[m][0] = dot(sums[m][0], both, low);
      sums[m][1] = dot(sums[m][1], both, high);
    }
  }
  PAGEWIRE_UNROLL
  for (int m = 0; m < M; m++) {
    _mm512_storeu_ps(c + m * c_row, sums[m][0]);
    _mm512_storeu_ps(c + m * c_row + LANES, sums[m][1]);
  }
}

}  // namespace dots
}  // namespace pagewire

#endif
