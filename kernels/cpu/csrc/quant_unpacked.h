// Products with several rows where there are sixteen registers: AVX2, whose panel is a group.
//
// Eight vectors of codes, which the rows of a register tile of quant_product.cpp share, leave too few
// registers for sums. Here a chunk of blocks is unpacked into the first-level cache once for all
// rows, and a tile's registers hold the integer sums of one block alone: a broadcast of four
// activations meets two vectors of codes, a vector of codes meets all rows of the tile. Float sums
// wait in memory. Their order is that of the other tiles, so a result does not depend on which
// of them computed it.
#pragma once

#include <algorithm>

#include "quant_dots.h"

namespace pagewire {
namespace quant {
namespace unpacked {

constexpr int ROWS = 4;       // of a tile
constexpr int FEWEST = 3;     // rows for which unpacking pays
constexpr int64_t CHUNK = 4;  // blocks; more would come from memory in bursts

// 8-bit codes that are multiplied in pairs are kept less 128.
template <int BITS>
constexpr bool CENTRED = BITS == 8 && BYTE_PAIRS;

// A block of a panel: a byte for each code, in the order of quant.h.
template <int BITS, int ZERO, int HALVES_>
struct Block {
  static constexpr int CODE_BITS = BITS, OFFSET = ZERO, HALVES = HALVES_;
  static constexpr bool HAS_MIN = ZERO == 0;
  // Whether the offset is taken off a row's sums, not off the codes.
  static constexpr bool STARTS = ZERO > 0 && !CENTRED<BITS>;

  alignas(LINE) uint8_t codes[8][4 * PANEL];
  float scale[HALVES][PANEL];
  float min[PANEL];  // where HAS_MIN
};

template <class F>
using BlockOf = Block<F::CODE_BITS, F::OFFSET, F::HALVES>;

// Block b of a group, whose codes lie at `codes`.
template <class F>
inline void unpack(const uint8_t* group, const uint8_t* codes, int64_t b, BlockOf<F>& to) {
  for (int64_t column = 0; column < PANEL; column += W) {
    vi vectors[8];
    F::unpack(codes + column * 4, vectors);
    PAGEWIRE_UNROLL
    for (int j = 0; j < 8; j++) {
      if constexpr (CENTRED<F::CODE_BITS>) vectors[j] = less_128(vectors[j]);
      std::memcpy(to.codes[j] + column * 4, &vectors[j], sizeof(vi));
    }
    Scales s = F::load_block(group, b, column);
    PAGEWIRE_UNROLL
    for (int half = 0; half < F::HALVES; half++) store(to.scale[half] + column, s.scale[half]);
    if constexpr (F::HAS_MIN) store(to.min + column, s.min);
  }
}

// M prepared rows at one block.
template <int M>
struct Rows {
  const char* first;
  int64_t row_bytes;

  const PreparedBlock& operator[](int m) const {
    return *reinterpret_cast<const PreparedBlock*>(first + m * row_bytes);
  }
};

#if defined(PAGEWIRE_BYTE_PAIRS)
// The compiler must add now. It would put a block's sums off to its end, and their terms on the stack.
template <class V>
inline void settle(V& sum) {
  asm("" : "+x"(sum));
}

template <class B>
inline vs dot_codes(vi codes, vi x) {
  return B::CODE_BITS == 8 ? dot2_signed(codes, x) : dot2(codes, x);
}

// So many words add up below 2^15.
template <class B>
constexpr int RUN = B::CODE_BITS == 8 ? 1 : B::CODE_BITS == 6 ? 2 : B::CODE_BITS == 5 ? 4 : 8;

// Adds RUN vectors of codes from j on. Long runs keep the words of all rows; of short ones the codes are
// kept, and beside the integers there is room for the words of one row.
template <class B, int M>
PAGEWIRE_INLINE void add_run(const B& block, const Rows<M>& rows, int j, vi (&low)[M], vi (&high)[M]) {
  if constexpr (RUN<B> <= 2) {
    vi codes[RUN<B>][2];
    PAGEWIRE_UNROLL
    for (int k = 0; k < RUN<B>; k++) {
      codes[k][0] = load_bytes(block.codes[j + k]);
      codes[k][1] = load_bytes(block.codes[j + k] + 4 * W);
    }
    PAGEWIRE_UNROLL
    for (int m = 0; m < M; m++) {
      vi x = broadcast4(rows[m].codes + 4 * j);
      vs low_words = dot_codes<B>(codes[0][0], x), high_words = dot_codes<B>(codes[0][1], x);
      PAGEWIRE_UNROLL
      for (int k = 1; k < RUN<B>; k++) {
        x = broadcast4(rows[m].codes + 4 * (j + k));
        low_words += dot_codes<B>(codes[k][0], x);
        high_words += dot_codes<B>(codes[k][1], x);
      }
      low[m] += add_pairs(low_words);
      high[m] += add_pairs(high_words);
      settle(low[m]);
      settle(high[m]);
    }
  } else {
    vs low_words[M], high_words[M];
    PAGEWIRE_UNROLL
    for (int k = 0; k < RUN<B>; k++) {
      vi low_codes = load_bytes(block.codes[j + k]);
      vi high_codes = load_bytes(block.codes[j + k] + 4 * W);
      PAGEWIRE_UNROLL
      for (int m = 0; m < M; m++) {
        vi x = broadcast4(rows[m].codes + 4 * (j + k));
        vs low_dots = dot2(low_codes, x), high_dots = dot2(high_codes, x);
        low_words[m] = k == 0 ? low_dots : low_words[m] + low_dots;
        high_words[m] = k == 0 ? high_dots : high_words[m] + high_dots;
        settle(low_words[m]);
        settle(high_words[m]);
      }
    }
    PAGEWIRE_UNROLL
    for (int m = 0; m < M; m++) {
      low[m] += add_pairs(low_words[m]);
      high[m] += add_pairs(high_words[m]);
    }
  }
}
#else
template <class B>
constexpr int RUN = 1;

template <class B, int M>
PAGEWIRE_INLINE void add_run(const B& block, const Rows<M>& rows, int j, vi (&low)[M], vi (&high)[M]) {
  vi low_codes = load_bytes(block.codes[j]), high_codes = load_bytes(block.codes[j] + 4 * W);
  PAGEWIRE_UNROLL
  for (int m = 0; m < M; m++) {
    vi x = broadcast4(rows[m].codes + 4 * j);
    low[m] = dot4(low[m], low_codes, x);
    high[m] = dot4(high[m], high_codes, x);
  }
}
#endif

// low and high [M]: the integers of both vectors of columns, for one of B::HALVES halves.
template <int HALF, class B, int M>
PAGEWIRE_INLINE void dot_rows(const B& block, const Rows<M>& rows, vi (&low)[M], vi (&high)[M]) {
  PAGEWIRE_UNROLL
  for (int m = 0; m < M; m++) {
    low[m] = vi{};
    if constexpr (B::STARTS) low[m] = splat_int(rows[m].template start_of<B>(HALF));
    high[m] = low[m];
  }
  constexpr int STEPS = 8 / B::HALVES;
  PAGEWIRE_UNROLL
  for (int j = HALF * STEPS; j < (HALF + 1) * STEPS; j += RUN<B>)
    add_run(block, rows, j, low, high);
}

// Adds the products of M rows with half a block, or with all of it, to sums [M][PANEL].
template <int HALF, class B, int M>
PAGEWIRE_INLINE void add_half(const B& block, const Rows<M>& rows, float* sums) {
  vi low[M], high[M];
  dot_rows<HALF>(block, rows, low, high);
  vf low_scale = load(block.scale[HALF]), high_scale = load(block.scale[HALF] + W);
  PAGEWIRE_UNROLL
  for (int m = 0; m < M; m++) {
    float* to = sums + m * PANEL;
    vf low_sum = load(to) + to_floats(low[m]) * (low_scale * rows[m].scale);
    vf high_sum = load(to + W) + to_floats(high[m]) * (high_scale * rows[m].scale);
    if constexpr (B::HAS_MIN) {
      low_sum += load(block.min) * rows[m].scaled_sum;
      high_sum += load(block.min + W) * rows[m].scaled_sum;
    }
    store(to, low_sum);
    store(to + W, high_sum);
  }
}

template <class B, int M>
__attribute__((noinline)) void tile(const B* block, int64_t blocks, const char* x,
                                    int64_t row_bytes, float* sums) {
  for (int64_t b = 0; b < blocks; b++, block++, x += sizeof(PreparedBlock)) {
    Rows<M> rows{x, row_bytes};
    add_half<0>(*block, rows, sums);
    if constexpr (B::HALVES == 2) add_half<1>(*block, rows, sums);
  }
}

template <class B, int M>
void tile_of(int64_t count, const B* block, int64_t blocks, const char* x, int64_t row_bytes,
             float* sums) {
  if constexpr (M > 1) {  // FEWEST rows and more divide into tiles of two and more
    if (count == M) return tile<B, M>(block, blocks, x, row_bytes, sums);
    tile_of<B, M - 1>(count, block, blocks, x, row_bytes, sums);
  }
}

// sums [rows][PANEL] of a group, which is a panel.
template <class F>
void multiply(const uint8_t* group, int64_t blocks, const char* x, int64_t row_bytes, int64_t rows,
              float* sums) {
  using B = BlockOf<F>;
  B chunk[CHUNK];
  std::fill_n(sums, rows * PANEL, 0.0f);
  const uint8_t* codes = group + F::scale_bytes(blocks);
  const uint8_t* ahead = group + AHEAD;
  int64_t step = F::group_bytes(blocks) / blocks;
  for (int64_t b = 0; b < blocks; b += CHUNK) {
    int64_t count = std::min(CHUNK, blocks - b);
    for (int64_t i = 0; i < count; i++, codes += F::BYTES, ahead += step) {
      // As much as a block takes, scales and all.
      PAGEWIRE_UNROLL
      for (int64_t line = 0; line < F::BYTES + LINE; line += LINE) __builtin_prefetch(ahead + line);
      unpack<F>(group, codes, b + i, chunk[i]);
    }
    const char* at = x + b * int64_t(sizeof(PreparedBlock));
    // Of even height: a low tile has too few sums in flight.
    int64_t left = (rows + ROWS - 1) / ROWS;
    for (int64_t r = 0; r < rows; left--) {
      int64_t height = (rows - r + left - 1) / left;
      tile_of<B, ROWS>(height, chunk, count, at + r * row_bytes, row_bytes, sums + r * PANEL);
      r += height;
    }
  }
}

}  // namespace unpacked
}  // namespace quant
}  // namespace pagewire
