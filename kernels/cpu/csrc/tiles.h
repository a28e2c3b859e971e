// Tile registers (AMX): eight matrices of up to 16 rows of 64 bytes, and products of them.
//
// Tests compile the paths that use them for any machine, with registers of plain C++
// (PAGEWIRE_EMULATED_TILES). The instructions are written out, because GCC 12's intrinsics neither
// take a template's argument for a register nor say that a load reads memory.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define PAGEWIRE_TILES
#elif defined(PAGEWIRE_EMULATED_TILES)
#define PAGEWIRE_TILES
#endif

namespace pagewire {

constexpr int64_t TILE_ROWS = 16;   // at most
constexpr int64_t TILE_BYTES = 64;  // of a row, at most

#if defined(PAGEWIRE_TILES)

constexpr bool HAS_TILES = true;

// The shape of each register: the 64 bytes that LDTILECFG reads, of which palette 1 uses eight
// registers. A register of no rows may not be used.
struct alignas(64) TileShapes {
  uint8_t palette, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  explicit constexpr TileShapes(uint8_t from_palette = 1) : palette(from_palette) {}

  // A product C += A B, where A is [m][k groups of 4 bytes] and B [k][n groups of 4 bytes].
  void set_product(int c, int a, int b, int64_t m, int64_t n, int64_t k) {
    set(c, m, 4 * n);
    set(a, m, 4 * k);
    set(b, k, 4 * n);
  }

 private:
  void set(int tile, int64_t tile_rows, int64_t bytes) {
    rows[tile] = uint8_t(tile_rows);
    row_bytes[tile] = uint16_t(bytes);
  }
};
static_assert(sizeof(TileShapes) == 64);

}  // namespace pagewire

#if defined(PAGEWIRE_EMULATED_TILES)
#include "emulated_tiles.h"
#else

namespace pagewire {
namespace tile_registers {

inline void load_shapes(const TileShapes& shapes) { asm volatile("ldtilecfg %0" : : "m"(shapes)); }
inline void release() { asm volatile("tilerelease"); }

template <int TILE>
inline void zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(TILE));
}

// Rows lie `stride` bytes apart in memory.
template <int TILE>
inline void load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(TILE) : "memory");
}
template <int TILE>
inline void store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(TILE) : "memory");
}

// C [m][n] float32 += A [m][k] pairs of bfloat16 * B [k][n] pairs. Even and odd features are summed
// apart over k, each with one rounding per product, then both are added to C; denormals are zeros.
template <int C, int A, int B>
inline void add_bfloat16_product() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

// C [m][n] int32 += A [m][k] fours of signed bytes * B [k][n] fours of unsigned ones.
template <int C, int A, int B>
inline void add_byte_product() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

}  // namespace tile_registers
}  // namespace pagewire

#endif

namespace pagewire {
namespace tile_registers {

// Those that this thread has loaded; palette 0 is none.
inline thread_local TileShapes loaded(0);

}  // namespace tile_registers

// While one lives, its thread's registers belong to this library, and shapes that stay the same are
// loaded once. Afterwards they are released: other libraries of the process load shapes of their
// own, and the kernel saves 8 KiB more of a thread whose tiles are in use.
class TileScope {
 public:
  TileScope() = default;
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;
  ~TileScope() {
    if (tile_registers::loaded.palette == 0) return;
    tile_registers::release();
    tile_registers::loaded.palette = 0;
  }

  // All registers are zero if the shapes are not those that were there.
  static void use(const TileShapes& shapes) {
    if (std::memcmp(&tile_registers::loaded, &shapes, sizeof shapes) == 0) return;
    tile_registers::load_shapes(shapes);
    tile_registers::loaded = shapes;
  }
};

#else

constexpr bool HAS_TILES = false;

// There is nothing to release.
struct TileScope {};

#endif

}  // namespace pagewire
