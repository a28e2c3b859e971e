// The AVX-512 instructions that kernels/cpu/csrc uses, by AVX2 and plain loops, so that a CPU
// without them can run what is written for them. Compilers get this file before any other
// (-include): <immintrin.h> is read while they do not believe in AVX-512, then the sources are
// told that it is there. Functions of namespace pagewire hide the compiler's own of their
// names. Each is what Intel's Intrinsics Guide says of it, one function an instruction.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

// Inlined, they would take minutes to compile.
#define EMULATED __attribute__((noinline)) inline

#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512CD__ 1
#define __AVX512DQ__ 1
#define __AVX512VL__ 1
#define __AVX512VNNI__ 1
#define __AVX512BF16__ 1

// Those with an immediate are macros of some compilers.
#undef _mm512_cmp_ps_mask
#undef _mm512_extractf32x8_ps
#undef _mm512_maskz_cvtps_ph
#undef _mm512_roundscale_ps
#undef _mm512_shuffle_i32x4
#undef _mm512_slli_epi16
#undef _mm512_slli_epi32
#undef _mm512_ternarylogic_epi32

namespace pagewire {
namespace emulated {

template <class T, int BYTES = 64>
struct Lanes {
  static constexpr int COUNT = BYTES / int(sizeof(T));
  T at[COUNT] = {};

  template <class V>
  static Lanes of(V v) {
    static_assert(sizeof v == BYTES);
    Lanes lanes;
    std::memcpy(lanes.at, &v, BYTES);
    return lanes;
  }
  // Lane i is f(i).
  template <class F>
  static Lanes make(F f) {
    Lanes lanes;
    for (int i = 0; i < COUNT; i++) lanes.at[i] = T(f(i));
    return lanes;
  }
  template <class V>
  operator V() const {
    static_assert(sizeof(V) == BYTES);
    V v;
    std::memcpy(&v, at, BYTES);
    return v;
  }
  T operator[](int i) const { return at[i]; }
};

typedef Lanes<int8_t> I8;
typedef Lanes<uint8_t> U8;
typedef Lanes<int16_t> I16;
typedef Lanes<uint16_t> U16;
typedef Lanes<int32_t> I32;
typedef Lanes<uint32_t> U32;
typedef Lanes<int64_t> I64;
typedef Lanes<float> F32;
typedef Lanes<__m128i> Quarters;
typedef Lanes<__m256i> Halves;

inline bool has(uint64_t mask, int i) { return mask >> i & 1; }

template <class L, class F>
uint64_t mask_where(F f) {
  uint64_t mask = 0;
  for (int i = 0; i < L::COUNT; i++) mask |= uint64_t(bool(f(i))) << i;
  return mask;
}

// bfloat16 instructions take subnormal numbers for zeros, whatever MXCSR says.
inline float flushed(float x) {
  return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x;
}
inline float from_bfloat16(uint16_t bits) {
  uint32_t wide = uint32_t(bits) << 16;
  float x;
  std::memcpy(&x, &wide, sizeof x);
  return flushed(x);
}
inline uint16_t to_bfloat16(float x) {
  x = flushed(x);
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if (x != x) return uint16_t(bits >> 16 | 0x40);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Of the four lanes of each 128 bits, or the two of 64: the FROM-th of a, of b, the next of a, of b.
template <class L>
L unpack(__m512i a, __m512i b, int from) {
  constexpr int PER_QUARTER = L::COUNT / 4;
  L x = L::of(a), y = L::of(b);
  return L::make([&](int i) {
    int at = i / PER_QUARTER * PER_QUARTER + from + i % PER_QUARTER / 2;
    return i % 2 ? y[at] : x[at];
  });
}

}  // namespace emulated

// Memory: what a mask leaves out is not touched.

EMULATED __m512 _mm512_loadu_ps(const void* p) {
  __m512 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
EMULATED __m512i _mm512_loadu_si512(const void* p) {
  __m512i v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
EMULATED void _mm512_storeu_ps(void* p, __m512 v) { std::memcpy(p, &v, sizeof v); }
EMULATED void _mm512_storeu_si512(void* p, __m512i v) { std::memcpy(p, &v, sizeof v); }
EMULATED __m512i _mm512_maskz_loadu_epi16(__mmask32 mask, const void* p) {
  const int16_t* from = static_cast<const int16_t*>(p);
  return emulated::I16::make([&](int i) { return emulated::has(mask, i) ? from[i] : 0; });
}
EMULATED __m256i _mm256_maskz_loadu_epi8(__mmask32 mask, const void* p) {
  const int8_t* from = static_cast<const int8_t*>(p);
  return emulated::Lanes<int8_t, 32>::make(
      [&](int i) { return emulated::has(mask, i) ? from[i] : 0; });
}

// Constants and casts.

EMULATED __m512i _mm512_setzero_si512() { return emulated::I32{}; }
EMULATED __m512i _mm512_set1_epi8(int8_t x) { return emulated::I8::make([&](int) { return x; }); }
EMULATED __m512i _mm512_set1_epi16(int16_t x) { return emulated::I16::make([&](int) { return x; }); }
EMULATED __m512i _mm512_set1_epi32(int32_t x) { return emulated::I32::make([&](int) { return x; }); }
EMULATED __m512 _mm512_set1_ps(float x) { return emulated::F32::make([&](int) { return x; }); }
template <class... Words>
EMULATED __m512i _mm512_set_epi16(Words... from_last_to_first) {
  const int words[] = {from_last_to_first...};
  static_assert(sizeof...(Words) == 32);
  return emulated::I16::make([&](int i) { return words[31 - i]; });
}
EMULATED __m512i _mm512_zextsi128_si512(__m128i x) {
  emulated::Quarters quarters;
  quarters.at[0] = x;
  return quarters;
}
EMULATED __m256 _mm512_castps512_ps256(__m512 x) {
  return _mm256_castsi256_ps(emulated::Halves::of(x)[0]);
}
EMULATED __m256 _mm512_extractf32x8_ps(__m512 x, int which) {
  return _mm256_castsi256_ps(emulated::Halves::of(x)[which]);
}

// Conversions.

EMULATED __m512i _mm512_cvtepu8_epi16(__m256i x) {
  auto bytes = emulated::Lanes<uint8_t, 32>::of(x);
  return emulated::I16::make([&](int i) { return bytes[i]; });
}
EMULATED __m512i _mm512_cvtepu16_epi32(__m256i x) {
  auto words = emulated::Lanes<uint16_t, 32>::of(x);
  return emulated::I32::make([&](int i) { return words[i]; });
}
EMULATED __m512i _mm512_cvtepi8_epi32(__m128i x) {
  auto bytes = emulated::Lanes<int8_t, 16>::of(x);
  return emulated::I32::make([&](int i) { return bytes[i]; });
}
EMULATED __m512 _mm512_cvtepi32_ps(__m512i x) {
  auto integers = emulated::I32::of(x);
  return emulated::F32::make([&](int i) { return integers[i]; });
}
EMULATED __m512 _mm512_maskz_cvtph_ps(__mmask16 mask, __m256i x) {
  auto quarters = emulated::Lanes<__m128i, 32>::of(x);
  auto floats = emulated::F32::of(emulated::Lanes<__m256>::make(
      [&](int i) { return _mm256_cvtph_ps(quarters[i]); }).operator __m512());
  return emulated::F32::make([&](int i) { return emulated::has(mask, i) ? floats[i] : 0.0f; });
}
EMULATED __m256i _mm512_maskz_cvtps_ph(__mmask16 mask, __m512 x, int rounding) {
  if (rounding != _MM_FROUND_TO_NEAREST_INT) __builtin_trap();
  auto floats = emulated::Lanes<__m256>::of(x);
  __m256i rounded = emulated::Lanes<__m128i, 32>::make(
      [&](int i) { return _mm256_cvtps_ph(floats[i], _MM_FROUND_TO_NEAREST_INT); });
  auto halves = emulated::Lanes<int16_t, 32>::of(rounded);
  return emulated::Lanes<int16_t, 32>::make(
      [&](int i) { return emulated::has(mask, i) ? halves[i] : 0; });
}
EMULATED __m256bh _mm512_cvtneps_pbh(__m512 x) {
  auto floats = emulated::F32::of(x);
  return emulated::Lanes<uint16_t, 32>::make(
      [&](int i) { return emulated::to_bfloat16(floats[i]); });
}
EMULATED __m512bh _mm512_cvtne2ps_pbh(__m512 high, __m512 low) {
  auto above = emulated::F32::of(high), below = emulated::F32::of(low);
  return emulated::U16::make(
      [&](int i) { return emulated::to_bfloat16(i < 16 ? below[i] : above[i - 16]); });
}

// Bits, and integers.

EMULATED __m512i _mm512_and_si512(__m512i a, __m512i b) { return a & b; }
EMULATED __m512i _mm512_xor_si512(__m512i a, __m512i b) { return a ^ b; }
EMULATED __m512i _mm512_ternarylogic_epi32(__m512i a, __m512i b, __m512i c, int table) {
  auto x = emulated::U32::of(a), y = emulated::U32::of(b), z = emulated::U32::of(c);
  return emulated::U32::make([&](int i) {
    uint32_t result = 0;
    for (int bit = 0; bit < 32; bit++) {
      int index = (x[i] >> bit & 1) << 2 | (y[i] >> bit & 1) << 1 | (z[i] >> bit & 1);
      result |= uint32_t(table >> index & 1) << bit;
    }
    return result;
  });
}
EMULATED __m512i _mm512_add_epi16(__m512i a, __m512i b) {
  auto x = emulated::U16::of(a), y = emulated::U16::of(b);
  return emulated::U16::make([&](int i) { return x[i] + y[i]; });
}
EMULATED __m512i _mm512_mask_sub_epi8(__m512i otherwise, __mmask64 mask, __m512i a, __m512i b) {
  auto x = emulated::U8::of(a), y = emulated::U8::of(b), z = emulated::U8::of(otherwise);
  return emulated::U8::make([&](int i) { return emulated::has(mask, i) ? x[i] - y[i] : z[i]; });
}
EMULATED __m512i _mm512_abs_epi8(__m512i a) {
  auto x = emulated::I8::of(a);
  return emulated::U8::make([&](int i) { return x[i] < 0 ? -x[i] : x[i]; });
}
EMULATED __m512i _mm512_slli_epi16(__m512i a, int count) {
  auto x = emulated::U16::of(a);
  return emulated::U16::make([&](int i) { return x[i] << count; });
}
EMULATED __m512i _mm512_slli_epi32(__m512i a, int count) {
  auto x = emulated::U32::of(a);
  return emulated::U32::make([&](int i) { return x[i] << count; });
}
EMULATED int32_t _mm512_reduce_max_epi32(__m512i a) {
  auto x = emulated::I32::of(a);
  int32_t most = x[0];
  for (int32_t each : x.at) most = each > most ? each : most;
  return most;
}

// Products of bytes and words.

EMULATED __m512i _mm512_maddubs_epi16(__m512i a, __m512i b) {
  auto x = emulated::Halves::of(a), y = emulated::Halves::of(b);
  return emulated::Halves::make([&](int i) { return _mm256_maddubs_epi16(x[i], y[i]); });
}
EMULATED __m512i _mm512_madd_epi16(__m512i a, __m512i b) {
  auto x = emulated::Halves::of(a), y = emulated::Halves::of(b);
  return emulated::Halves::make([&](int i) { return _mm256_madd_epi16(x[i], y[i]); });
}
EMULATED __m512i _mm512_dpbusd_epi32(__m512i sum, __m512i a, __m512i b) {
  auto total = emulated::U32::of(sum);
  auto x = emulated::U8::of(a);
  auto y = emulated::I8::of(b);
  return emulated::U32::make([&](int i) {
    int32_t products = 0;
    for (int k = 4 * i; k < 4 * i + 4; k++) products += x[k] * y[k];
    return total[i] + uint32_t(products);
  });
}

// Lanes by masks and from elsewhere.

EMULATED __mmask64 _mm512_movepi8_mask(__m512i a) {
  auto x = emulated::I8::of(a);
  return emulated::mask_where<emulated::I8>([&](int i) { return x[i] < 0; });
}
EMULATED __mmask16 _mm_testn_epi8_mask(__m128i a, __m128i b) {
  auto both = emulated::Lanes<uint8_t, 16>::of(_mm_and_si128(a, b));
  return __mmask16(emulated::mask_where<decltype(both)>([&](int i) { return both[i] == 0; }));
}
EMULATED __mmask32 _mm512_cmplt_epu16_mask(__m512i a, __m512i b) {
  auto x = emulated::U16::of(a), y = emulated::U16::of(b);
  return __mmask32(emulated::mask_where<emulated::U16>([&](int i) { return x[i] < y[i]; }));
}
EMULATED __mmask32 _mm512_cmpeq_epi16_mask(__m512i a, __m512i b) {
  auto x = emulated::U16::of(a), y = emulated::U16::of(b);
  return __mmask32(emulated::mask_where<emulated::U16>([&](int i) { return x[i] == y[i]; }));
}
EMULATED __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int predicate) {
  if (predicate != _CMP_NLT_UQ) __builtin_trap();
  auto x = emulated::F32::of(a), y = emulated::F32::of(b);
  return __mmask16(emulated::mask_where<emulated::F32>([&](int i) { return !(x[i] < y[i]); }));
}
EMULATED __m512i _mm512_mask_mov_epi16(__m512i otherwise, __mmask32 mask, __m512i a) {
  auto x = emulated::I16::of(a), y = emulated::I16::of(otherwise);
  return emulated::I16::make([&](int i) { return emulated::has(mask, i) ? x[i] : y[i]; });
}
EMULATED __m256i _mm256_mask_mov_epi16(__m256i otherwise, __mmask16 mask, __m256i a) {
  auto x = emulated::Lanes<int16_t, 32>::of(a), y = emulated::Lanes<int16_t, 32>::of(otherwise);
  return decltype(x)::make([&](int i) { return emulated::has(mask, i) ? x[i] : y[i]; });
}
EMULATED __m512 _mm512_mask_blend_ps(__mmask16 mask, __m512 a, __m512 b) {
  auto x = emulated::F32::of(a), y = emulated::F32::of(b);
  return emulated::F32::make([&](int i) { return emulated::has(mask, i) ? y[i] : x[i]; });
}
EMULATED __m512i _mm512_mask_permutexvar_epi16(__m512i otherwise, __mmask32 mask, __m512i index,
                                             __m512i a) {
  auto x = emulated::U16::of(a), at = emulated::U16::of(index), y = emulated::U16::of(otherwise);
  return emulated::U16::make(
      [&](int i) { return emulated::has(mask, i) ? x[at[i] % 32] : y[i]; });
}
EMULATED __m512i _mm512_permutex2var_epi16(__m512i a, __m512i index, __m512i b) {
  auto x = emulated::U16::of(a), at = emulated::U16::of(index), y = emulated::U16::of(b);
  return emulated::U16::make(
      [&](int i) { return at[i] & 32 ? y[at[i] % 32] : x[at[i] % 32]; });
}
EMULATED __m512i _mm512_shuffle_i32x4(__m512i a, __m512i b, int order) {
  auto x = emulated::Quarters::of(a), y = emulated::Quarters::of(b);
  return emulated::Quarters::make([&](int i) {
    int at = order >> (2 * i) & 3;
    return i < 2 ? x[at] : y[at];
  });
}
EMULATED __m512i _mm512_unpacklo_epi32(__m512i a, __m512i b) {
  return emulated::unpack<emulated::I32>(a, b, 0);
}
EMULATED __m512i _mm512_unpackhi_epi32(__m512i a, __m512i b) {
  return emulated::unpack<emulated::I32>(a, b, 2);
}
EMULATED __m512i _mm512_unpacklo_epi64(__m512i a, __m512i b) {
  return emulated::unpack<emulated::I64>(a, b, 0);
}
EMULATED __m512i _mm512_unpackhi_epi64(__m512i a, __m512i b) {
  return emulated::unpack<emulated::I64>(a, b, 1);
}

// Floats.

EMULATED float _mm512_reduce_max_ps(__m512 a) {
  auto x = emulated::F32::of(a);
  float most = x[0];
  for (float each : x.at) most = each > most ? each : most;
  return most;
}
EMULATED __m512 _mm512_roundscale_ps(__m512 a, int how) {
  if (how != (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)) __builtin_trap();
  auto x = emulated::F32::of(a);
  return emulated::F32::make([&](int i) { return std::nearbyint(x[i]); });
}
// a * 2^floor(b)
EMULATED __m512 _mm512_maskz_scalef_ps(__mmask16 mask, __m512 a, __m512 b) {
  auto x = emulated::F32::of(a), power = emulated::F32::of(b);
  return emulated::F32::make([&](int i) {
    if (!emulated::has(mask, i)) return 0.0f;
    if (x[i] != x[i] || power[i] != power[i]) return std::nanf("");
    return x[i] * std::exp2(std::floor(power[i]));
  });
}
// The odd products are added first, each with one rounding.
EMULATED __m512 _mm512_dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
  auto total = emulated::F32::of(sum);
  auto x = emulated::U16::of(a), y = emulated::U16::of(b);
  return emulated::F32::make([&](int i) {
    float result = emulated::flushed(total[i]);
    for (int k = 2 * i + 1; k >= 2 * i; k--)
      result = emulated::flushed(
          std::fma(emulated::from_bfloat16(x[k]), emulated::from_bfloat16(y[k]), result));
    return result;
  });
}

}  // namespace pagewire
