// Products with weights of quant.h by tile registers, 16 rows at a time.
//
// A block of weights is a tile as it is unpacked: eight rows of four features of 16 outputs. Its
// product with 16 prepared rows is the integers that other paths find too, and these join the
// float sums in the same order: which path a row takes does not show in its result.
#pragma once

#include <cstddef>

#include "quant_prepared.h"
#include "tiles.h"

#if defined(PAGEWIRE_TILES)

namespace pagewire {
namespace quant {
namespace tiled {

static_assert(W == GROUP && TILE_ROWS == 16);

// Registers: of half h integers h, rows 2 + h, weights 4 + h.
template <class F>
TileShapes shapes() {
  TileShapes shapes;
  for (int h = 0; h < F::HALVES; h++)
    shapes.set_product(h, 2 + h, 4 + h, TILE_ROWS, GROUP, BLOCK / 4 / F::HALVES);
  return shapes;
}

template <class F>
struct Products {
  int32_t of_half[F::HALVES][TILE_ROWS][GROUP];
};

// The products of a block of codes with a block of 16 prepared rows.
template <class F>
inline void multiply(const uint8_t* block, const char* x, int64_t row_bytes, Products<F>& to) {
  using namespace tile_registers;
  constexpr int64_t HALF = BLOCK / F::HALVES;
  alignas(64) uint8_t unpacked[BLOCK * GROUP];
  const uint8_t* codes = block;
  if constexpr (F::CODE_BITS < 8) {
    vi vectors[8];
    F::unpack(block, vectors);
    std::memcpy(unpacked, vectors, sizeof vectors);
    codes = unpacked;
  }
  static_assert(offsetof(PreparedBlock, codes) == 0);
  zero<0>();
  load<2>(x, row_bytes);
  load<4>(codes, LINE);
  add_byte_product<0, 2, 4>();
  store<0>(to.of_half[0], LINE);
  if constexpr (F::HALVES == 2) {
    zero<1>();
    load<3>(x + HALF, row_bytes);
    load<5>(codes + HALF / 4 * LINE, LINE);
    add_byte_product<1, 3, 5>();
    store<1>(to.of_half[1], LINE);
  }
}

// sums[m * PANEL] of a group's rows of the weight, for 16 prepared rows.
template <class F>
__attribute__((noinline)) void tile(const uint8_t* group, int64_t blocks, const char* x,
                                    int64_t row_bytes, float* sums) {
  const uint8_t* codes = group + F::scale_bytes(blocks);
  int64_t step = F::group_bytes(blocks) / blocks;
  vf acc[TILE_ROWS] = {};
  // A block's integers are in memory by the time that its successor's are asked for.
  alignas(64) Products<F> products[2];
  multiply<F>(codes, x, row_bytes, products[0]);
  for (int64_t b = 0; b < blocks; b++, x += sizeof(PreparedBlock)) {
    // As much as a block takes, scales and all.
    PAGEWIRE_UNROLL
    for (int64_t line = 0; line < F::BYTES + LINE; line += LINE)
      __builtin_prefetch(group + AHEAD + b * step + line);
    if (b + 1 < blocks)
      multiply<F>(codes + (b + 1) * F::BYTES, x + sizeof(PreparedBlock), row_bytes,
                  products[(b + 1) % 2]);
    // Opaque: sixteen addresses kept for all blocks would spill.
    int64_t stride = row_bytes;
    asm("" : "+r"(stride));
    auto prepared = [&](int64_t m) -> const PreparedBlock& {
      return *reinterpret_cast<const PreparedBlock*>(x + m * stride);
    };
    Scales s = F::load_block(group, b, 0);
    PAGEWIRE_UNROLL
    for (int h = 0; h < F::HALVES; h++) {
      PAGEWIRE_UNROLL
      for (int m = 0; m < TILE_ROWS; m++) {
        vi product;
        std::memcpy(&product, products[b % 2].of_half[h][m], sizeof product);
        if constexpr (F::OFFSET > 0) product += splat_int(prepared(m).template start_of<F>(h));
        acc[m] += __builtin_convertvector(product, vf) * (s.scale[h] * prepared(m).scale);
        if constexpr (F::HAS_MIN) acc[m] += s.min * prepared(m).scaled_sum;
      }
    }
  }
  PAGEWIRE_UNROLL
  for (int m = 0; m < TILE_ROWS; m++) store(sums + m * PANEL, acc[m]);
}

// The first rows, as many as are sixteens; returns their number.
template <class F>
int64_t multiply_rows(const uint8_t* group, int64_t blocks, const char* x, int64_t row_bytes,
                      int64_t rows, float* sums) {
  int64_t r = 0;
  if (rows >= TILE_ROWS) TileScope::use(shapes<F>());
  for (; r + TILE_ROWS <= rows; r += TILE_ROWS)
    tile<F>(group, blocks, x + r * row_bytes, row_bytes, sums + r * PANEL);
  return r;
}

}  // namespace tiled
}  // namespace quant
}  // namespace pagewire

#endif
