// GGUF's rows of quantized weights into groups of sixteen (quant.h), and single rows back into
// floats for the embedding.

#include <algorithm>

#include "parallel.h"
#include "quant.h"

namespace pagewire {
namespace quant {
namespace {

void put_scale(uint8_t* scales, int64_t row, const uint8_t* half) {
  std::memcpy(scales + row * 2, half, 2);
}

// Six-bit scale and min of block b from twelve bytes: ggml's get_scale_min_k4.
void unpack_k4(const uint8_t* packed, int64_t b, uint8_t* scale, uint8_t* min) {
  if (b < 4) {
    *scale = packed[b] & 63;
    *min = packed[b + 4] & 63;
  } else {
    *scale = uint8_t((packed[b + 4] & 15) | (packed[b - 4] >> 6 << 4));
    *min = uint8_t((packed[b + 4] >> 4) | (packed[b] >> 6 << 4));
  }
}

// Formats with half floats for every block. The row's blocks lie one after another.
template <class F>
void pack_row(F, const uint8_t* from, int64_t blocks, int64_t row, uint8_t* scales,
              uint8_t* codes) {
  constexpr int64_t HALVES = F::HAS_MIN ? 4 : 2;
  constexpr int64_t HIGH = F::CODE_BITS == 5 ? 4 : 0;
  constexpr int64_t SOURCE_BYTES = HALVES + HIGH + (F::CODE_BITS == 8 ? 32 : 16);
  for (int64_t b = 0; b < blocks; b++, from += SOURCE_BYTES) {
    uint8_t* to = codes + b * F::BYTES;
    uint8_t* scale = scales + b * F::BLOCK_BYTES;
    put_scale(scale, row, from);
    if constexpr (F::HAS_MIN) put_scale(scale + GROUP * 2, row, from + 2);
    const uint8_t* body = from + HALVES + HIGH;
    uint32_t high = 0;
    if constexpr (HIGH > 0) std::memcpy(&high, from + HALVES, 4);
    for (int64_t i = 0; i < BLOCK; i++) {
      if constexpr (F::CODE_BITS == 8) {
        F::put(to, row, i, body[i] ^ 0x80);
      } else {
        uint8_t code = i < 16 ? body[i] & 15 : body[i - 16] >> 4;
        F::put(to, row, i, uint8_t(code | ((high >> i) & 1) << 4));
      }
    }
  }
}

// Q4_K and Q5_K: d, dmin, 12 bytes of scales, a fifth bit for all, nibbles.
template <int BITS>
void pack_k_row(const uint8_t* from, int64_t blocks, int64_t row, uint8_t* scales, uint8_t* codes) {
  using F = Layout<BITS, 0, SuperScales<true>>;
  constexpr int64_t HIGH = BITS == 5 ? 32 : 0;
  for (int64_t b = 0; b < blocks; b++) {
    const uint8_t* super = from + b / SUPER_BLOCKS * (16 + HIGH + 128);
    int64_t k = b % SUPER_BLOCKS;
    uint8_t* to = scales + b / SUPER_BLOCKS * F::SUPER_BYTES;
    if (k == 0) {
      put_scale(to, row, super);
      put_scale(to + GROUP * 2, row, super + 2);
    }
    uint8_t* bytes = to + F::HALVES_BYTES + k * 2 * GROUP;
    unpack_k4(super + 4, k, bytes + row, bytes + GROUP + row);
    const uint8_t* nibbles = super + 16 + HIGH + k / 2 * 32;
    for (int64_t i = 0; i < BLOCK; i++) {
      uint8_t code = (nibbles[i] >> (k % 2 * 4)) & 15;
      if constexpr (BITS == 5) code |= ((super[16 + i] >> k) & 1) << 4;
      F::put(codes + b * F::BYTES, row, i, code);
    }
  }
}

void pack_row(Q4_K, const uint8_t* from, int64_t blocks, int64_t row, uint8_t* scales,
              uint8_t* codes) {
  pack_k_row<4>(from, blocks, row, scales, codes);
}
void pack_row(Q5_K, const uint8_t* from, int64_t blocks, int64_t row, uint8_t* scales,
              uint8_t* codes) {
  pack_k_row<5>(from, blocks, row, scales, codes);
}

// 128 bytes of low halves, 64 of high pairs, 16 signed scales, d.
void pack_row(Q6_K, const uint8_t* from, int64_t blocks, int64_t row, uint8_t* scales,
              uint8_t* codes) {
  for (int64_t b = 0; b < blocks; b++) {
    const uint8_t* super = from + b / SUPER_BLOCKS * 210;
    int64_t k = b % SUPER_BLOCKS, half = k / 4, quarter = k % 4;
    uint8_t* to = scales + b / SUPER_BLOCKS * Q6_K::SUPER_BYTES;
    if (k == 0) put_scale(to, row, super + 208);
    uint8_t* bytes = to + Q6_K::HALVES_BYTES + k * 2 * GROUP;
    bytes[row] = super[192 + 2 * k];
    bytes[GROUP + row] = super[192 + 2 * k + 1];
    const uint8_t* low = super + half * 64 + quarter % 2 * 32;
    const uint8_t* high = super + 128 + half * 32;
    for (int64_t i = 0; i < BLOCK; i++) {
      uint8_t code = (low[i] >> (quarter / 2 * 4)) & 15;
      code |= ((high[i] >> (2 * quarter)) & 3) << 4;
      Q6_K::put(codes + b * Q6_K::BYTES, row, i, code);
    }
  }
}

// W rows' scales are loaded to use one of them: a lookup touches few rows.
template <class F, class T>
void unpack_row(const uint8_t* group, int64_t row, int64_t blocks, T* out) {
  const uint8_t* codes = group + F::scale_bytes(blocks);
  int64_t first = row / W * W, lane = row % W;
  for (int64_t b = 0; b < blocks; b++) {
    Scales s = F::load_block(group, b, first);
    for (int64_t i = 0; i < BLOCK; i++) {
      float scale = s.scale[F::HALVES == 2 ? i / (BLOCK / 2) : 0][lane];
      float code = float(int(F::get(codes + b * F::BYTES, row, i)) - F::OFFSET);
      float value = scale * code;
      if constexpr (F::HAS_MIN) value = value + s.min[lane];
      from_float(value, out + b * BLOCK + i);
    }
  }
}

}  // namespace
}  // namespace quant
}  // namespace pagewire

using namespace pagewire;
using namespace pagewire::quant;

// Bytes that pagewire_quant_pack fills.
PAGEWIRE_API int64_t pagewire_quant_bytes(int format, int64_t rows, int64_t in) {
  return with_format(format, [&](auto f) {
    return (rows + GROUP - 1) / GROUP * decltype(f)::group_bytes(in / BLOCK);
  });
}

// rows of row_bytes each, as GGUF has them; missing rows of the last group are zeros.
PAGEWIRE_API void pagewire_quant_pack(int format, const uint8_t* from, int64_t row_bytes,
                                      int64_t rows, int64_t in, uint8_t* to, int threads) {
  with_format(format, [&](auto f) {
    using F = decltype(f);
    int64_t blocks = in / BLOCK, group_bytes = F::group_bytes(blocks);
    parallel_for((rows + GROUP - 1) / GROUP, threads, [&](int64_t g) {
      uint8_t* group = to + g * group_bytes;
      std::memset(group, 0, size_t(group_bytes));
      for (int64_t row = g * GROUP; row < std::min(rows, (g + 1) * GROUP); row++)
        pack_row(f, from + row * row_bytes, blocks, row % GROUP, group,
                 group + F::scale_bytes(blocks));
    });
  });
}

// out[t] = weights of row ids[t]. Returns the first t whose id is out of range, or -1.
PAGEWIRE_API int64_t pagewire_quant_rows(int dtype, int format, const uint8_t* packed, int64_t rows,
                                         int64_t in, const int64_t* ids, int64_t tokens, void* out,
                                         int threads) {
  for (int64_t t = 0; t < tokens; t++)
    if (ids[t] < 0 || ids[t] >= rows) return t;
  with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    with_format(format, [&](auto f) {
      using F = decltype(f);
      int64_t blocks = in / BLOCK, group_bytes = F::group_bytes(blocks);
      for_rows(tokens, in, threads, [&](int64_t t) {
        unpack_row<F>(packed + ids[t] / GROUP * group_bytes, ids[t] % GROUP, blocks,
                      static_cast<T*>(out) + t * in);
      });
    });
  });
  return -1;
}
