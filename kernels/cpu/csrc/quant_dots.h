// Dot products of unsigned codes and signed activations, by what the instruction set has.
#pragma once

#include "quant_prepared.h"

namespace pagewire {
namespace quant {

// PAGEWIRE_EMULATED_BYTE_DOTS: for tests on CPUs without them, what is done with these
// instructions, but by dot4's general arithmetic.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(PAGEWIRE_EMULATED_BYTE_DOTS)
constexpr bool BYTE_DOTS = true;
#else
constexpr bool BYTE_DOTS = false;
#if defined(__AVX2__)
#define PAGEWIRE_BYTE_PAIRS
#endif
#endif

#if defined(PAGEWIRE_BYTE_PAIRS)
constexpr bool BYTE_PAIRS = true;
#else
constexpr bool BYTE_PAIRS = false;
#endif

typedef int16_t vs __attribute__((vector_size(4 * W)));

#if defined(PAGEWIRE_BYTE_PAIRS)
// Each 16-bit word: the dot product of two unsigned bytes and two signed ones, which must fit.
inline vs dot2(vi codes, vi x) {
#if defined(__AVX512BW__)
  return bits_as<vs>(_mm512_maddubs_epi16(bits_as<__m512i>(codes), bits_as<__m512i>(x)));
#else
  return bits_as<vs>(_mm256_maddubs_epi16(bits_as<__m256i>(codes), bits_as<__m256i>(x)));
#endif
}

inline vi add_pairs(vs words) {
#if defined(__AVX512BW__)
  return bits_as<vi>(_mm512_madd_epi16(bits_as<__m512i>(words), _mm512_set1_epi16(1)));
#else
  return bits_as<vi>(_mm256_madd_epi16(bits_as<__m256i>(words), _mm256_set1_epi16(1)));
#endif
}

// The same for two pairs of signed bytes: magnitudes fit, with their signs moved to x.
inline vs dot2_signed(vi codes, vi x) {
#if defined(__AVX512BW__)
  __m512i centred = bits_as<__m512i>(codes);
  __m512i bytes = bits_as<__m512i>(x);
  bytes = _mm512_mask_sub_epi8(bytes, _mm512_movepi8_mask(centred), _mm512_setzero_si512(), bytes);
  return dot2(bits_as<vi>(_mm512_abs_epi8(centred)), bits_as<vi>(bytes));
#else
  __m256i centred = bits_as<__m256i>(codes);
  __m256i bytes = _mm256_sign_epi8(bits_as<__m256i>(x), centred);
  return dot2(bits_as<vi>(_mm256_abs_epi8(centred)), bits_as<vi>(bytes));
#endif
}
#endif

// Codes up to 255, less 128 each.
inline vi less_128(vi codes) { return codes ^ int32_t(0x80808080); }

// sum += dot product of the four unsigned bytes and the four signed bytes of each lane.
inline vi dot4(vi sum, vi codes, vi x) {
#if defined(__AVX512VNNI__)
  return bits_as<vi>(
      _mm512_dpbusd_epi32(bits_as<__m512i>(sum), bits_as<__m512i>(codes), bits_as<__m512i>(x)));
#elif defined(__AVXVNNI__)
  return bits_as<vi>(
      _mm256_dpbusd_avx_epi32(bits_as<__m256i>(sum), bits_as<__m256i>(codes), bits_as<__m256i>(x)));
#else
  // Even and odd bytes as words, whose products fit: 255 * 128 < 2^15.
  vs even = bits_as<vs>(codes & 0x00ff00ff), odd = bits_as<vs>(bits_as<vw>(codes) >> 8);
  vs x_even = (bits_as<vs>(x) << 8) >> 8, x_odd = bits_as<vs>(x) >> 8;
  vi a = bits_as<vi>(even * x_even), b = bits_as<vi>(odd * x_odd);
  return sum + (a >> 16) + ((a << 16) >> 16) + (b >> 16) + ((b << 16) >> 16);
#endif
}

inline vf to_floats(vi v) { return __builtin_convertvector(v, vf); }

inline vi broadcast4(const int8_t* x) {
  int32_t four;
  std::memcpy(&four, x, sizeof four);
  return splat_int(four);
}

}  // namespace quant
}  // namespace pagewire
